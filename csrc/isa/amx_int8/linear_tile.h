/* The linear layers of integer codes on AMX's tiles: 32 rows by a panel of 32 outputs.
 *
 * The integer sums are exact, and the float operations on them are those of the other ISAs in the same order, so the bits
 * are the same. Rows that are streamed once, and groups of inputs that no tile fits, are left to AVX-512.
 *
 * As in isa/linear_drive.h a block of a panel's weights stays in the L1 cache while all tiles of rows pass over it, here
 * always as signed bytes, [quad of inputs][block][output][input], with the scales as floats. Activations are packed as
 * [block][tile of rows][scaled run of inputs][chunk][row][input], then the scales [run][row], then the products of scale and
 * sum. A run is a group, or with two levels the inputs that share a scale of the last; a chunk is what a tile multiplies at
 * once. The sums of a few runs are written to memory and then added to the float sums. A block, the sums and the tile's
 * activations share the L1 cache: with more than 12 KiB of sums or of weights each takes about a third more time.
 */
#pragma once
#include "isa/avx512_vnni/linear_tile.h"
#include "isa/amx_int8/tiles.h"
#include "isa/linear_forms.h"

namespace HR_NS {

constexpr int TILE = 16, ROWS = 2 * TILE;
constexpr int64_t ACTIVATIONS = 4 << 20, NEAR = 1400 << 10; /* bytes of scratch: at most, and of those that stay in the L2 cache */

/* The inputs of a chunk: the greatest number of whole quads that fits a tile and divides the run; 0 if none is worth it. */
HR_INLINE int64_t chunk_of(int64_t run) { return run % 64 == 0 ? 64 : run % 32 == 0 ? 32 : run == 16 ? 16 : 0; }

template <int mode>
HR_INLINE int64_t inputs_of_run(const Linear& p) {
    return is_k(mode) ? 8 * sub_octs(mode) : p.l.group;
}

/* How the inputs are cut. */
struct Cut {
    int64_t run, chunk;           /* inputs */
    int64_t runs, block, step;    /* runs of a row, of a block, and at most of those that are added together */
    int64_t run_bytes, row_bytes; /* of a run's codes for 32 outputs; of a row's activations */
};

template <int mode>
HR_INLINE Cut cut_of(const Linear& p) {
    Cut c;
    c.run = inputs_of_run<mode>(p), c.chunk = chunk_of(c.run), c.runs = p.l.groups * subs_of(mode);
    c.step = c.run < 128 ? 4 : 3;
    c.block = at_least(subs_of(mode), at_least(1, (c.run < 128 ? 256 : 384) / c.run));
    c.run_bytes = c.run * HR_PANEL;
    c.row_bytes = c.runs * (c.run + (with_min(mode) ? 8 : 4));
    return c;
}

/* The integer sums of a run, [2 * (tile of rows) + block][row][output]. */
typedef int32_t Sums[4][TILE][HR_LANES];

/* A block of weights as bytes and floats. */
struct Block {
    int8_t* codes;
    float *d, *m; /* [run][32] */
    int64_t runs, share;
    bool first, last;    /* of the row */
    const uint8_t* next; /* stored weights that are fetched while it is used, `share` bytes with each run */
};

/* A tile of rows: what it is multiplied with, and where it goes. */
struct TileOfRows {
    const uint8_t* codes;
    const float *sa, *products; /* [run][32] */
    float* acc;                 /* [row][32] */
    int rows;
};

/* Adds runs i ... i + runs - 1 of a block. */
template <int mode, int runs>
HR_INLINE void add_runs(const Sums* sums, const Block& block, const TileOfRows& t, int64_t i) {
    __m512 d[runs][2], m[runs][2];
    const bool fresh = block.first && i == 0;
    _Pragma("GCC unroll 4") for (int j = 0; j < runs; j++) HR_BLOCKS {
        d[j][b] = mode == HR_MODE_CHANNEL ? _mm512_setzero_ps() : _mm512_load_ps(block.d + (i + j) * HR_PANEL + b * 16);
        m[j][b] = with_min(mode) ? _mm512_load_ps(block.m + (i + j) * HR_PANEL + b * 16) : _mm512_setzero_ps();
    }
    /* Plain pointers and few of them: gcc computes each index of an array anew. */
    const int32_t* sum = sums[0][0][0];
    const float *sa = t.sa + i * ROWS, *products = t.products + i * ROWS;
    float* acc = t.acc;
    for (int64_t left = t.rows; left > 0; left -= TILE, sum += TILE * HR_LANES)
        for (int64_t r = at_most(TILE, left); r > 0; r--, sum += HR_LANES, acc += HR_PANEL, sa++, products++) {
            __m512 y[2];
            HR_BLOCKS y[b] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(acc + b * 16);
            _Pragma("GCC unroll 4") for (int j = 0; j < runs; j++) {
                const __m512 scale = _mm512_set1_ps(sa[j * ROWS]);
                const __m512 product = with_min(mode) ? _mm512_set1_ps(products[j * ROWS]) : scale;
                HR_BLOCKS {
                    const __m512 isum = _mm512_cvtepi32_ps(_mm512_load_si512(sum + (4 * j + b) * TILE * HR_LANES));
                    if (mode == HR_MODE_CHANNEL) y[b] = _mm512_fmadd_ps(isum, scale, y[b]);
                    else y[b] = _mm512_fmadd_ps(_mm512_mul_ps(isum, scale), d[j][b], y[b]);
                    if (with_min(mode)) y[b] = _mm512_fmadd_ps(product, m[j][b], y[b]);
                }
            }
            HR_BLOCKS _mm512_store_ps(acc + b * 16, y[b]);
        }
}

/* Half of a tile's sums. One half is written to memory while the tile unit is at work on the other. */
template <int half>
HR_INLINE void store_half(Sums& to) {
    store_tile<2 * half>(to[2 * half], HR_LINE), store_tile<2 * half + 1>(to[2 * half + 1], HR_LINE);
}

/* A run of a tile of rows by a panel: its first half to `to`; of the run before, if any and if there are `both`, the second to `before`. */
HR_INLINE void multiply_run(const uint8_t* w, const uint8_t* a, const Cut& c, bool both, Sums& to, Sums* before) {
    zero_tile<0>(), zero_tile<1>();
    for (int64_t k = 0; k < c.run; k += c.chunk, w += c.chunk * HR_PANEL, a += c.chunk * ROWS) {
        load_tile<4>(a, c.chunk), load_tile<6>(w, 2 * HR_LINE);
        multiply_tiles<0, 4, 6>();
        load_tile<7>(w + HR_LINE, 2 * HR_LINE);
        multiply_tiles<1, 4, 7>();
        if (!both) continue;
        if (k == 0) {
            if (before) store_half<1>(*before);
            zero_tile<2>(), zero_tile<3>();
        }
        load_tile<5>(a + c.chunk * TILE, c.chunk);
        multiply_tiles<2, 5, 6>(), multiply_tiles<3, 5, 7>();
    }
    store_half<0>(to);
}

/* A tile of rows by a block. */
template <int mode>
static void multiply_block(Block& block, const Cut& c, const TileOfRows& t, Sums* sums) {
    const bool both = t.rows > TILE;
    for (int64_t i = 0; i < block.runs;) {
        const int runs = (int)at_most(c.step, block.runs - i);
        for (int j = 0; j < runs; j++) {
            for (int64_t n = block.share; n > 0; n -= HR_LINE, block.next += HR_LINE) __builtin_prefetch(block.next, 0, 2);
            multiply_run((const uint8_t*)block.codes + (i + j) * c.run_bytes, t.codes + (i + j) * c.run * ROWS, c, both, sums[j],
                         j && both ? &sums[j - 1] : nullptr);
        }
        if (both) store_half<1>(sums[runs - 1]);
        switch (runs) {
            case 1: add_runs<mode, 1>(sums, block, t, i); break;
            case 2: add_runs<mode, 2>(sums, block, t, i); break;
            case 3: add_runs<mode, 3>(sums, block, t, i); break;
            case 4: add_runs<mode, 4>(sums, block, t, i); break;
        }
        i += runs;
    }
}

/* Groups first ... last - 1 of a panel, at w, as bytes and floats. */
template <int mode, int kind>
static void open_block(const Linear& p, const Cut& c, const uint8_t* w, int64_t first, int64_t last, Block& to) {
    const int64_t subs = subs_of(mode);
    const __m512i offset = _mm512_set1_epi8((char)p.offset);
    to.runs = (last - first) * subs, to.first = first == 0, to.last = last == p.l.groups;
    float *d = to.d, *m = to.m;
    for (int64_t g = first; g < last; g++) {
        const uint8_t* header = w + (g - first) * p.l.group_bytes;
        alignas(64) int8_t scales[mode == HR_MODE_K32_MIN ? subs_of(mode) : 1][64];
        if (mode == HR_MODE_K32_MIN) open_scales<subs_of(mode)>(header + 128, scales);
        for (int64_t sub = 0; mode != HR_MODE_CHANNEL && sub < subs; sub++, d += HR_PANEL, m += HR_PANEL) HR_BLOCKS {
            const V top = load_f16((const uint16_t*)header + b * 16);
            const V least = with_min(mode) ? load_f16((const uint16_t*)header + 32 + b * 16) : zero();
            if (mode == HR_MODE_K16_MIN) {
                const I pair = load_u8(header + 128 + 32 * sub + 16 * b);
                store(d + b * 16, mul(top, {low_nibble(pair).v})), store(m + b * 16, mul(least, {high_nibble(pair).v}));
            } else if (is_k(mode)) {
                const int8_t* at = with_min(mode) ? scales[sub] : (const int8_t*)header + 64 + 32 * sub;
                store(d + b * 16, mul(top, load_i8(at + 16 * b)));
                if (with_min(mode)) store(m + b * 16, mul(least, load_i8(at + 32 + 16 * b)));
            } else {
                store(d + b * 16, top);
                if (with_min(mode)) store(m + b * 16, least);
            }
        }
        const int64_t octs = at_most(p.l.group_octs, p.l.octs - g * p.l.group_octs);
        const uint8_t* from = header + p.l.header;
        int8_t* out = to.codes + (g - first) * subs * c.run_bytes;
        const __m512i table = kind == HR_CODES_BOOK ? book_of(p.book) : _mm512_setzero_si512();
        for (int64_t o = 0; o < octs; o += step_octs(kind), from += step_bytes(kind))
            for (int half = 0; half < step_octs(kind); half++, out += 4 * HR_LINE) {
                __m512i x[4];
                if (kind == HR_CODES_8) _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) x[i] = line(from + HR_LINE * i);
                else wide<kind>(from, half, table, x);
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) _mm512_store_si512(out + HR_LINE * i, _mm512_sub_epi8(x[i], offset));
            }
    }
}

