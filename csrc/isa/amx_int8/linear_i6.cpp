#include "generic/ops.h"
#include "isa/amx_int8/linear_tile.h"

HR_BELOW(linear_i6)

namespace HR_NS {

void linear_i6(const HrArgs_linear_i6* a, HrTask* task) {
    if (!linear_of<Amx>(a, task)) hr_avx512_vnni::linear_i6(a, task);
}

}  // namespace HR_NS
