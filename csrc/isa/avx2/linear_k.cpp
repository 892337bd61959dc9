#include "generic/ops.h"
#include "isa/avx2/linear_tile.h"
#include "isa/linear_forms.h"

namespace HR_NS {

void linear_k(const HrArgs_linear_k* a, HrTask* task) { linear_of<Avx2>(a, task); }

}  // namespace HR_NS
