#include "generic/ops.h"
#include "isa/neon_dot/linear_tile.h"
#include "isa/linear_forms.h"

namespace HR_NS {

void linear_i6(const HrArgs_linear_i6* a, HrTask* task) { linear_of<Neon>(a, task); }

}  // namespace HR_NS
