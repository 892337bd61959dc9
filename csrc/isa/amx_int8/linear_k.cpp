#include "generic/ops.h"
#include "isa/amx_int8/linear_tile.h"

HR_BELOW(linear_k)

namespace HR_NS {

void linear_k(const HrArgs_linear_k* a, HrTask* task) {
    if (!linear_of<Amx>(a, task)) hr_avx512_vnni::linear_k(a, task);
}

}  // namespace HR_NS
