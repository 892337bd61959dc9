#include "isa/scalar/linear_codes.h"

namespace HR_NS {

void linear_i5(const HrArgs_linear_i5* a, HrTask* task) {
    const bool has_min = a->form == HR_FORM_MIN;
    linear(a, task, {hr_layout_i(5, a->num_in, a->group, a->form), has_min ? 0 : 16, hr_book(a->form), true, has_min});
}

}  // namespace HR_NS
