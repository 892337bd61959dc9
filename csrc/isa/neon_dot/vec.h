/* Sixteen floats in four registers of NEON. See isa/scalar/vec.h for the meaning of each function. */
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace HR_NS {

#define HR_INLINE static inline __attribute__((always_inline))
/* An expression of i, or a statement, for each of the four registers: written out, as loops take the compiler minutes. */
#define HR_AT(n, ...)    \
    {                    \
        enum { i = n };  \
        __VA_ARGS__;     \
    }
#define HR_QUARTERS(...) \
    { HR_AT(0, __VA_ARGS__) HR_AT(1, __VA_ARGS__) HR_AT(2, __VA_ARGS__) HR_AT(3, __VA_ARGS__) }
#define HR_FOUR(type, ...)                   \
    {                                        \
        type r;                              \
        HR_QUARTERS(r.v[i] = __VA_ARGS__)    \
        return r;                            \
    }

struct V { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct M { uint32x4_t v[4]; };

HR_INLINE M first_n(int64_t n) {
    const int32_t counted[4] = {0, 1, 2, 3};
    HR_FOUR(M, vcgtq_s32(vdupq_n_s32((int32_t)n - 4 * i), vld1q_s32(counted)))
}
HR_INLINE V set1(float x) HR_FOUR(V, vdupq_n_f32(x))
HR_INLINE V zero() { return set1(0.0f); }
HR_INLINE V load(const float* p) HR_FOUR(V, vld1q_f32(p + 4 * i))
HR_INLINE void store(float* p, V x) { HR_QUARTERS(vst1q_f32(p + 4 * i, x.v[i])) }
HR_INLINE V load_n(const float* p, int64_t n) {
    if (n == 16) return load(p);
    float t[16] = {0};
    memcpy(t, p, 4 * (size_t)n);
    return load(t);
}
HR_INLINE void store_n(float* p, V x, int64_t n) {
    if (n == 16) return store(p, x);
    float t[16];
    store(t, x);
    memcpy(p, t, 4 * (size_t)n);
}

HR_INLINE V add(V x, V y) HR_FOUR(V, vaddq_f32(x.v[i], y.v[i]))
HR_INLINE V sub(V x, V y) HR_FOUR(V, vsubq_f32(x.v[i], y.v[i]))
HR_INLINE V mul(V x, V y) HR_FOUR(V, vmulq_f32(x.v[i], y.v[i]))
HR_INLINE V div(V x, V y) HR_FOUR(V, vdivq_f32(x.v[i], y.v[i]))
HR_INLINE V fma(V x, V y, V z) HR_FOUR(V, vfmaq_f32(z.v[i], x.v[i], y.v[i]))
/* Not fmax and fmin, which let a NaN of either side out. */
HR_INLINE V max(V x, V y) HR_FOUR(V, vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]))
HR_INLINE V min(V x, V y) HR_FOUR(V, vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]))
HR_INLINE V sqrt(V x) HR_FOUR(V, vsqrtq_f32(x.v[i]))
HR_INLINE V abs(V x) HR_FOUR(V, vabsq_f32(x.v[i]))

