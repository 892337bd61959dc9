/* The operators of every ISA that this machine can run against scalar, bit for bit, on ragged shapes and on one and
 * three threads. Without Python, and under the sanitizers: `make native-test`. */
#include <stdio.h>

#include "include/team.h"
#include "selftest/problem.h"

namespace {

/* Kinds of the fields of each operator, in order: p address, i integer, f float. */
const char* const kinds[] = {
#define P(type, name) "p"
#define I(name) "i"
#define F(name) "f"
#define HR_KINDS(op) HR_FIELDS_##op(P, I, F),
    HR_OPS(HR_KINDS)
#undef P
#undef I
#undef F
};

struct Outcome {
    std::vector<std::vector<char>> memory;
    std::vector<int64_t> dims;
};

Outcome run(const Problem& problem, const hr::Kernels& kernels, int num_threads) {
    std::vector<std::unique_ptr<Buffer>> copies;
    for (const auto& buffer : problem.buffers) {
        copies.push_back(std::make_unique<Buffer>(buffer->size));
        memcpy(copies.back()->data, buffer->data, buffer->size);
    }
    std::vector<char> args = problem.args;
    for (size_t i = 0; i < args.size() / 8; i++) {
        if (kinds[problem.op][i] != 'p') continue;
        char* address;
        memcpy(&address, &args[i * 8], 8);
        for (size_t b = 0; b < copies.size(); b++) {
            const Buffer& from = *problem.buffers[b];
            if (address < from.data || address >= from.data + (from.size ? from.size : 1)) continue;
            char* moved = copies[b]->data + (address - from.data);
            memcpy(&args[i * 8], &moved, 8);
            break;
        }
    }
    hr::Tape tape(kernels);
    tape.add(problem.op, args.data(), args.size());
    memcpy(tape.dims(), problem.dims.data(), problem.dims.size() * sizeof(int64_t));
    tape.run(0, 1, num_threads, nullptr);
    Outcome outcome;
    for (const auto& copy : copies) outcome.memory.emplace_back(copy->data, copy->data + copy->size);
    outcome.dims.assign(tape.dims(), tape.dims() + tape.dims_used());
    return outcome;
}

bool same(const Outcome& a, const Outcome& b) { return a.memory == b.memory && a.dims == b.dims; }

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
                if (!table->op[op] || (table == tables[0] && threads == 1)) continue;
                compared++;
                if (same(expected, run(problem, hr::choose(table->isa), threads))) continue;
                failures++;
                printf("DIFFERS: %s, %s, %d threads, seed %d\n", named.op, table->isa, threads, seed);
            }
    }
    std::string served;
    for (const HrKernelTable* table : tables)
        if (op >= 0 && table->op[op]) served += std::string(" ") + table->isa;
    printf("%-12s %4d runs compared;%s\n", named.op, compared, served.empty() ? " nobody serves it" : served.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<const HrKernelTable*>& tables = hr::tables();
    std::vector<Named> all = row_problems;
    all.insert(all.end(), layer_problems.begin(), layer_problems.end());
    for (const Named& named : all)
        if (argc < 2 || strcmp(argv[1], named.op) == 0) compare(named, tables, 40);

    Problem problem(1);
    for (const Named& named : all)
        if (strcmp(named.op, "add") == 0) named.build(problem);
    hr::Kernels wrong = hr::choose("scalar");
    wrong.op[HR_OP_add] = nearly_add;
    if (same(run(problem, hr::choose("scalar"), 1), run(problem, wrong, 1))) {
        printf("NOT NOTICED: an addition that is wrong in one bit\n");
        failures++;
    }
    printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
