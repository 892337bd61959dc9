/* Mixture of experts: which rows go to which expert, there, through its linear layers, and back. */
#include HR_VEC_H
#include "generic/math.h"
#include "generic/ops.h"
#include "generic/select.h"

namespace HR_NS {
namespace {

HR_INLINE float infinity() { return __builtin_inff(); }

/* e of the contract, and the sum of all of it. */
HR_INLINE V scores_of(const HrArgs_route* a, const float* x, float* e) {
    V best = set1(-infinity()), sum = zero();
    for (int64_t i = 0; i < a->num_experts; i++) best = max(best, set1(x[i]));
    each_vector(0, a->num_experts, [&](int64_t i, int64_t n) {
        const V v = load_some(x + i, n);
        V s = a->score == HR_SOFTMAX ? exp(sub(v, best)) : sigmoid(v);
        if (n != 16) s = select(first_n(n), s, zero());
        sum = add(sum, s);
        store_some(e + i, s, n);
    });
    return set1(hsum(sum));
}

/* The choice of experts of groups that take no part becomes -infinity. */
void leave_groups(const HrArgs_route* a, float* choice, Ranked* heap) {
    const int64_t size = a->num_experts / a->num_groups;
    float* of_group = choice + a->num_experts;
    for (int64_t g = 0; g < a->num_groups; g++) {
        select_greatest(choice + g * size, size, a->group_top < size ? a->group_top : size, heap);
        of_group[g] = a->group_top == 2 && size > 1 ? heap[0].value + heap[1].value : heap[0].value;
    }
    select_greatest(of_group, a->num_groups, a->top_groups, heap);
    for (int64_t g = 0; g < a->num_groups; g++) {
        bool stays = false;
        for (int64_t i = 0; i < a->top_groups; i++) stays |= heap[i].id == g;
        for (int64_t i = 0; !stays && i < size; i++) choice[g * size + i] = -infinity();
    }
}

}  // namespace

void route(const HrArgs_route* a, HrTask* task) {
    const int64_t experts = a->num_experts, k = a->top_k;
    float* e = (float*)task->scratch;
    float* choice = e + (experts + 15) / 16 * 16;
    Ranked* heap = (Ranked*)(choice + (2 * experts + 15) / 16 * 16);
    const bool softmax = a->score == HR_SOFTMAX, grouped = a->num_groups > 1;
    const bool all = a->bias || !softmax || !a->renormalise;
    share(task, task->dims[a->dim], experts, experts, 4, [&](int64_t row, int64_t, int64_t) {
        const float* x = a->x + row * a->ld_x;
        float* weights = a->weights + row * k;
        int32_t* ids = a->ids + row * k;
        V total = zero();
        if (all) total = scores_of(a, x, e);
        const float* by = x;
        V poison = zero();
        if (a->bias || grouped) {
            each_vector(0, experts, [&](int64_t i, int64_t n) {
                const V v = load_n(x + i, n);
                poison = fma(v, zero(), poison);
                V c = v;
                if (a->bias) c = add(softmax ? div(load_n(e + i, n), total) : load_n(e + i, n), load_n(a->bias + i, n));
                store_n(choice + i, c, n);
            });
            if (grouped) leave_groups(a, choice, heap);
            by = choice;
        }
        const V unsound = select_greatest(by, experts, k, heap);
        /* Groups that were left are infinite by intent. */
        poison = by == x ? unsound : poison;
        V sum = zero();
        for (int64_t i = 0; i < k; i++) ids[i] = heap[i].id, weights[i] = all ? e[heap[i].id] : x[heap[i].id];
        const V best = set1(weights[0]);
        each_vector(0, k, [&](int64_t i, int64_t n) {
            V w = load_n(weights + i, n);
            if (!all) w = exp(sub(w, best));
            if (n != 16) w = select(first_n(n), w, zero());
            sum = add(sum, w);
            store_n(weights + i, w, n);
        });
        const V over = a->renormalise ? set1(hsum(sum)) : softmax ? total : set1(1.0f), bad = set1(hsum(poison));
        const V factor = set1((float)a->scale);
        /* + bad: an expert that was not chosen may be the one that is not finite. Else it is a zero. */
        each_vector(0, k, [&](int64_t i, int64_t n) {
            V w = div(load_n(weights + i, n), over);
            if (a->scale != 1) w = mul(w, factor);
            store_n(weights + i, add(w, bad), n);
        });
        for (int64_t i = 0; a->factors && i < k; i++) weights[i] *= a->factors[ids[i]];
    });
}

/* One thread does it: a row adds a few numbers to lists that all rows share. */
void moe_group(const HrArgs_moe_group* a, HrTask* task) {
    if (task->tid != 0) return;
    const int64_t rows = task->dims[a->dim], k = a->top_k;
    int32_t *begin = a->begin, *next = (int32_t*)task->scratch;
    for (int64_t e = 0; e <= a->num_experts; e++) begin[e] = 0;
    for (int64_t i = 0; i < rows * k; i++) begin[a->ids[i] + 1]++;
    for (int64_t e = 0; e < a->num_experts; e++) begin[e + 1] += begin[e], next[e] = begin[e];
    for (int64_t row = 0; row < rows; row++) {
        int32_t* places = a->places + row * k;
        for (int64_t i = 0; i < k; i++) {
            const int32_t pair = next[a->ids[row * k + i]]++;
            a->rows[pair] = (int32_t)row;
            a->pair_weights[pair] = a->weights[row * k + i];
            int64_t at = i;
            for (; at > 0 && places[at - 1] > pair; at--) places[at] = places[at - 1];
            places[at] = pair;
        }
    }
    task->dims[HR_DIM_PAIRS] = rows * k;
    for (int64_t i = 0; a->own_begin && i <= a->num_own; i++) a->own_begin[i] = begin[a->first + i] - begin[a->first];
    task->dims[HR_DIM_OWN_PAIRS] = a->own_begin ? a->own_begin[a->num_own] : 0;
}

void moe_gather(const HrArgs_moe_gather* a, HrTask* task) {
    const int64_t from = a->from ? *a->from : 0;
    share(task, task->dims[a->dim], a->width, a->width, 1, [&](int64_t i, int64_t, int64_t) {
        const int64_t row = a->list[from + i];
        if (!a->q) {
            const float* x = a->x + row * a->ld_x;
            const V weight = set1(a->weights ? a->weights[from + i] : 1.0f);
            each_vector(0, a->width, [&](int64_t at, int64_t n) {
                const V v = load_some(x + at, n);
                store_some(a->out + i * a->ld_out + at, a->weights ? mul(v, weight) : v, n);
            });
            return;
        }
        memcpy(a->to_q + i * a->ld_q, a->q + row * a->ld_q, (size_t)a->ld_q);
        memcpy(a->to_scales + i * a->ld_s, a->scales + row * a->ld_s, sizeof(float) * (size_t)a->ld_s);
        memcpy(a->to_sums + i * a->ld_s, a->sums + row * a->ld_s, sizeof(int32_t) * (size_t)a->ld_s);
    });
}

namespace {

template <class Args>
HR_INLINE void from_pair(Args* args, int64_t pair) {
    args->q += pair * args->ld_q;
    args->scales += pair * args->ld_s;
    args->sums += pair * args->ld_s;
    args->out += pair * args->ld_out;
}
HR_INLINE void from_pair(HrArgs_linear_f* args, int64_t pair) {
    args->x += pair * args->ld_x, args->out += pair * args->ld_out;
}
HR_INLINE void from_pair(HrArgs_linear_w* args, int64_t pair) {
    args->x += pair * args->ld_x, args->out += pair * args->ld_out;
}

/* A thread that finds no more work at one expert goes on to the next: no barrier stands between them, because each has a
 * counter of its own. The last thread to leave puts the counters back to 0. */
template <class Args>
void each(const HrArgs_linear_each* a, HrTask* task) {
    enum { APART = 8 };
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t e = a->experts[i], first = a->begin ? a->begin[e] : 0;
        int64_t rows = a->begin ? a->begin[e + 1] - first : task->dims[a->dim];
        if (rows <= 0) continue;
        Args args = ((const Args*)a->args)[i];
        from_pair(&args, first);
        HrTask part = *task;
        part.dims = &rows, part.counter = a->counters + APART * i;
        ((HrOpFn)a->fn)(&args, &part);
    }
    int64_t* left = a->counters + APART * a->count;
    if (__atomic_add_fetch(left, 1, __ATOMIC_ACQ_REL) < task->num_threads) return;
    for (int64_t i = 0; i <= a->count; i++) __atomic_store_n(a->counters + APART * i, 0, __ATOMIC_RELAXED);
}

}  // namespace

