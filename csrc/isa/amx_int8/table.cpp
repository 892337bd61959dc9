#include "generic/table.h"

#ifdef HR_EMULATED
HR_TABLE(amx_emulated, HR_CPU_AVX2 | HR_CPU_AVX512 | HR_CPU_VNNI512)
#else
HR_TABLE(amx_int8, HR_CPU_AVX2 | HR_CPU_AVX512 | HR_CPU_VNNI512 | HR_CPU_AMX_INT8)
#endif
