/* The tiles of the linear layers of integer codes in AVX2: up to 4 rows by 2 blocks of 16 outputs, one block at a time.
 * Compiled a second time with HR_ISA_AVX_VNNI, whose vpdpbusd adds four products of unsigned and signed bytes to 32 bits.
 *
 * vpmaddubsw adds two products of unsigned and signed bytes in 16 bits and saturates. Of int4 codes, 2 * 15 * 127 fits
 * twice over, and so does 2 * 63 * 127 of 6 bits and all below. Of int8 codes, and those out of a book, the sign goes to the activation: 2 * 128 * 127 = 32512 just fits. */
#pragma once
#include "isa/avx2/vec.h"
#include "isa/linear_drive.h"

namespace HR_NS {

HR_INLINE __m256i half_line(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
HR_INLINE __m256i all_quad(const uint8_t* p) { return _mm256_set1_epi32(*(const int32_t*)p); }

#ifdef HR_ISA_AVX_VNNI
/* All codes are unsigned; what they are too great by is in what the sums start from. As assembly, as in avx512_vnni. */
constexpr bool has_dot = true;
HR_INLINE void dot4(__m256i& acc, __m256i w, __m256i a) { asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a)); }
#else
constexpr bool has_dot = false;
HR_INLINE void dot4(__m256i&, __m256i, __m256i) {}
#endif

#define HR_ROWS _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
#define HR_HALVES _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++)

/* Scales and minima of 6 bits as bytes (isa/linear_layout.h). */
template <int64_t subs>
HR_INLINE void open_scales(const uint8_t* from, int8_t (*to)[64]) {
    const __m256i six = _mm256_set1_epi8(63), lowest = _mm256_set1_epi8(3);
    const __m256i middle = _mm256_set1_epi8(12), highest = _mm256_set1_epi8(48);
    for (int64_t j = 0; j < subs; j += 4, from += 192) for (int h = 0; h < 64; h += 32) {
        const __m256i x = half_line(from + h), y = half_line(from + 64 + h), z = half_line(from + 128 + h);
        const __m256i first = _mm256_and_si256(_mm256_srli_epi16(x, 6), lowest);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(y, 4), middle);
        const __m256i third = _mm256_and_si256(_mm256_srli_epi16(z, 2), highest);
        _mm256_store_si256((__m256i*)(to[j] + h), _mm256_and_si256(x, six));
        _mm256_store_si256((__m256i*)(to[j + 1] + h), _mm256_and_si256(y, six));
        _mm256_store_si256((__m256i*)(to[j + 2] + h), _mm256_and_si256(z, six));
        _mm256_store_si256((__m256i*)(to[j + 3] + h), _mm256_or_si256(_mm256_or_si256(first, second), third));
    }
}

