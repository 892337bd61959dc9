/* A problem for one operator: arguments, and the memory that they point at, of exactly the size that the contract
 * gives, so that the address sanitizer sees one byte too many. */
#pragma once
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "include/tape.h"

struct Buffer {
    char* data;
    size_t size;
    explicit Buffer(size_t bytes) : data(nullptr), size(bytes) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, bytes ? bytes : 1) != 0) abort();
        data = (char*)memory;
    }
    ~Buffer() { free(data); }
    Buffer(const Buffer&) = delete;
};

struct Random {
    uint64_t state;
    bool edges = false; /* fuzzing: sizes are mostly borders of blocks and their neighbours, and now and then great */
    uint32_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return (uint32_t)(state >> 32);
    }
    int64_t whole(int64_t least, int64_t most) { return least + (int64_t)(next() % (uint64_t)(most - least + 1)); }
    float number() { return ((float)next() * 0x1p-32f - 0.5f) * 6.0f; }
    bool coin() { return next() & 1; }
    int64_t size(int64_t least, int64_t most) {
        static const int64_t borders[] = {1, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096};
        const int64_t n = edges && next() % 4 ? borders[next() % 18] + whole(-1, 1) : -1;
        return n >= least && n <= most ? n : whole(least, most);
    }
    /* `often`, or when fuzzing once in `times` the other. */
    int64_t rarely(int64_t times, int64_t seldom, int64_t often) {
        return edges && next() % (uint64_t)times == 0 ? seldom : often;
    }
};

struct Problem {
    int op = -1;
    std::vector<int64_t> dims = {1, 1, 1};
    std::vector<char> args;
    std::vector<std::unique_ptr<Buffer>> buffers;
    Random random;
    int64_t units = 0; /* rows of the table, or tiles of the cache */

    explicit Problem(uint64_t seed, bool edges = false) : random{seed * 0x9e3779b97f4a7c15u + 1, edges} {
        for (int i = 0; i < 8; i++) random.next();
    }

    template <class T>
    T* make(int64_t count) {
        buffers.push_back(std::make_unique<Buffer>((size_t)count * sizeof(T)));
        /* Not zero, so that a place that should have been written is seen. */
        memset(buffers.back()->data, 0x5a, buffers.back()->size);
        return (T*)buffers.back()->data;
    }
    float* floats(int64_t count) {
        float* numbers = make<float>(count);
        for (int64_t i = 0; i < count; i++) numbers[i] = random.number();
        return numbers;
    }
    int32_t* wholes(int64_t count, int64_t least, int64_t most) {
        int32_t* numbers = make<int32_t>(count);
        for (int64_t i = 0; i < count; i++) numbers[i] = (int32_t)random.whole(least, most);
        return numbers;
    }
    template <class Args>
    void take(int which, const Args& fields) {
        op = which;
        args.assign((const char*)&fields, (const char*)&fields + sizeof fields);
    }
};

/* Fills `problem` with an operator of random, ragged sizes. */
typedef void (*Builder)(Problem& problem);
struct Named {
    const char* op;
    Builder build;
};
extern const std::vector<Named> row_problems, layer_problems, state_problems;

/* What a run leaves behind. */
struct Outcome {
    std::vector<std::vector<char>> memory;
    std::vector<int64_t> dims;
    bool operator==(const Outcome& o) const { return memory == o.memory && dims == o.dims; }
};

/* Another place for a problem's memory: rows of `row` bytes, `stride` apart, the first of them at `shift`. */
struct Place {
    int64_t row = 0, stride = 0, shift = 0;
};
struct Far {
    std::vector<Place> places;   /* of each buffer */
    std::vector<char> args;
    std::vector<int64_t> added;  /* to the whole numbers of each buffer */
    bool any = false;
};
/* So far apart that no index fits 32 bits. */
Far far_apart(const Problem& problem);

/* One run on a copy of the memory. What comes back lies as the problem's own does, also after one far apart. */
Outcome run(const Problem& problem, const hr::Kernels& kernels, int num_threads, const Far* far = nullptr);

/* `selftest fuzz COUNT SEED FIRST`, and `selftest planted NAME`: a fault that has to be noticed. */
int fuzz(int64_t count, uint64_t seed, int64_t first);
int planted(const std::string& name);

/* Stored numbers of a table, a weight or a cache: HR_F32, HR_F16, HR_BF16, finite ones. */
void* stored(Problem& problem, int64_t type, int64_t count);
/* Rows of K-quants, `count` weights in all, as they lie in a file. */
uint8_t* k_blocks(Problem& problem, int64_t type, int64_t count);
