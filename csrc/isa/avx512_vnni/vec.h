/* Sixteen floats in one zmm register. See isa/scalar/vec.h for the meaning of each function. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace HR_NS {

#define HR_INLINE static inline __attribute__((always_inline))

struct V { __m512 v; };
struct I { __m512i v; };
struct M { __mmask16 m; };

HR_INLINE M first_n(int64_t n) { return {(__mmask16)((1u << n) - 1)}; }
HR_INLINE V zero() { return {_mm512_setzero_ps()}; }
HR_INLINE V set1(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE V load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_n(n).m, p)}; }
HR_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE void store_n(float* p, V a, int64_t n) { _mm512_mask_storeu_ps(p, first_n(n).m, a.v); }

HR_INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE V sqrt(V a) { return {_mm512_sqrt_ps(a.v)}; }
HR_INLINE V abs(V a) { return {_mm512_abs_ps(a.v)}; }

HR_INLINE M lt(V a, V b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
HR_INLINE M le(V a, V b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
HR_INLINE M both(M a, M b) { return {(__mmask16)(a.m & b.m)}; }
HR_INLINE uint32_t bits(M a) { return a.m; }
HR_INLINE V select(M m, V a, V b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }

HR_INLINE V load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
HR_INLINE V load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
HR_INLINE V load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
HR_INLINE V load_f16_n(const uint16_t* p, int64_t n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_n(n).m, p))};
}
HR_INLINE V load_bf16_n(const uint16_t* p, int64_t n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_n(n).m, p)), 16))};
}
HR_INLINE V load_i8_n(const int8_t* p, int64_t n) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_n(n).m, p)))};
}
HR_INLINE V load_e4m3(__m128i x) {
    const __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
    return {_mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16((int16_t)0xbfff)))};
}
HR_INLINE V load_e5m2(__m128i x) { return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8))}; }
HR_INLINE V load_e4m3(const uint8_t* p) { return load_e4m3(_mm_loadu_si128((const __m128i*)p)); }
HR_INLINE V load_e5m2(const uint8_t* p) { return load_e5m2(_mm_loadu_si128((const __m128i*)p)); }
HR_INLINE V load_e4m3_n(const uint8_t* p, int64_t n) { return load_e4m3(_mm_maskz_loadu_epi8(first_n(n).m, p)); }
HR_INLINE V load_e5m2_n(const uint8_t* p, int64_t n) { return load_e5m2(_mm_maskz_loadu_epi8(first_n(n).m, p)); }
HR_INLINE I load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
HR_INLINE I load_u8_n(const uint8_t* p, int64_t n) {
    return {_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first_n(n).m, p))};
}
HR_INLINE __m256i to_f16(V a) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT); }
HR_INLINE __m256i to_bf16(V a) {
    __m512i x = _mm512_castps_si512(a.v);
    __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(x, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, x, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
HR_INLINE void store_f16(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, to_f16(a)); }
HR_INLINE void store_bf16(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, to_bf16(a)); }
HR_INLINE void store_f16_n(uint16_t* p, V a, int64_t n) { _mm256_mask_storeu_epi16(p, first_n(n).m, to_f16(a)); }
HR_INLINE void store_bf16_n(uint16_t* p, V a, int64_t n) { _mm256_mask_storeu_epi16(p, first_n(n).m, to_bf16(a)); }

HR_INLINE I round_i32(V a) { return {_mm512_cvtps_epi32(a.v)}; }
HR_INLINE V to_f32(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
/* One shuffle, which looks at four bits of a number, where a mask and a conversion would be two. */
HR_INLINE V low_nibble(I a) {
    return {_mm512_permutexvar_ps(a.v, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
}
HR_INLINE V high_nibble(I a) { return low_nibble({_mm512_srli_epi32(a.v, 4)}); }
HR_INLINE I load_lines(const void* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE I iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
HR_INLINE I iand(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
HR_INLINE I ior(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
HR_INLINE I ixor(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n> HR_INLINE I shift_left(I a) { return {n ? _mm512_slli_epi32(a.v, n) : a.v}; }
template <int n> HR_INLINE I shift_right(I a) { return {n ? _mm512_srli_epi32(a.v, n) : a.v}; }
template <int n> HR_INLINE I shift_signed(I a) { return {_mm512_srai_epi32(a.v, n)}; }
HR_INLINE bool all_equal(I a, I b) { return _mm512_cmpneq_epi32_mask(a.v, b.v) == 0; }
HR_INLINE V as_floats(I a) { return {_mm512_castsi512_ps(a.v)}; }
HR_INLINE V look_up(V table, I index) { return {_mm512_permutexvar_ps(index.v, table.v)}; }
HR_INLINE I izero() { return {_mm512_setzero_si512()}; }
HR_INLINE I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
HR_INLINE int32_t ihsum(I a) { return _mm512_reduce_add_epi32(a.v); }
HR_INLINE I dot(I acc, I u, I s) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(u.v), "v"(s.v));
    return acc;
}
HR_INLINE I dot(I acc, I u, const int32_t* word) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(u.v), "m"(*word));
    return acc;
}
HR_INLINE void store_i8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }
HR_INLINE void store_i8_n(int8_t* p, I a, int64_t n) { _mm512_mask_cvtsepi32_storeu_epi8(p, first_n(n).m, a.v); }
HR_INLINE V pow2(I n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}

HR_INLINE float hsum(V a) {
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
HR_INLINE float hmax(V a) { return _mm512_reduce_max_ps(a.v); }

}  // namespace HR_NS
