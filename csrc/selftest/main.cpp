/* The operators of every ISA that this machine can run against scalar, bit for bit, on ragged shapes and on one and
 * three threads. Without Python, and under the sanitizers: `make native-test`. For `make fuzz-kernels` see fuzz.cpp. */
#include <stdio.h>

#include "selftest/problem.h"

namespace {

/* A kernel that is wrong in the last bit of one number must be noticed; else the comparison compares nothing. */
void nearly_add(const void* raw, HrTask* task) {
    const HrArgs_add* a = (const HrArgs_add*)raw;
    if (task->tid != 0) return;
    for (int64_t row = 0; row < task->dims[a->dim]; row++)
        for (int64_t i = 0; i < a->width; i++)
            a->out[row * a->ld_out + i] = a->x[row * a->ld_x + i] + a->y[row * a->ld_y + i];
    uint32_t* last = (uint32_t*)&a->out[(task->dims[a->dim] - 1) * a->ld_out + a->width - 1];
    *last ^= 1;
}

int failures = 0;

void compare(const Named& named, const std::vector<const HrKernelTable*>& tables, int trials) {
    hr::Kernels scalar = hr::choose("scalar");
    int op = -1, compared = 0;
    for (int seed = 0; seed < trials; seed++) {
        Problem problem((uint64_t)seed);
        named.build(problem);
        op = problem.op;
        if (!scalar.op[op]) break;
        Outcome expected = run(problem, scalar, 1);
        for (const HrKernelTable* table : tables)
            for (int threads : {1, 3}) {
                /* An ISA that has no linear_each of its own is served the one below, with its own linear layers. */
                if (!(table->op[op] || op == HR_OP_linear_each) || (table == tables[0] && threads == 1)) continue;
                compared++;
                if (expected == run(problem, hr::choose(table->isa), threads)) continue;
                failures++;
                printf("DIFFERS: %s, %s, %d threads, seed %d\n", named.op, table->isa, threads, seed);
            }
    }
    std::string served;
    for (const HrKernelTable* table : tables)
        if (op >= 0 && table->op[op]) served += std::string(" ") + table->isa;
    printf("%-12s %4d runs compared;%s\n", named.op, compared, served.empty() ? " no ISA serves it" : served.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "fuzz") {
        const auto number = [&](int at, int64_t other) { return argc > at ? strtoll(argv[at], nullptr, 10) : other; };
        return fuzz(number(2, 100000), (uint64_t)number(3, 0), number(4, 0));
    }
    if (what == "planted" && argc > 2) return planted(argv[2]);
    const std::vector<const HrKernelTable*>& tables = hr::tables();
    std::vector<Named> all = row_problems;
    all.insert(all.end(), layer_problems.begin(), layer_problems.end());
    all.insert(all.end(), state_problems.begin(), state_problems.end());
    for (const Named& named : all)
        if (what.empty() || what == named.op) compare(named, tables, 40);

    Problem problem(1);
    for (const Named& named : all)
        if (strcmp(named.op, "add") == 0) named.build(problem);
    hr::Kernels wrong = hr::choose("scalar");
    wrong.op[HR_OP_add] = nearly_add;
    if (run(problem, hr::choose("scalar"), 1) == run(problem, wrong, 1)) {
        printf("NOT NOTICED: an addition that is wrong in one bit\n");
        failures++;
    }
    printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
