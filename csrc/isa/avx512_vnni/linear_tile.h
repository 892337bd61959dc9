/* The tiles of the linear layers of integer codes in AVX-512 VNNI: up to 12 rows by 2 blocks of 16 outputs. */
#pragma once
/* gcc 12 warns of the "undefined" operands in its own header. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include "isa/avx512_vnni/vec.h"
#include "isa/linear_drive.h"

namespace HR_NS {

/* acc += for each lane the sum over four bytes of unsigned w times signed a. As assembly because gcc 12 copies the
 * accumulators of the intrinsic about and spills them. */
HR_INLINE void dot4(__m512i& acc, __m512i w, __m512i a) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a)); }

/* As assembly, so that two registers get one each instead of sharing and copying. */
HR_INLINE __m512i start(const uint8_t* p) {
    __m512i x;
    asm volatile("vpbroadcastd %1, %0" : "=v"(x) : "m"(*(const int32_t*)p));
    return x;
}
HR_INLINE __m512i line(const uint8_t* p) { return _mm512_loadu_si512(p); }
HR_INLINE __m512i all_quad(const uint8_t* p) { return _mm512_set1_epi32(*(const int32_t*)p); }
HR_INLINE __m512 all_float(const uint8_t* p) { return _mm512_set1_ps(*(const float*)p); }

enum { HELD = 4 }; /* rows whose float sums fit the registers beside the integer ones */

#define HR_ROWS _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
#define HR_BLOCKS _Pragma("GCC unroll 2") for (int b = 0; b < 2; b++)

#define HR_FETCH(lines) \
    for (int64_t i = 0; i < (lines); i++, fetch += 64) __builtin_prefetch(fetch, 0, level);

/* The products of an oct. */
#define HR_OCT(half)                                                                                       \
    {                                                                                                      \
        __m512i x[4];                                                                                      \
        wide<codes>(w, half, book, x);                                                                     \
        HR_ROWS {                                                                                          \
            const __m512i q = all_quad(a + 4 * r);                                                         \
            dot4(c[r][0], x[0], q), dot4(c[r][1], x[1], q);                                                \
        }                                                                                                  \
        HR_ROWS {                                                                                          \
            const __m512i q = all_quad(a + 4 * (R + r));                                                   \
            dot4(c[r][0], x[2], q), dot4(c[r][1], x[3], q);                                                \
        }                                                                                                  \
        a += 8 * R;                                                                                        \
    }

/* A book of 16 codes in every quarter, greater by 128. */
HR_INLINE __m512i book_of(const int8_t* book) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)book);
    return _mm512_broadcast_i32x4(_mm_xor_si128(codes, _mm_set1_epi8(-128)));
}

/* An oct of 2 to 6 bits as bytes: x[2 * quad + block]. half: which oct of a step it is. */
template <int codes>
HR_INLINE void wide(const uint8_t* w, int half, __m512i book, __m512i* x) {
    constexpr int bits = bits_of(codes);
    const __m512i first = line(w + half * hr_low_lines(bits) * 64);
    if (bits < 4) {
        const __m512i low = _mm512_set1_epi8(3);
        x[0] = _mm512_and_si512(first, low), x[1] = _mm512_and_si512(_mm512_srli_epi16(first, 2), low);
        x[2] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low), x[3] = _mm512_and_si512(_mm512_srli_epi16(first, 6), low);
    } else {
        const __m512i low = _mm512_set1_epi8(15), second = line(w + half * 128 + 64);
        x[0] = _mm512_and_si512(first, low), x[2] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
        x[1] = _mm512_and_si512(second, low), x[3] = _mm512_and_si512(_mm512_srli_epi16(second, 4), low);
    }
    if (codes == HR_CODES_BOOK) {
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) x[i] = _mm512_shuffle_epi8(book, x[i]);
    }
    if (bits == hr_low_bits(bits)) return;
    /* a | b & c at once */
    __m512i high = line(w + high_line(codes));
    if (half) high = _mm512_srli_epi16(high, 4);
    if (codes == HR_CODES_6) {
        const __m512i two = _mm512_set1_epi8(0x30);
        x[0] = _mm512_ternarylogic_epi64(x[0], _mm512_slli_epi16(high, 4), two, 0xf8);
        x[1] = _mm512_ternarylogic_epi64(x[1], _mm512_slli_epi16(high, 2), two, 0xf8);
        x[2] = _mm512_ternarylogic_epi64(x[2], high, two, 0xf8);
        x[3] = _mm512_ternarylogic_epi64(x[3], _mm512_srli_epi16(high, 2), two, 0xf8);
    } else if (codes == HR_CODES_5) {
        const __m512i one = _mm512_set1_epi8(0x10);
        x[0] = _mm512_ternarylogic_epi64(x[0], _mm512_slli_epi16(high, 4), one, 0xf8);
        x[1] = _mm512_ternarylogic_epi64(x[1], _mm512_slli_epi16(high, 3), one, 0xf8);
        x[2] = _mm512_ternarylogic_epi64(x[2], _mm512_slli_epi16(high, 2), one, 0xf8);
        x[3] = _mm512_ternarylogic_epi64(x[3], _mm512_slli_epi16(high, 1), one, 0xf8);
    } else {
        const __m512i one = _mm512_set1_epi8(4);
        x[0] = _mm512_ternarylogic_epi64(x[0], _mm512_slli_epi16(high, 2), one, 0xf8);
        x[1] = _mm512_ternarylogic_epi64(x[1], _mm512_slli_epi16(high, 1), one, 0xf8);
        x[2] = _mm512_ternarylogic_epi64(x[2], high, one, 0xf8);
        x[3] = _mm512_ternarylogic_epi64(x[3], _mm512_srli_epi16(high, 1), one, 0xf8);
    }
}

