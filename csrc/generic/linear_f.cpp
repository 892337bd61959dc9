/* Linear layers whose weights are floats: f32, f16 or bf16.
 *
 * Few rows read a panel as it lies, from end to end, at the memory's pace. More
 * rows go through it a block of inputs at a time, while the next block is fetched: x is packed tile by tile (rows a
 * power of two apart would push each other out of the first cache), and many rows have the block's weights widened
 * once. The chains wait in `sums` from block to block. */
#include HR_VEC_H
#include "generic/linear_tiles.h"
#include "generic/ops.h"

namespace HR_NS {
namespace {

constexpr int64_t WIDEN_ROWS = 24; /* beyond so many the weights are widened in a pass of their own */

constexpr TileFns<HR_F32, false, DIRECT_ROWS> direct_f32;
constexpr TileFns<HR_F16, false, DIRECT_ROWS> direct_f16;
constexpr TileFns<HR_BF16, false, DIRECT_ROWS> direct_bf16;
constexpr TileFns<HR_F16, true, TILE> packed_f16;
constexpr TileFns<HR_BF16, true, TILE> packed_bf16;
static_assert(HR_F32 == 0 && HR_F16 == 1 && HR_BF16 == 2, "order of these");
const TileFn* const direct_tiles[] = {direct_f32.of, direct_f16.of, direct_bf16.of};
const TileFn* const packed_tiles[] = {packed_f32.of, packed_f16.of, packed_bf16.of};

/* `steps` rows of `width` weights to floats [steps][64], zeros in what a narrow panel lacks. */
template <int type>
void widen(const char* w, int64_t steps, int64_t width, float* to) {
    constexpr int64_t size = type == HR_F32 ? 4 : 2;
    for (int64_t k = 0; k < steps; k++)
        for (int64_t i = 0; i < HR_PANEL_F; i += HR_LANES)
            store(to + k * HR_PANEL_F + i, i < width ? weights_at<type>(w + k * width * size, i) : zero());
}

/* All sums of one block of rows and one panel. */
void multiply(const HrArgs_linear_f* a, const float* x, const Tiles& tiles, int64_t panel, bool packed, Scratch* s) {
    const int64_t size = hr_size_f(a->type), width = hr_width_f(panel, a->num_out);
    const char* w = (const char*)a->weights + panel * HR_PANEL_F * a->num_in * size;
    const bool wide = width != HR_PANEL_F || (tiles.rows > WIDEN_ROWS && a->type != HR_F32);
    const bool whole = tiles.count == 1 && !wide && vectors_of((int)tiles.rows) == VECTORS;
    const int64_t block = whole ? a->num_in : BLOCK_IN;
    const TileFn* fns = (packed ? packed_tiles : direct_tiles)[wide ? (int64_t)HR_F32 : a->type];
    memset(s->sums, 0, sizeof(float) * HR_PANEL_F * (size_t)tiles.rows);
    for (int64_t from = 0; from < a->num_in; from += block) {
        const int64_t steps = from + block < a->num_in ? block : a->num_in - from;
        const char* now = w + from * width * size;
        /* The first tile fetches: the next block, or where there is but one, what comes a little later in it. */
        const char* fetch = now + (whole ? AHEAD : steps * width * size);
        if (wide) {
            if (a->type == HR_F32) widen<HR_F32>(now, steps, width, s->wide);
            else if (a->type == HR_F16) widen<HR_F16>(now, steps, width, s->wide);
            else widen<HR_BF16>(now, steps, width, s->wide);
            now = (const char*)s->wide;
        }
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = tiles.begin(t), rows = tiles.begin(t + 1) - first;
            const float* at = packed ? x + from * tiles.rows + first * steps : x + first * a->ld_x + from;
            fns[rows - 1](now, steps, at, a->ld_x, s->sums + first * HR_PANEL_F, fetch);
            fetch = now;
        }
    }
}

}  // namespace

void linear_f(const HrArgs_linear_f* a, HrTask* task) {
    const int64_t rows = task->dims[a->dim], panels = (a->num_out + HR_PANEL_F - 1) / HR_PANEL_F;
    Scratch* s = (Scratch*)task->scratch;
    int64_t block = rows_of_block(a->num_in);
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
        finish_rows(a, s->sums, begin, end, panel);
    }
}

}  // namespace HR_NS
