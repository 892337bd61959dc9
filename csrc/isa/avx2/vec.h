/* Sixteen floats in two ymm registers. See isa/scalar/vec.h for the meaning of each function. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace HR_NS {

#define HR_INLINE static inline __attribute__((always_inline))

struct V { __m256 a, b; };
struct I { __m256i a, b; };
struct M { __m256 a, b; };

HR_INLINE M first_n(int64_t n) {
    const __m256i k = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), m = _mm256_set1_epi32((int)n);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(m, k)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(m, _mm256_add_epi32(k, _mm256_set1_epi32(8))))};
}
HR_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HR_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE V load_n(const float* p, int64_t n) {
    M m = first_n(n);
    return {_mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b))};
}
HR_INLINE void store(float* p, V x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
HR_INLINE void store_n(float* p, V x, int64_t n) {
    M m = first_n(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), x.a), _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), x.b);
}

HR_INLINE V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
HR_INLINE V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
HR_INLINE V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
HR_INLINE V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
HR_INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
HR_INLINE V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
HR_INLINE V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
HR_INLINE V sqrt(V x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
HR_INLINE V abs(V x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}

HR_INLINE M lt(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
HR_INLINE M le(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ)}; }
HR_INLINE M both(M x, M y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
HR_INLINE uint32_t bits(M x) { return (uint32_t)(_mm256_movemask_ps(x.a) | _mm256_movemask_ps(x.b) << 8); }
HR_INLINE V select(M m, V x, V y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }

HR_INLINE V load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HR_INLINE __m256 widen_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
HR_INLINE V load_bf16(const uint16_t* p) {
    return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HR_INLINE V load_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
HR_INLINE V load_f16_n(const uint16_t* p, int64_t n) {
    uint16_t t[16] = {0};
    memcpy(t, p, 2 * (size_t)n);
    return load_f16(t);
}
HR_INLINE V load_bf16_n(const uint16_t* p, int64_t n) {
    uint16_t t[16] = {0};
    memcpy(t, p, 2 * (size_t)n);
    return load_bf16(t);
}
HR_INLINE V load_i8_n(const int8_t* p, int64_t n) {
    int8_t t[16] = {0};
    memcpy(t, p, (size_t)n);
    return load_i8(t);
}
HR_INLINE __m256 widen_e4m3(__m128i x) {
    const __m128i h = _mm_slli_epi16(_mm_cvtepi8_epi16(x), 7);
    return _mm256_cvtph_ps(_mm_and_si128(h, _mm_set1_epi16((int16_t)0xbfff)));
}
HR_INLINE __m256 widen_e5m2(__m128i x) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(x), 8)); }
HR_INLINE V load_e4m3(const uint8_t* p) {
    return {widen_e4m3(_mm_loadl_epi64((const __m128i*)p)), widen_e4m3(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
HR_INLINE V load_e5m2(const uint8_t* p) {
    return {widen_e5m2(_mm_loadl_epi64((const __m128i*)p)), widen_e5m2(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
HR_INLINE I load_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
HR_INLINE V load_e4m3_n(const uint8_t* p, int64_t n) {
    uint8_t t[16] = {0};
    memcpy(t, p, (size_t)n);
    return load_e4m3(t);
}
HR_INLINE V load_e5m2_n(const uint8_t* p, int64_t n) {
    uint8_t t[16] = {0};
    memcpy(t, p, (size_t)n);
    return load_e5m2(t);
}
HR_INLINE I load_u8_n(const uint8_t* p, int64_t n) {
    uint8_t t[16] = {0};
    memcpy(t, p, (size_t)n);
    return load_u8(t);
}
HR_INLINE void store_f16(uint16_t* p, V x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
HR_INLINE __m128i narrow_bf16(__m256 f) {
    __m256i x = _mm256_castps_si256(f);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(x, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
    r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q)));
    r = _mm256_srli_epi32(r, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
HR_INLINE void store_bf16(uint16_t* p, V x) {
    _mm_storeu_si128((__m128i*)p, narrow_bf16(x.a)), _mm_storeu_si128((__m128i*)(p + 8), narrow_bf16(x.b));
}
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

HR_INLINE I round_i32(V x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
HR_INLINE V to_f32(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HR_INLINE V low_nibble(I x) {
    const __m256i m = _mm256_set1_epi32(15);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(x.a, m)), _mm256_cvtepi32_ps(_mm256_and_si256(x.b, m))};
}
HR_INLINE V high_nibble(I x) { return low_nibble({_mm256_srli_epi32(x.a, 4), _mm256_srli_epi32(x.b, 4)}); }
HR_INLINE I load_lines(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
HR_INLINE I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HR_INLINE I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
HR_INLINE I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
HR_INLINE I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int n> HR_INLINE I shift_left(I x) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
template <int n> HR_INLINE I shift_right(I x) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
template <int n> HR_INLINE I shift_signed(I x) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
HR_INLINE bool all_equal(I x, I y) {
    const __m256i same = _mm256_and_si256(_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b));
    return _mm256_movemask_epi8(same) == -1;
}
HR_INLINE V as_floats(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
/* The shuffle looks at three bits of an index, the blend at its uppermost one. */
HR_INLINE __m256 look_up(V table, __m256i index) {
    const __m256 low = _mm256_permutevar8x32_ps(table.a, index), high = _mm256_permutevar8x32_ps(table.b, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
HR_INLINE V look_up(V table, I index) { return {look_up(table, index.a), look_up(table, index.b)}; }
HR_INLINE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
HR_INLINE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
HR_INLINE int32_t ihsum(I x) {
    __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    return _mm_cvtsi128_si32(t);
}
#if defined(HR_ISA_AVX_VNNI)
HR_INLINE __m256i dot(__m256i acc, __m256i u, __m256i s) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u), "x"(s));
    return acc;
}
#else
/* vpmaddubsw would saturate: even and odd bytes go as 16 bits. */
HR_INLINE __m256i dot(__m256i acc, __m256i u, __m256i s) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
#endif
HR_INLINE I dot(I acc, I u, const int32_t* word) {
    const __m256i s = _mm256_set1_epi32(*word);
    return {dot(acc.a, u.a, s), dot(acc.b, u.b, s)};
}
HR_INLINE I dot(I acc, I u, I s) { return {dot(acc.a, u.a, s.a), dot(acc.b, u.b, s.b)}; }
HR_INLINE void store_i8(int8_t* p, I x) {
    __m128i lo = _mm_packs_epi32(_mm256_castsi256_si128(x.a), _mm256_extracti128_si256(x.a, 1));
    __m128i hi = _mm_packs_epi32(_mm256_castsi256_si128(x.b), _mm256_extracti128_si256(x.b, 1));
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(lo, hi));
}
HR_INLINE void store_i8_n(int8_t* p, I x, int64_t n) {
    int8_t t[16];
    store_i8(t, x);
    memcpy(p, t, (size_t)n);
}
HR_INLINE V pow2(I n) {
    const __m256i b = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, b), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, b), 23))};
}

HR_INLINE float hsum(V x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
HR_INLINE float hmax(V x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

}  // namespace HR_NS
