/* The linear layers of integer codes, one product after the other: the oracle of the other ISAs. */
#pragma once
#include "generic/ops.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace HR_NS {

/* How codes become numbers, and what their groups bring: a scale each, a minimum each, or one scale for each output. */
struct Codes {
    HrLayout l;
    int offset;
    const int8_t* book;
    bool scaled, has_min;
    float unit = 1.0f; /* what an entry of the book counts in */
};

template <class Args>
static float dot(const Args* a, const Codes& c, int64_t out, int64_t row) {
    const HrLayout* l = &c.l;
    const uint8_t* w = (const uint8_t*)a->weights;
    const int8_t* q = a->q + row * a->ld_q;
    float acc = 0.0f;
    for (int64_t g = 0; g < l->groups; g++) {
        const int64_t first = g * l->group, last = first + l->group < l->num_in ? first + l->group : l->num_in;
        const float sa = a->scales[row * a->ld_s + g] * c.unit;
        int32_t isum = 0;
        for (int64_t k = first; k < last; k++) {
            const int code = hr_code(w, l, out, k);
            isum += q[k] * (c.book ? c.book[code] : code - c.offset);
        }
        if (!c.scaled) {
            acc = fmaf((float)isum, sa, acc);
            continue;
        }
        uint16_t h[2] = {0, 0};
        memcpy(h, w + hr_at_d(l, out, g), 2);
        acc = fmaf((float)isum * sa, widen_f16(h[0]), acc);
        if (c.has_min) {
            memcpy(h + 1, w + hr_at_d(l, out, g) + HR_LINE, 2);
            acc = fmaf((float)a->sums[row * a->ld_s + g] * sa, widen_f16(h[1]), acc);
        }
    }
    if (c.scaled) return acc;
    float d;
    memcpy(&d, w + hr_at_channel(l, out), 4);
    return acc * d;
}

/* With two levels of scales. */
static inline float dot_k(const HrArgs_linear_k* a, const HrLayout* l, int64_t out, int64_t row) {
    const int64_t sub = hr_k_sub(a->form), lane = out % HR_PANEL;
    const int8_t* q = a->q + row * a->ld_q;
    float acc = 0.0f;
    for (int64_t first = 0; first < l->num_in; first += sub) {
        const uint8_t* header = (const uint8_t*)a->weights + out / HR_PANEL * l->panel_bytes +
                                first / HR_K_BLOCK * l->group_bytes;
        const float sa = a->scales[row * a->ld_s + first / 32];
        int32_t isum = 0, sum = 0;
        for (int64_t k = first; k < first + sub; k++) {
            sum += q[k], isum += q[k] * (hr_code((const uint8_t*)a->weights, l, out, k) - hr_k_middle(a->form));
        }
        int scale, least;
        uint16_t d, dm;
        hr_k_scales(header, a->form, lane, first % HR_K_BLOCK / sub, &scale, &least);
        memcpy(&d, header + 2 * lane, 2), memcpy(&dm, header + HR_LINE + 2 * lane, 2);
        acc = fmaf((float)isum * sa, widen_f16(d) * (float)scale, acc);
        if (hr_k_has_min(a->form)) acc = fmaf((float)sum * sa, widen_f16(dm) * (float)least, acc);
    }
    return acc;
}

/* dot(out, row) of all outputs and rows, with what is added to it. */
template <class Args, class F>
static void each_output(const Args* a, HrTask* task, F dot_of) {
    const int64_t rows = task->dims[a->dim];
    for (int64_t p = hr_next(task); p < hr_num_panels(a->num_out); p = hr_next(task)) {
        for (int64_t n = p * HR_PANEL; n < (p + 1) * HR_PANEL && n < a->num_out; n++) {
            for (int64_t r = 0; r < rows; r++) {
                float y = dot_of(n, r);
                if (a->bias) y += a->bias[n];
                if (a->residual) y += a->residual[r * a->ld_res + n];
                a->out[r * a->ld_out + n] = y;
            }
        }
    }
}

template <class Args>
static void linear(const Args* a, HrTask* task, const Codes& c) {
    each_output(a, task, [&](int64_t out, int64_t row) { return dot(a, c, out, row); });
}

}  // namespace HR_NS
