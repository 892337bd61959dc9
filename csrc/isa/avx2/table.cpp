#include "generic/table.h"

HR_TABLE(avx2, HR_CPU_AVX2)
