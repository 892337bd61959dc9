/* A problem run on a copy of its memory, which may lie so far apart that an index of 32 bits would not reach. */
#include <stdio.h>
#include <sys/mman.h>

#include "selftest/problem.h"

namespace {

/* Kinds of the fields of each operator, in order (p address, i integer, f float), and their names. */
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
const std::vector<std::string> names[] = {
#define P(type, name) #name,
#define I(name) #name,
#define F(name) #name,
#define HR_NAMES(op) {HR_FIELDS_##op(P, I, F)},
    HR_OPS(HR_NAMES)
#undef P
#undef I
#undef F
};

/* Memory that exists where it is touched. */
struct Wide {
    char* data;
    size_t size;
    explicit Wide(size_t bytes) : size(bytes) {
        data = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data == MAP_FAILED) perror("mmap"), abort();
    }
    ~Wide() { munmap(data, size); }
    Wide(const Wide&) = delete;
};

/* The value of a field, and its place among the arguments. */
int64_t* field(std::vector<char>& args, int op, const char* name) {
    for (size_t i = 0; i < names[op].size(); i++)
        if (names[op][i] == name) return (int64_t*)&args[i * 8];
    return nullptr;
}

/* Which buffer an argument points at the beginning of; -1 if none. */
int buffer_at(const Problem& p, std::vector<char>& args, const char* name) {
    const int64_t* at = field(args, p.op, name);
    for (size_t b = 0; at && b < p.buffers.size(); b++)
        if (p.buffers[b]->size && (int64_t)p.buffers[b]->data == *at) return (int)b;
    return -1;
}

void copy_rows(char* wide, char* narrow, int64_t size, const Place& place, bool out) {
    const int64_t row = place.row ? place.row : size;
    for (int64_t at = 0; at < size; at += row) {
        char* there = wide + place.shift + (place.row ? at / row * place.stride : 0);
        const size_t bytes = (size_t)(size - at < row ? size - at : row);
        out ? memcpy(narrow + at, there, bytes) : memcpy(there, narrow + at, bytes);
    }
}

/* The buffer of `p` in which an address lies; -1 if none. */
int buffer_of(const Problem& p, const char* address) {
    for (size_t b = 0; b < p.buffers.size(); b++) {
        const Buffer& buffer = *p.buffers[b];
        if (address >= buffer.data && address < buffer.data + (buffer.size ? buffer.size : 1)) return (int)b;
    }
    return -1;
}

/* The buffer that holds addresses itself; -1 if none. */
int buffer_of_rows(const Problem& p) {
    std::vector<char> args = p.args;
    if (p.op == HR_OP_linear_each) return buffer_at(p, args, "args");
    return p.op == HR_OP_choose ? buffer_at(p, args, "rows") : -1;
}

void add_to(char* data, size_t size, int64_t added) {
    for (size_t i = 0; i < size / 4; i++) ((int32_t*)data)[i] += (int32_t)added;
}

const int64_t FAR = (int64_t)1 << 32;

}  // namespace

