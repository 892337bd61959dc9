/* How the linear layers of integer codes go through memory: shared by the ISAs with vectors, each of which brings tiles.
 *
 * Few rows (at most `max_rows` of the tile): each panel of weights is streamed once, straight into the registers.
 * Many rows: pieces of one panel by a chunk of rows. The inputs are cut into blocks that keep a panel's weights in the
 * L1 cache; all row tiles of the chunk pass over a block, their float sums waiting in scratch. With more than a few
 * tiles codes of 2 to 6 bits are unpacked there first, into the layout of int8 (where that pays), and the next block is fetched while
 * all tiles are at work; with fewer the first tile fetches as it goes. Groups of inputs come in order for each row all
 * the same, so the bits are those of one row alone.
 *
 * Activations are packed before use, [block][tile of rows][group]: R int32 corrections (what the integer sum starts
 * from), R scales, R products of scale and sum (has_min only), then [quad of inputs][row][4] codes.
 *
 * Scratch holds a tile of rows of 2^18 inputs and more.
 *
 * Include after vec.h. An ISA gives a struct with
 *     enum { max_rows, unpacks }           rows of its greatest tile; whether 2 to 6 bits are unpacked
 *     static int64_t ahead(int rows)       how far a tile of so many rows prefetches
 *     template <int mode, int codes, bool stream> static void tile(int rows, const Span&)
 *     template <int codes> static void unpack(const uint8_t* from, uint8_t* to, int64_t octs, const int8_t* book)
 *                                          octs to those of int8; entries of the book become greater by 128
 *     static void pack_codes(const int8_t* from, int64_t ld, int rows, int64_t quads, uint8_t* to) */
#pragma once
#include "include/kernels.h"
#include "isa/linear_layout.h"

