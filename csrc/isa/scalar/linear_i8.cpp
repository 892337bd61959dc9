#include "isa/scalar/linear_codes.h"

namespace HR_NS {

void linear_i8(const HrArgs_linear_i8* a, HrTask* task) {
    const bool has_min = a->weight_group & HR_I8_MIN;
    linear(a, task, {hr_layout_i8(a->num_in, a->group, a->weight_group), 128, nullptr, a->weight_group != 0, has_min});
}

}  // namespace HR_NS
