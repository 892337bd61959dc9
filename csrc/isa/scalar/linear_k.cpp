#include "isa/scalar/linear_codes.h"

namespace HR_NS {

void linear_k(const HrArgs_linear_k* a, HrTask* task) {
    const HrLayout l = hr_layout_k(a->num_in, a->form);
    each_output(a, task, [&](int64_t out, int64_t row) { return dot_k(a, &l, out, row); });
}

}  // namespace HR_NS
