/* generic/elementwise.cpp for scalar as it would be with one number too many at the end of each row: what the address
 * sanitizer has to notice, or it looks at nothing. */
#define HR_NS hr_planted
#define HR_ISA_SCALAR 1
#define HR_VEC_H "isa/scalar/vec.h"
#include HR_VEC_H

#include "generic/quantize.h"
#define each_vector(begin, end, ...) each_vector(begin, (end) + 1, __VA_ARGS__)
#include "generic/elementwise.cpp"
