/* The two products of attention as register tiles, and the softmax between them.
 *
 * A "combo" is one row and one query head; up to MAX_COMBOS of them share what is loaded of the cache. Every score is
 * one chain over d and every output one chain over keys, so speed comes from many chains at once: combos times key
 * tiles of 16 in the first product, combos times vectors of head_dim in the second. How many fit follows from the
 * registers of the ISA; the bits do not depend on it. */
#pragma once
#include "include/kernels.h"
#include HR_VEC_H
#include "generic/math.h"

namespace HR_NS {
namespace {

enum { MAX_COMBOS = 6, SPAN_TILES = HR_SPAN / HR_LANES };
enum { LD_S = HR_SPAN + 16 }; /* rows of scores, kept off one another's cache lines */

/* How a type is read. `scaled`: its numbers are codes, with a scale for each token and head. `pair`: channels in a byte. */
struct Plain {
    static constexpr bool scaled = false, dot = false;
    static constexpr int pair = 1;
    static int64_t key_rows(int64_t head_dim) { return head_dim; }
    static int64_t value_row(int64_t head_dim) { return head_dim; }
};
struct Scaled : Plain {
    static constexpr bool scaled = true;
    HR_INLINE V scale(const void* p) { return load((const float*)p); }
};
struct F32 : Plain {
    typedef float E;
    static constexpr int type = HR_F32;
    HR_INLINE V get(const E* p) { return load(p); }
    HR_INLINE V get_n(const E* p, int64_t n) { return load_n(p, n); }
};
struct F16 : Plain {
    typedef uint16_t E;
    static constexpr int type = HR_F16;
    HR_INLINE V get(const E* p) { return load_f16(p); }
    HR_INLINE V get_n(const E* p, int64_t n) { return load_f16_n(p, n); }
};
struct BF16 : Plain {
    typedef uint16_t E;
    static constexpr int type = HR_BF16;
    HR_INLINE V get(const E* p) { return load_bf16(p); }
    HR_INLINE V get_n(const E* p, int64_t n) { return load_bf16_n(p, n); }
};
struct E5M2 : Plain {
    typedef uint8_t E;
    static constexpr int type = HR_E5M2;
    HR_INLINE V get(const E* p) { return load_e5m2(p); }
    HR_INLINE V get_n(const E* p, int64_t n) { return load_e5m2_n(p, n); }
};
struct E4M3 : Scaled {
    typedef uint8_t E;
    static constexpr int type = HR_E4M3;
    HR_INLINE V get(const E* p) { return load_e4m3(p); }
    HR_INLINE V get_n(const E* p, int64_t n) { return load_e4m3_n(p, n); }
};
struct I4 : Scaled {
    typedef uint8_t E;
    static constexpr int type = HR_I4, pair = 2;
    static int64_t key_rows(int64_t head_dim) { return (head_dim + 1) / 2; }
    static int64_t value_row(int64_t head_dim) { return head_dim / 32 * 16 + (head_dim % 32 < 16 ? head_dim % 32 : 16); }
    HR_INLINE V scale(const void* p) { return load_bf16((const uint16_t*)p); }
    HR_INLINE V least(const void* p) { return load_bf16((const uint16_t*)p + 16); }
};
struct I8 : Scaled {
    typedef int8_t E;
    static constexpr int type = HR_I8;
    HR_INLINE V get(const E* p) { return load_i8(p); }
    HR_INLINE V get_n(const E* p, int64_t n) { return load_i8_n(p, n); }
};

/* Products of integers: four channels of a key, or four keys of a channel, lie together. */
struct I8Dot : Scaled {
    typedef uint8_t E;
    static constexpr int type = HR_I8_DOT;
    static constexpr bool dot = true;
    static int64_t key_rows(int64_t head_dim) { return (head_dim + 3) / 4 * 4; }
    static int64_t value_row(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
};

/* Vectors that go with `combos` rows of accumulators: up to 24 of 32 registers, or 6 of 8 pairs. */
constexpr int tile_width(int combos) {
#if defined(HR_ISA_AVX512_VNNI)
    return combos <= 3 ? 8 : 4;
#else
    return combos == 1 ? 4 : combos <= 3 ? 2 : 1;
#endif
}

/* To the second level of cache: the first is full of what is in use. */
HR_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

/* Both products also fetch `ahead`, the tiles of the next span, step by step with their own, so that the memory works
 * while they compute. */

/* s[c][t * 16 + i] = chain over d of q[d][c] * k[t][d][i]; where channels come in pairs, an odd one's other is 0 in q. */
template <class K, int C, int T>
static void scores_tile(const float* q, const void* const* tiles, const void* const* ahead, int64_t head_dim,
                        float* s) {
    V a[C][T];
    const typename K::E *k[T], *next[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) k[t] = (const typename K::E*)tiles[t], next[t] = (const typename K::E*)ahead[t];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) a[c][t] = zero();
    const int64_t key_rows = K::key_rows(head_dim);
    for (int64_t d = 0; d < key_rows; d++, q += C * K::pair) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            fetch(next[t] + d * 16);
            if constexpr (K::pair == 2) {
                const I both = load_u8(k[t] + d * 16);
                const V low = low_nibble(both), high = high_nibble(both);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) a[c][t] = fma(set1(q[C + c]), high, fma(set1(q[c]), low, a[c][t]));
            } else {
                V x = K::get(k[t] + d * 16);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) a[c][t] = fma(set1(q[c]), x, a[c][t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) store(s + c * LD_S + t * 16, a[c][t]);
}

template <class K, int C>
static void scores(const float* q, const void* const* tiles, const void* const* ahead, int first, int last,
                   int64_t head_dim, float* s) {
    constexpr int W = tile_width(C);
    int t = first;
    for (; last - t >= W; t += W) scores_tile<K, C, W>(q, tiles + t, ahead + t, head_dim, s + t * 16);
    if constexpr (W > 4)
        if (last - t >= 4) scores_tile<K, C, 4>(q, tiles + t, ahead + t, head_dim, s + t * 16), t += 4;
    if constexpr (W > 2)
        if (last - t >= 2) scores_tile<K, C, 2>(q, tiles + t, ahead + t, head_dim, s + t * 16), t += 2;
    if constexpr (W > 1)
        if (last - t >= 1) scores_tile<K, C, 1>(q, tiles + t, ahead + t, head_dim, s + t * 16);
}

/* Sixteen channels of a value from d0 on, or n of them; of a pair's bytes the low or the high bits. */
template <class K, bool Ragged>
HR_INLINE V value_at(const typename K::E* v, int64_t d0, int64_t n) {
    if constexpr (K::pair == 2) {
        if (d0 & 16) return high_nibble(load_u8(v)); /* the low channels are all there */
        return low_nibble(Ragged ? load_u8_n(v, n) : load_u8(v));
    } else {
        return Ragged ? K::get_n(v, n) : K::get(v);
    }
}

/* acc[c][d0 ...] = acc * alpha[c], then the chain over keys first ... last - 1 of w[c][j] * v[j][d]. Keys are counted
 * within the span; n < 16 marks the ragged end of head_dim. */
template <class K, int C, int D, bool Ragged>
static void values_tile(const float* w, const void* const* tiles, const void* const* ahead, int first, int last,
                        int64_t ld_v, int64_t d0, int64_t n, const float* alpha, float* acc, int64_t ld_acc) {
    V a[C][D];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
        for (int i = 0; i < D; i++) a[c][i] = mul(load(acc + c * ld_acc + d0 + i * 16), set1(alpha[c]));
    for (int j = first; j < last;) {
        const int64_t at = j % 16 * ld_v + (K::pair == 2 ? d0 / 32 * 16 : d0);
        const typename K::E* v = (const typename K::E*)tiles[j / 16] + at;
        const typename K::E* next = (const typename K::E*)ahead[j / 16] + at;
        int end = (j | 15) + 1 < last ? (j | 15) + 1 : last;
        for (; j < end; j++, v += ld_v, next += ld_v) {
#pragma GCC unroll 8
            for (int i = 0; i < D * 16 * (int)sizeof(*v) / K::pair; i += 64) fetch((const char*)next + i);
            if constexpr (K::pair == 2 && D > 1) {
#pragma GCC unroll 8
                for (int i = 0; i < D; i += 2) {
                    const I both = load_u8(v + i * 8);
                    const V low = low_nibble(both), high = high_nibble(both);
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) a[c][i] = fma(set1(w[c * LD_S + j]), low, a[c][i]);
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) a[c][i + 1] = fma(set1(w[c * LD_S + j]), high, a[c][i + 1]);
                }
            } else {
#pragma GCC unroll 8
                for (int i = 0; i < D; i++) {
                    V x = value_at<K, Ragged>(v + i * 16, d0, n);
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) a[c][i] = fma(set1(w[c * LD_S + j]), x, a[c][i]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
        for (int i = 0; i < D; i++) store(acc + c * ld_acc + d0 + i * 16, a[c][i]);
}

template <class K, int C>
static void values(const float* w, const void* const* tiles, const void* const* ahead, int first, int last,
                   int64_t head_dim, int64_t ld_v, const float* alpha, float* acc, int64_t ld_acc) {
    constexpr int W = tile_width(C);
    int64_t d = 0;
#define HR_CALL(width, ragged, n) \
    values_tile<K, C, width, ragged>(w, tiles, ahead, first, last, ld_v, d, n, alpha, acc, ld_acc)
    for (; head_dim - d >= 16 * W; d += 16 * W) HR_CALL(W, false, 16);
    if constexpr (W > 4)
        if (head_dim - d >= 64) HR_CALL(4, false, 16), d += 64;
    if constexpr (W > 2)
        if (head_dim - d >= 32) HR_CALL(2, false, 16), d += 32;
    if constexpr (W > 1)
        if (head_dim - d >= 16) HR_CALL(1, false, 16), d += 16;
    if (d < head_dim) HR_CALL(1, true, head_dim - d);
#undef HR_CALL
}

#define HR_BY_COMBOS(call)          \
    switch (combos) {               \
        case 1: call(1); break;     \
        case 2: call(2); break;     \
        case 3: call(3); break;     \
        case 4: call(4); break;     \
        case 5: call(5); break;     \
        default: call(6); break;    \
    }

template <class K>
static void scores(int combos, const float* q, const void* const* tiles, const void* const* ahead, int first, int last,
                   int64_t head_dim, float* s) {
#define HR_CALL(n) scores<K, n>(q, tiles, ahead, first, last, head_dim, s)
    HR_BY_COMBOS(HR_CALL)
#undef HR_CALL
}

template <class K>
static void values(int combos, const float* w, const void* const* tiles, const void* const* ahead, int first, int last,
                   int64_t head_dim, int64_t ld_v, const float* alpha, float* acc, int64_t ld_acc) {
#define HR_CALL(n) values<K, n>(w, tiles, ahead, first, last, head_dim, ld_v, alpha, acc, ld_acc)
    HR_BY_COMBOS(HR_CALL)
#undef HR_CALL
}

/* As scores_tile and values_tile, of HR_I8_DOT. q holds four channels in a word, the high parts of all combos' codes and
 * then the low ones; of what the keys' 128 adds, `added` has both sums. */
template <int C, int T>
static void dot_scores_tile(const int32_t* q, const int32_t* added, const void* const* tiles, const void* const* ahead,
                            int64_t words, float* s) {
    I high[C][T], low[C][T];
    const char *k[T], *next[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        k[t] = (const char*)tiles[t], next[t] = (const char*)ahead[t];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) high[c][t] = iset1(-added[c * 2]), low[c][t] = iset1(-added[c * 2 + 1]);
    }
    for (int64_t d = 0; d < words; d++, q += 2 * C) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            const I x = load_lines(k[t] + d * 64);
            fetch(next[t] + d * 64);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                high[c][t] = dot(high[c][t], x, q + c);
                low[c][t] = dot(low[c][t], x, q + C + c);
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) store(s + c * LD_S + t * 16, fma(to_f32(high[c][t]), set1(128.0f), to_f32(low[c][t])));
}

template <int C>
static void dot_scores(const int32_t* q, const int32_t* added, const void* const* tiles, const void* const* ahead,
                       int first, int last, int64_t words, float* s) {
    constexpr int W = tile_width(C) > 1 ? tile_width(C) / 2 : 1;
    int t = first;
    for (; last - t >= W; t += W) dot_scores_tile<C, W>(q, added, tiles + t, ahead + t, words, s + t * 16);
    for (; t < last; t++) dot_scores_tile<C, 1>(q, added, tiles + t, ahead + t, words, s + t * 16);
}

/* codes: those of HR_SPAN keys of each combo, of a hidden one 0. A combo that sees no key is left as it is. */
template <int C, int D>
static void dot_values_tile(const uint8_t* codes, const void* const* tiles, const void* const* ahead, int first, int last,
                            int64_t row, int64_t d0, const bool* sees, const float* step, const float* alpha, float* acc,
                            int64_t ld_acc) {
    I a[C][D];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
        for (int i = 0; i < D; i++) a[c][i] = iset1(0);
    for (int g = first; g < last; g++) {
        const int64_t at = g % 4 * row + d0 * 4;
        const char *v = (const char*)tiles[g / 4] + at, *next = (const char*)ahead[g / 4] + at;
        I w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            int32_t four;
            memcpy(&four, codes + c * HR_SPAN + g * 4, 4);
            w[c] = iset1(four);
        }
#pragma GCC unroll 8
        for (int i = 0; i < D; i++) {
            const I x = load_lines(v + i * 64);
            fetch(next + i * 64);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) a[c][i] = dot(a[c][i], w[c], x);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
        if (sees[c])
#pragma GCC unroll 8
            for (int i = 0; i < D; i++) {
                float* to = acc + c * ld_acc + d0 + i * 16;
                store(to, fma(to_f32(a[c][i]), set1(step[c]), mul(load(to), set1(alpha[c]))));
            }
}

template <int C>
static void dot_values(const uint8_t* codes, const void* const* tiles, const void* const* ahead, int first, int last,
                       int64_t row, const bool* sees, const float* step, const float* alpha, float* acc, int64_t ld_acc) {
    constexpr int W = tile_width(C);
    int64_t d = 0;
#define HR_CALL(n) dot_values_tile<C, n>(codes, tiles, ahead, first, last, row, d, sees, step, alpha, acc, ld_acc)
    for (; ld_acc - d >= 16 * W; d += 16 * W) HR_CALL(W);
    for (; d < ld_acc; d += 16) HR_CALL(1);
#undef HR_CALL
}

static void dot_scores(int combos, const int32_t* q, const int32_t* added, const void* const* tiles,
                       const void* const* ahead, int first, int last, int64_t words, float* s) {
#define HR_CALL(n) dot_scores<n>(q, added, tiles, ahead, first, last, words, s)
    HR_BY_COMBOS(HR_CALL)
#undef HR_CALL
}

static void dot_values(int combos, const uint8_t* codes, const void* const* tiles, const void* const* ahead, int first,
                       int last, int64_t row, const bool* sees, const float* step, const float* alpha, float* acc,
                       int64_t ld_acc) {
#define HR_CALL(n) dot_values<n>(codes, tiles, ahead, first, last, row, sees, step, alpha, acc, ld_acc)
    HR_BY_COMBOS(HR_CALL)
#undef HR_CALL
}

/* exp(x) of math.h where x <= 0 or NaN: its upper bounds can do nothing there. */
HR_INLINE V exp_falling(V x) {
    V y = max(set1(-88.0f), x);
    I n = round_i32(mul(y, set1(1.44269504088896341f)));
    V f = to_f32(n);
    V r = fma(f, set1(-0.693359375f), y);
    r = fma(f, set1(2.12194440e-4f), r);
    V p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    p = mul(p, pow2(n));
    return select(lt(x, set1(-87.3f)), zero(), p);
}

}  // namespace
}  // namespace HR_NS
