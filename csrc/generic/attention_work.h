/* The pieces of a step of attention, and how the threads share them out. */
#pragma once
#include "include/kernels.h"

namespace HR_NS {
namespace {

enum { PIECE_COMBOS = 192 };

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* The first position that the row at position p sees, or a number below 0. */
inline int64_t low_of(const HrArgs_attention* a, int64_t p) {
    return a->window > 0 ? p - a->window + 1 : a->window < 0 ? p - p % -a->window : 0;
}

/* The position behind the last that the row at position p of a chunk sees. */
inline int64_t end_of(const HrArgs_attention* a, int64_t chunk, int64_t p) {
    if (a->seen) return a->seen[a->row_begin[chunk] + p - a->start[chunk]] + 1;
    return p + 1 + least(a->ahead, a->start[chunk] + a->row_begin[chunk + 1] - a->row_begin[chunk] - (p + 1));
}

struct Scratch {
    char* at;
    template <class T>
    T* take(int64_t count) {
        T* p = (T*)at;
        at += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

struct Piece {
    int64_t chunk, row, rows, kv_head, head, heads; /* `heads` query heads of the kv head's group, from `head` on */
};

/* Row tiles of a chunk, and about how long one of them takes, as half the bits of the count of its products. */
struct Share {
    int64_t tiles, bucket;
};
Share share_of(const HrArgs_attention* a, int64_t chunk, int64_t heads) {
    int64_t rows = a->row_begin[chunk + 1] - a->row_begin[chunk], most_rows = most(1, PIECE_COMBOS / heads);
    int64_t tiles = (rows + most_rows - 1) / most_rows, keys = a->start[chunk] + rows;
    if (a->window) keys = least(keys, (a->window > 0 ? a->window : -a->window) + least(a->ahead, rows) + rows);
    return {tiles, (64 - __builtin_clzll((uint64_t)most(1, rows / most(1, tiles) * keys))) / 2};
}

/* The pieces of a step, those that take longest first. Every thread walks the same list and takes what hr_next says. */
struct Work {
    const HrArgs_attention* args;
    HrTask* task;
    int64_t num_chunks, kv_heads, group, parts, heads, bucket, chunk, begun;

    Work(const HrArgs_attention* a, HrTask* t)
        : args(a), task(t), num_chunks(t->dims[HR_DIM_SEQS]), kv_heads(a->kv_heads), group(a->heads / a->kv_heads),
          parts((group + PIECE_COMBOS - 1) / PIECE_COMBOS), heads((group + parts - 1) / parts), bucket(0), chunk(0),
          begun(0) {
        int64_t total = 0;
        for (int64_t i = 0; i < num_chunks; i++) total += share_of(a, i, heads).tiles * kv_heads * parts;
        /* Few pieces: the query heads of a group are shared out too, though the cache is then read more than once. */
        if (total % t->num_threads != 0 && total < 2 * t->num_threads && group % t->num_threads == 0)
            parts = t->num_threads, heads = group / parts;
        for (int64_t i = 0; i < num_chunks; i++) bucket = most(bucket, share_of(a, i, heads).bucket);
    }

    bool take(Piece* piece) {
        int64_t next = hr_next(task), each = kv_heads * parts;
        for (; bucket >= 0; bucket--, chunk = 0)
            for (; chunk < num_chunks; chunk++) {
                Share share = share_of(args, chunk, heads);
                if (share.bucket != bucket) continue;
                if (next < begun + share.tiles * each) {
                    int64_t rows = args->row_begin[chunk + 1] - args->row_begin[chunk];
                    int64_t tile = share.tiles - 1 - (next - begun) / each, part = (next - begun) % each;
                    piece->chunk = chunk, piece->row = rows * tile / share.tiles;
                    piece->rows = rows * (tile + 1) / share.tiles - piece->row;
                    piece->kv_head = part / parts, piece->head = part % parts * heads;
                    piece->heads = least(heads, group - piece->head);
                    return true;
                }
                begun += share.tiles * each;
            }
        return false;
    }
};

/* The keys that some row of a piece sees: positions first ... last - 1. */
struct Keys {
    const int32_t* blocks;
    int64_t kv_head, first, last;
};
Keys keys_of(const HrArgs_attention* a, const Piece& piece) {
    int64_t start = a->start[piece.chunk] + piece.row;
    return {a->blocks + a->table_begin[piece.chunk], piece.kv_head, most(0, low_of(a, start)),
            end_of(a, piece.chunk, start + piece.rows - 1)};
}

}  // namespace
}  // namespace HR_NS
