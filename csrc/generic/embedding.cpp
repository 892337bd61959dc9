/* Rows picked by number: of a table of weights, and of a step's own. */
#include HR_VEC_H
#include "generic/ops.h"
#include "generic/share.h"

namespace HR_NS {

template <class T, V (*load_wide)(const T*, int64_t)>
static void look_up(const HrArgs_embedding* a, HrTask* task) {
    const float factor = (float)a->scale;
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t row, int64_t begin, int64_t end) {
        const T* from = (const T*)a->table + a->ids[row] * a->width;
        float* out = a->out + row * a->ld_out;
        each_vector(begin, end, [&](int64_t i, int64_t n) {
            const V x = load_wide(from + i, n);
            store_some(out + i, factor == 1.0f ? x : mul(x, set1(factor)), n);
        });
    });
}

void embedding(const HrArgs_embedding* a, HrTask* task) {
    switch (a->type) {
        case HR_F32: return look_up<float, load_n>(a, task);
        case HR_F16: return look_up<uint16_t, load_f16_n>(a, task);
        default: return look_up<uint16_t, load_bf16_n>(a, task);
    }
}

void select_rows(const HrArgs_select_rows* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t row, int64_t begin, int64_t end) {
        memcpy(a->out + row * a->ld_out + begin, a->x + a->rows[row] * a->ld_x + begin,
               sizeof(float) * (size_t)(end - begin));
    });
}

}  // namespace HR_NS
