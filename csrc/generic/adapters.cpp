/* Adapters of linear layers (LoRA, arXiv 2106.09685): two thin products of the rows that have one. Up to four rows of one
 * adapter go together, so that its weights are read once for them. */
#include HR_VEC_H
#include "generic/ops.h"
#include "generic/share.h"

namespace HR_NS {
namespace {

constexpr int64_t RANKS = 8, COLUMNS = 256; /* of a piece of work */

struct Part {
    const void *a, *b;
    int32_t rank, type;
    double scale;
    const float* gains;
};
struct Tile {
    const int32_t* rows;
    int64_t count;
    const Part* parts;
};

template <int type>
HR_INLINE V weights_at(const void* w, int64_t i) {
    if (type == HR_F32) return load((const float*)w + i);
    if (type == HR_F16) return load_f16((const uint16_t*)w + i);
    return load_bf16((const uint16_t*)w + i);
}

template <class Args>
HR_INLINE Tile tile_of(const Args* a, int64_t t) {
    const int32_t* tile = a->tiles + 1 + 3 * t;
    return {a->list + tile[0], tile[1], (const Part*)a->table + tile[2] * a->parts};
}

/* f(tile, part, block) for each of a part's blocks; the tiles of one block follow each other. */
template <class Args, class F>
HR_INLINE void each_block(const Args* a, HrTask* task, int64_t blocks, F f) {
    if (task->dims[a->dim] <= 0) return;
    const int64_t tiles = a->tiles[0], all = tiles * a->parts * blocks;
    for (int64_t p = all ? hr_next(task) : 0; p < all; p = hr_next(task))
        f(tile_of(a, p % tiles), p / tiles % a->parts, p / tiles / a->parts);
}

template <int type, int rows>
HR_INLINE void rank_of(const HrArgs_adapt_in* a, const Tile& tile, const void* w, float scale, int64_t at) {
    const float* x[rows];
    V sum[rows];
    for (int r = 0; r < rows; r++) x[r] = a->x + tile.rows[r] * a->ld_x, sum[r] = zero();
    each_vector(0, a->num_in, [&](int64_t i, int64_t n) {
        const V v = weights_at<type>(w, i);
        for (int r = 0; r < rows; r++) sum[r] = fma(v, load_some(x[r] + i, n), sum[r]);
    });
    for (int r = 0; r < rows; r++) a->out[tile.rows[r] * a->ld_out + at] = hsum(sum[r]) * scale;
}

template <int type>
void ranks_of(const HrArgs_adapt_in* a, const Tile& tile, int64_t part, int64_t block) {
    const Part& p = tile.parts[part];
    const int64_t size = type == HR_F32 ? 4 : 2, ld = (a->num_in + 15) / 16 * 16 * size;
    for (int64_t i = block * RANKS; i < p.rank && i < (block + 1) * RANKS; i++) {
        const char* w = (const char*)p.a + i * ld;
        const int64_t at = part * a->max_rank + i;
        switch (tile.count) {
            case 4: rank_of<type, 4>(a, tile, w, (float)p.scale, at); break;
            case 3: rank_of<type, 3>(a, tile, w, (float)p.scale, at); break;
            case 2: rank_of<type, 2>(a, tile, w, (float)p.scale, at); break;
            default: rank_of<type, 1>(a, tile, w, (float)p.scale, at);
        }
    }
}

template <int type, int rows>
HR_INLINE void columns_of(const HrArgs_adapt_out* a, const Tile& tile, int64_t part, int64_t begin, int64_t end) {
    const Part& p = tile.parts[part];
    const int64_t size = type == HR_F32 ? 4 : 2, first = a->begins[part];
    const int64_t width = (a->begins[part + 1] - first + 15) / 16 * 16, ld = width * size;
    const float* x[rows];
    float* out[rows];
    for (int r = 0; r < rows; r++) {
        x[r] = a->x + tile.rows[r] * a->ld_x + part * a->max_rank;
        out[r] = a->out + tile.rows[r] * a->ld_out + first;
    }
    each_vector(begin, end, [&](int64_t j, int64_t n) {
        V sum[rows];
        for (int r = 0; r < rows; r++) sum[r] = zero();
        const char* w = (const char*)p.b + j * size;
        for (int64_t i = 0; i < p.rank; i++) {
            const V v = weights_at<type>(w + i * ld, 0);
            for (int r = 0; r < rows; r++) sum[r] = fma(set1(x[r][i]), v, sum[r]);
        }
        for (int r = 0; r < rows; r++) {
            const V y = load_some(out[r] + j, n);
            if (p.gains) {
                const int64_t at = tile.rows[r] * a->ld_res + first + j;
                const V own = a->residual ? sub(y, load_some(a->residual + at, n)) : y;
                sum[r] = fma(set1((float)p.scale), fma(load(p.gains + j), own, load(p.gains + width + j)), sum[r]);
            }
            store_some(out[r] + j, add(y, sum[r]), n);
        }
    });
}

template <int type>
void block_of(const HrArgs_adapt_out* a, const Tile& tile, int64_t part, int64_t block) {
    const int64_t width = a->begins[part + 1] - a->begins[part], begin = block * COLUMNS;
    const int64_t end = begin + COLUMNS < width ? begin + COLUMNS : width;
    if (begin >= end) return;
    switch (tile.count) {
        case 4: return columns_of<type, 4>(a, tile, part, begin, end);
        case 3: return columns_of<type, 3>(a, tile, part, begin, end);
        case 2: return columns_of<type, 2>(a, tile, part, begin, end);
        default: return columns_of<type, 1>(a, tile, part, begin, end);
    }
}

}  // namespace

void adapt_in(const HrArgs_adapt_in* a, HrTask* task) {
    each_block(a, task, (a->max_rank + RANKS - 1) / RANKS, [&](const Tile& tile, int64_t part, int64_t block) {
        const int64_t type = tile.parts[part].type;
        if (type == HR_F32) ranks_of<HR_F32>(a, tile, part, block);
        else if (type == HR_F16) ranks_of<HR_F16>(a, tile, part, block);
        else ranks_of<HR_BF16>(a, tile, part, block);
    });
}

void adapt_out(const HrArgs_adapt_out* a, HrTask* task) {
    int64_t most = 0;
    for (int64_t p = 0; p < a->parts; p++) {
        const int64_t width = a->begins[p + 1] - a->begins[p];
        if (width > most) most = width;
    }
    each_block(a, task, (most + COLUMNS - 1) / COLUMNS, [&](const Tile& tile, int64_t part, int64_t block) {
        const int64_t rank = tile.parts[part].rank, type = tile.parts[part].type;
        if (rank == 0) return;
        if (type == HR_F32) block_of<HR_F32>(a, tile, part, block);
        else if (type == HR_F16) block_of<HR_F16>(a, tile, part, block);
        else block_of<HR_BF16>(a, tile, part, block);
    });
}

}  // namespace HR_NS
