#include "generic/ops.h"
#include "isa/avx2/linear_tile.h"

namespace HR_NS {

void linear_i4(const HrArgs_linear_i4* a, HrTask* task) {
    const Linear p = as_linear(a, task, hr_layout_i4(a->num_in, a->group, a->has_min), a->has_min ? 0 : 8);
    if (a->has_min) linear<Avx2, HR_MODE_MIN, true>(p, task);
    else linear<Avx2, HR_MODE_GROUP, true>(p, task);
}

}  // namespace HR_NS