void linear_each(const HrArgs_linear_each* a, HrTask* task) {
    switch (a->op) {
        case HR_OP_linear_i4: return each<HrArgs_linear_i4>(a, task);
        case HR_OP_linear_i5: return each<HrArgs_linear_i5>(a, task);
        case HR_OP_linear_i6: return each<HrArgs_linear_i6>(a, task);
        case HR_OP_linear_i8: return each<HrArgs_linear_i8>(a, task);
        case HR_OP_linear_k: return each<HrArgs_linear_k>(a, task);
        case HR_OP_linear_w: return each<HrArgs_linear_w>(a, task);
        default: return each<HrArgs_linear_f>(a, task);
    }
}

void moe_combine(const HrArgs_moe_combine* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, 16, a->top_k, [&](int64_t row, int64_t begin, int64_t end) {
        const int32_t* places = a->places + row * a->top_k;
        float* out = a->out + row * a->ld_out;
        each_vector(begin, end, [&](int64_t at, int64_t n) {
            V y = zero();
            for (int64_t j = 0; j < a->top_k; j++) {
                const V x = load_some(a->x + places[j] * a->ld_x + at, n);
                y = a->weights ? fma(set1(a->weights[places[j]]), x, y) : add(y, x);
            }
            if (a->residual) y = add(y, load_some(a->residual + row * a->ld_res + at, n));
            store_some(out + at, y, n);
        });
    });
}

}  // namespace HR_NS
