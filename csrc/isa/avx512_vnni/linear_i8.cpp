#include "generic/ops.h"
#include "isa/avx512_vnni/linear_tile.h"

namespace HR_NS {

void linear_i8(const HrArgs_linear_i8* a, HrTask* task) {
    const Linear p = as_linear(a, task, hr_layout_i8(a->num_in, a->group, a->weight_group), 128, nullptr);
    if (a->weight_group & HR_I8_MIN) linear<Avx512, HR_MODE_MIN, HR_CODES_8>(p, task);
    else if (a->weight_group) linear<Avx512, HR_MODE_GROUP, HR_CODES_8>(p, task);
    else linear<Avx512, HR_MODE_CHANNEL, HR_CODES_8>(p, task);
}

}  // namespace HR_NS
