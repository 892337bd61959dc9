#include <arm_neon.h>

#include "include/limits.h"

namespace HR_NS {

/* As in avx512_vnni: named accumulators, held by assembly. */
#define EACH(X)                                                                                              \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19)
#define BEGIN(j) int32x4_t a##j = x;
#ifdef HR_ISA_NEON_I8MM
#define STEP(j) __asm__ volatile("usmmla %0.4s, %1.16b, %1.16b" : "+w"(a##j) : "w"(x));
#else
#define STEP(j) __asm__ volatile("sdot %0.4s, %1.16b, %1.16b" : "+w"(a##j) : "w"(x));
#endif

static void int8(int64_t turns) {
    const int32x4_t x = vdupq_n_s32(0);
    EACH(BEGIN)
    for (int64_t i = 0; i < turns; i++) { EACH(STEP) }
}

extern const HrProbe probe;

#ifdef HR_ISA_NEON_I8MM

const HrProbe probe = {"neon_i8mm", nullptr, int8, 20 * 64, nullptr, 0}; /* reads and adds floats as neon_dot does */

#else

static uint64_t read(const void* data, size_t size) {
    uint64x2_t sums[4] = {vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0)};
    for (const uint64_t *p = (const uint64_t*)data, *end = p + size / 8; p < end; p += 32) {
        for (int j = 0; j < 16; j++) sums[j % 4] = vaddq_u64(sums[j % 4], vld1q_u64(p + 2 * j));
        for (int j = 256; j < 288; j += 8) __builtin_prefetch(p + j);
    }
    return vaddvq_u64(vaddq_u64(vaddq_u64(sums[0], sums[1]), vaddq_u64(sums[2], sums[3])));
}

#undef STEP
#define STEP(j) __asm__ volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(a##j) : "w"(x));
static void f32(int64_t turns) {
    const int32x4_t x = vdupq_n_s32(0);
    EACH(BEGIN)
    for (int64_t i = 0; i < turns; i++) { EACH(STEP) }
}

const HrProbe probe = {"neon_dot", read, int8, 20 * 32, f32, 20 * 8};

#endif

}  // namespace HR_NS
