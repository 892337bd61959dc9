#include "generic/table.h"

#ifdef HR_ISA_AVX_VNNI
HR_TABLE(avx_vnni, HR_CPU_AVX2 | HR_CPU_AVX_VNNI)
#else
HR_TABLE(avx2, HR_CPU_AVX2)
#endif
