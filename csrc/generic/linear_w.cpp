/* Linear layers whose weights are codes and whose inputs are floats: nothing of the activations is rounded.
 *
 * A weight becomes a float in the registers (code to number, times scale, plus minimum, as unpack_row has it), and an
 * output is one chain of fma, so the bits are those of linear_f over the unpacked weights. Few rows: 64 outputs at a time,
 * two panels side by side, each streamed once. Many rows: a block of inputs of 64 outputs is unpacked into the first
 * cache, and the tiles of linear_f pass over it. Scalar has an oracle of its own. */
#ifndef HR_ISA_SCALAR
#include HR_VEC_H
#include "generic/linear_tiles.h"
#include "generic/ops.h"
#include "isa/linear_drive.h"

namespace HR_NS {
namespace {

enum { HR_CODES_F8 = HR_CODES_BOOK };
constexpr int FEW = 4;    /* rows */
constexpr int STEP = 16;  /* inputs: what is left of a row after whole steps is copied, and filled up with zeros */
/* Panels side by side: the sums of all rows stay in registers where they fit. */
#ifdef HR_ISA_AVX512_VNNI
constexpr int panels_of(int) { return 2; }
/* Whether the vectors of an input come in turn, since each is one chain; else all inputs of an oct for each vector. */
constexpr bool in_turn(int codes) { return codes != HR_CODES_F8; }
#else
constexpr bool in_turn(int) { return false; }
constexpr int panels_of(int rows) { return rows == 1 ? 2 : 1; }
#endif

struct Wide {
    HrLayout l;
    int mode;
    int64_t run; /* inputs with one scale */
    alignas(64) float book[16]; /* what codes of up to 4 bits stand for, whatever lies above the bits of a shorter one */
    float offset;               /* that of codes of 5 and 6 bits is greater */
};

template <int i>
struct Number {
    enum { value = i };
};
template <int i, int n, class F>
HR_INLINE void each(F f) {
    if constexpr (i < n) {
        f(Number<i>());
        each<i + 1, n>(f);
    }
}

constexpr int width_of(int codes) { return codes == HR_CODES_F8 ? 8 : bits_of(codes); }
/* Of the octs that lie together: their lines, and where the second begins. */
constexpr int64_t lines_of(int codes) { return width_of(codes) * hr_step_octs(width_of(codes)) / 2; }
constexpr int64_t half_bytes(int codes) { return hr_low_lines(width_of(codes)) * HR_LINE; }

/* Eight inputs of the sixteen outputs of a block; half: which oct of a pair it is (codes of 3 and 5 bits). */
template <int codes, int block, int half = 0>
struct Oct {
    I low, high;
    bool normal; /* no code of f8 is zero or subnormal */
    __attribute__((always_inline)) explicit Oct(const uint8_t* at)
        : low(load_lines(at + (width_of(codes) < 4 ? 0 : 64 * block))), high(low), normal(true) {
        if (codes == HR_CODES_8 || codes == HR_CODES_F8) high = load_lines(at + 128 + 64 * block);
        if (codes == HR_CODES_8) low = ixor(low, iset1((int32_t)0x80808080)), high = ixor(high, iset1((int32_t)0x80808080));
        if (codes == HR_CODES_6) high = load_lines(at + 128);
        if (codes == HR_CODES_3 || codes == HR_CODES_5) high = load_lines(at + (2 - half) * half_bytes(codes));
        if (codes == HR_CODES_F8) {
            /* Seven bits: the sum of an exponent that is not zero reaches the uppermost bit of its byte. */
            const I exponents = iset1(0x78787878), top = iset1((int32_t)0x80808080);
            const I first = iadd(iand(low, exponents), exponents), second = iadd(iand(high, exponents), exponents);
            normal = all_equal(iand(iand(first, second), top), top);
        }
    }
    /* The upper bits from bit `from` on, moved to bit `to`. */
    template <int from, int to>
    __attribute__((always_inline)) I above() const {
        if constexpr (from < to) return shift_left<to - from>(high);
        else return shift_right<from - to>(high);
    }
    /* What the code of input j stands for, without its scale. */
    template <int j>
    __attribute__((always_inline)) V number(V book, V offset) const {
        constexpr int quad = j / 4, at = 8 * (j % 4);
        if constexpr (codes == HR_CODES_4) return look_up(book, shift_right<at + 4 * quad>(low));
        if constexpr (codes == HR_CODES_2) return look_up(book, shift_right<at + 2 * (2 * quad + block)>(low));
        if constexpr (codes == HR_CODES_3) {
            const I two = iand(shift_right<at + 2 * (2 * quad + block)>(low), iset1(3));
            return look_up(book, ior(two, iand(above<at + 4 * half + 2 * quad + block, 2>(), iset1(4))));
        }
        if constexpr (codes == HR_CODES_5 || codes == HR_CODES_6) {
            const I four = iand(shift_right<at + 4 * quad>(low), iset1(15));
            const I rest = codes == HR_CODES_6 ? iand(above<at + 2 * (2 * quad + block), 4>(), iset1(0x30))
                                               : iand(above<at + 4 * half + 2 * quad + block, 4>(), iset1(16));
            return sub(to_f32(ior(four, rest)), offset);
        }
        const I top = shift_left<24 - at>(quad ? high : low);
        if constexpr (codes == HR_CODES_8) return to_f32(shift_signed<24>(top));
        /* E4M3's bits are those of a float whose exponent is less by 120. Of exponent zero the number is 2^-7 * (1 + m / 8)
         * in place of 2^-9 * m: floats that are subnormal themselves would cost a hundred times as much. */
        const I bits = iand(shift_signed<4>(top), iset1((int32_t)0x87f00000));
        const V x = as_floats(iadd(bits, iset1(120 << 23)));
        if (__builtin_expect(normal, 1)) return x;
        const V least = as_floats(ior(iand(bits, iset1(INT32_MIN)), iset1(121 << 23)));
        return select(lt(abs(x), set1(0x1p-6f)), sub(add(x, x), least), x);
    }
};

/* Scales d and minima m of a block of a panel, `header` being its group's. */
template <bool floats>
HR_INLINE void scales_of(const Wide& p, const uint8_t* header, const uint8_t* channel, int64_t sub, int block, V& d, V& m) {
    m = zero();
    if (p.mode == HR_MODE_CHANNEL) d = load((const float*)channel + 16 * block);
    else if (floats) d = load((const float*)header + 16 * block);
    else d = load_f16((const uint16_t*)header + 16 * block);
    if (p.mode == HR_MODE_ZERO) {
        /* Codes and zeros are so short that code * d + m is (code - zero) * d, exactly. */
        const I pair = load_u8(header + HR_LINE);
        m = mul(HR_NS::sub(zero(), block ? high_nibble(pair) : low_nibble(pair)), d);
    } else if (with_min(p.mode)) {
        m = load_f16((const uint16_t*)header + HR_PANEL + 16 * block);
    }
    if (!is_k(p.mode)) return;
    if (!with_min(p.mode)) {
        d = mul(d, load_i8((const int8_t*)header + HR_LINE + sub * HR_PANEL + 16 * block));
        return;
    }
    if (p.mode == HR_MODE_K16_MIN) {
        const I pair = load_u8(header + 2 * HR_LINE + sub * HR_PANEL + 16 * block);
        d = mul(d, low_nibble(pair)), m = mul(m, high_nibble(pair));
        return;
    }
    V parts[2];
    for (int i = 0; i < 2; i++) {
        const uint8_t* at = header + 2 * HR_LINE + sub / 4 * 3 * HR_LINE + 32 * i + 16 * block;
        if (sub % 4 < 3) {
            parts[i] = to_f32(iand(load_u8(at + sub % 4 * HR_LINE), iset1(63)));
        } else {
            const I x = shift_right<6>(load_u8(at)), y = shift_right<6>(load_u8(at + HR_LINE));
            const I z = shift_right<6>(load_u8(at + 2 * HR_LINE));
            parts[i] = to_f32(ior(x, ior(shift_left<2>(y), shift_left<4>(z))));
        }
    }
    d = mul(d, parts[0]), m = mul(m, parts[1]);
}

/* f(input of the oct, vector, weights) of the oct at `at` of each panel. A minimum is added with the product in one fma: the
 * product of a code and its scale is exact then (22 bits at most). */
template <int codes, bool has_min, int panels, int half, class F>
HR_INLINE void walk_oct(const uint8_t* const* at_panel, int64_t at, V book, V offset, const V* d, const V* m, F f) {
    const auto weight = [&](auto& o, auto j, int v) __attribute__((always_inline)) {
        const V number = o.template number<decltype(j)::value>(book, offset);
        return has_min ? fma(number, d[v], m[v]) : mul(number, d[v]);
    };
    if constexpr (in_turn(codes)) {
        const Oct<codes, 0, half> o0(at_panel[0] + at), o2(at_panel[panels - 1] + at);
        const Oct<codes, 1, half> o1(at_panel[0] + at), o3(at_panel[panels - 1] + at);
        each<0, 8>([&](auto j) __attribute__((always_inline)) {
            f(decltype(j)::value, 0, weight(o0, j, 0)), f(decltype(j)::value, 1, weight(o1, j, 1));
            if (panels == 2) f(decltype(j)::value, 2, weight(o2, j, 2)), f(decltype(j)::value, 3, weight(o3, j, 3));
        });
    } else {
        each<0, 2 * panels>([&](auto n) __attribute__((always_inline)) {
            constexpr int v = decltype(n)::value;
            const Oct<codes, v % 2, half> o(at_panel[v / 2] + at);
            each<0, 8>([&](auto j) __attribute__((always_inline)) { f(decltype(j)::value, v, weight(o, j, v)); });
        });
    }
}

/* f(k, vector, weights) over whole steps of inputs that cover from ... to - 1 (`from` is a multiple of STEP) of `panels`
 * panels, in order for each vector. */
template <int codes, bool has_min, int panels, class F>
HR_INLINE void walk(const Wide& p, const uint8_t* w, const uint8_t* other, int64_t from, int64_t to, F f) {
    constexpr int64_t step = 8 * hr_step_octs(width_of(codes));
    const HrLayout& l = p.l;
    const V book = load(p.book), offset = set1(p.offset);
    const uint8_t* const at_panel[2] = {w, other};
    const int64_t bytes = l.oct_bytes * (step / 8);
    for (int64_t k = from; k < to;) {
        const int64_t g = k / l.group, first = g * l.group, sub = (k - first) / p.run;
        const int64_t end = at_most(to, first + (sub + 1) * p.run);
        V d[2 * panels], m[2 * panels];
#pragma GCC unroll 4
        for (int v = 0; v < 2 * panels; v++) {
            const uint8_t* panel = at_panel[v / 2];
            scales_of<codes == HR_CODES_F8>(p, panel + g * l.group_bytes, panel + l.panel_bytes - 4 * HR_PANEL, sub, v % 2,
                                            d[v], m[v]);
        }
        int64_t at = g * l.group_bytes + l.header + (k - first) / 8 * l.oct_bytes;
        for (; k < end; k += step, at += bytes) {
            each<0, panels * lines_of(codes)>([&](auto n) __attribute__((always_inline)) {
                constexpr int64_t lines = lines_of(codes);
                __builtin_prefetch(at_panel[decltype(n)::value / lines] + at + AHEAD + decltype(n)::value % lines * HR_LINE);
            });
            walk_oct<codes, has_min, panels, 0>(at_panel, at, book, offset, d, m, [&](int64_t j, int v, V weight)
                                                    __attribute__((always_inline)) { f(k + j, v, weight); });
            if (step == 16)
                walk_oct<codes, has_min, panels, step == 16>(
                    at_panel, at + half_bytes(codes), book, offset, d, m,
                    [&](int64_t j, int v, V weight) __attribute__((always_inline)) { f(k + 8 + j, v, weight); });
        }
    }
}

/* The sums of a few rows, [row][64]. x of row r begins at x[r]. */
template <int codes, bool has_min, int rows>
void few_rows_of(const Wide& p, const uint8_t* w, const uint8_t* other, const float* const* x, float* sums) {
    constexpr int panels = panels_of(rows);
    const int64_t whole = p.l.num_in / STEP * STEP;
    float rest[rows][STEP] = {};
    for (int r = 0; r < rows; r++) memcpy(rest[r], x[r] + whole, sizeof(float) * (size_t)(p.l.num_in - whole));
    for (int at = 0; at < 2; at += panels) {
        V c[rows][2 * panels];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < 2 * panels; v++) c[r][v] = zero();
        for (int part = 0; part < 2; part++) {
            const float* from[rows];
            for (int r = 0; r < rows; r++) from[r] = part ? rest[r] - whole : x[r];
            walk<codes, has_min, panels>(p, at ? other : w, other, part ? whole : 0, part ? p.l.num_in : whole,
                                         [&](int64_t k, int v, V weight) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) c[r][v] = fma(set1(from[r][k]), weight, c[r][v]);
            });
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < 2 * panels; v++) store(sums + r * HR_PANEL_F + 32 * at + 16 * v, c[r][v]);
    }
}