/* Scales and minima of 6 bits as bytes (isa/linear_layout.h). */
template <int64_t subs>
HR_INLINE void open_scales(const uint8_t* from, int8_t (*to)[64]) {
    const __m512i six = _mm512_set1_epi8(63), lowest = _mm512_set1_epi8(3);
    const __m512i middle = _mm512_set1_epi8(12), highest = _mm512_set1_epi8(48);
    _Pragma("GCC unroll 4") for (int64_t j = 0; j < subs; j += 4, from += 192) {
        const __m512i x = line(from), y = line(from + 64), z = line(from + 128);
        const __m512i first = _mm512_and_si512(_mm512_srli_epi16(x, 6), lowest);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(y, 4), middle);
        const __m512i third = _mm512_and_si512(_mm512_srli_epi16(z, 2), highest);
        _mm512_store_si512(to[j], _mm512_and_si512(x, six));
        _mm512_store_si512(to[j + 1], _mm512_and_si512(y, six));
        _mm512_store_si512(to[j + 2], _mm512_and_si512(z, six));
        _mm512_store_si512(to[j + 3], _mm512_or_si512(_mm512_or_si512(first, second), third));
    }
}

/* Not inlined: within a caller gcc 12 spills the sums, and a third of the speed is gone. */
template <int R, int mode, int codes, bool stream>
__attribute__((noinline)) static void tile_of(const Span& s) {
    constexpr bool held = R <= HELD; /* float sums stay in registers */
    constexpr int level = R <= HELD ? 3 : 2;
    const uint8_t *w = s.w, *a = s.a;
    const int64_t ahead = s.ahead;
    const __m512i book = codes == HR_CODES_BOOK ? book_of(s.book) : _mm512_setzero_si512();
    float* const acc = s.acc;
    __m512 f[R][2];
    if (held) HR_ROWS HR_BLOCKS f[r][b] = _mm512_load_ps(acc + r * 32 + b * 16);
    for (int64_t g = 0; g < s.groups; g++) {
        const uint8_t *const header = w, *fetch = w + ahead;
        w += weight_header(mode);
        __m512 d[2], m[2], top[2], top_m[2];
        alignas(64) int8_t scales[mode == HR_MODE_K32_MIN ? subs_of(mode) : 1][64];
        if (is_k(mode)) {
            HR_BLOCKS top[b] = load_f16((const uint16_t*)header + b * 16).v;
            if (with_min(mode)) HR_BLOCKS top_m[b] = load_f16((const uint16_t*)header + 32 + b * 16).v;
            if (mode == HR_MODE_K32_MIN) open_scales<subs_of(mode)>(header + 128, scales);
        }
        for (int64_t sub = 0; sub < subs_of(mode); sub++) {
            const uint8_t* const rows = a;
            if (stream) {
                /* In the order in which they lie, the lines of a long header a few at a time. */
                constexpr int64_t lines = weight_header(mode) / 64, each = lines / subs_of(mode);
                HR_FETCH(each)
                if (lines % subs_of(mode) && sub < lines % subs_of(mode)) HR_FETCH(1)
            }
            if (!held) asm volatile("" ::: "memory"); /* else gcc carries all sums in registers, and spills */
            a += (with_min(mode) ? 12 : 8) * R;
            __m512i c[R][2];
            HR_ROWS HR_BLOCKS c[r][b] = start(rows + 4 * r);
            int64_t n = (is_k(mode) ? sub_octs(mode) : g + 1 < s.groups ? s.octs : s.last_octs) / step_octs(codes);
            do {
                if (codes != HR_CODES_8) {
                    HR_OCT(0)
                    if (stream) HR_FETCH(step_bytes(codes) / 64)
                    if (step_octs(codes) == 2) HR_OCT(1)
                } else {
                    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
                        const __m512i x = line(w + 128 * i), y = line(w + 128 * i + 64);
                        if (stream) HR_FETCH(2)
                        HR_ROWS {
                            const __m512i q = all_quad(a + 4 * (R * i + r));
                            dot4(c[r][0], x, q), dot4(c[r][1], y, q);
                        }
                    }
                    a += 8 * R;
                }
                w += step_bytes(codes);
            } while (--n);
            HR_BLOCKS {
                if (mode == HR_MODE_K16_MIN) {
                    const I pair = load_u8(header + 128 + 32 * sub + 16 * b);
                    d[b] = _mm512_mul_ps(top[b], low_nibble(pair).v), m[b] = _mm512_mul_ps(top_m[b], high_nibble(pair).v);
                } else if (is_k(mode)) {
                    const int8_t* at = with_min(mode) ? scales[sub] : (const int8_t*)header + 64 + 32 * sub;
                    d[b] = _mm512_mul_ps(top[b], load_i8(at + 16 * b).v);
                    if (with_min(mode)) m[b] = _mm512_mul_ps(top_m[b], load_i8(at + 32 + 16 * b).v);
                } else if (mode != HR_MODE_CHANNEL) {
                    d[b] = load_f16((const uint16_t*)header + b * 16).v;
                    if (mode == HR_MODE_MIN) m[b] = load_f16((const uint16_t*)header + 32 + b * 16).v;
                }
            }
            HR_ROWS {
                const __m512 sa = all_float(rows + 4 * (R + r));
                HR_BLOCKS {
                    float* at = acc + r * 32 + b * 16;
                    __m512 y = held ? f[r][b] : _mm512_load_ps(at);
                    const __m512 isum = _mm512_cvtepi32_ps(c[r][b]);
                    if (mode == HR_MODE_CHANNEL) y = _mm512_fmadd_ps(isum, sa, y);
                    else y = _mm512_fmadd_ps(_mm512_mul_ps(isum, sa), d[b], y);
                    if (with_min(mode)) y = _mm512_fmadd_ps(all_float(rows + 4 * (2 * R + r)), m[b], y);
                    if (held) f[r][b] = y;
                    else _mm512_store_ps(at, y);
                }
            }
        }
    }
    if (held) HR_ROWS HR_BLOCKS _mm512_store_ps(acc + r * 32 + b * 16, f[r][b]);
}