HR_INLINE M lt(V x, V y) HR_FOUR(M, vcltq_f32(x.v[i], y.v[i]))
HR_INLINE M le(V x, V y) HR_FOUR(M, vcleq_f32(x.v[i], y.v[i]))
HR_INLINE M both(M x, M y) HR_FOUR(M, vandq_u32(x.v[i], y.v[i]))
HR_INLINE V select(M m, V x, V y) HR_FOUR(V, vbslq_f32(m.v[i], x.v[i], y.v[i]))
HR_INLINE uint32_t bits(M x) {
    const uint16_t ones[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t each = vld1q_u16(ones);
    const uint16x8_t low = vcombine_u16(vmovn_u32(x.v[0]), vmovn_u32(x.v[1]));
    const uint16x8_t high = vcombine_u16(vmovn_u32(x.v[2]), vmovn_u32(x.v[3]));
    return (uint32_t)vaddvq_u16(vandq_u16(low, each)) | (uint32_t)vaddvq_u16(vandq_u16(high, each)) << 8;
}

HR_INLINE float32x4_t widen_f16(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
HR_INLINE V load_f16(const uint16_t* p) HR_FOUR(V, widen_f16(vld1_u16(p + 4 * i)))
HR_INLINE V load_bf16(const uint16_t* p) HR_FOUR(V, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)))
/* Four of sixteen bytes as 32 bits. */
HR_INLINE int32x4_t quarter(int8x16_t x, int i) {
    const int16x8_t half = i < 2 ? vmovl_s8(vget_low_s8(x)) : vmovl_high_s8(x);
    return i % 2 ? vmovl_high_s16(half) : vmovl_s16(vget_low_s16(half));
}
HR_INLINE uint32x4_t quarter(uint8x16_t x, int i) {
    const uint16x8_t half = i < 2 ? vmovl_u8(vget_low_u8(x)) : vmovl_high_u8(x);
    return i % 2 ? vmovl_high_u16(half) : vmovl_u16(vget_low_u16(half));
}
HR_INLINE V load_i8(const int8_t* p) {
    const int8x16_t x = vld1q_s8(p);
    HR_FOUR(V, vcvtq_f32_s32(quarter(x, i)))
}
HR_INLINE I load_u8(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    HR_FOUR(I, vreinterpretq_s32_u32(quarter(x, i)))
}
HR_INLINE V widen_f16(uint16x8_t low, uint16x8_t high) {
    return {{widen_f16(vget_low_u16(low)), widen_f16(vget_high_u16(low)), widen_f16(vget_low_u16(high)),
             widen_f16(vget_high_u16(high))}};
}
HR_INLINE V load_e4m3(const uint8_t* p) {
    const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
    const uint16x8_t m = vdupq_n_u16(0xbfff);
    return widen_f16(vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(x), 7)), m),
                     vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_high_s8(x), 7)), m));
}
HR_INLINE V load_e5m2(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p), none = vdupq_n_u8(0);
    return widen_f16(vreinterpretq_u16_u8(vzip1q_u8(none, x)), vreinterpretq_u16_u8(vzip2q_u8(none, x)));
}
#define HR_SOME(type, load, E)                      \
    HR_INLINE type load##_n(const E* p, int64_t n) { \
        E t[16] = {0};                              \
        memcpy(t, p, sizeof(E) * (size_t)n);        \
        return load(t);                             \
    }
HR_SOME(V, load_f16, uint16_t)
HR_SOME(V, load_bf16, uint16_t)
HR_SOME(V, load_i8, int8_t)
HR_SOME(V, load_e4m3, uint8_t)
HR_SOME(V, load_e5m2, uint8_t)
HR_SOME(I, load_u8, uint8_t)
#undef HR_SOME

HR_INLINE void store_f16(uint16_t* p, V x) { HR_QUARTERS(vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])))) }
HR_INLINE uint16x4_t narrow_bf16(float32x4_t f) {
    const uint32x4_t x = vreinterpretq_u32_f32(f), lsb = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
    const uint32x4_t r = vaddq_u32(x, vaddq_u32(lsb, vdupq_n_u32(0x7fff))), quiet = vorrq_u32(x, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(f, f), r, quiet), 16);
}
HR_INLINE void store_bf16(uint16_t* p, V x) { HR_QUARTERS(vst1_u16(p + 4 * i, narrow_bf16(x.v[i]))) }
HR_INLINE void store_f16_n(uint16_t* p, V x, int64_t n) {
    uint16_t t[16];
    store_f16(t, x);
    memcpy(p, t, 2 * (size_t)n);
}
HR_INLINE void store_bf16_n(uint16_t* p, V x, int64_t n) {
    uint16_t t[16];
    store_bf16(t, x);
    memcpy(p, t, 2 * (size_t)n);
}

