/* The greatest logits of a row. */
#include HR_VEC_H
#include "generic/ops.h"
#include "generic/select.h"

namespace HR_NS {

/* True if x is free of NaN and +infinity. */
static bool usable(const float* x, int64_t width) {
    M good = first_n(16);
    const V infinity = set1(__builtin_inff());
    each_vector(0, width, [&](int64_t i, int64_t n) { good = both(good, lt(load_some(x + i, n), infinity)); });
    return bits(good) == 0xffff;
}

void top_k(const HrArgs_top_k* a, HrTask* task) {
    const int64_t k = a->k < a->width ? a->k : a->width;
    Ranked* heap = (Ranked*)task->scratch;
    share(task, task->dims[a->dim], a->width, a->width, 1, [&](int64_t row, int64_t, int64_t) {
        const float* x = a->x + row * a->ld_x;
        const V poison = select_greatest(x, a->width, k, heap);
        for (int64_t i = 0; i < k; i++) {
            a->ids[row * a->k + i] = heap[i].id;
            a->values[row * a->k + i] = heap[i].value;
        }
        a->finite[row] = sound(poison) || usable(x, a->width); /* -infinity alone is no harm */
    });
}

}  // namespace HR_NS
