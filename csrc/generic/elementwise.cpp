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

void xielu(const HrArgs_xielu* a, HrTask* task) {
    const Quant to = quant_of(a);
    const V positive = set1((float)a->positive), negative = set1((float)a->negative), beta = set1((float)a->beta);
    share(task, task->dims[a->dim], a->width, to.q ? to.group : 16, ACT_COST,
          [&](int64_t row, int64_t begin, int64_t end) {
              const float* x = a->x + row * a->ld_x;
              float* out = a->out ? a->out + row * a->ld_out : nullptr;
              emit(to, row, begin, end, a->width, out, (float*)task->scratch, [&](int64_t i, int64_t n) {
                  const V v = load_some(x + i, n), line = mul(beta, v);
                  const V far = sub(sub(exp(v), set1(1.0f)), v), near = mul(mul(v, v), exp_tail(v));
                  const V bent = select(lt(v, set1(-0.34f)), far, near);
                  return select(lt(zero(), v), fma(mul(positive, v), v, line), fma(negative, bent, line));
              });
          });
}

template <class Act>
static void gate(const HrArgs_gated* a, HrTask* task, Act act) {
    const Quant to = quant_of(a);
    share(task, task->dims[a->dim], a->width, to.q ? to.group : 16, ACT_COST,
          [&](int64_t row, int64_t begin, int64_t end) {
              const float *x = a->x + row * a->ld_x, *y = x + a->width;
              float* out = a->out ? a->out + row * a->ld_out : nullptr;
              emit(to, row, begin, end, a->width, out, (float*)task->scratch,
                   [&](int64_t i, int64_t n) { return act(load_some(x + i, n), load_some(y + i, n)); });
          });
}

template <V (*act)(V)>
static void gate_by(const HrArgs_gated* a, HrTask* task) {
    gate(a, task, [](V x, V y) { return mul(act(x), y); });
}

template <V (*act)(V)>
static void multiply_by(const HrArgs_multiply* a, HrTask* task) {
    const int64_t cost = a->kind == HR_IDENTITY ? 1 : ACT_COST;
    share(task, task->dims[a->dim], a->width, 16, cost, [&](int64_t row, int64_t begin, int64_t end) {
        const float *x = a->x + row * a->ld_x, *gate = a->gate + row * a->ld_gate;
        const float* residual = a->residual ? a->residual + row * a->ld_res : nullptr;
        float* out = a->out + row * a->ld_out;
        const bool one = a->gate_width == 1;
        const V first = act(set1(*gate));
        each_vector(begin, end, [&](int64_t i, int64_t n) {
            V y = mul(load_some(x + i, n), one ? first : act(load_some(gate + i, n)));
            if (residual) y = add(y, load_some(residual + i, n));
            store_some(out + i, y, n);
        });
    });
}

void activation(const HrArgs_activation* a, HrTask* task) {
    switch (a->kind) {
        case HR_SILU: return activate<silu>(a, task);
        case HR_GELU: return activate<gelu>(a, task);
        case HR_GELU_TANH: return activate<gelu_tanh>(a, task);
        case HR_SIGMOID: return activate<sigmoid>(a, task);
        case HR_RELU2: return activate<relu2>(a, task);
        case HR_IDENTITY: return activate<identity>(a, task);
        default: return activate<relu>(a, task);
    }
}

void gated(const HrArgs_gated* a, HrTask* task) {
    switch (a->kind) {
        case HR_SILU: return gate_by<silu>(a, task);
        case HR_GELU: return gate_by<gelu>(a, task);
        case HR_GELU_TANH: return gate_by<gelu_tanh>(a, task);
        case HR_SIGMOID: return gate_by<sigmoid>(a, task);
        case HR_RELU2: return gate_by<relu2>(a, task);
        case HR_IDENTITY: return gate_by<identity>(a, task);
        case HR_CLAMPED_SWIGLU: return gate(a, task, clamped_swiglu);
        default: return gate_by<relu>(a, task);
    }
}

void multiply(const HrArgs_multiply* a, HrTask* task) {
    switch (a->kind) {
        case HR_SILU: return multiply_by<silu>(a, task);
        case HR_GELU: return multiply_by<gelu>(a, task);
        case HR_GELU_TANH: return multiply_by<gelu_tanh>(a, task);
        case HR_SIGMOID: return multiply_by<sigmoid>(a, task);
        case HR_RELU2: return multiply_by<relu2>(a, task);
        case HR_IDENTITY: return multiply_by<identity>(a, task);
        default: return multiply_by<relu>(a, task);
    }
}

void scale(const HrArgs_scale* a, HrTask* task) {
    const V factor = set1((float)a->factor);
    share(task, task->dims[a->dim], a->width, 16, 1, [&](int64_t row, int64_t begin, int64_t end) {
        const float* x = a->x + row * a->ld_x;
        const float* residual = a->residual ? a->residual + row * a->ld_res : nullptr;
        float* out = a->out + row * a->ld_out;
        each_vector(begin, end, [&](int64_t i, int64_t n) {
            V y = mul(load_some(x + i, n), factor);
            if (residual) y = add(y, load_some(residual + i, n));
            store_some(out + i, y, n);
        });
    });
}

void spread(const HrArgs_spread* a, HrTask* task) {
    share(task, task->dims[a->dim], a->heads, 1, 16, [&](int64_t row, int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; h++) {
            const float* x = a->x + row * a->ld_x + h * a->step_x;
            float* out = a->out + row * a->ld_out + h * a->step_out;
            each_vector(0, a->width, [&](int64_t i, int64_t n) { store_some(out + i, load_some(x + i, n), n); });
        }
    });
}

void finite(const HrArgs_finite* a, HrTask* task) {
    const V bound = set1((float)a->bound);
    share(task, task->dims[a->dim], a->width, a->width, 1, [&](int64_t row, int64_t, int64_t) {
        const float* x = a->x + (a->rows ? a->rows[row] : row) * a->ld_x;
        const M all = lt(zero(), set1(1.0f));
        M fit[4] = {all, all, all, all};
        int64_t i = 0;
        for (; i + 64 <= a->width; i += 64)
            for (int j = 0; j < 4; j++) fit[j] = both(fit[j], lt(abs(load(x + i + 16 * j)), bound));
        each_vector(i, a->width,
                    [&](int64_t at, int64_t n) { fit[0] = both(fit[0], lt(abs(load_some(x + at, n)), bound)); });
        a->finite[row] = bits(both(both(fit[0], fit[1]), both(fit[2], fit[3]))) == 0xffff;
    });
}

}  // namespace HR_NS