namespace HR_NS {

/* A scale for each group; a minimum too; one scale for each output; a zero (linear_w alone); two levels, with 16 or 32 inputs
 * in the last. */
enum { HR_MODE_GROUP, HR_MODE_MIN, HR_MODE_CHANNEL, HR_MODE_ZERO, HR_MODE_K16, HR_MODE_K16_MIN, HR_MODE_K32_MIN };
/* Bits of each; or 4 that choose from a book. */
enum { HR_CODES_8, HR_CODES_6, HR_CODES_5, HR_CODES_4, HR_CODES_3, HR_CODES_2, HR_CODES_BOOK };
constexpr int bits_of(int codes) {
    constexpr int bits[] = {8, 6, 5, 4, 3, 2, 4};
    return bits[codes];
}
constexpr int64_t step_octs(int codes) { return hr_step_octs(bits_of(codes)); }
constexpr int64_t step_bytes(int codes) { return bits_of(codes) * HR_LINE / 2 * step_octs(codes); }
/* Where the line of a step is that has its upper bits. */
constexpr int64_t high_line(int codes) { return hr_low_lines(bits_of(codes)) * HR_LINE * step_octs(codes); }

/* One tile of rows by one panel of outputs over some groups of inputs. */
struct Span {
    const uint8_t* w;
    const uint8_t* a;
    int64_t groups, octs, last_octs; /* octs of a group, and of the last one here */
    float* acc;                      /* [rows][32] on a cache line, added to */
    int64_t ahead;                   /* distance of what to prefetch from what is read, if streaming */
    const int8_t* book;
};

/* Both argument structs as one. */
struct Linear {
    const int8_t* q;
    int64_t ld_q;
    const float* scales;
    const int32_t* sums;
    int64_t ld_s;
    const uint8_t* weights;
    int64_t num_out;
    const float* bias;
    const float* residual;
    int64_t ld_res;
    float* out;
    int64_t ld_out, rows;
    int32_t offset; /* the codes are greater by it, those out of a book when 128 is added to its entries */
    const int8_t* book;
    HrLayout l;
    float unit; /* what an entry of the book counts in */
};

template <class Args>
HR_INLINE Linear as_linear(const Args* a, HrTask* task, HrLayout l, int32_t offset, const int8_t* book, float unit = 1.0f) {
    return {a->q,        a->ld_q,   a->scales, a->sums,   a->ld_s, (const uint8_t*)a->weights, a->num_out,
            a->bias,     a->residual, a->ld_res, a->out, a->ld_out, task->dims[a->dim], offset, book, l, unit};
}

HR_INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
HR_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr bool is_k(int mode) { return mode >= HR_MODE_K16; }
constexpr bool with_min(int mode) {
    return mode == HR_MODE_MIN || mode == HR_MODE_ZERO || mode == HR_MODE_K16_MIN || mode == HR_MODE_K32_MIN;
}
/* Scales of a group, and octs that share one with two levels. */
constexpr int64_t subs_of(int mode) { return mode == HR_MODE_K32_MIN ? 8 : is_k(mode) ? 16 : 1; }
constexpr int64_t sub_octs(int mode) { return HR_K_BLOCK / 8 / subs_of(mode); }
/* Bytes before the octs of a group: of weights, and of activations for each row. */
constexpr int64_t weight_header(int mode) {
    if (is_k(mode)) return 64 * (1 + with_min(mode)) + (mode == HR_MODE_K32_MIN ? 48 : 32) * subs_of(mode);
    return mode == HR_MODE_CHANNEL ? 0 : mode == HR_MODE_MIN ? 128 : 64;
}
template <int mode>
constexpr int64_t activation_header() { return (with_min(mode) ? 12 : 8) * subs_of(mode); }

/* Where piece i of `panels` begins: each round of as many pieces as there are threads takes three quarters of what is
 * left, in pieces of at least `least`. Taking a piece costs a fence, which empties the pipes of memory; so few, and
 * small ones last, for those who are done early. */
HR_INLINE int64_t begin_of(int64_t i, int64_t panels, int64_t threads, int64_t least) {
    int64_t begin = 0;
    for (;; i -= threads) {
        const int64_t size = at_least(least, (panels - begin) * 3 / (4 * threads));
        if (i < threads || begin >= panels) return at_most(panels, begin + i * size);
        begin += threads * size;
    }
}

/* The scale of a row's run i of inputs, and the sum of its codes: of a group, or with two levels of what shares the last. */
struct Scale {
    float scale;
    int32_t sum;
};
template <int mode>
HR_INLINE Scale scale_of(const Linear& p, int64_t row, int64_t i) {
    constexpr bool half = mode == HR_MODE_K16 || mode == HR_MODE_K16_MIN; /* the activations have a scale for each 32 */
    const int64_t at = row * p.ld_s + (half ? i / 2 : i);
    Scale s = {p.scales[at] * p.unit, p.sums[at]};
    if (!half) return s;
    s.sum = 0;
    for (int k = 0; k < 16; k++) s.sum += p.q[row * p.ld_q + 16 * i + k];
    return s;
}

/* Rows row ... row + n - 1 of groups first ... last - 1, to `to`. Returns the end. */
template <class Isa, int mode>
static uint8_t* pack_tile(const Linear& p, int64_t row, int n, int64_t first, int64_t last, uint8_t* to) {
    constexpr int64_t subs = subs_of(mode);
    for (int64_t i = first * subs; i < last * subs; i++) {
        const int8_t* q = p.q + row * p.ld_q + i * (is_k(mode) ? 8 * sub_octs(mode) : p.l.group);
        for (int r = 0; r < n; r++) {
            const Scale s = scale_of<mode>(p, row + r, i);
            const int32_t from = (int32_t)(0u - (uint32_t)p.offset * (uint32_t)s.sum);
            memcpy(to + 4 * r, &from, 4), memcpy(to + 4 * (n + r), &s.scale, 4);
            if (with_min(mode)) {
                const float product = (float)s.sum * s.scale;
                memcpy(to + 4 * (2 * n + r), &product, 4);
            }
        }
        to += (with_min(mode) ? 12 : 8) * n;
        const int64_t octs = is_k(mode) ? sub_octs(mode) : at_most(p.l.group_octs, p.l.octs - i * p.l.group_octs);
        Isa::pack_codes(q, p.ld_q, n, 2 * octs, to);
        to += 8 * octs * n;
    }
    return to;
}

/* The sums of a tile to where they go, with what is added at the end. */
template <int mode>
static void finish(const Linear& p, int64_t row, int rows, int64_t panel, const float* acc) {
    const float* channel = (const float*)(p.weights + (panel + 1) * p.l.panel_bytes - 4 * HR_PANEL);
    for (int half = 0; half < 2; half++) {
        const int64_t col = panel * HR_PANEL + half * 16, n = at_most(16, p.num_out - col);
        if (n <= 0) return;
        const V bias = p.bias ? load_n(p.bias + col, n) : zero();
        for (int r = 0; r < rows; r++) {
            V y = load(acc + r * HR_PANEL + half * 16);
            if (mode == HR_MODE_CHANNEL) y = mul(y, load(channel + half * 16));
            if (p.bias) y = add(y, bias);
            const float* residual = p.residual ? p.residual + (row + r) * p.ld_res + col : nullptr;
            float* out = p.out + (row + r) * p.ld_out + col;
            if (n == 16) {
                if (residual) y = add(y, load(residual));
                store(out, y);
            } else {
                if (residual) y = add(y, load_n(residual, n));
                store_n(out, y, n);
            }
        }
    }
}

HR_INLINE uint8_t* on_line(uint8_t* p) { return (uint8_t*)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

/* Each panel is streamed once. What comes next is known before a piece ends, so that prefetching does not stop. */
template <class Isa, int mode, int kind>
static void few_rows(const Linear& p, HrTask* task, int64_t row, int rows) {
    constexpr int64_t LEAST = 64 << 10;
    const int64_t distance = Isa::ahead(rows);
    const int64_t panels = hr_num_panels(p.num_out);
    const int64_t least = at_least(1, LEAST / p.l.panel_bytes), threads = task->num_threads;
    int64_t piece = hr_next(task), next = begin_of(piece, panels, threads, least);
    if (next >= panels) return;

    float* acc = (float*)task->scratch;
    uint8_t* codes = (uint8_t*)task->scratch + Isa::max_rows * HR_PANEL * 4;
    pack_tile<Isa, mode>(p, row, rows, 0, p.l.groups, codes);
    const int64_t last_octs = p.l.octs - (p.l.groups - 1) * p.l.group_octs;
    const int64_t a_group = rows * (activation_header<mode>() + 8 * p.l.group_octs);
    /* The groups at the end of a piece, while which the beginning of the next is fetched. */
    const int64_t bytes = p.l.group_bytes;
    const int64_t tail = bytes > 2 * distance ? 0 : at_most(p.l.groups, (distance + bytes - 1) / bytes);
    const int64_t ahead = tail ? tail * bytes : distance;
    while (next < panels) {
        const int64_t first = next, last = begin_of(piece + 1, panels, threads, least);
        piece = hr_next(task), next = begin_of(piece, panels, threads, least);
        for (int64_t panel = first; panel < last; panel++) {
            const uint8_t* w = p.weights + panel * p.l.panel_bytes;
            const int64_t jump = panel + 1 < last ? 0 : tail;
            Span s = {w, codes, p.l.groups - jump, p.l.group_octs, jump ? p.l.group_octs : last_octs, acc, ahead, p.book};
            memset(acc, 0, (size_t)rows * HR_PANEL * 4);
            if (s.groups) Isa::template tile<mode, kind, true>(rows, s);
            if (jump) {
                s.w += s.groups * bytes, s.a += s.groups * a_group;
                s.groups = jump, s.last_octs = last_octs;
                s.ahead = next < panels ? p.weights + next * p.l.panel_bytes - s.w : 0;
                Isa::template tile<mode, kind, true>(rows, s);
            }
            finish<mode>(p, row, rows, panel, acc);
        }
    }
}

template <class Isa, int mode, int kind>
static void many_rows(const Linear& p, HrTask* task) {
    constexpr int64_t WEIGHTS = 16 << 10, ACTIVATIONS = 4 << 20;
    constexpr bool unpack = kind != HR_CODES_8 && Isa::unpacks;
    const int64_t unpacked = p.l.header + p.l.group_octs * 4 * HR_LINE; /* a group as int8 */
    const int64_t few = unpack && unpacked > 1 << 20 ? INT64_MAX : 4;
    const int64_t block = at_least(1, WEIGHTS / unpacked);
    const int64_t panels = hr_num_panels(p.num_out);
    const int64_t row_bytes = p.l.groups * activation_header<mode>() + 8 * p.l.octs + 4 * HR_PANEL;
    const int64_t fit = at_least(Isa::max_rows, ACTIVATIONS / row_bytes);
    const int64_t chunks = (p.rows + fit - 1) / fit;

    uint8_t* weights = (uint8_t*)task->scratch;
    float* acc = (float*)on_line(weights + (unpack && few < INT64_MAX ? block * unpacked : 0));
    int64_t packed = -1, row = 0, rows = 0, tiles = 0;
    uint8_t* codes = 0;
    /* Neighbours in long runs, also because threads that write beside each other disturb each other. */
    const int64_t units = panels * chunks, threads = task->num_threads;
    int64_t unit = 0, last = 0;
    for (;; unit++) {
        if (unit == last) {
            const int64_t piece = hr_next(task);
            unit = begin_of(piece, units, threads, 1), last = begin_of(piece + 1, units, threads, 1);
            if (unit == last) break;
        }
        const int64_t chunk = unit / panels, panel = unit % panels;
        if (chunk != packed) {
            packed = chunk, row = p.rows * chunk / chunks, rows = p.rows * (chunk + 1) / chunks - row;
            tiles = (rows + Isa::max_rows - 1) / Isa::max_rows;
            codes = (uint8_t*)(acc + rows * HR_PANEL);
            uint8_t* to = codes;
            for (int64_t g = 0; g < p.l.groups; g += block)
                for (int64_t t = 0; t < tiles; t++) {
                    const int64_t from = rows * t / tiles;
                    to = pack_tile<Isa, mode>(p, row + from, (int)(rows * (t + 1) / tiles - from), g,
                                              at_most(p.l.groups, g + block), to);
                }
        }
        memset(acc, 0, (size_t)rows * HR_PANEL * 4);
        const uint8_t* a = codes;
        const uint8_t* w = p.weights + panel * p.l.panel_bytes;
        for (int64_t g = 0; g < p.l.groups; g += block) {
            const int64_t groups = at_most(block, p.l.groups - g);
            const int64_t octs = at_most(groups * p.l.group_octs, p.l.octs - g * p.l.group_octs);
            const int64_t bytes = groups * p.l.header + octs * p.l.oct_bytes;
            const int64_t last_octs = octs - (groups - 1) * p.l.group_octs;
            const uint8_t* use = w;
            if (unpack && tiles > few) {
                uint8_t* to = weights;
                for (int64_t i = 0; i < groups; i++) {
                    const int64_t n = i + 1 < groups ? p.l.group_octs : last_octs;
                    const uint8_t* from = w + i * p.l.group_bytes;
                    memcpy(to, from, (size_t)p.l.header);
                    Isa::template unpack<kind>(from + p.l.header, to + p.l.header, n, p.book);
                    to += unpacked;
                }
                use = weights;
            }
            w += bytes;
            const bool end = g + block >= p.l.groups;
            /* What comes next is fetched little by little, so that the fetches do not wait for each other. */
            const int64_t share = tiles > few ? (bytes / HR_LINE + tiles - 1) / tiles * HR_LINE : 0;
            const int64_t a_row = groups * activation_header<mode>() + 8 * octs;
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t from = rows * t / tiles;
                const int n = (int)(rows * (t + 1) / tiles - from);
                for (int64_t i = 0; i < share; i += HR_LINE) __builtin_prefetch(w + t * share + i, 0, 2);
                const Span s = {use, a, groups, p.l.group_octs, last_octs, acc + from * HR_PANEL, Isa::ahead(n), p.book};
                if (tiles > few) Isa::template tile<mode, unpack ? HR_CODES_8 : kind, false>(n, s);
                else Isa::template tile<mode, kind, true>(n, s);
                a += n * a_row;
                if (end) finish<mode>(p, row + from, n, panel, acc + from * HR_PANEL);
            }
        }
    }
}

template <class Isa, int mode, int kind>
static void drive(const Linear& p, HrTask* task) {
    if (p.rows <= 0) return;
    if (p.rows <= Isa::max_rows) few_rows<Isa, mode, kind>(p, task, 0, (int)p.rows);
    else many_rows<Isa, mode, kind>(p, task);
}

}  // namespace HR_NS
