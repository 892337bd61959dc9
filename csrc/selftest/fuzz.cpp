/* Shapes without end: every operator of every ISA and every packer, in sizes at and beside the borders of blocks, with
 * nothing to do, and with rows so far apart that 32 bits do not count them. The bits are those of scalar, the memory is
 * exactly as long as the contract says, and the sanitizers look on. Arguments that a tape must refuse are refused. */
#include <sanitizer/common_interface_defs.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include <map>
#include <stdexcept>

#include "isa/linear_layout.h"
#include "selftest/problem.h"

namespace hr_planted { /* planted.cpp */
void add(const HrArgs_add* args, HrTask* task);
}

namespace {

struct Count {
    int64_t shapes = 0, runs = 0;
};
std::map<std::string, Count> counts;
int64_t far_runs = 0, empty_runs = 0, refusals = 0, failures = 0;
char now[200];
/* The program that runs this one where it is of another processor. It keeps a table of all pages that ever were, so memory
 * far apart would fill its own. */
const char* const emulator = getenv("HEADRACE_EMULATOR");

void tell_where() { fprintf(stderr, "\nwhile at %s\n", now); }

void fail(const char* why) {
    printf("%s: %s\n", why, now);
    failures++;
}

/* The answer of a tape to arguments that it has to refuse. */
bool refused(int op, const std::vector<char>& args) {
    Buffer exact(args.size());
    if (!args.empty()) memcpy(exact.data, args.data(), args.size());
    try {
        hr::Tape(hr::choose("scalar")).add(op, exact.data, args.size());
    } catch (const std::invalid_argument&) {
        refusals++;
        return true;
    }
    return false;
}

void refuse_all(const Problem& p) {
    for (size_t size : {(size_t)0, (size_t)8, p.args.size() - 8, p.args.size() + 8}) {
        std::vector<char> args = p.args;
        args.resize(size);
        if (!refused(p.op, args)) fail("TAKEN: arguments of another size");
    }
    const auto with = [&](size_t at, int64_t value) {
        std::vector<char> args = p.args;
        memcpy(&args[at], &value, 8);
        if (!refused(p.op, args)) fail("TAKEN: a dimension that is not there");
    };
    for (int64_t dim : {(int64_t)-1, (int64_t)HR_NUM_DIMS, (int64_t)1 << 32, INT64_MIN, INT64_MAX}) with(0, dim);
    if (p.op == HR_OP_linear_each) {
        for (int64_t op : {(int64_t)HR_OP_add, (int64_t)-1, (int64_t)HR_NUM_OPS, INT64_MIN, INT64_MAX})
            with(offsetof(HrArgs_linear_each, op), op);
        for (int64_t num : {(int64_t)0, (int64_t)HR_MAX_EXPERTS + 1, INT64_MIN, INT64_MAX})
            with(offsetof(HrArgs_linear_each, count), num);
    }
    if (p.op != HR_OP_moe_group) return;
    for (int64_t num : {(int64_t)0, (int64_t)-1, (int64_t)HR_MAX_EXPERTS + 1, INT64_MIN, INT64_MAX})
        with(offsetof(HrArgs_moe_group, num_experts), num);
    for (int64_t num : {(int64_t)-1, (int64_t)HR_MAX_EXPERTS + 1, INT64_MIN, INT64_MAX})
        with(offsetof(HrArgs_moe_group, first), num), with(offsetof(HrArgs_moe_group, num_own), num);
}

/* linear_w is linear_f over the weights that unpack_row gives, bit for bit. */
void as_unpacked(const Problem& w, const Outcome& expected) {
    static const HrFormat* const formats[] = {&hr_format_i4, &hr_format_i6, &hr_format_i8, &hr_format_k, &hr_format_f8,
                                              &hr_format_i3, &hr_format_i2, &hr_format_i5};
    HrArgs_linear_w a;
    memcpy(&a, w.args.data(), sizeof a);
    std::vector<float> dense((size_t)(a.num_out * a.num_in));
    for (int64_t i = 0; i < a.num_out; i++)
        formats[a.kind]->unpack_row(a.weights, a.num_out, a.num_in, a.group, a.form, i, &dense[(size_t)(i * a.num_in)]);
    Buffer packed(hr_format_f.packed_bytes(a.num_out, a.num_in, 0, HR_F32));
    hr_format_f.pack(dense.data(), nullptr, nullptr, a.num_in, 0, HR_F32, 0, a.num_out, a.num_out, packed.data);
    for (size_t b = 0; b < w.buffers.size(); b++) {
        if (w.buffers[b]->data != (char*)a.out) continue;
        Buffer out(w.buffers[b]->size);
        memcpy(out.data, a.out, out.size);
        const float* residual = a.residual == a.out ? (float*)out.data : a.residual;
        HrArgs_linear_f f = {a.dim,  a.x,      a.ld_x,   packed.data, HR_F32, a.num_in,
                             a.num_out, a.bias, residual, a.ld_res,  (float*)out.data, a.ld_out};
        hr::Tape tape(hr::choose(""));
        tape.add(HR_OP_linear_f, &f, sizeof f);
        tape.dims()[0] = w.dims[0], tape.run(0, 1, 1, nullptr);
        if (memcmp(out.data, expected.memory[b].data(), out.size)) fail("DIFFERS from unpacked weights");
    }
}

int64_t trial(const Named& named, uint64_t seed) {
    Problem problem(seed, true);
    named.build(problem);
    const std::vector<const HrKernelTable*>& tables = hr::tables();
    static const hr::Kernels scalar = hr::choose("scalar");
    const Outcome expected = run(problem, scalar, 1);
    int64_t runs = 1;
    if (problem.op == HR_OP_linear_w) as_unpacked(problem, expected);
    for (const HrKernelTable* table : tables) {
        if (!table->op[problem.op] && problem.op != HR_OP_linear_each) continue;
        const int threads = (int)problem.random.whole(1, 5);
        if (table == tables[0] && (threads == 1 || problem.random.next() % 4)) continue;
        runs++;
        if (!(expected == run(problem, hr::choose(table->isa), threads))) fail("DIFFERS");
    }
    const hr::Kernels some = hr::choose(tables[problem.random.next() % tables.size()]->isa);
    if (problem.random.next() % 4 == 0 && !emulator) {
        const Far far = far_apart(problem);
        if (far.any) {
            runs++, far_runs++;
            if (!(expected == run(problem, some, 2, &far))) fail("DIFFERS far apart");
        }
    }
    if (problem.random.next() % 16 == 0) refuse_all(problem);
    if (problem.random.next() % 16 == 0) {
        problem.dims = {0, 0, 0}, runs++, empty_runs++;
        const Outcome left = run(problem, some, 2);
        for (size_t b = 0; b < problem.buffers.size(); b++)
            if (!std::equal(left.memory[b].begin(), left.memory[b].end(), problem.buffers[b]->data))
                fail("WRITTEN for no rows");
    }
    return runs;
}

/* A code of E4M3 that is not negative. */
float e4m3(int code) {
    const int exponent = code >> 3, fraction = code & 7;
    return exponent ? ldexpf((float)(8 + fraction), exponent - 10) : ldexpf((float)fraction, -9);
}

/* A matrix packed at once and in parts: the same bytes; unpacked: the numbers that went in. */
int64_t packing(const std::string& name, uint64_t seed) {
    Problem p(seed, true);
    const bool i4 = name == "i4", i5 = name == "i5", i6 = name == "i6" || i5, i8 = name == "i8", k = name == "k", f = name == "f", f8 = name == "f8";
    const bool i2 = name == "i2", i3 = name == "i3", few = i2 || i3;
    const HrFormat& format = i4 ? hr_format_i4 : i5 ? hr_format_i5 : i6 ? hr_format_i6 : i8 ? hr_format_i8 : k ? hr_format_k
                             : f8 ? hr_format_f8 : i3 ? hr_format_i3 : i2 ? hr_format_i2 : hr_format_f;
    const int64_t num_out = p.random.size(1, 200), num_in = k ? 256 * p.random.whole(1, 3) : p.random.size(1, 300);
    const int64_t step = i3 || i5 ? 16 : 8, whole_row = (num_in + step - 1) / step * step;
    const int64_t group = k ? 32 : p.random.coin() ? whole_row : step * p.random.whole(1, 20);
    const int64_t groups = (num_in + group - 1) / group;
    const int64_t i8_flag = group | (i8 && p.random.coin() ? HR_I8_MIN : 0);
    const int64_t flag = i4 ? p.random.whole(0, HR_FORM_FP4) : i6 ? p.random.whole(0, 1) : i8 || f8 ? (p.random.coin() ? i8_flag : 0)
                         : few ? p.random.coin() * HR_FORM_ZERO
                         : k ? p.random.whole(HR_K_Q2, HR_K_Q6) : p.random.whole(0, 2);
    const bool exact = (i8 || f8) && flag == 0, zeros = flag == HR_FORM_ZERO && few;
    const bool mins = (i4 || i6) ? flag == HR_FORM_MIN : i8 && flag & HR_I8_MIN;
    const int64_t per_row = exact ? 1 : groups, row_bytes = format.row_bytes(num_in, flag);
    const int64_t count = num_out * num_in;
    void* codes = k ? k_blocks(p, flag, count) : f ? stored(p, flag, count) : p.make<int8_t>(count);
    for (int64_t i = 0; i < count && !k && !f; i++)
        ((int8_t*)codes)[i] = (int8_t)(i8 ? p.random.whole(-128, 127) : p.random.whole(0, i2 ? 3 : i3 ? 7 : i4 ? 15 : i5 ? 31 : i6 ? 63 : 126));
    float *d = p.floats(num_out * per_row), *m = p.floats(num_out * per_row);
    for (int64_t i = 0; i < num_out * per_row && !exact; i++) /* numbers of f16 */
        d[i] = (float)p.random.whole(-2048, 2048) * 0x1p-8f, m[i] = (float)p.random.whole(-2048, 2048) * 0x1p-6f;
    for (int64_t i = 0; i < num_out * per_row && zeros; i++) m[i] = (float)p.random.whole(0, 15);

    const int64_t bytes = (int64_t)format.packed_bytes(num_out, num_in, group, flag);
    char *at_once = p.make<char>(bytes), *in_parts = p.make<char>(bytes);
    for (int parts = 0; parts < 2; parts++)
        for (int64_t first = 0, last; first < num_out; first = last) {
            last = parts ? std::min(num_out, first + format.panel * p.random.whole(1, 3)) : num_out;
            Problem memory(seed); /* memory of the part alone */
            const int64_t rows = last - first;
            char* part = memory.make<char>(rows * row_bytes);
            float *part_d = memory.make<float>(rows * per_row), *part_m = memory.make<float>(rows * per_row);
            memcpy(part, (char*)codes + first * row_bytes, (size_t)(rows * row_bytes));
            memcpy(part_d, d + first * per_row, (size_t)(rows * per_row) * 4);
            memcpy(part_m, m + first * per_row, (size_t)(rows * per_row) * 4);
            format.pack(part, k || f ? nullptr : part_d, mins || zeros ? part_m : nullptr, num_in, group, flag, first, last,
                        num_out, parts ? in_parts : at_once);
        }
    if (memcmp(at_once, in_parts, (size_t)bytes)) fail("DIFFERS in parts");

    /* What the weights are: rows of a table for floats and K-quants, code * d + m for the others. */
    Problem table(seed);
    float* expected = table.make<float>(count);
    std::vector<int32_t> ids((size_t)num_out);
    if (k || f) {
        for (int64_t i = 0; i < num_out; i++) ids[(size_t)i] = (int32_t)i;
        HrArgs_embedding a = {};
        a.ids = ids.data(), a.table = codes, a.file = -1, a.type = flag, a.scale = 1;
        a.width = a.ld_out = num_in, a.out = expected;
        hr::Tape tape(hr::choose("scalar"));
        tape.add(HR_OP_embedding, &a, sizeof a);
        tape.dims()[0] = num_out, tape.run(0, 1, 1, nullptr);
    }
    for (int64_t i = 0; i < count && !k && !f; i++) {
        const int64_t at = i / num_in * per_row + (exact ? 0 : i % num_in / group);
        const int code = ((int8_t*)codes)[i];
        const float number = few ? (float)code - (zeros ? m[at] : i2 ? 2.0f : 4.0f) : i4 ? hr_level(flag, code) : (float)(i8 || mins ? code : code - (i5 ? 16 : 32));
        const float product = (f8 ? e4m3(code) : number) * d[at];
        expected[i] = mins ? product + m[at] : product;
    }
    float* row = p.make<float>(num_in);
    for (int64_t i = 0; i < num_out; i++) {
        format.unpack_row(at_once, num_out, num_in, group, flag, i, row);
        if (memcmp(row, expected + i * num_in, (size_t)num_in * 4)) return fail("DIFFERS unpacked"), 1;
    }
    return 1;
}

/* x + y with an index of 32 bits. */
void narrow_add(const void* raw, HrTask* task) {
    const HrArgs_add* a = (const HrArgs_add*)raw;
    for (int32_t row = 0; row < task->dims[a->dim] && task->tid == 0; row++)
        for (int64_t i = 0; i < a->width; i++)
            a->out[row * a->ld_out + i] = a->x[(uint32_t)row * (uint32_t)a->ld_x + i] + a->y[row * a->ld_y + i];
}

void greedy_add(const void*, HrTask* task) { ((char*)task->scratch)[HR_SCRATCH_BYTES] = 1; }

/* Runs a fault in another process; true if the sanitizers or the comparison notice it. */
bool noticed(const std::string& name) {
    char program[4096] = {};
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0) return false;
    const std::string first = emulator ? std::string(emulator) + " " : "";
    FILE* output = popen((first + "'" + std::string(program) + "' planted " + name + " 2>&1").c_str(), "r");
    if (!output) return false;
    std::string text;
    char part[4096];
    while (size_t n = fread(part, 1, sizeof part, output)) text.append(part, n);
    const bool ended_well = pclose(output) == 0;
    const char* sign = name == "narrow-index" ? "DIFFERS far apart" : "AddressSanitizer: heap-buffer-overflow";
    return !ended_well && text.find(sign) != std::string::npos;
}

