/* What the machine can do at most, measured on the team's threads. */
#ifndef HEADRACE_LIMITS_H
#define HEADRACE_LIMITS_H

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

/* One for each ISA: loops that do nothing but the thing measured. A NULL is not measured. */
typedef struct {
    const char* isa;
    uint64_t (*read)(const void* data, size_t size); /* size: a multiple of 256; the sum of what is there */
    void (*int8)(int64_t turns);                     /* multiply-adds of bytes, as the kernels do them */
    double int8_ops;                                 /* operations of a turn; a multiply-add is two */
    void (*f32)(int64_t turns);                      /* fused multiply-adds of floats */
    double f32_ops;
} HrProbe;

namespace hr {

struct Limit {
    std::string isa, what; /* what: read, int8, f32 */
    double rate;           /* per second: bytes or operations; the median */
    double least, most;
    int64_t bytes;         /* of the buffer that was read, else 0 */
};

/* Each measurement takes about `seconds` in several pieces, after one that is not counted. Read is a buffer of at most
   `most_bytes`, and at most a quarter of the memory that is free. */
std::vector<Limit> measure_limits(int num_threads, double seconds, int64_t most_bytes);

}  // namespace hr
#endif