/* Inputs from ... to - 1 of 64 outputs to floats [to - from, rounded up to steps][64]. */
template <int codes, bool has_min>
void widen_of(const Wide& p, const uint8_t* w, const uint8_t* other, int64_t from, int64_t to, float* out) {
    walk<codes, has_min, 2>(p, w, other, from, to, [&](int64_t k, int v, V weight) __attribute__((always_inline)) {
        store(out + (k - from) * HR_PANEL_F + 16 * v, weight);
    });
}

struct Fns {
    void (*one)(const Wide&, const uint8_t*, const uint8_t*, const float* const*, float*);
    void (*few)(const Wide&, const uint8_t*, const uint8_t*, const float* const*, float*);
    void (*widen)(const Wide&, const uint8_t*, const uint8_t*, int64_t, int64_t, float*);
};
template <int codes, bool has_min>
constexpr Fns fns = {few_rows_of<codes, has_min, 1>, few_rows_of<codes, has_min, FEW>, widen_of<codes, has_min>};

const Fns* fns_of(int64_t kind, const Wide& p) {
    const bool has_min = with_min(p.mode);
    if (kind == HR_KIND_F8) return &fns<HR_CODES_F8, false>;
    switch (hr_bits(&p.l)) {
#define HR_CASE(bits) \
    case bits: return has_min ? &fns<HR_CODES_##bits, true> : &fns<HR_CODES_##bits, false>;
        HR_CASE(2) HR_CASE(3) HR_CASE(4) HR_CASE(5) HR_CASE(6)
        default: HR_CASE(8)
#undef HR_CASE
    }
}

