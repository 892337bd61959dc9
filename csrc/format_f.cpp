/* The packed form of float weights (linear_f): see generic/layout_f.h. */
#include <string.h>

#include "generic/layout_f.h"

#ifndef HR_NS
#define HR_NS hr_format
#endif
#include "isa/scalar/vec.h"

static int64_t row_bytes(int64_t num_in, int64_t type) { return num_in * hr_size_f(type); }

static size_t packed_bytes(int64_t num_out, int64_t num_in, int64_t, int64_t type) {
    return (size_t)((num_out + HR_LANES - 1) / HR_LANES * HR_LANES * num_in * hr_size_f(type));
}

template <class T>
static void pack_as(const T* from, int64_t num_in, int64_t first, int64_t last, int64_t num_out, T* packed) {
    for (int64_t panel = first / HR_PANEL_F; panel * HR_PANEL_F < last; panel++) {
        const int64_t begin = panel * HR_PANEL_F, width = hr_width_f(panel, num_out);
        T* to = packed + begin * num_in;
        /* Sixteen inputs at a time, so that the lines written stay in the first cache until they are full. */
        for (int64_t k = 0; k < num_in; k += 16)
            for (int64_t i = 0; i < width; i++)
                for (int64_t j = k; j < num_in && j < k + 16; j++)
                    to[j * width + i] = begin + i < num_out ? from[(begin + i - first) * num_in + j] : T(0);
    }
}

static void pack(const void* codes, const float*, const float*, int64_t num_in, int64_t, int64_t type, int64_t first,
                 int64_t last, int64_t num_out, void* packed) {
    if (type == HR_F32) return pack_as((const uint32_t*)codes, num_in, first, last, num_out, (uint32_t*)packed);
    pack_as((const uint16_t*)codes, num_in, first, last, num_out, (uint16_t*)packed);
}

static void unpack_row(const void* packed, int64_t num_out, int64_t num_in, int64_t, int64_t type, int64_t row,
                       float* out) {
    const int64_t panel = row / HR_PANEL_F, width = hr_width_f(panel, num_out);
    const int64_t at = panel * HR_PANEL_F * num_in + row % HR_PANEL_F;
    for (int64_t k = 0; k < num_in; k++) {
        const int64_t i = at + k * width;
        if (type == HR_F32) out[k] = ((const float*)packed)[i];
        else if (type == HR_F16) out[k] = HR_NS::widen_f16(((const uint16_t*)packed)[i]);
        else out[k] = HR_NS::widen_bf16(((const uint16_t*)packed)[i]);
    }
}

extern "C" const HrFormat hr_format_f = {"f-panel64", HR_PANEL_F, row_bytes, packed_bytes, pack, unpack_row};