/* Rows row ... row + n - 1 of runs first ... last - 1, to `to`. Returns the end. Rows that do not exist hold anything: their
 * sums are not read. */
template <int mode>
static uint8_t* pack_rows(const Linear& p, const Cut& c, int64_t row, int n, int64_t first, int64_t last, uint8_t* to) {
    for (int64_t i = first; i < last; i++)
        for (int64_t k = 0; k < c.run; k += c.chunk, to += ROWS * c.chunk) {
            const int64_t at = i * c.run + k;
            if (at >= p.ld_q) { /* a last group that ends before its chunks */
                memset(to, 0, (size_t)(ROWS * c.chunk));
                continue;
            }
            const int8_t* q = p.q + row * p.ld_q + at;
            if (c.chunk == 64) for (int r = 0; r < n; r++) _mm512_store_si512(to + 64 * r, _mm512_loadu_si512(q + r * p.ld_q));
            else for (int r = 0; r < n; r++) memcpy(to + c.chunk * r, q + r * p.ld_q, (size_t)c.chunk);
        }
    float* scales = (float*)to;
    const int64_t runs = last - first;
    for (int64_t i = 0; i < runs; i++)
        for (int r = 0; r < n; r++) {
            const Scale s = scale_of<mode>(p, row + r, first + i);
            scales[i * ROWS + r] = s.scale;
            if (with_min(mode)) scales[(runs + i) * ROWS + r] = (float)s.sum * s.scale;
        }
    return to + (with_min(mode) ? 8 : 4) * runs * ROWS;
}