int mode_of(const HrArgs_linear_w* a) {
    if (a->kind == HR_KIND_K) {
        if (!hr_k_has_min(a->form)) return HR_MODE_K16;
        return hr_k_sub(a->form) == 16 ? HR_MODE_K16_MIN : HR_MODE_K32_MIN;
    }
    if (a->kind == HR_KIND_I8 && a->form & HR_I8_MIN) return HR_MODE_MIN;
    if (a->kind == HR_KIND_I8 || a->kind == HR_KIND_F8) return a->form ? HR_MODE_GROUP : HR_MODE_CHANNEL;
    return a->form == HR_FORM_MIN ? HR_MODE_MIN : a->form == HR_FORM_ZERO ? HR_MODE_ZERO : HR_MODE_GROUP;
}

Wide wide_of(const HrArgs_linear_w* a) {
    Wide p = {};
    p.mode = mode_of(a);
    const int64_t whole = a->num_in > 8 ? a->num_in : 8;
    static const int bits_of_kind[] = {4, 6, 8, 0, 8, 3, 2, 5};
    const bool whole_numbers = a->kind == HR_KIND_I8 || a->kind == HR_KIND_F8, middled = a->form == HR_FORM_MIDDLE;
    const int bits = a->kind == HR_KIND_K ? hr_k_bits(a->form) : bits_of_kind[a->kind];
    int middle = whole_numbers || !middled ? 0 : 1 << (bits - 1);
    switch (a->kind) {
        case HR_KIND_I8: p.l = hr_layout_i8(a->num_in, a->form ? a->group : whole, a->form); break;
        case HR_KIND_F8: p.l = hr_layout_f8(a->num_in, a->form); break;
        case HR_KIND_K: p.l = hr_layout_k(a->num_in, a->form), middle = hr_k_middle(a->form); break;
        default: p.l = hr_layout_i(bits, a->num_in, a->group, a->form);
    }
    for (int i = 0; i < 16; i++)
        p.book[i] = a->kind == HR_KIND_I4 ? hr_level(a->form, i) : (float)((i & ((1 << at_most(bits, 4)) - 1)) - middle);
    p.offset = (float)middle, p.run = a->kind == HR_KIND_K ? hr_k_sub(a->form) : p.l.group;
    return p;
}

}  // namespace

