/* linear_i8, one product after the other: the oracle of the other ISAs. */
#include "generic/ops.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace HR_NS {

static float dot(const HrArgs_linear_i8* a, const HrLayout* l, int64_t out, int64_t row) {
    const uint8_t* w = (const uint8_t*)a->weights;
    const int8_t* q = a->q + row * a->ld_q;
    float acc = 0.0f;
    for (int64_t g = 0; g < l->groups; g++) {
        const int64_t first = g * l->group, last = first + l->group < l->num_in ? first + l->group : l->num_in;
        const float sa = a->scales[row * a->ld_s + g];
        int32_t isum = 0;
        for (int64_t k = first; k < last; k++) isum += q[k] * ((int)w[hr_at_code(l, out, k)] - 128);
        if (a->weight_group) {
            uint16_t h;
            memcpy(&h, w + hr_at_d(l, out, g), 2);
            acc = fmaf((float)isum * sa, widen_f16(h), acc);
        } else {
            acc = fmaf((float)isum, sa, acc);
        }
    }
    if (a->weight_group) return acc;
    float d;
    memcpy(&d, w + hr_at_channel(l, out), 4);
    return acc * d;
}

void linear_i8(const HrArgs_linear_i8* a, HrTask* task) {
    const HrLayout l = hr_layout_i8(a->num_in, a->group, a->weight_group);
    const int64_t rows = task->dims[a->dim];
    for (int64_t p = hr_next(task); p < hr_num_panels(a->num_out); p = hr_next(task)) {
        for (int64_t n = p * HR_PANEL; n < (p + 1) * HR_PANEL && n < a->num_out; n++) {
            for (int64_t r = 0; r < rows; r++) {
                float y = dot(a, &l, n, r);
                if (a->bias) y += a->bias[n];
                if (a->residual) y += a->residual[r * a->ld_res + n];
                a->out[r * a->ld_out + n] = y;
            }
        }
    }
}

}  // namespace HR_NS
