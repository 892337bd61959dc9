/* Mixture of experts: which rows go to which expert, and there and back. */
#include HR_VEC_H
#include "generic/math.h"
#include "generic/ops.h"
#include "generic/select.h"

namespace HR_NS {

void route(const HrArgs_route* a, HrTask* task) {
    Ranked* heap = (Ranked*)task->scratch;
    const int64_t k = a->top_k;
    share(task, task->dims[a->dim], a->num_experts, a->num_experts, 4, [&](int64_t row, int64_t, int64_t) {
        const V poison = select_greatest(a->x + row * a->ld_x, a->num_experts, k, heap);
        float* weights = a->weights + row * k;
        for (int64_t i = 0; i < k; i++) {
            a->ids[row * k + i] = heap[i].id;
            weights[i] = heap[i].value;
        }
        const V best = set1(heap[0].value);
        V sum = zero();
        each_vector(0, k, [&](int64_t i, int64_t n) {
            V w = exp(sub(load_n(weights + i, n), best));
            if (n != 16) w = select(first_n(n), w, zero());
            sum = add(sum, w);
            store_n(weights + i, w, n);
        });
        const V total = set1(hsum(sum)), bad = set1(hsum(poison));
        /* + bad: an expert that was not chosen may be the one that is not finite. Else it is a zero. */
        each_vector(0, k, [&](int64_t i, int64_t n) {
            store_n(weights + i, add(div(load_n(weights + i, n), total), bad), n);
        });
    });
}

/* One thread does it: a row adds a few numbers to lists that all rows share. */
void moe_group(const HrArgs_moe_group* a, HrTask* task) {
    if (task->tid != 0) return;
    const int64_t rows = task->dims[a->dim];
    int64_t* counts = task->dims + a->first_dim;
    for (int64_t e = 0; e < a->num_experts; e++) counts[e] = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * a->top_k; i < (row + 1) * a->top_k; i++) {
            const int64_t e = a->ids[i], at = e * a->ld_list + counts[e]++;
            a->lists[at] = (int32_t)row;
            a->list_weights[at] = a->weights[i];
        }
}

void moe_gather(const HrArgs_moe_gather* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, a->width, 1, [&](int64_t i, int64_t, int64_t) {
        const int64_t row = a->list[i];
        if (!a->q) {
            memcpy(a->out + i * a->ld_out, a->x + row * a->ld_x, sizeof(float) * (size_t)a->width);
            return;
        }
        memcpy(a->to_q + i * a->ld_q, a->q + row * a->ld_q, (size_t)a->ld_q);
        memcpy(a->to_scales + i * a->ld_s, a->scales + row * a->ld_s, sizeof(float) * (size_t)a->ld_s);
        memcpy(a->to_sums + i * a->ld_s, a->sums + row * a->ld_s, sizeof(int32_t) * (size_t)a->ld_s);
    });
}

void moe_scatter(const HrArgs_moe_scatter* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t i, int64_t begin, int64_t end) {
        const V weight = set1(a->list_weights[i]);
        const float* x = a->x + i * a->ld_x;
        float* out = a->out + a->list[i] * a->ld_out;
        each_vector(begin, end, [&](int64_t at, int64_t n) {
            store_some(out + at, fma(weight, load_some(x + at, n), load_some(out + at, n)), n);
        });
    });
}

}  // namespace HR_NS
