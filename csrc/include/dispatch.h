/* Which tables this machine can run, and which of them serves an operator. */
#ifndef HEADRACE_DISPATCH_H
#define HEADRACE_DISPATCH_H

#include <stdint.h>

#include <string>
#include <vector>

#include "include/kernels.h"

namespace hr {

/* What the processor and the operating system say, as it was read. Zeros where there is no such leaf, or another processor. */
struct CpuWords {
    uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax;
    uint64_t xcr0;
    uint64_t hwcap, hwcap2; /* of AArch64 */
};

/* HR_CPU_* bits: a feature counts only if the system also saves the registers that it needs. */
uint64_t decide(const CpuWords& words);
CpuWords read_cpu();
uint64_t features(); /* of this machine */
/* Asks the system for the tile registers of this process and tries them in a child process. */
bool amx_runs();

/* Tables that this machine can run, in rising order. */
const std::vector<const HrKernelTable*>& tables();

/* The table of tables: each operator with the highest ISA that has it, up to a ceiling. */
struct Kernels {
    HrOpFn op[HR_NUM_OPS];
    const char* isa[HR_NUM_OPS]; /* "" where no ISA serves */
};

/* `isa` is the ceiling; "" is the one of `set_isa`, or the best. Throws std::invalid_argument for an ISA that this
 * build or this machine has not. */
Kernels choose(const std::string& isa);
void set_isa(const std::string& isa);

}  // namespace hr
#endif
