#include "generic/table.h"

#ifdef HR_ISA_NEON_I8MM
HR_TABLE(neon_i8mm, HR_CPU_DOTPROD | HR_CPU_I8MM)
#else
HR_TABLE(neon_dot, HR_CPU_DOTPROD)
#endif
