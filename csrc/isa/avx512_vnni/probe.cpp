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
    const __m512i sum = _mm512_add_epi64(_mm512_add_epi64(a[0], a[1]), _mm512_add_epi64(a[2], a[3]));
    return (uint64_t)_mm512_reduce_add_epi64(sum);
}

/* Accumulators have names and assembly holds them in registers: those of an array, or of gcc 12's intrinsics once there
 * are many, are copied to memory and back. */
#define EACH(X)                                                                                              \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19)

static void int8(int64_t turns) {
    __m512i x = _mm512_setzero_si512();
#define BEGIN(j) __m512i a##j = x;
#define STEP(j) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(a##j) : "v"(x));
    EACH(BEGIN)
    for (int64_t i = 0; i < turns; i++) { EACH(STEP) }
#undef BEGIN
#undef STEP
}

static void f32(int64_t turns) {
    __m512 x = _mm512_setzero_ps();
#define BEGIN(j) __m512 a##j = x;
#define STEP(j) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(a##j) : "v"(x));
    EACH(BEGIN)
    for (int64_t i = 0; i < turns; i++) { EACH(STEP) }
}

extern const HrProbe probe;
const HrProbe probe = {"avx512_vnni", read, int8, 20 * 128, f32, 20 * 32};

}  // namespace HR_NS
