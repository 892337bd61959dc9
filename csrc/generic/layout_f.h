/* How linear_f's weights lie: panels of 64 outputs, each [num_in][width] numbers of the stored type, width 64 but for
 * the last panel, which is padded with zeros to a multiple of 16 outputs. So one row of x streams a panel. */
#pragma once
#include "include/kernels.h"

enum { HR_PANEL_F = 64 };

static inline int64_t hr_size_f(int64_t type) { return type == HR_F32 ? 4 : 2; }

static inline int64_t hr_width_f(int64_t panel, int64_t num_out) {
    const int64_t left = num_out - panel * HR_PANEL_F;
    return left >= HR_PANEL_F ? (int64_t)HR_PANEL_F : (left + HR_LANES - 1) / HR_LANES * HR_LANES;
}
