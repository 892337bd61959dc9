/* A problem for one operator: arguments, and the memory that they point at, of exactly the size that the contract
 * gives, so that the address sanitizer sees one byte too many. */
#pragma once
#include <stdlib.h>
#include <string.h>

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
    uint32_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return (uint32_t)(state >> 32);
    }
    int64_t whole(int64_t least, int64_t most) { return least + (int64_t)(next() % (uint64_t)(most - least + 1)); }
    float number() { return ((float)next() * 0x1p-32f - 0.5f) * 6.0f; }
    bool coin() { return next() & 1; }
};

struct Problem {
    int op = -1;
    std::vector<int64_t> dims = {1, 1, 1};
    std::vector<char> args;
    std::vector<std::unique_ptr<Buffer>> buffers;
    Random random;

    explicit Problem(uint64_t seed) : random{seed * 0x9e3779b97f4a7c15u + 1} {
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
        float* made = make<float>(count);
        for (int64_t i = 0; i < count; i++) made[i] = random.number();
        return made;
    }
    int32_t* wholes(int64_t count, int64_t least, int64_t most) {
        int32_t* made = make<int32_t>(count);
        for (int64_t i = 0; i < count; i++) made[i] = (int32_t)random.whole(least, most);
        return made;
    }
    template <class Args>
    void take(int which, const Args& given) {
        op = which;
        args.assign((const char*)&given, (const char*)&given + sizeof given);
    }
};

/* Fills `problem` with an operator of random, ragged sizes. */
typedef void (*Builder)(Problem& problem);
struct Named {
    const char* op;
    Builder build;
};
extern const std::vector<Named> row_problems, layer_problems;

/* Stored numbers of a table, a weight or a cache: HR_F32, HR_F16, HR_BF16, finite ones. */
void* stored(Problem& problem, int64_t type, int64_t count);
