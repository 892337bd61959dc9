/* Rows of floats to codes, for what no fused operator has quantised. */
#include HR_VEC_H
#include "generic/ops.h"
#include "generic/quantize.h"

namespace HR_NS {

void quantize(const HrArgs_quantize* a, HrTask* task) {
    const Quant to = quant_of(a);
    share(task, task->dims[a->dim], a->width, a->group, 2, [&](int64_t row, int64_t begin, int64_t end) {
        const float* x = a->x + row * a->ld_x;
        emit(to, row, begin, end, a->width, nullptr, (float*)task->scratch,
             [&](int64_t i, int64_t n) { return load_some(x + i, n); });
    });
}

}  // namespace HR_NS
