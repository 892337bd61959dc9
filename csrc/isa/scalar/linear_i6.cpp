#include "isa/scalar/linear_codes.h"

namespace HR_NS {

void linear_i6(const HrArgs_linear_i6* a, HrTask* task) {
    const bool has_min = a->form == HR_FORM_MIN;
    linear(a, task, {hr_layout_i(6, a->num_in, a->group, a->form), has_min ? 0 : 32, hr_book(a->form), true, has_min});
}

}  // namespace HR_NS