/* The lines that a tile will be written to, and those of the residual. */
HR_INLINE void fetch_rows(const Linear& p, int64_t row, int n, int64_t panel) {
    for (int r = 0; r < n; r++) {
        const float* out = p.out + (row + r) * p.ld_out + panel * HR_PANEL;
        __builtin_prefetch(out, 1), __builtin_prefetch(out + 16, 1);
        if (!p.residual || p.residual == p.out) continue;
        const float* residual = p.residual + (row + r) * p.ld_res + panel * HR_PANEL;
        __builtin_prefetch(residual), __builtin_prefetch(residual + 16);
    }
}

template <int mode, int kind>
static void on_tiles(const Linear& p, const Cut& c, HrTask* task) {
    const int64_t panels = hr_num_panels(p.num_out);
    const int64_t tiles = (p.rows + ROWS - 1) / ROWS, near = at_least(1, NEAR / ROWS / (c.row_bytes + 4 * HR_PANEL));
    const int64_t chunks = (tiles + near - 1) / near, fit = (tiles + chunks - 1) / chunks * ROWS;
    const int64_t groups = c.block / subs_of(mode); /* of a block */

    Sums* sums = (Sums*)task->scratch;
    Block block;
    block.codes = (int8_t*)(sums + c.step);
    block.d = (float*)(block.codes + c.block * c.run_bytes), block.m = block.d + c.block * HR_PANEL;
    float* acc = block.m + c.block * HR_PANEL;
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = (uint8_t)(i < 6 ? TILE : c.chunk / 4);
        shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? c.chunk : (int64_t)HR_LINE);
    }
    set_shapes(shapes);
    int64_t packed = -1, row = 0, rows = 0, unit = 0, last = 0;
    uint8_t* codes = nullptr;
    const int64_t units = panels * chunks, threads = task->num_threads;
    for (;; unit++) {
        if (unit == last) {
            const int64_t piece = hr_next(task);
            unit = begin_of(piece, units, threads, 1), last = begin_of(piece + 1, units, threads, 1);
            if (unit == last) break;
        }
        const int64_t chunk = unit / panels, panel = unit % panels;
        if (chunk != packed) {
            packed = chunk, row = fit * chunk, rows = at_most(fit, p.rows - row);
            codes = (uint8_t*)(acc + rows * HR_PANEL);
            uint8_t* to = codes;
            for (int64_t i = 0; i < c.runs; i += c.block)
                for (int64_t r = 0; r < rows; r += ROWS)
                    to = pack_rows<mode>(p, c, row + r, (int)at_most(ROWS, rows - r), i, at_most(c.runs, i + c.block), to);
        }
        const uint8_t* a = codes;
        const uint8_t* w = p.weights + panel * p.l.panel_bytes;
        for (int64_t g = 0; g < p.l.groups; g += groups, w += groups * p.l.group_bytes) {
            open_block<mode, kind>(p, c, w, g, at_most(p.l.groups, g + groups), block);
            block.next = w + groups * p.l.group_bytes;
            block.share = (groups * p.l.group_bytes * ROWS / (block.runs * fit) + HR_LINE - 1) / HR_LINE * HR_LINE;
            for (int64_t r = 0; r < rows; r += ROWS, a += block.runs * (c.run + (with_min(mode) ? 8 : 4)) * ROWS) {
                const int n = (int)at_most(ROWS, rows - r);
                if (block.last) fetch_rows(p, row + r, n, panel);
                const float* scales = (const float*)(a + block.runs * c.run * ROWS);
                const TileOfRows t = {a, scales, scales + block.runs * ROWS, acc + r * HR_PANEL, n};
                multiply_block<mode>(block, c, t, sums);
                if (block.last) finish<mode>(p, row + r, n, panel, t.acc);
            }
        }
    }
    release_tiles();
}

struct Amx {
    /* False where AVX-512 has to serve. */
    template <int mode, int codes>
    static bool linear(const Linear& p, HrTask* task) {
        constexpr int64_t FEW = 12, GREATEST_RUN = 2048;
        const Cut c = cut_of<mode>(p);
        const bool fits = ROWS * (c.row_bytes + 4 * HR_PANEL) <= ACTIVATIONS && c.run <= GREATEST_RUN;
        if (p.rows <= FEW || c.chunk == 0 || !fits) return false;
        on_tiles<mode, codes>(p, c, task);
        return true;
    }
};

}  // namespace HR_NS

#define HR_BELOW(op)                                                  \
    namespace hr_avx512_vnni {                                        \
    void op(const HrArgs_##op* args, HrTask* task);                   \
    }
