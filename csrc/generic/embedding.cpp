/* Rows picked by number: of a table of weights, and of a step's own. Columns likewise. */
#include HR_VEC_H
#include <errno.h>
#include <unistd.h>

#include "generic/ops.h"
#include "generic/quantize.h"
#include "isa/k_blocks.h"

namespace HR_NS {

/* Numbers of a row that are read at once. */
enum { PIECE = 4096 };

/* Bytes at .. at + n - 1 of the table, where they lie or read into `room`; all bits are set where they can not be read. */
static const uint8_t* bytes_of(const HrArgs_embedding* a, int64_t at, int64_t n, uint8_t* room) {
    if (a->file < 0) return (const uint8_t*)a->table + at;
    for (int64_t done = 0; done < n;) {
        const int64_t got = pread((int)a->file, room + done, (size_t)(n - done), (off_t)(a->place + at + done));
        if (got > 0) {
            done += got;
        } else if (got == 0 || errno != EINTR) {
            memset(room, 0xff, (size_t)n);
            break;
        }
    }
    return room;
}

template <class T, V (*load_wide)(const T*, int64_t)>
static void look_up(const HrArgs_embedding* a, HrTask* task) {
    const float factor = (float)a->scale;
    alignas(64) uint8_t room[PIECE * sizeof(T)];
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t row, int64_t begin, int64_t end) {
        const int64_t first = a->ids[row] * a->width;
        float* out = a->out + row * a->ld_out;
        for (int64_t at = begin; at < end; at += PIECE) {
            const int64_t num = end - at < PIECE ? end - at : (int64_t)PIECE, size = sizeof(T);
            const T* from = (const T*)bytes_of(a, (first + at) * size, num * size, room);
            each_vector(0, num, [&](int64_t i, int64_t n) {
                const V x = load_wide(from + i, n);
                store_some(out + at + i, factor == 1.0f ? x : mul(x, set1(factor)), n);
            });
        }
    });
}

/* Rows of blocks as they lie in a GGUF file. */
static void look_up_k(const HrArgs_embedding* a, HrTask* task) {
    const float factor = (float)a->scale;
    const int64_t bytes = hr_k_bytes(a->type), each = hr_k_sub(a->type);
    alignas(64) uint8_t room[PIECE]; /* a block has fewer bytes than numbers */
    share(task, task->dims[a->dim], a->width, HR_K_BLOCK, 1, [&](int64_t row, int64_t begin, int64_t end) {
        const uint8_t* from = nullptr;
        float* out = a->out + row * a->ld_out + begin;
        for (int64_t at = begin; at < end; at += HR_K_BLOCK, from += bytes, out += HR_K_BLOCK) {
            if ((at - begin) % PIECE == 0) {
                const int64_t num = end - at < PIECE ? end - at : (int64_t)PIECE;
                from = bytes_of(a, (a->ids[row] * a->width + at) / HR_K_BLOCK * bytes, num / HR_K_BLOCK * bytes, room);
            }
            HrKBlock b;
            hr_k_read(a->type, from, &b);
            alignas(64) float first[16] = {}, tops[2][16];
            uint16_t halves[16] = {b.d, b.dm};
            store(first, load_f16(halves));
            store(tops[0], mul(set1(first[0]), load_i8(b.scale))), store(tops[1], mul(set1(first[1]), load_i8(b.least)));
            for (int64_t i = 0; i < HR_K_BLOCK; i += 16) {
                const V code = sub(load_i8((const int8_t*)b.code + i), set1((float)hr_k_middle(a->type)));
                V x = mul(code, set1(tops[0][i / each]));
                if (hr_k_has_min(a->type)) x = add(x, set1(tops[1][i / each]));
                store(out + i, factor == 1.0f ? x : mul(x, set1(factor)));
            }
        }
    });
}

void embedding(const HrArgs_embedding* a, HrTask* task) {
    switch (a->type) {
        case HR_F32: return look_up<float, load_n>(a, task);
        case HR_F16: return look_up<uint16_t, load_f16_n>(a, task);
        case HR_BF16: return look_up<uint16_t, load_bf16_n>(a, task);
        default: return look_up_k(a, task);
    }
}

void select_rows(const HrArgs_select_rows* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t row, int64_t begin, int64_t end) {
        memcpy(a->out + row * a->ld_out + begin, a->x + a->rows[row] * a->ld_x + begin,
               sizeof(float) * (size_t)(end - begin));
    });
}

void permute(const HrArgs_permute* a, HrTask* task) {
    const Quant to = quant_of(a);
    share(task, task->dims[a->dim], a->width, to.q ? a->group : 16, 2, [&](int64_t row, int64_t begin, int64_t end) {
        const float* x = a->x + row * a->ld_x;
        float* out = a->out ? a->out + row * a->ld_out : nullptr;
        const int32_t* columns = a->columns;
        for (int64_t e = 1; a->begin && e < a->count && a->begin[e] <= row; e++) columns = a->columns + e * a->width;
        emit(to, row, begin, end, a->width, out, (float*)task->scratch, [&](int64_t i, int64_t n) {
            alignas(64) float picked[16] = {};
            for (int64_t j = 0; j < n; j++) picked[j] = x[columns[i + j]];
            return load(picked);
        });
    });
}

}  // namespace HR_NS
