/* Linear layers whose weights are floats: f32, f16 or bf16.
 *
 * An output is one chain of fma over the inputs, and so speed comes from many chains side by side: a tile is up to six
 * rows by 64 outputs. Few rows read the panels as they lie, once, at the memory's pace. Many rows have x packed tile by
 * tile, and the weights widened into the first cache a block of inputs at a time; the chains wait in `sums` meanwhile. */
#include HR_VEC_H
#include "generic/layout_f.h"
#include "generic/ops.h"
#include "generic/share.h"

namespace HR_NS {
namespace {

#ifdef HR_ISA_AVX2
constexpr int NARROW = 1; /* vectors in a tile of several rows: sixteen registers hold six rows of one */
#else
constexpr int NARROW = 4;
#endif
constexpr int VECTORS = HR_PANEL_F / HR_LANES, TILE = 6;
constexpr int64_t DIRECT_ROWS = 12;  /* up to so many, widening the weights once is not worth a pass of its own */
constexpr int64_t BLOCK_ROWS = 192, BLOCK_IN = 64;
constexpr int64_t AHEAD = 2048;      /* bytes, of the weights prefetched */
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

/* One tile: sums[row][64] goes on by `steps` inputs. x of row r and input k is x[r * row_step + k], or x[k * rows + r] where
 * packed. What lies `ahead` of w is fetched meanwhile. */
template <int type, int rows, bool packed, int vectors>
HR_INLINE void tile_part(const char* w, int64_t steps, const float* x, int64_t row_step, float* sums, int64_t ahead) {
    constexpr int64_t size = type == HR_F32 ? 4 : 2, line = HR_PANEL_F * size;
    V c[rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) c[r][v] = load(sums + r * HR_PANEL_F + v * HR_LANES);
    for (int64_t k = 0; k < steps; k++) {
        V b[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) b[v] = weights_at<type>(w, v * HR_LANES);
#pragma GCC unroll 8
        for (int i = 0; i < line; i += 64) __builtin_prefetch(w + ahead + i);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const V a = set1(packed ? x[r] : x[r * row_step]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) c[r][v] = fma(a, b[v], c[r][v]);
        }
        w += line;
        x += packed ? rows : 1;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store(sums + r * HR_PANEL_F + v * HR_LANES, c[r][v]);
}

using TileFn = void (*)(const char*, int64_t, const float*, int64_t, float*, int64_t);

template <int type, int rows, bool packed>
void tile(const char* w, int64_t steps, const float* x, int64_t row_step, float* sums, int64_t ahead) {
    constexpr int vectors = rows == 1 ? VECTORS : NARROW, size = type == HR_F32 ? 4 : 2;
    for (int v = 0; v < VECTORS; v += vectors)
        tile_part<type, rows, packed, vectors>(w + v * HR_LANES * size, steps, x, row_step, sums + v * HR_LANES, ahead);
}

#define ROWS_OF(type, packed) \
    {tile<type, 1, packed>, tile<type, 2, packed>, tile<type, 3, packed>, \
     tile<type, 4, packed>, tile<type, 5, packed>, tile<type, 6, packed>}
const TileFn direct_tiles[3][TILE] = {ROWS_OF(HR_F32, false), ROWS_OF(HR_F16, false), ROWS_OF(HR_BF16, false)};
const TileFn packed_tiles[TILE] = ROWS_OF(HR_F32, true);
#undef ROWS_OF

/* `steps` rows of `width` weights to floats [steps][64], zeros in what a narrow panel lacks. */
template <int type>
void widen(const char* w, int64_t steps, int64_t width, float* to) {
    constexpr int64_t size = type == HR_F32 ? 4 : 2;
    for (int64_t k = 0; k < steps; k++)
        for (int64_t i = 0; i < HR_PANEL_F; i += HR_LANES)
            store(to + k * HR_PANEL_F + i, i < width ? weights_at<type>(w + k * width * size, i) : zero());
}

/* The rows of a block in tiles of at most six, as even as can be. */
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

/* All sums of one block of rows and one panel. */
void multiply(const HrArgs_linear_f* a, const float* x, const Tiles& tiles, int64_t panel, bool packed, Scratch* s) {
    const int64_t size = hr_size_f(a->type), width = hr_width_f(panel, a->num_out);
    const char* w = (const char*)a->weights + panel * HR_PANEL_F * a->num_in * size;
    const bool wide = width != HR_PANEL_F || (packed && a->type != HR_F32);
    const bool whole = tiles.count == 1 && !wide && (tiles.rows == 1 || NARROW == VECTORS);
    const int64_t block = whole ? a->num_in : BLOCK_IN;
    const TileFn* fns = packed ? packed_tiles : direct_tiles[wide ? (int64_t)HR_F32 : a->type];
    memset(s->sums, 0, sizeof(float) * HR_PANEL_F * (size_t)tiles.rows);
    for (int64_t from = 0; from < a->num_in; from += block) {
        const int64_t steps = from + block < a->num_in ? block : a->num_in - from;
        const char* now = w + from * width * size;
        /* The first tile fetches: what comes next in the panel, or where that has to be widened, the next block. */
        int64_t ahead = AHEAD;
        if (wide) {
            if (a->type == HR_F32) widen<HR_F32>(now, steps, width, s->wide);
            else if (a->type == HR_F16) widen<HR_F16>(now, steps, width, s->wide);
            else widen<HR_BF16>(now, steps, width, s->wide);
            ahead = 0;
            now = (const char*)s->wide;
        }
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = tiles.begin(t), rows = tiles.begin(t + 1) - first;
            const float* at = packed ? x + from * tiles.rows + first * steps : x + first * a->ld_x + from;
            fns[rows - 1](now, steps, at, a->ld_x, s->sums + first * HR_PANEL_F, ahead);
            ahead = 0;
        }
    }
}

}  // namespace

void linear_f(const HrArgs_linear_f* a, HrTask* task) {
    const int64_t rows = task->dims[a->dim], panels = (a->num_out + HR_PANEL_F - 1) / HR_PANEL_F;
    Scratch* s = (Scratch*)task->scratch;
    int64_t block = PACKED_X / 4 / (a->num_in > 0 ? a->num_in : 1);
    block = block < BLOCK_ROWS ? block / TILE * TILE : BLOCK_ROWS;
    const bool packed = rows > DIRECT_ROWS && block > DIRECT_ROWS;
    if (!packed) block = DIRECT_ROWS;
    const int64_t blocks = (rows + block - 1) / block;
    int64_t packed_block = -1;
    for (int64_t p = hr_next(task); p < blocks * panels; p = hr_next(task)) {
        const int64_t b = p / panels, panel = p % panels;
        const int64_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
        const Tiles tiles(end - begin);
        const float* x = a->x + begin * a->ld_x;
        if (packed && packed_block != b) pack_x(x, a->ld_x, a->num_in, tiles, s->x), packed_block = b;
        multiply(a, packed ? s->x : x, tiles, panel, packed, s);
        for (int64_t row = begin; row < end; row++)
            for (int64_t i = 0; i < HR_PANEL_F; i += HR_LANES) {
                const int64_t at = panel * HR_PANEL_F + i, left = a->num_out - at;
                if (left <= 0) break;
                const int64_t n = left < HR_LANES ? left : (int64_t)HR_LANES;
                V y = load(s->sums + (row - begin) * HR_PANEL_F + i);
                if (a->bias) y = add(y, load_n(a->bias + at, n));
                if (a->residual) y = add(y, load_n(a->residual + row * a->ld_res + at, n));
                store_n(a->out + row * a->ld_out + at, y, n);
            }
    }
}

}  // namespace HR_NS