HR_INLINE void transpose(__m512i* x) {
    __m512i y[16];
    _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
        x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
        x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88), x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

struct Avx512 {
    enum { max_rows = 12, unpacks = 1 };
    template <int mode, int codes>
    static bool linear(const Linear& p, HrTask* task) {
        drive<Avx512, mode, codes>(p, task);
        return true;
    }
    /* Few rows wait for memory, so into the first level of cache, just ahead. More rows give it time, but would fill
     * the first level with what is not needed yet. */
    static constexpr int64_t ahead(int rows) { return rows <= HELD ? 4096 : 12288; }

    template <int mode, int codes, bool stream>
    static void tile(int rows, const Span& s) {
        switch (rows) {
#define HR_CASE(R) \
    case R: return tile_of<R, mode, codes, stream>(s);
            HR_CASE(1) HR_CASE(2) HR_CASE(3) HR_CASE(4) HR_CASE(5) HR_CASE(6)
            HR_CASE(7) HR_CASE(8) HR_CASE(9) HR_CASE(10) HR_CASE(11) HR_CASE(12)
#undef HR_CASE
        }
    }

    template <int codes>
    static void unpack(const uint8_t* from, uint8_t* to, int64_t octs, const int8_t* book) {
        const __m512i table = codes == HR_CODES_BOOK ? book_of(book) : _mm512_setzero_si512();
        for (; octs > 0; octs -= step_octs(codes), from += step_bytes(codes))
            for (int half = 0; half < step_octs(codes); half++, to += 256) {
                __m512i x[4];
                wide<codes>(from, half, table, x);
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) _mm512_storeu_si512(to + 64 * i, x[i]);
            }
    }

    static void pack_codes(const int8_t* from, int64_t ld, int rows, int64_t quads, uint8_t* to) {
        if (rows == 1) {
            memcpy(to, from, (size_t)(4 * quads));
            return;
        }
        for (int64_t k = 0; k < quads; k += 16) {
            const int64_t n = at_most(16, quads - k);
            __m512i x[16];
            for (int r = 0; r < rows; r++) x[r] = _mm512_maskz_loadu_epi32(first_n(n).m, from + r * ld + 4 * k);
            for (int r = rows; r < 16; r++) x[r] = _mm512_setzero_si512();
            transpose(x);
            for (int64_t i = 0; i < n; i++, to += 4 * rows) _mm512_mask_storeu_epi32(to, first_n(rows).m, x[i]);
        }
    }
};

}  // namespace HR_NS
