#include "generic/ops.h"
#include "isa/avx512_vnni/linear_tile.h"

namespace HR_NS {

void linear_i6(const HrArgs_linear_i6* a, HrTask* task) {
    const HrLayout l = hr_layout_i(6, a->num_in, a->group, a->form);
    if (a->form == HR_FORM_MIN) linear<Avx512, HR_MODE_MIN, HR_CODES_6>(as_linear(a, task, l, 0, nullptr), task);
    else linear<Avx512, HR_MODE_GROUP, HR_CODES_6>(as_linear(a, task, l, 32, nullptr), task);
}

}  // namespace HR_NS
