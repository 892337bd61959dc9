#include "generic/ops.h"
#include "isa/amx_int8/linear_tile.h"

HR_BELOW(linear_i5)

namespace HR_NS {

void linear_i5(const HrArgs_linear_i5* a, HrTask* task) {
    if (!linear_of<Amx>(a, task)) hr_avx512_vnni::linear_i5(a, task);
}

}  // namespace HR_NS
