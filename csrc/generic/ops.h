/* The operators of one ISA: every generic source is compiled once for each, in a namespace of its own (HR_NS). */
#pragma once
#include "include/kernels.h"

namespace HR_NS {
#define HR_DECLARE(op) void op(const HrArgs_##op* args, HrTask* task);
HR_OPS(HR_DECLARE)
#undef HR_DECLARE
}  // namespace HR_NS
