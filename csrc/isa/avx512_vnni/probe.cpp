#include <immintrin.h>

#include "include/limits.h"

namespace HR_NS {

static uint64_t read(const void* data, size_t size) {
    const char* p = (const char*)data;
    __m512i a[4];
    for (int j = 0; j < 4; j++) a[j] = _mm512_setzero_si512();
    for (size_t i = 0; i < size; i += 256)
        for (int j = 0; j < 4; j++) {
            a[j] = _mm512_add_epi64(a[j], _mm512_loadu_si512(p + i + 64 * j));
            _mm_prefetch(p + i + 2048 + 64 * j, _MM_HINT_T0);
        }
    return (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a[0], a[1]), _mm512_add_epi64(a[2], a[3])));
}

/* Assembly keeps the accumulators in registers: gcc 12 copies those of the intrinsics once there are many. */
static void int8(int64_t turns) {
    __m512i a[20], x = _mm512_setzero_si512();
    for (int j = 0; j < 20; j++) a[j] = x;
    for (int64_t i = 0; i < turns; i++) {
#pragma GCC unroll 20
        for (int j = 0; j < 20; j++) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(a[j]) : "v"(x));
    }
}

static void f32(int64_t turns) {
    __m512 a[20], x = _mm512_setzero_ps();
    for (int j = 0; j < 20; j++) a[j] = x;
    for (int64_t i = 0; i < turns; i++) {
#pragma GCC unroll 20
        for (int j = 0; j < 20; j++) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(a[j]) : "v"(x));
    }
}

extern const HrProbe probe;
const HrProbe probe = {"avx512_vnni", read, int8, 20 * 128, f32, 20 * 32};

}  // namespace HR_NS
