/* Operators on each number by itself: sums, soft caps, activations; and whether all numbers of a row are finite. */
#include HR_VEC_H
#include "generic/math.h"
#include "generic/ops.h"
#include "generic/quantize.h"

namespace HR_NS {

/* Of an element with an exp and a division in it, beside an addition. */
enum { ACT_COST = 8 };

void add(const HrArgs_add* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t row, int64_t begin, int64_t end) {
        const float *x = a->x + row * a->ld_x, *y = a->y + row * a->ld_y;
        float* out = a->out + row * a->ld_out;
        each_vector(begin, end, [&](int64_t i, int64_t n) {
            store_some(out + i, add(load_some(x + i, n), load_some(y + i, n)), n);
        });
    });
}

void softcap(const HrArgs_softcap* a, HrTask* task) {
    const V cap = set1((float)a->cap);
    share(task, task->dims[a->dim], a->width, 16, ACT_COST, [&](int64_t row, int64_t begin, int64_t end) {
        const float* x = a->x + row * a->ld_x;
        float* out = a->out + row * a->ld_out;
        each_vector(begin, end, [&](int64_t i, int64_t n) {
            const V v = load_some(x + i, n);
            /* + x * 0: an infinity must not become a sound `cap`. Other numbers keep their bits. */
            store_some(out + i, fma(v, zero(), mul(cap, tanh(div(v, cap)))), n);
        });
    });
}

template <V (*act)(V)>
static void activate(const HrArgs_activation* a, HrTask* task) {
    const Quant to = quant_of(a);
    share(task, task->dims[a->dim], a->width, to.q ? to.group : 16, ACT_COST,
          [&](int64_t row, int64_t begin, int64_t end) {
              const float* x = a->x + row * a->ld_x;
              float* out = a->out ? a->out + row * a->ld_out : nullptr;
              emit(to, row, begin, end, a->width, out, (float*)task->scratch,
                   [&](int64_t i, int64_t n) { return act(load_some(x + i, n)); });
          });
}

template <V (*act)(V)>
static void gate(const HrArgs_gated* a, HrTask* task) {
    const Quant to = quant_of(a);
    share(task, task->dims[a->dim], a->width, to.q ? to.group : 16, ACT_COST,
          [&](int64_t row, int64_t begin, int64_t end) {
              const float *x = a->x + row * a->ld_x, *y = x + a->width;
              float* out = a->out ? a->out + row * a->ld_out : nullptr;
              emit(to, row, begin, end, a->width, out, (float*)task->scratch,
                   [&](int64_t i, int64_t n) { return mul(act(load_some(x + i, n)), load_some(y + i, n)); });
          });
}

void activation(const HrArgs_activation* a, HrTask* task) {
    switch (a->kind) {
        case HR_SILU: return activate<silu>(a, task);
        case HR_GELU: return activate<gelu>(a, task);
        case HR_GELU_TANH: return activate<gelu_tanh>(a, task);
        default: return activate<relu>(a, task);
    }
}

void gated(const HrArgs_gated* a, HrTask* task) {
    switch (a->kind) {
        case HR_SILU: return gate<silu>(a, task);
        case HR_GELU: return gate<gelu>(a, task);
        case HR_GELU_TANH: return gate<gelu_tanh>(a, task);
        default: return gate<relu>(a, task);
    }
}

void zero(const HrArgs_zero* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t row, int64_t begin, int64_t end) {
        memset(a->out + row * a->ld_out + begin, 0, sizeof(float) * (size_t)(end - begin));
    });
}

void finite(const HrArgs_finite* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, a->width, 1, [&](int64_t row, int64_t, int64_t) {
        const float* x = a->x + row * a->ld_x;
        V poison[4] = {zero(), zero(), zero(), zero()};
        int64_t i = 0;
        for (; i + 64 <= a->width; i += 64)
            for (int j = 0; j < 4; j++) poison[j] = fma(load(x + i + 16 * j), zero(), poison[j]);
        each_vector(i, a->width,
                    [&](int64_t at, int64_t n) { poison[0] = fma(load_some(x + at, n), zero(), poison[0]); });
        a->finite[row] = sound(add(add(poison[0], poison[1]), add(poison[2], poison[3])));
    });
}

}  // namespace HR_NS
