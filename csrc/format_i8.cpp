/* Packing of int8 weights (isa/linear_layout.h). */
#ifndef HR_NS
#define HR_NS hr_format
#endif
#include "include/kernels.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace {

/* With one scale for each output the group of the activations leaves no trace, so any will do. */
HrLayout layout(int64_t num_in, int64_t weight_group) {
    return hr_layout_i8(num_in, num_in > 8 ? num_in : 8, weight_group);
}

int64_t row_bytes(int64_t num_in, int64_t) { return num_in; }

size_t packed_bytes(int64_t num_out, int64_t num_in, int64_t, int64_t weight_group) {
    return (size_t)(hr_num_panels(num_out) * layout(num_in, weight_group).panel_bytes);
}

void pack(const void* codes, const float* d, const float*, int64_t num_in, int64_t, int64_t weight_group, int64_t first,
          int64_t last, int64_t num_out, void* packed) {
    const HrLayout l = layout(num_in, weight_group);
    if (last > num_out) last = num_out;
    for (int64_t out = first; out < last; out++) {
        const uint8_t* row = (const uint8_t*)codes + (out - first) * num_in;
        if (out % HR_PANEL == 0) memset((uint8_t*)packed + out / HR_PANEL * l.panel_bytes, 0, (size_t)l.panel_bytes);
        if (!weight_group) memcpy((uint8_t*)packed + hr_at_channel(&l, out), d + out - first, 4);
        for (int64_t g = 0; weight_group && g < l.groups; g++) {
            const uint16_t h = HR_NS::narrow_f16(d[(out - first) * l.groups + g]);
            memcpy((uint8_t*)packed + hr_at_d(&l, out, g), &h, 2);
        }
        for (int64_t k = 0; k < num_in; k += 4) {
            uint32_t quad = 0;
            memcpy(&quad, row + k, (size_t)(num_in - k < 4 ? num_in - k : 4));
            quad ^= 0x80808080; /* code + 128 */
            memcpy((uint8_t*)packed + hr_at_code(&l, out, k), &quad, 4);
        }
    }
}

void unpack_row(const void* packed, int64_t, int64_t num_in, int64_t, int64_t weight_group, int64_t row, float* out) {
    const HrLayout l = layout(num_in, weight_group);
    const uint8_t* base = (const uint8_t*)packed;
    float d = 0.0f;
    if (!weight_group) memcpy(&d, base + hr_at_channel(&l, row), 4);
    for (int64_t k = 0; k < num_in; k++) {
        if (weight_group) {
            uint16_t h;
            memcpy(&h, base + hr_at_d(&l, row, k / weight_group), 2);
            d = HR_NS::widen_f16(h);
        }
        out[k] = (float)((int)base[hr_at_code(&l, row, k)] - 128) * d;
    }
}

}  // namespace

extern "C" const HrFormat hr_format_i8 = {"i8/panel32/quad4/f16", HR_PANEL, row_bytes, packed_bytes, pack, unpack_row};
