/* linear_w, one weight after the other: the oracle of the other ISAs. */
#include "generic/ops.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace HR_NS {

void linear_w(const HrArgs_linear_w* a, HrTask* task) {
    static const HrFormat* const formats[] = {&hr_format_i4, &hr_format_i6, &hr_format_i8, &hr_format_k, &hr_format_f8,
                                              &hr_format_i3, &hr_format_i2, &hr_format_i5};
    float* const w = (float*)task->scratch;
    for (int64_t n = hr_next(task); n < a->num_out; n = hr_next(task)) {
        formats[a->kind]->unpack_row(a->weights, a->num_out, a->num_in, a->group, a->form, n, w);
        for (int64_t r = 0; r < task->dims[a->dim]; r++) {
            float y = 0.0f;
            for (int64_t k = 0; k < a->num_in; k++) y = fmaf(a->x[r * a->ld_x + k], w[k], y);
            if (a->bias) y += a->bias[n];
            if (a->residual) y += a->residual[r * a->ld_res + n];
            a->out[r * a->ld_out + n] = y;
        }
    }
}

}  // namespace HR_NS