Far far_apart(const Problem& p) {
    static const struct { const char *ld, *of[2]; int64_t bytes; } strides[] = {
        {"ld_x", {"x", ""}, 4}, {"ld_y", {"y", ""}, 4}, {"ld_out", {"out", ""}, 4}, {"ld_res", {"residual", ""}, 4},
        {"ld_q", {"q", ""}, 1}, {"ld_s", {"scales", "sums"}, 4}, {"ld_list", {"lists", "list_weights"}, 4},
        {"ld_query", {"query", ""}, 4}, {"ld_key", {"key", ""}, 4}, {"ld_value", {"value", ""}, 4}, {"ld_decay", {"decay", ""}, 4},
        {"ld_beta", {"beta", ""}, 4}, {"ld_b", {"b", ""}, 4}, {"ld_c", {"c", ""}, 4}, {"ld_dt", {"dt", ""}, 4}};
    Far far = {std::vector<Place>(p.buffers.size()), p.args, std::vector<int64_t>(p.buffers.size()), false};
    std::vector<char> before = p.args;
    const bool linear = p.op >= HR_OP_linear_i4 && p.op <= HR_OP_linear_f;
    const auto spread = [&](int buffer, int64_t row, int64_t stride) {
        far.places[(size_t)buffer] = {row, stride, 0};
        far.any = true;
    };
    for (const auto& s : strides) {
        /* Whole rows of codes are padded with zeros or copied: those would take as long as they are wide. */
        if ((s.bytes == 1 && !linear) || (p.op == HR_OP_moe_gather && strcmp(s.ld, "ld_s") == 0)) continue;
        int64_t* ld = field(far.args, p.op, s.ld);
        const int first = ld && *ld > 0 ? buffer_at(p, before, s.of[0]) : -1;
        if (first < 0) continue;
        const int64_t row = *ld * s.bytes, rows = ((int64_t)p.buffers[(size_t)first]->size + row - 1) / row;
        if (rows < 2) continue;
        *ld += (FAR / (rows - 1) / 64 + 1) * 64;
        for (const char* name : s.of) {
            const int buffer = buffer_at(p, before, name);
            if (buffer >= 0) spread(buffer, row, *ld * s.bytes);
        }
    }
    /* Rows of a table, or slots of a cache, behind very many others. */
    const auto shift = [&](const char* ints, int64_t by, std::initializer_list<const char*> moved, int64_t units) {
        const int buffer = buffer_at(p, before, ints);
        if (buffer < 0) return;
        far.added[(size_t)buffer] = by, far.any = true;
        for (const char* name : moved) {
            const int b = buffer_at(p, before, name);
            if (b >= 0) far.places[(size_t)b].shift = (int64_t)p.buffers[(size_t)b]->size / p.units * units;
        }
    };
    if (p.op == HR_OP_embedding) {
        const int64_t width = *field(before, p.op, "width"), by = std::min(FAR / width + 1, (int64_t)1 << 30);
        shift("ids", by, {"table"}, by);
    }
    if (p.op == HR_OP_attention || p.op == HR_OP_rope_store) {
        const int64_t block = p.op == HR_OP_attention ? *field(before, p.op, "block_size") : 1;
        const int64_t kv_heads = *field(before, p.op, "kv_heads"); /* 0 where rope_store has queries alone */
        const int64_t token = std::max<int64_t>(1, kv_heads) * *field(before, p.op, "head_dim");
        const int64_t tiles = std::min(FAR / token / 16 / block + 1, ((int64_t)1 << 26) / block) * block;
        for (const char* ints : {"blocks", "slots", "copy_slots"})
            shift(ints, tiles * 16 / block, {"k", "v", "k_scale", "v_scale"}, tiles);
    }
    const int addresses = p.op == HR_OP_choose ? buffer_of_rows(p) : -1;
    const int64_t rows = addresses < 0 ? 0 : (int64_t)p.buffers[(size_t)addresses]->size / 8;
    if (rows > 1) {
        const int64_t row = *field(before, p.op, "width") * 4, more = FAR / (rows - 1) + 1;
        spread(buffer_of(p, *(char**)p.buffers[(size_t)addresses]->data), row, row + more * 4);
    }
    return far;
}

Outcome run(const Problem& problem, const hr::Kernels& kernels, int num_threads, const Far* far) {
    std::vector<std::unique_ptr<Buffer>> copies;
    std::vector<std::unique_ptr<Wide>> wide(problem.buffers.size());
    for (size_t b = 0; b < problem.buffers.size(); b++) {
        const Buffer& from = *problem.buffers[b];
        copies.push_back(std::make_unique<Buffer>(from.size));
        if (from.size) memcpy(copies[b]->data, from.data, from.size);
        if (!far) continue;
        const Place place = far->places[b];
        const int64_t size = (int64_t)from.size;
        if (place.row || place.shift) {
            const int64_t rows = place.row ? (size + place.row - 1) / place.row : 1;
            const int64_t last = place.row ? place.row : size;
            wide[b] = std::make_unique<Wide>((size_t)(place.shift + (rows - 1) * place.stride + last));
            copy_rows(wide[b]->data, from.data, size, place, false);
        }
        add_to(copies[b]->data, from.size, far->added[b]);
    }
    /* Where an address of the problem's own memory lies in the copies. */
    const auto moved = [&](char* address) {
        const int at = buffer_of(problem, address);
        if (at < 0) return address;
        const size_t b = (size_t)at;
        const int64_t offset = address - problem.buffers[b]->data, row = far ? far->places[b].row : 0;
        return wide[b] ? wide[b]->data + (row ? offset / row * far->places[b].stride : 0) : copies[b]->data + offset;
    };
    std::vector<char> args = far ? far->args : problem.args;
    for (size_t i = 0; i < args.size() / 8; i++) {
        if (kinds[problem.op][i] != 'p') continue;
        char* address;
        memcpy(&address, &args[i * 8], 8);
        address = moved(address);
        memcpy(&args[i * 8], &address, 8);
    }
    const int addresses = buffer_of_rows(problem);
    for (size_t i = 0; addresses >= 0 && i < copies[(size_t)addresses]->size / 8; i++) {
        char** row = (char**)copies[(size_t)addresses]->data + i;
        *row = moved(*row);
    }
    hr::Tape tape(kernels);
    tape.add(problem.op, args.data(), args.size());
    memcpy(tape.dims(), problem.dims.data(), problem.dims.size() * sizeof(int64_t));
    tape.run(0, 1, num_threads, nullptr);
    Outcome outcome;
    for (size_t b = 0; b < copies.size(); b++) {
        if (wide[b]) copy_rows(wide[b]->data, copies[b]->data, (int64_t)copies[b]->size, far->places[b], true);
        if (far) add_to(copies[b]->data, copies[b]->size, -far->added[b]);
        if ((int)b == addresses) memcpy(copies[b]->data, problem.buffers[b]->data, copies[b]->size);
        outcome.memory.emplace_back(copies[b]->data, copies[b]->data + copies[b]->size);
    }
    outcome.dims.assign(tape.dims(), tape.dims() + tape.dims_used());
    return outcome;
}
