/* The one exported symbol of an ISA: the table of the operators that its units define. */
#pragma once
#include "generic/ops.h"

/* Weak references: an operator that no unit of the ISA defines is NULL in the table, so a folder may begin with one. */
namespace HR_NS {
#define HR_WEAK(op) __attribute__((weak)) void op(const HrArgs_##op* args, HrTask* task);
HR_OPS(HR_WEAK)
#undef HR_WEAK
}  // namespace HR_NS

#define HR_ENTRY(op) (HrOpFn)HR_NS::op,
#define HR_TABLE(isa, needs)                                                                \
    extern "C" const HrKernelTable* hr_kernels_##isa(void) {                                \
        static const HrKernelTable table = {#isa, needs, {HR_OPS(HR_ENTRY)}};               \
        return &table;                                                                      \
    }