/* Not inlined: within a caller gcc 12 spills the sums, and a third of the speed is gone. */
template <int R, int mode, int codes, bool stream>
__attribute__((noinline)) static void tile_of(const Span& s) {
    constexpr int64_t lead = (with_min(mode) ? 12 : 8) * R;
    constexpr bool small = codes != HR_CODES_8 && codes != HR_CODES_BOOK;
    constexpr int bits = bits_of(codes);
    constexpr int64_t oct = bits * 32, step = step_octs(codes);
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(bits < 4 ? 3 : 15), flip = _mm256_set1_epi8(-128);
    const __m256i upper = _mm256_set1_epi8(codes == HR_CODES_6 ? 0x30 : codes == HR_CODES_5 ? 0x10 : 4);
    const __m256i book = codes == HR_CODES_BOOK ? _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)s.book))
                                                : _mm256_setzero_si256();
    const uint8_t *w = s.w, *a = s.a;
    for (int64_t g = 0; g < s.groups; g++) {
        const int64_t octs = is_k(mode) ? sub_octs(mode) : g + 1 < s.groups ? s.octs : s.last_octs;
        const uint8_t* const header = w;
        w += weight_header(mode);
        alignas(32) int8_t scales[mode == HR_MODE_K32_MIN ? subs_of(mode) : 1][64];
        if (mode == HR_MODE_K32_MIN) open_scales<subs_of(mode)>(header + 128, scales);
        for (int64_t i = 0; stream && i < weight_header(mode); i += 64) __builtin_prefetch(header + s.ahead + i);
        for (int64_t sub = 0; sub < subs_of(mode); sub++) {
            for (int b = 0; b < 2; b++) {
                const uint8_t *x = bits < 4 ? w : w + 64 * b, *y = a + lead;
                __m256i c[R][2];
                HR_ROWS HR_HALVES c[r][h] = small || has_dot ? all_quad(a + 4 * r) : _mm256_setzero_si256();
                for (int64_t n = 0; n < octs; n++, y += 8 * R) {
                    const int64_t half = n % step;
                    if (small) {
                        if (stream) __builtin_prefetch(x + s.ahead);
                        __m256i first[2], second[2];
                        HR_HALVES {
                            __m256i both = half_line(x + 32 * h + half * hr_low_lines(bits) * 64);
                            if (bits < 4 && b) both = _mm256_srli_epi16(both, 2);
                            first[h] = _mm256_and_si256(both, low);
                            second[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                            if (bits == hr_low_bits(bits)) continue;
                            __m256i p, q, high = half_line(x + high_line(codes) - (bits < 4 ? 0 : 64 * b) + 32 * h);
                            if (codes == HR_CODES_6) {
                                p = b ? _mm256_slli_epi16(high, 2) : _mm256_slli_epi16(high, 4);
                                q = b ? _mm256_srli_epi16(high, 2) : high;
                            } else {
                                if (half) high = _mm256_srli_epi16(high, 4);
                                if (b) high = _mm256_srli_epi16(high, 1);
                                p = codes == HR_CODES_5 ? _mm256_slli_epi16(high, 4) : _mm256_slli_epi16(high, 2);
                                q = codes == HR_CODES_5 ? _mm256_slli_epi16(high, 2) : high;
                            }
                            first[h] = _mm256_or_si256(first[h], _mm256_and_si256(p, upper));
                            second[h] = _mm256_or_si256(second[h], _mm256_and_si256(q, upper));
                        }
                        HR_ROWS {
                            const __m256i p = all_quad(y + 4 * r), q = all_quad(y + 4 * (R + r));
                            HR_HALVES {
                                if (has_dot) {
                                    dot4(c[r][h], first[h], p), dot4(c[r][h], second[h], q);
                                    continue;
                                }
                                const __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16(first[h], p),
                                                                     _mm256_maddubs_epi16(second[h], q));
                                c[r][h] = _mm256_add_epi32(c[r][h], _mm256_madd_epi16(sum, ones));
                            }
                        }
                        if (half == step - 1) x += step_bytes(codes);
                    } else {
                        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++, x += oct / 2) {
                            if (stream) __builtin_prefetch(x + s.ahead);
                            __m256i code[2], size[2];
                            HR_HALVES {
                                if (codes == HR_CODES_BOOK) {
                                    const __m256i both = half_line(x - 64 * i + 32 * h);
                                    const __m256i nibble = i ? _mm256_srli_epi16(both, 4) : both;
                                    code[h] = _mm256_shuffle_epi8(book, _mm256_and_si256(nibble, low));
                                } else {
                                    code[h] = _mm256_xor_si256(half_line(x + 32 * h), flip);
                                }
                                size[h] = has_dot ? _mm256_xor_si256(code[h], flip) : _mm256_abs_epi8(code[h]);
                            }
                            HR_ROWS {
                                const __m256i p = all_quad(y + 4 * (R * i + r));
                                HR_HALVES {
                                    if (has_dot) {
                                        dot4(c[r][h], size[h], p);
                                        continue;
                                    }
                                    const __m256i sum = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(p, code[h]));
                                    c[r][h] = _mm256_add_epi32(c[r][h], _mm256_madd_epi16(sum, ones));
                                }
                            }
                        }
                    }
                }
                V d, m;
                if (mode == HR_MODE_K16_MIN) {
                    const I pair = load_u8(header + 128 + 32 * sub + 16 * b);
                    d = mul(load_f16((const uint16_t*)header + 16 * b), low_nibble(pair));
                    m = mul(load_f16((const uint16_t*)header + 32 + 16 * b), high_nibble(pair));
                } else if (is_k(mode)) {
                    const int8_t* at = with_min(mode) ? scales[sub] : (const int8_t*)header + 64 + 32 * sub;
                    d = mul(load_f16((const uint16_t*)header + 16 * b), load_i8(at + 16 * b));
                    if (with_min(mode)) m = mul(load_f16((const uint16_t*)header + 32 + 16 * b), load_i8(at + 32 + 16 * b));
                } else if (mode != HR_MODE_CHANNEL) {
                    d = load_f16((const uint16_t*)header + 16 * b);
                    if (mode == HR_MODE_MIN) m = load_f16((const uint16_t*)header + 32 + 16 * b);
                }
                HR_ROWS {
                    float* at = s.acc + r * HR_PANEL + 16 * b;
                    const V isum = to_f32(I{c[r][0], c[r][1]}), sa = set1(*(const float*)(a + 4 * (R + r)));
                    V f = load(at);
                    f = mode == HR_MODE_CHANNEL ? fma(isum, sa, f) : fma(mul(isum, sa), d, f);
                    if (with_min(mode)) f = fma(set1(*(const float*)(a + 4 * (2 * R + r))), m, f);
                    store(at, f);
                }
            }
            w += octs * oct;
            a += lead + octs * 8 * R;
        }
    }
}

struct Avx2 {
    enum { max_rows = 4, unpacks = 0 };
    template <int mode, int codes>
    static bool linear(const Linear& p, HrTask* task) {
        drive<Avx2, mode, codes>(p, task);
        return true;
    }
    static constexpr int64_t ahead(int) { return 4096; }

    template <int mode, int codes, bool stream>
    static void tile(int rows, const Span& s) {
        switch (rows) {
            case 1: return tile_of<1, mode, codes, stream>(s);
            case 2: return tile_of<2, mode, codes, stream>(s);
            case 3: return tile_of<3, mode, codes, stream>(s);
            case 4: return tile_of<4, mode, codes, stream>(s);
        }
    }

    template <int codes>
    static void unpack(const uint8_t*, uint8_t*, int64_t, const int8_t*) {}

    static void pack_codes(const int8_t* from, int64_t ld, int rows, int64_t quads, uint8_t* to) {
        for (int64_t k = 0; k < quads; k++)
            for (int r = 0; r < rows; r++, to += 4) memcpy(to, from + r * ld + 4 * k, 4);
    }
};

}  // namespace HR_NS
