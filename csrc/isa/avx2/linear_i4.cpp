#include "generic/ops.h"
#include "isa/avx2/linear_tile.h"

namespace HR_NS {

void linear_i4(const HrArgs_linear_i4* a, HrTask* task) {
    const HrLayout l = hr_layout_i(4, a->num_in, a->group, a->form);
    if (a->form == HR_FORM_MIN) linear<Avx2, HR_MODE_MIN, HR_CODES_4>(as_linear(a, task, l, 0, nullptr), task);
    else if (a->form == HR_FORM_MIDDLE) linear<Avx2, HR_MODE_GROUP, HR_CODES_4>(as_linear(a, task, l, 8, nullptr), task);
    else linear<Avx2, HR_MODE_GROUP, HR_CODES_BOOK>(as_linear(a, task, l, 128, hr_book(a->form), hr_unit(a->form)), task);
}

}  // namespace HR_NS
