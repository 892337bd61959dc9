/* The tiles of the linear layers of integer codes in NEON: up to 6 rows by a block of 16 outputs.
 *
 * sdot adds four products of signed bytes to 32 bits. Codes of 2 to 6 bits are below 128, so they are what they are; those
 * of int8 lose the 128 that was added, and entries of a book are signed.
 *
 * Compiled a second time with HR_ISA_NEON_I8MM, whose usdot and usmmla take unsigned codes: all are too great by an offset,
 * which is in what the sums start from. usmmla multiplies two outputs by two rows, eight inputs each. */
#pragma once
#include "isa/neon_dot/vec.h"
#include "isa/linear_drive.h"

namespace HR_NS {

#define HR_ROWS _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)

/* The sums of R rows by 16 outputs. c[r] is a row; or with squares c[r].v[i] has, of an even row and the next one, outputs 4i
 * and 4i + 1, and c[r + 1].v[i] the two behind them: [output][row]. */
#ifdef HR_ISA_NEON_I8MM
constexpr bool squares = true;
HR_INLINE int32x4_t square(int32x4_t c, int8x16_t w, int8x16_t a) { return vusmmlaq_s32(c, vreinterpretq_u8_s8(w), a); }
template <int lane>
HR_INLINE int32x4_t dot4(int32x4_t c, int8x16_t w, int8x8_t a) {
    return vusdotq_lane_s32(c, vreinterpretq_u8_s8(w), a, lane);
}
#else
constexpr bool squares = false;
HR_INLINE int32x4_t square(int32x4_t c, int8x16_t, int8x16_t) { return c; }
template <int lane>
HR_INLINE int32x4_t dot4(int32x4_t c, int8x16_t w, int8x8_t a) {
    return vdotq_lane_s32(c, w, a, lane);
}
#endif

template <int R>
constexpr bool in_squares(int r) { return squares && r < R / 2 * 2; }

template <int R>
HR_INLINE void begin(I* c, const int32_t* start) {
    HR_ROWS {
        if (!in_squares<R>(r)) {
            c[r] = iset1(start[r]);
        } else if (r % 2 == 0) {
            const int32x2_t both = vld1_s32(start + r);
            HR_QUARTERS(c[r].v[i] = c[r + 1].v[i] = vcombine_s32(both, both))
        }
    }
}

/* Adds the products of quarter i of an oct, whose two quads of inputs are `first` and `second`, with rows of eight inputs. */
template <int R, int i>
HR_INLINE void add_quarter(I* c, I first, I second, const int8_t* rows) {
    const int8x16_t x = vreinterpretq_s8_s32(first.v[i]), y = vreinterpretq_s8_s32(second.v[i]);
    const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(first.v[i], second.v[i]));
    const int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(first.v[i], second.v[i]));
    HR_ROWS {
        if (!in_squares<R>(r)) {
            const int8x8_t a = vld1_s8(rows + 8 * r);
            c[r].v[i] = dot4<1>(dot4<0>(c[r].v[i], x, a), y, a);
        } else if (r % 2 == 0) {
            const int8x16_t pair = vld1q_s8(rows + 8 * r);
            c[r].v[i] = square(c[r].v[i], low, pair), c[r + 1].v[i] = square(c[r + 1].v[i], high, pair);
        }
    }
}
template <int R>
HR_INLINE void add_oct(I* c, I first, I second, const int8_t* rows) {
    HR_QUARTERS(add_quarter<R, i>(c, first, second, rows);)
}

/* c[r] becomes the row r. */
template <int R>
HR_INLINE void end(I* c) {
    HR_ROWS {
        if (in_squares<R>(r) && r % 2 == 0)
            HR_QUARTERS(const int32x4_t x = c[r].v[i], y = c[r + 1].v[i];
                        c[r].v[i] = vuzp1q_s32(x, y), c[r + 1].v[i] = vuzp2q_s32(x, y))
    }
}

/* Whether the sums count codes as they are stored, too great by an offset. */
constexpr bool with_offset(int codes) { return squares || (codes != HR_CODES_8 && codes != HR_CODES_BOOK); }

HR_INLINE I of_book(int8x16_t book, I index) HR_FOUR(I, vreinterpretq_s32_s8(vqtbl1q_s8(book, vreinterpretq_u8_s32(index.v[i]))))
HR_INLINE int8x16_t load_book(const int8_t* book) {
    return squares ? veorq_s8(vld1q_s8(book), vdupq_n_s8(-128)) : vld1q_s8(book);
}
HR_INLINE I all_bytes(int x) { return iset1((int32_t)(0x01010101u * (uint32_t)x)); }

