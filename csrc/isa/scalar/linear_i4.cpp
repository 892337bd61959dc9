/* linear_i4, one product after the other: the oracle of the other ISAs. */
#include "generic/ops.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace HR_NS {

static float dot(const HrArgs_linear_i4* a, const HrLayout* l, int64_t out, int64_t row) {
    const uint8_t* w = (const uint8_t*)a->weights;
    const int8_t* q = a->q + row * a->ld_q;
    float acc = 0.0f;
    for (int64_t g = 0; g < l->groups; g++) {
        const int64_t first = g * l->group, last = first + l->group < l->num_in ? first + l->group : l->num_in;
        const float sa = a->scales[row * a->ld_s + g];
        const int offset = a->has_min ? 0 : 8;
        int32_t isum = 0;
        for (int64_t k = first; k < last; k++) {
            const int code = w[hr_at_code(l, out, k)] >> (k % 8 < 4 ? 0 : 4) & 15;
            isum += q[k] * (code - offset);
        }
        uint16_t h[2] = {0, 0};
        memcpy(h, w + hr_at_d(l, out, g), 2);
        acc = fmaf((float)isum * sa, widen_f16(h[0]), acc);
        if (a->has_min) {
            memcpy(h + 1, w + hr_at_d(l, out, g) + HR_LINE, 2);
            acc = fmaf((float)a->sums[row * a->ld_s + g] * sa, widen_f16(h[1]), acc);
        }
    }
    return acc;
}

void linear_i4(const HrArgs_linear_i4* a, HrTask* task) {
    const HrLayout l = hr_layout_i4(a->num_in, a->group, a->has_min);
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
