/* Tiles of rows by outputs in float, for the linear layers whose inputs are floats (linear_f, linear_w).
 *
 * An output is one chain of fma over the inputs, and so speed comes from many chains side by side: a tile is up to six
 * rows by 64 outputs, or twelve by 32. Include after HR_VEC_H. */
#pragma once
#include "generic/layout_f.h"
#include "generic/share.h"

namespace HR_NS {
namespace {

constexpr int VECTORS = HR_PANEL_F / HR_LANES;
/* Rows of a tile at most, and how many vectors of outputs go with so many rows: the sums fill the registers. */
#if defined(HR_ISA_AVX2) || defined(HR_ISA_NEON_DOT)
constexpr int TILE = 6;
constexpr int vectors_of(int rows) { return rows == 1 ? VECTORS : 1; }
#else
constexpr int TILE = 12;
constexpr int vectors_of(int rows) { return rows <= TILE / 2 ? VECTORS : VECTORS / 2; }
#endif
constexpr int64_t DIRECT_ROWS = 6; /* up to so many rows x is read as it lies */
constexpr int64_t BLOCK_ROWS = 192, BLOCK_IN = 64;
constexpr int64_t AHEAD = 8192;       /* bytes, of the weights prefetched */
constexpr int64_t PACKED_X = 4 << 20; /* bytes of scratch */

/* What is in a thread's scratch. */
struct Scratch {
    float sums[BLOCK_ROWS * HR_PANEL_F];
    float wide[BLOCK_IN * HR_PANEL_F];
    float x[PACKED_X / 4];
};
static_assert(sizeof(Scratch) <= HR_SCRATCH_BYTES, "scratch");

template <int type>
HR_INLINE V weights_at(const char* w, int64_t i) {
    if (type == HR_F32) return load((const float*)w + i);
    if (type == HR_F16) return load_f16((const uint16_t*)w + i);
    return load_bf16((const uint16_t*)w + i);
}

/* One tile: sums[row][64] goes on by `steps` inputs. x of row r and input k is x[r * row_step + k], or x[k * rows + r]
 * where packed. Meanwhile as many bytes as are used of w are fetched from `fetch` on. */
template <int type, int rows, bool packed, int vectors>
HR_INLINE void tile_part(const char* w, int64_t steps, const float* x, int64_t row_step, float* sums,
                         const char* fetch) {
    constexpr int64_t size = type == HR_F32 ? 4 : 2, line = HR_PANEL_F * size, used = vectors * HR_LANES * size;
    V c[rows][vectors];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) c[r][v] = load(sums + r * HR_PANEL_F + v * HR_LANES);
    for (int64_t k = 0; k < steps; k++) {
        V b[vectors];
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) b[v] = weights_at<type>(w, v * HR_LANES);
#pragma GCC unroll 12
        for (int i = 0; i < used; i += 64) __builtin_prefetch(fetch + i);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const V a = set1(packed ? x[r] : x[r * row_step]);
#pragma GCC unroll 12
            for (int v = 0; v < vectors; v++) c[r][v] = fma(a, b[v], c[r][v]);
        }
        w += line;
        fetch += used;
        x += packed ? rows : 1;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) store(sums + r * HR_PANEL_F + v * HR_LANES, c[r][v]);
}

using TileFn = void (*)(const char*, int64_t, const float*, int64_t, float*, const char*);

template <int type, int rows, bool packed>
void tile(const char* w, int64_t steps, const float* x, int64_t row_step, float* sums, const char* fetch) {
    constexpr int vectors = vectors_of(rows), size = type == HR_F32 ? 4 : 2;
    for (int64_t v = 0; v < VECTORS; v += vectors) {
        const int64_t at = v * HR_LANES;
        tile_part<type, rows, packed, vectors>(w + at * size, steps, x, row_step, sums + at, fetch + at * size * steps);
    }
}

/* The tile for each number of rows up to `most`. */
template <int type, bool packed, int most>
struct TileFns {
    TileFn of[most];
    template <int rows = most>
    constexpr void fill() {
        of[rows - 1] = tile<type, rows, packed>;
        if constexpr (rows > 1) fill<rows - 1>();
    }
    constexpr TileFns() : of() { fill(); }
};
constexpr TileFns<HR_F32, true, TILE> packed_f32;

/* The rows of a block in as few tiles as can be, as even as can be. */
struct Tiles {
    int64_t count, rows;
    explicit Tiles(int64_t num_rows) : count((num_rows + TILE - 1) / TILE), rows(num_rows) {}
    int64_t begin(int64_t t) const { return rows * t / count; }
};

/* x of a block to [block of inputs][tile][input][row of the tile]. */
void pack_x(const float* x, int64_t ld_x, int64_t num_in, const Tiles& tiles, float* to) {
    for (int64_t from = 0; from < num_in; from += BLOCK_IN) {
        const int64_t steps = from + BLOCK_IN < num_in ? BLOCK_IN : num_in - from;
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = tiles.begin(t), rows = tiles.begin(t + 1) - first;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t k = 0; k < steps; k++) to[k * rows + r] = x[(first + r) * ld_x + from + k];
            to += steps * rows;
        }
    }
}

/* The sums of rows begin ... end - 1 and outputs 64 * panel ... to where they go, with what is added at the end. */
template <class Args>
HR_INLINE void finish_rows(const Args* a, const float* sums, int64_t begin, int64_t end, int64_t panel) {
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < HR_PANEL_F; i += HR_LANES) {
            const int64_t at = panel * HR_PANEL_F + i, left = a->num_out - at;
            if (left <= 0) break;
            const int64_t n = left < HR_LANES ? left : (int64_t)HR_LANES;
            V y = load(sums + (row - begin) * HR_PANEL_F + i);
            if (a->bias) y = add(y, load_n(a->bias + at, n));
            if (a->residual) y = add(y, load_n(a->residual + row * a->ld_res + at, n));
            store_n(a->out + row * a->ld_out + at, y, n);
        }
}

/* Rows that are multiplied together, when they are packed. */
HR_INLINE int64_t rows_of_block(int64_t num_in) {
    const int64_t block = PACKED_X / 4 / (num_in > 0 ? num_in : 1);
    return block < BLOCK_ROWS ? block / TILE * TILE : BLOCK_ROWS;
}

}  // namespace
}  // namespace HR_NS