/* The two quads of an oct as bytes; w is the step of octs that lie together, and `half` says which of them. */
template <int codes, int block, int half>
HR_INLINE void open_oct(const uint8_t* w, int8x16_t book, I& first, I& second) {
    constexpr int bits = bits_of(codes);
    if constexpr (bits == 8) {
        first = load_lines(w + 64 * block), second = load_lines(w + 128 + 64 * block);
        if (!squares) first = ixor(first, all_bytes(128)), second = ixor(second, all_bytes(128));
        return;
    }
    const I low = all_bytes(bits < 4 ? 3 : 15), line = load_lines(w + half * hr_low_lines(bits) * 64 + (bits < 4 ? 0 : 64 * block));
    constexpr int skip = bits < 4 ? 2 * block : 0;
    first = iand(shift_right<skip>(line), low), second = iand(shift_right<skip + 4>(line), low);
    if (codes == HR_CODES_BOOK) first = of_book(book, first), second = of_book(book, second);
    if constexpr (bits != hr_low_bits(bits)) {
        const I high = load_lines(w + high_line(codes));
        constexpr int least = hr_low_bits(bits), each = bits - least, at = half * 4 + block * each;
        const I upper = all_bytes(((1 << each) - 1) << least);
        if constexpr (at < least) first = ior(first, iand(shift_left<least - at>(high), upper));
        else first = ior(first, iand(shift_right<at - least>(high), upper));
        constexpr int next = at + 2 * each;
        if constexpr (next < least) second = ior(second, iand(shift_left<least - next>(high), upper));
        else second = ior(second, iand(shift_right<next - least>(high), upper));
    }
}

HR_INLINE void store_lines(void* p, I x) { HR_QUARTERS(vst1q_u8((uint8_t*)p + 16 * i, vreinterpretq_u8_s32(x.v[i]))) }

/* Scales and minima of 6 bits as bytes (isa/linear_layout.h). */
template <int64_t subs>
HR_INLINE void open_scales(const uint8_t* from, int8_t (*to)[64]) {
    const I six = all_bytes(63), lowest = all_bytes(3), middle = all_bytes(12), highest = all_bytes(48);
    for (int64_t j = 0; j < subs; j += 4, from += 192) {
        const I x = load_lines(from), y = load_lines(from + 64), z = load_lines(from + 128);
        store_lines(to[j], iand(x, six)), store_lines(to[j + 1], iand(y, six)), store_lines(to[j + 2], iand(z, six));
        const I lower = ior(iand(shift_right<6>(x), lowest), iand(shift_right<4>(y), middle));
        store_lines(to[j + 3], ior(lower, iand(shift_right<2>(z), highest)));
    }
}

/* What a run of inputs brings to the float sums of a block: `from` is its header in the activations, w its octs. */
template <int R, int mode, int codes, int block>
HR_INLINE void add_run(const Span& s, const uint8_t* w, const uint8_t* from, int64_t octs, bool fetch, int8x16_t book, V d, V m) {
    const int32_t* start = (const int32_t*)from;
    const float* scales = (const float*)from + R;
    const int8_t* rows = (const int8_t*)from + (with_min(mode) ? 12 : 8) * R;
    I c[R];
    if (with_offset(codes)) begin<R>(c, start);
    else HR_ROWS c[r] = izero();
    for (int64_t n = 0; n < octs; n += step_octs(codes), w += step_bytes(codes)) {
        if (fetch)
            for (int64_t i = 0; i < step_bytes(codes); i += 64) __builtin_prefetch(w + s.ahead + i);
        I first, second;
        open_oct<codes, block, 0>(w, book, first, second);
        add_oct<R>(c, first, second, rows), rows += 8 * R;
        if constexpr (step_octs(codes) == 2) {
            open_oct<codes, block, 1>(w, book, first, second);
            add_oct<R>(c, first, second, rows), rows += 8 * R;
        }
    }
    end<R>(c);
    HR_ROWS {
        float* at = s.acc + r * HR_PANEL + 16 * block;
        const V isum = to_f32(c[r]), sa = set1(scales[r]);
        V f = load(at);
        f = mode == HR_MODE_CHANNEL ? fma(isum, sa, f) : fma(mul(isum, sa), d, f);
        if (with_min(mode)) f = fma(set1(scales[R + r]), m, f);
        store(at, f);
    }
}