const char* const faults[] = {"one-too-many", "narrow-index", "scratch"};

}  // namespace

int planted(const std::string& name) {
    hr::Kernels wrong = hr::choose("scalar");
    wrong.op[HR_OP_add] = name == "scratch" ? greedy_add : narrow_add;
    if (name == "one-too-many") wrong.op[HR_OP_add] = (HrOpFn)hr_planted::add;
    for (uint64_t seed = 0; seed < 50; seed++) {
        Problem problem(seed, true);
        for (const Named& named : row_problems)
            if (strcmp(named.op, "add") == 0) named.build(problem);
        const Far far = far_apart(problem);
        const bool wide = name == "narrow-index";
        if (wide && !far.any) continue;
        if (run(problem, hr::choose("scalar"), 1) == run(problem, wrong, 1, wide ? &far : nullptr)) continue;
        printf("DIFFERS%s\n", wide ? " far apart" : "");
        return 1;
    }
    return 0;
}

int fuzz(int64_t count, uint64_t seed, int64_t first) {
    std::vector<Named> all = row_problems;
    all.insert(all.end(), layer_problems.begin(), layer_problems.end());
    all.insert(all.end(), state_problems.begin(), state_problems.end());
    static const char* const formats[] = {"i4", "i5", "i6", "i8", "f8", "k", "f", "i3", "i2"};
    const int64_t kinds = (int64_t)all.size() + 9;
    __sanitizer_set_death_callback(tell_where);
    std::string caught;
    for (const char* name : faults) {
        const bool seen = noticed(name);
        caught += std::string(caught.empty() ? "" : ", ") + "\"" + name + "\": " + (seen ? "true" : "false");
        if (!seen) snprintf(now, sizeof now, "%s", name), fail("NOT NOTICED");
    }
    for (int64_t i = first; i < first + count; i++) {
        const int64_t kind = i % kinds;
        const bool packer = kind >= (int64_t)all.size();
        const std::string format = packer ? formats[kind - (int64_t)all.size()] : "";
        const std::string name = packer ? "pack_" + format : all[(size_t)kind].op;
        snprintf(now, sizeof now, "%s (again: selftest fuzz 1 %lld %lld)", name.c_str(), (long long)seed, (long long)i);
        const uint64_t problem_seed = seed * 1000000007u + (uint64_t)i;
        Count& counted = counts[name];
        counted.shapes++;
        counted.runs += packer ? packing(format, problem_seed) : trial(all[(size_t)kind], problem_seed);
    }
    int64_t runs = 0;
    std::string operators, isas;
    for (const auto& [name, counted] : counts) {
        runs += counted.runs;
        operators += (operators.empty() ? "\"" : ", \"") + name + "\": {\"shapes\": " + std::to_string(counted.shapes) +
                     ", \"runs\": " + std::to_string(counted.runs) + "}";
    }
    for (const HrKernelTable* table : hr::tables())
        isas += std::string(isas.empty() ? "\"" : ", \"") + table->isa + "\"";
    const std::pair<const char*, int64_t> totals[] = {
        {"shapes", count},       {"runs", runs},               {"seed", (int64_t)seed},  {"first", first},
        {"far_apart", far_runs}, {"without_rows", empty_runs}, {"refused", refusals},    {"failures", failures}};
    printf("{\"isas\": [%s], \"planted_noticed\": {%s}, ", isas.c_str(), caught.c_str());
    for (const auto& [name, number] : totals) printf("\"%s\": %lld, ", name, (long long)number);
    printf("\"operators\": {%s}}\n", operators.c_str());
    return failures ? 1 : 0;
}
