/* Norms of rows, quantised in the same pass if q is not NULL. */
#include HR_VEC_H
#include "generic/ops.h"
#include "generic/quantize.h"

namespace HR_NS {

/* An element is loaded, multiplied and divided: what it costs beside an addition. */
enum { NORM_COST = 4 };

void rms_norm(const HrArgs_rms_norm* a, HrTask* task) {
    const Quant to = quant_of(a);
    const V offset = set1((float)a->offset);
    const bool plain = a->offset == 0;
    const int64_t width = a->width, whole = a->heads * width;
    /* Heads are norms of their own, and so the columns may be cut between them. */
    share(task, task->dims[a->dim], whole, width, NORM_COST, [&](int64_t row, int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at += width) {
            const float* x = a->x + row * a->ld_x + at;
            V ss = zero();
            each_vector(0, width, [&](int64_t i, int64_t n) {
                const V v = load_some(x + i, n);
                ss = fma(v, v, ss);
            });
            const V rms = sqrt(add(div(set1(hsum(ss)), set1((float)width)), set1((float)a->eps)));
            float* out = a->out ? a->out + row * a->ld_out + at : nullptr;
            const float* weight = a->weight + at / width * a->weight_step;
            emit(to, row, 0, width, width, out, (float*)task->scratch, [&](int64_t i, int64_t n) {
                const V y = div(load_some(x + i, n), rms);
                if (!a->weight) return y;
                V gain = load_some(weight + i, n);
                if (!plain) gain = add(gain, offset);
                return mul(y, gain);
            });
        }
    });
}

void layer_norm(const HrArgs_layer_norm* a, HrTask* task) {
    const Quant to = quant_of(a);
    const int64_t width = a->width;
    share(task, task->dims[a->dim], width, width, NORM_COST, [&](int64_t row, int64_t, int64_t) {
        const float* x = a->x + row * a->ld_x;
        V sum = zero(), ss = zero();
        each_vector(0, width, [&](int64_t i, int64_t n) { sum = add(sum, load_some(x + i, n)); });
        const V mean = div(set1(hsum(sum)), set1((float)width));
        each_vector(0, width, [&](int64_t i, int64_t n) {
            V d = sub(load_some(x + i, n), mean);
            if (n != 16) d = select(first_n(n), d, zero());
            ss = fma(d, d, ss);
        });
        const V dev = sqrt(add(div(set1(hsum(ss)), set1((float)width)), set1((float)a->eps)));
        float* out = a->out ? a->out + row * a->ld_out : nullptr;
        emit(to, row, 0, width, width, out, (float*)task->scratch, [&](int64_t i, int64_t n) {
            const V d = div(sub(load_some(x + i, n), mean), dev);
            if (!a->weight) return d;
            return fma(d, load_some(a->weight + i, n), a->bias ? load_some(a->bias + i, n) : zero());
        });
    });
}

}  // namespace HR_NS
