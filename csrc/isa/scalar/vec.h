/* Sixteen floats, one by one: the meaning of the vector functions that generic/ is written in.
 *
 * V sixteen floats, I sixteen int32, M sixteen truths. *_n take n elements of 0 ... 16; those missing are 0 when loaded and
 * left alone when stored. fma rounds once; nothing else is fused. max(a, b) is a > b ? a : b and min is a < b ? a : b, so
 * that a NaN in b comes out and one in a does not. round_i32 rounds to nearest even. hsum is the tree of kernels.h.
 * hmax must not be given NaN. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace HR_NS {

#define HR_INLINE static inline __attribute__((always_inline))
#define HR_EACH for (int i = 0; i < 16; i++)

struct V { float v[16]; };
struct I { int32_t v[16]; };
struct M { uint16_t m; };

HR_INLINE float as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
HR_INLINE uint32_t as_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

HR_INLINE M first_n(int64_t n) { return {(uint16_t)((1u << n) - 1)}; }
HR_INLINE V set1(float x) { V r; HR_EACH r.v[i] = x; return r; }
HR_INLINE V zero() { return set1(0.0f); }
HR_INLINE V load_n(const float* p, int64_t n) { V r; HR_EACH r.v[i] = i < n ? p[i] : 0.0f; return r; }
HR_INLINE V load(const float* p) { return load_n(p, 16); }
HR_INLINE void store_n(float* p, V a, int64_t n) { for (int i = 0; i < n; i++) p[i] = a.v[i]; }
HR_INLINE void store(float* p, V a) { store_n(p, a, 16); }

HR_INLINE V add(V a, V b) { V r; HR_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
HR_INLINE V sub(V a, V b) { V r; HR_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
HR_INLINE V mul(V a, V b) { V r; HR_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
HR_INLINE V div(V a, V b) { V r; HR_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
HR_INLINE V fma(V a, V b, V c) { V r; HR_EACH r.v[i] = fmaf(a.v[i], b.v[i], c.v[i]); return r; }
HR_INLINE V max(V a, V b) { V r; HR_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
HR_INLINE V min(V a, V b) { V r; HR_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
HR_INLINE V sqrt(V a) { V r; HR_EACH r.v[i] = sqrtf(a.v[i]); return r; }
HR_INLINE V abs(V a) { V r; HR_EACH r.v[i] = fabsf(a.v[i]); return r; }

HR_INLINE M lt(V a, V b) { M r = {0}; HR_EACH r.m |= (uint16_t)((a.v[i] < b.v[i]) << i); return r; }
HR_INLINE M le(V a, V b) { M r = {0}; HR_EACH r.m |= (uint16_t)((a.v[i] <= b.v[i]) << i); return r; }
HR_INLINE M both(M a, M b) { return {(uint16_t)(a.m & b.m)}; }
HR_INLINE uint32_t bits(M a) { return a.m; }
HR_INLINE V select(M m, V a, V b) { V r; HR_EACH r.v[i] = m.m >> i & 1 ? a.v[i] : b.v[i]; return r; }

HR_INLINE float widen_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 31) return as_float(sign | 0x7f800000 | m << 13 | (m ? 0x400000 : 0));
    if (e) return as_float(sign | (e + 112) << 23 | m << 13);
    float f = (float)m * 0x1p-24f;
    return sign ? -f : f;
}
HR_INLINE uint16_t narrow_f16(float f) {
    uint32_t x = as_bits(f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and above round to infinity */
    if (a < 0x38800000) return (uint16_t)(sign | (uint32_t)lrintf(as_float(a) * 0x1p24f)); /* subnormal */
    uint32_t r = a - 0x38000000 + 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | r >> 13);
}
HR_INLINE float widen_bf16(uint16_t h) { return as_float((uint32_t)h << 16); }
HR_INLINE uint16_t narrow_bf16(float f) {
    uint32_t x = as_bits(f);
    if ((x & 0x7fffffff) > 0x7f800000) return (uint16_t)((x | 0x400000) >> 16);
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

HR_INLINE V load_f16_n(const uint16_t* p, int64_t n) { V r; HR_EACH r.v[i] = i < n ? widen_f16(p[i]) : 0.0f; return r; }
HR_INLINE V load_bf16_n(const uint16_t* p, int64_t n) { V r; HR_EACH r.v[i] = i < n ? widen_bf16(p[i]) : 0.0f; return r; }
HR_INLINE V load_i8_n(const int8_t* p, int64_t n) { V r; HR_EACH r.v[i] = i < n ? (float)p[i] : 0.0f; return r; }
HR_INLINE V load_f16(const uint16_t* p) { return load_f16_n(p, 16); }
HR_INLINE V load_bf16(const uint16_t* p) { return load_bf16_n(p, 16); }
HR_INLINE V load_i8(const int8_t* p) { return load_i8_n(p, 16); }
HR_INLINE void store_f16_n(uint16_t* p, V a, int64_t n) { for (int i = 0; i < n; i++) p[i] = narrow_f16(a.v[i]); }
HR_INLINE void store_bf16_n(uint16_t* p, V a, int64_t n) { for (int i = 0; i < n; i++) p[i] = narrow_bf16(a.v[i]); }
HR_INLINE void store_f16(uint16_t* p, V a) { store_f16_n(p, a, 16); }
HR_INLINE void store_bf16(uint16_t* p, V a) { store_bf16_n(p, a, 16); }

/* A code of E4M3 as the 256th part of what it stands for, of E5M2 as it is: both are bits of a half. */
HR_INLINE float widen_e4m3(uint8_t c) { return widen_f16((uint16_t)((c & 0x80) << 8 | (c & 0x7f) << 7)); }
HR_INLINE float widen_e5m2(uint8_t c) { return widen_f16((uint16_t)(c << 8)); }
HR_INLINE V load_e4m3_n(const uint8_t* p, int64_t n) { V r; HR_EACH r.v[i] = i < n ? widen_e4m3(p[i]) : 0.0f; return r; }
HR_INLINE V load_e5m2_n(const uint8_t* p, int64_t n) { V r; HR_EACH r.v[i] = i < n ? widen_e5m2(p[i]) : 0.0f; return r; }
HR_INLINE V load_e4m3(const uint8_t* p) { return load_e4m3_n(p, 16); }
HR_INLINE V load_e5m2(const uint8_t* p) { return load_e5m2_n(p, 16); }
HR_INLINE I load_u8_n(const uint8_t* p, int64_t n) { I r; HR_EACH r.v[i] = i < n ? p[i] : 0; return r; }
HR_INLINE I load_u8(const uint8_t* p) { return load_u8_n(p, 16); }

HR_INLINE I round_i32(V a) {
    I r;
    /* What the vector instruction gives for NaN and what does not fit. */
    HR_EACH r.v[i] = a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f ? (int32_t)lrintf(a.v[i]) : INT32_MIN;
    return r;
}
HR_INLINE V to_f32(I a) { V r; HR_EACH r.v[i] = (float)a.v[i]; return r; }
/* Numbers below 256: their low and their high four bits. */
HR_INLINE V low_nibble(I a) { V r; HR_EACH r.v[i] = (float)(a.v[i] & 15); return r; }
HR_INLINE V high_nibble(I a) { V r; HR_EACH r.v[i] = (float)(a.v[i] >> 4 & 15); return r; }
/* Bits of sixteen numbers. load_lines reads 64 bytes; shift_signed repeats the uppermost bit; look_up takes the entry of
 * the index's low four bits. */
HR_INLINE I load_lines(const void* p) { I r; memcpy(r.v, p, 64); return r; }
HR_INLINE I iset1(int32_t x) { I r; HR_EACH r.v[i] = x; return r; }
HR_INLINE I iand(I a, I b) { I r; HR_EACH r.v[i] = a.v[i] & b.v[i]; return r; }
HR_INLINE I ior(I a, I b) { I r; HR_EACH r.v[i] = a.v[i] | b.v[i]; return r; }
HR_INLINE I ixor(I a, I b) { I r; HR_EACH r.v[i] = a.v[i] ^ b.v[i]; return r; }
template <int n> HR_INLINE I shift_left(I a) { I r; HR_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] << n); return r; }
template <int n> HR_INLINE I shift_right(I a) { I r; HR_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] >> n); return r; }
template <int n> HR_INLINE I shift_signed(I a) { I r; HR_EACH r.v[i] = a.v[i] >> n; return r; }
HR_INLINE bool all_equal(I a, I b) { bool all = true; HR_EACH all = all && a.v[i] == b.v[i]; return all; }
HR_INLINE V as_floats(I a) { V r; memcpy(r.v, a.v, 64); return r; }
HR_INLINE V look_up(V table, I index) { V r; HR_EACH r.v[i] = table.v[index.v[i] & 15]; return r; }
HR_INLINE I izero() { I r; HR_EACH r.v[i] = 0; return r; }
HR_INLINE I iadd(I a, I b) { I r; HR_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return r; }
/* acc plus four products of the unsigned bytes of u and the signed ones of s, or of one word for all. */
HR_INLINE I dot(I acc, I u, I s) {
    HR_EACH for (int b = 0; b < 32; b += 8)
        acc.v[i] = (int32_t)((uint32_t)acc.v[i] + (uint32_t)((int32_t)((uint32_t)u.v[i] >> b & 255) * (int8_t)((uint32_t)s.v[i] >> b)));
    return acc;
}
HR_INLINE I dot(I acc, I u, const int32_t* word) { return dot(acc, u, iset1(*word)); }
HR_INLINE int32_t ihsum(I a) { uint32_t s = 0; HR_EACH s += (uint32_t)a.v[i]; return (int32_t)s; }
HR_INLINE void store_i8_n(int8_t* p, I a, int64_t n) {
    for (int i = 0; i < n; i++) p[i] = (int8_t)(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}
HR_INLINE void store_i8(int8_t* p, I a) { store_i8_n(p, a, 16); }
HR_INLINE V pow2(I n) { V r; HR_EACH r.v[i] = as_float((uint32_t)(n.v[i] + 127) << 23); return r; }

HR_INLINE float hsum(V a) {
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; i++) a.v[i] += a.v[i + w];
    return a.v[0];
}
HR_INLINE float hmax(V a) {
    float m = a.v[0];
    HR_EACH m = a.v[i] > m ? a.v[i] : m;
    return m;
}

}  // namespace HR_NS