void linear_w(const HrArgs_linear_w* a, HrTask* task) {
    const int64_t rows = task->dims[a->dim], pairs = (a->num_out + HR_PANEL_F - 1) / HR_PANEL_F;
    const Wide p = wide_of(a);
    const Fns* fns = fns_of(a->kind, p);
    Scratch* s = (Scratch*)task->scratch;
    int64_t block = rows_of_block(a->num_in);
    const bool few = rows <= FEW || block < FEW;
    if (few) block = FEW;
    const int64_t blocks = (rows + block - 1) / block, panels = hr_num_panels(a->num_out);
    int64_t packed_block = -1;
    for (int64_t i = hr_next(task); i < blocks * pairs; i = hr_next(task)) {
        const int64_t b = i / pairs, pair = i % pairs, begin = rows * b / blocks, end = rows * (b + 1) / blocks;
        const uint8_t* w = (const uint8_t*)a->weights + 2 * pair * p.l.panel_bytes;
        /* Of a panel alone the second half is computed from it too, and not written. */
        const uint8_t* other = 2 * pair + 1 < panels ? w + p.l.panel_bytes : w;
        const float* x = a->x + begin * a->ld_x;
        if (few) {
            /* Two and three rows are four, of which some are the last one again. */
            const float* of_row[FEW];
            for (int r = 0; r < FEW; r++) of_row[r] = x + at_most(r, end - begin - 1) * a->ld_x;
            (end - begin == 1 ? fns->one : fns->few)(p, w, other, of_row, s->sums);
            finish_rows(a, s->sums, begin, end, pair);
            continue;
        }
        const Tiles tiles(end - begin);
        if (packed_block != b) pack_x(x, a->ld_x, a->num_in, tiles, s->x), packed_block = b;
        memset(s->sums, 0, sizeof(float) * HR_PANEL_F * (size_t)tiles.rows);
        for (int64_t from = 0; from < a->num_in; from += BLOCK_IN) {
            const int64_t steps = at_most(BLOCK_IN, a->num_in - from);
            fns->widen(p, w, other, from, from + steps, s->wide);
            for (int64_t t = 0; t < tiles.count; t++) {
                const int64_t first = tiles.begin(t), n = tiles.begin(t + 1) - first;
                packed_f32.of[n - 1]((const char*)s->wide, steps, s->x + from * tiles.rows + first * steps, 0,
                                     s->sums + first * HR_PANEL_F, (const char*)s->wide);
            }
        }
        finish_rows(a, s->sums, begin, end, pair);
    }
}

}  // namespace HR_NS
#endif
