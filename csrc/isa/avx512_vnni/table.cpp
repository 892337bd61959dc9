#include "generic/table.h"

HR_TABLE(avx512_vnni, HR_CPU_AVX2 | HR_CPU_AVX512 | HR_CPU_VNNI512)
