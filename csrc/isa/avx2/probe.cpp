#include <immintrin.h>

#include "include/limits.h"

namespace HR_NS {

/* As in avx512_vnni: named accumulators, held by assembly. Bytes are multiplied in pairs, and pairs of pairs added. */
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9)

#ifdef HR_ISA_AVX_VNNI

static void int8(int64_t turns) {
    __m256i x = _mm256_setzero_si256();
#define BEGIN(j) __m256i a##j = x;
#define STEP(j) __asm__ volatile("%{vex%} vpdpbusd %1, %1, %0" : "+x"(a##j) : "x"(x));
    EACH(BEGIN)
    for (int64_t i = 0; i < turns; i++) { EACH(STEP) }
#undef BEGIN
#undef STEP
}

extern const HrProbe probe;
const HrProbe probe = {"avx_vnni", nullptr, int8, 10 * 64, nullptr, 0}; /* reads and adds floats as AVX2 does */

#else

static uint64_t read(const void* data, size_t size) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (const __m256i *p = (const __m256i*)data, *end = p + size / 32; p < end; p += 8) {
        a = _mm256_add_epi64(a, _mm256_add_epi64(_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)));
        b = _mm256_add_epi64(b, _mm256_add_epi64(_mm256_loadu_si256(p + 2), _mm256_loadu_si256(p + 3)));
        c = _mm256_add_epi64(c, _mm256_add_epi64(_mm256_loadu_si256(p + 4), _mm256_loadu_si256(p + 5)));
        d = _mm256_add_epi64(d, _mm256_add_epi64(_mm256_loadu_si256(p + 6), _mm256_loadu_si256(p + 7)));
        for (int j = 64; j < 72; j += 2) _mm_prefetch((const char*)(p + j), _MM_HINT_T0);
    }
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i*)lanes, _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d)));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

static void int8(int64_t turns) {
    __m256i x = _mm256_setzero_si256(), pairs;
#define BEGIN(j) __m256i a##j = x;
#define STEP(j)                                                                            \
    __asm__ volatile("vpmaddubsw %2, %2, %1\n\tvpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0"   \
                     : "+x"(a##j), "=&x"(pairs) : "x"(x));
    EACH(BEGIN)
    for (int64_t i = 0; i < turns; i++) { EACH(STEP) }
#undef BEGIN
#undef STEP
}

static void f32(int64_t turns) {
    __m256 x = _mm256_setzero_ps();
#define BEGIN(j) __m256 a##j = x;
#define STEP(j) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(a##j) : "x"(x));
    EACH(BEGIN)
    for (int64_t i = 0; i < turns; i++) { EACH(STEP) }
}

extern const HrProbe probe;
const HrProbe probe = {"avx2", read, int8, 10 * 64, f32, 10 * 16};

#endif

}  // namespace HR_NS
