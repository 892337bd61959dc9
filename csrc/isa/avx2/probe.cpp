#include <immintrin.h>

#include "include/limits.h"

namespace HR_NS {

static uint64_t read(const void* data, size_t size) {
    const char* p = (const char*)data;
    __m256i a[8];
    for (int j = 0; j < 8; j++) a[j] = _mm256_setzero_si256();
    for (size_t i = 0; i < size; i += 256)
        for (int j = 0; j < 8; j++) {
            a[j] = _mm256_add_epi64(a[j], _mm256_loadu_si256((const __m256i*)(p + i + 32 * j)));
            if (j % 2 == 0) _mm_prefetch(p + i + 2048 + 32 * j, _MM_HINT_T0);
        }
    for (int j = 1; j < 8; j++) a[0] = _mm256_add_epi64(a[0], a[j]);
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i*)lanes, a[0]);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

/* Assembly keeps the accumulators in registers: the compiler copies them once there are many. */
static void int8(int64_t turns) {
    __m256i a[10], x = _mm256_setzero_si256(), ones = x, t[2];
    for (int j = 0; j < 10; j++) a[j] = x;
    for (int64_t i = 0; i < turns; i++) {
#pragma GCC unroll 10
        for (int j = 0; j < 10; j++) {
            __asm__ volatile("vpmaddubsw %1, %1, %0" : "=x"(t[j % 2]) : "x"(x));
            __asm__ volatile("vpmaddwd %1, %0, %0" : "+x"(t[j % 2]) : "x"(ones));
            __asm__ volatile("vpaddd %1, %0, %0" : "+x"(a[j]) : "x"(t[j % 2]));
        }
    }
}

static void f32(int64_t turns) {
    __m256 a[12], x = _mm256_setzero_ps();
    for (int j = 0; j < 12; j++) a[j] = x;
    for (int64_t i = 0; i < turns; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(a[j]) : "x"(x));
    }
}

extern const HrProbe probe;
const HrProbe probe = {"avx2", read, int8, 10 * 64, f32, 12 * 16};

}  // namespace HR_NS