template <int R, int mode, int codes>
__attribute__((noinline)) static void tile_of(const Span& s, bool stream) {
    const int8x16_t book = codes == HR_CODES_BOOK ? load_book(s.book) : vdupq_n_s8(0);
    const uint8_t *w = s.w, *a = s.a;
    for (int64_t g = 0; g < s.groups; g++) {
        const int64_t octs = is_k(mode) ? sub_octs(mode) : g + 1 < s.groups ? s.octs : s.last_octs;
        const uint8_t* const header = w;
        w += weight_header(mode);
        int8_t scales[mode == HR_MODE_K32_MIN ? subs_of(mode) : 1][64];
        if (mode == HR_MODE_K32_MIN) open_scales<subs_of(mode)>(header + 128, scales);
        for (int64_t i = 0; stream && i < weight_header(mode); i += 64) __builtin_prefetch(header + s.ahead + i);
        for (int64_t sub = 0; sub < subs_of(mode); sub++) {
            const auto scales_of = [&](int b, V& d, V& m) __attribute__((always_inline)) {
                d = m = zero();
                if (mode == HR_MODE_CHANNEL) return;
                d = load_f16((const uint16_t*)header + 16 * b);
                if (with_min(mode)) m = load_f16((const uint16_t*)header + 32 + 16 * b);
                if (mode == HR_MODE_K16_MIN) {
                    const I pair = load_u8(header + 128 + 32 * sub + 16 * b);
                    d = mul(d, low_nibble(pair)), m = mul(m, high_nibble(pair));
                } else if (is_k(mode)) {
                    const int8_t* at = with_min(mode) ? scales[sub] : (const int8_t*)header + 64 + 32 * sub;
                    d = mul(d, load_i8(at + 16 * b));
                    if (with_min(mode)) m = mul(m, load_i8(at + 32 + 16 * b));
                }
            };
            V d, m;
            scales_of(0, d, m), add_run<R, mode, codes, 0>(s, w, a, octs, stream, book, d, m);
            scales_of(1, d, m), add_run<R, mode, codes, 1>(s, w, a, octs, false, book, d, m);
            w += octs * bits_of(codes) * HR_LINE / 2;
            a += (with_min(mode) ? 12 : 8) * R + octs * 8 * R;
        }
    }
}

struct Neon {
    enum { max_rows = 6, unpacks = squares };
    template <int mode, int codes>
    static bool linear(const Linear& p, HrTask* task) {
        drive<Neon, mode, codes>(p, task);
        return true;
    }
    static constexpr int64_t ahead(int) { return 4096; }

    template <int mode, int codes, bool stream>
    static void tile(int rows, const Span& s) {
        switch (rows) {
            case 1: return tile_of<1, mode, codes>(s, stream);
            case 2: return tile_of<2, mode, codes>(s, stream);
            case 3: return tile_of<3, mode, codes>(s, stream);
            case 4: return tile_of<4, mode, codes>(s, stream);
            case 5: return tile_of<5, mode, codes>(s, stream);
            case 6: return tile_of<6, mode, codes>(s, stream);
        }
    }

    template <int codes, int block, int half>
    HR_INLINE void unpack_oct(const uint8_t* from, int8x16_t book, uint8_t* to) {
        I first, second;
        open_oct<codes, block, half>(from, book, first, second);
        store_lines(to + 64 * block, first), store_lines(to + 128 + 64 * block, second);
    }
    template <int codes>
    static void unpack(const uint8_t* from, uint8_t* to, int64_t octs, const int8_t* codes_of) {
        const int8x16_t book = codes == HR_CODES_BOOK ? load_book(codes_of) : vdupq_n_s8(0);
        for (; octs > 0; octs -= step_octs(codes), from += step_bytes(codes), to += 256 * step_octs(codes)) {
            unpack_oct<codes, 0, 0>(from, book, to), unpack_oct<codes, 1, 0>(from, book, to);
            if constexpr (step_octs(codes) == 2)
                unpack_oct<codes, 0, 1>(from, book, to + 256), unpack_oct<codes, 1, 1>(from, book, to + 256);
        }
    }

    /* Eights of inputs, and of each the rows. */
    static void pack_codes(const int8_t* from, int64_t ld, int rows, int64_t quads, uint8_t* to) {
        for (int64_t k = 0; k < 4 * quads; k += 8)
            for (int r = 0; r < rows; r++, to += 8) memcpy(to, from + r * ld + k, 8);
    }
};

}  // namespace HR_NS