/* The conversion gives 0 for NaN, and the greatest number for what is too great. */
HR_INLINE I round_i32(V x) HR_FOUR(I, vbslq_s32(vcltq_f32(x.v[i], vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(x.v[i]),
                                                vdupq_n_s32(INT32_MIN)))
HR_INLINE V to_f32(I x) HR_FOUR(V, vcvtq_f32_s32(x.v[i]))
HR_INLINE I load_lines(const void* p) HR_FOUR(I, vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p + 16 * i)))
HR_INLINE I iset1(int32_t x) HR_FOUR(I, vdupq_n_s32(x))
HR_INLINE I izero() { return iset1(0); }
HR_INLINE I iand(I x, I y) HR_FOUR(I, vandq_s32(x.v[i], y.v[i]))
HR_INLINE I ior(I x, I y) HR_FOUR(I, vorrq_s32(x.v[i], y.v[i]))
HR_INLINE I ixor(I x, I y) HR_FOUR(I, veorq_s32(x.v[i], y.v[i]))
/* arm_neon.h adds signed numbers as C does, where an overflow is undefined. */
HR_INLINE int32x4_t wrapping_add(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_u32(vaddq_u32(vreinterpretq_u32_s32(x), vreinterpretq_u32_s32(y)));
}
HR_INLINE I iadd(I x, I y) HR_FOUR(I, wrapping_add(x.v[i], y.v[i]))
template <int n> HR_INLINE I shift_left(I x) HR_FOUR(I, vshlq_n_s32(x.v[i], n))
template <int n> HR_INLINE I shift_signed(I x) HR_FOUR(I, vshrq_n_s32(x.v[i], n))
template <int n> HR_INLINE I shift_right(I x) {
    if constexpr (n == 0) return x; /* the instruction has no shift by 0 */
    else HR_FOUR(I, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x.v[i]), n)))
}
HR_INLINE V low_nibble(I x) { return to_f32(iand(x, iset1(15))); }
HR_INLINE V high_nibble(I x) { return low_nibble(shift_right<4>(x)); }
HR_INLINE bool all_equal(I x, I y) {
    const uint32x4_t first = vandq_u32(vceqq_s32(x.v[0], y.v[0]), vceqq_s32(x.v[1], y.v[1]));
    const uint32x4_t second = vandq_u32(vceqq_s32(x.v[2], y.v[2]), vceqq_s32(x.v[3], y.v[3]));
    return vminvq_u32(vandq_u32(first, second)) != 0;
}
HR_INLINE V as_floats(I x) HR_FOUR(V, vreinterpretq_f32_s32(x.v[i]))
/* By bytes, of a table of 64: four times the index, and the numbers 0 to 3. */
HR_INLINE V look_up(V table, I index) {
    uint8x16x4_t bytes;
    HR_QUARTERS(bytes.val[i] = vreinterpretq_u8_f32(table.v[i]))
    const uint32x4_t four = vdupq_n_u32(0x04040404), upwards = vdupq_n_u32(0x03020100), low = vdupq_n_u32(15);
    HR_FOUR(V, vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(vmlaq_u32(
                   upwards, vandq_u32(vreinterpretq_u32_s32(index.v[i]), low), four)))))
}
/* u is 128 more than what a signed byte holds. */
HR_INLINE int32x4_t dot(int32x4_t acc, int32x4_t u, int32x4_t s) {
    const int8x16_t a = vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(u), vdupq_n_u8(128))), b = vreinterpretq_s8_s32(s);
    return vaddq_s32(vdotq_s32(acc, a, b), vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), b), 7));
}
HR_INLINE I dot(I acc, I u, I s) HR_FOUR(I, dot(acc.v[i], u.v[i], s.v[i]))
HR_INLINE I dot(I acc, I u, const int32_t* word) HR_FOUR(I, dot(acc.v[i], u.v[i], vdupq_n_s32(*word)))
HR_INLINE int32_t ihsum(I x) {
    return vaddvq_s32(wrapping_add(wrapping_add(x.v[0], x.v[1]), wrapping_add(x.v[2], x.v[3])));
}
HR_INLINE void store_i8(int8_t* p, I x) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
HR_INLINE void store_i8_n(int8_t* p, I x, int64_t n) {
    int8_t t[16];
    store_i8(t, x);
    memcpy(p, t, (size_t)n);
}
HR_INLINE V pow2(I n) { return as_floats(shift_left<23>(iadd(n, iset1(127)))); }

HR_INLINE float hsum(V x) {
    const float32x4_t s = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    return vaddv_f32(vadd_f32(vget_low_f32(s), vget_high_f32(s)));
}
HR_INLINE float hmax(V x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3]))); }

}  // namespace HR_NS
