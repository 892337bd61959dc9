/* Packing of int8 and fp8 (E4M3) weights (isa/linear_layout.h). */
#ifndef HR_NS
#define HR_NS hr_format
#endif
#include "include/kernels.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace {

/* With one scale for each output the group of the activations leaves no trace, so any will do. */
template <bool floats>
HrLayout layout(int64_t num_in, int64_t weight_group) {
    return floats ? hr_layout_f8(num_in, weight_group) : hr_layout_i8(num_in, num_in > 8 ? num_in : 8, weight_group);
}

int64_t row_bytes(int64_t num_in, int64_t) { return num_in; }

template <bool floats>
bool with_min(int64_t weight_group) { return !floats && weight_group & HR_I8_MIN; }

/* Where output `out` has its scale of group g. */
template <bool floats>
int64_t at_scale(const HrLayout& l, int64_t weight_group, int64_t out, int64_t g) {
    if (!weight_group) return hr_at_channel(&l, out);
    return hr_at_d(&l, out, g) + (floats ? out % HR_PANEL * 2 : 0);
}

template <bool floats>
size_t packed_bytes(int64_t num_out, int64_t num_in, int64_t, int64_t weight_group) {
    return (size_t)(hr_num_panels(num_out) * layout<floats>(num_in, weight_group).panel_bytes);
}

template <bool floats>
void pack(const void* codes, const float* d, const float* m, int64_t num_in, int64_t, int64_t weight_group, int64_t first,
          int64_t last, int64_t num_out, void* packed) {
    const HrLayout l = layout<floats>(num_in, weight_group);
    if (last > num_out) last = num_out;
    for (int64_t out = first; out < last; out++) {
        const uint8_t* row = (const uint8_t*)codes + (out - first) * num_in;
        if (out % HR_PANEL == 0) memset((uint8_t*)packed + out / HR_PANEL * l.panel_bytes, 0, (size_t)l.panel_bytes);
        for (int64_t g = 0; g < l.groups; g++) {
            const float scale = d[(out - first) * l.groups + g];
            const uint16_t h = HR_NS::narrow_f16(scale);
            uint8_t* to = (uint8_t*)packed + at_scale<floats>(l, weight_group, out, g);
            floats || !weight_group ? memcpy(to, &scale, 4) : memcpy(to, &h, 2);
            if (with_min<floats>(weight_group)) {
                const uint16_t least = HR_NS::narrow_f16(m[(out - first) * l.groups + g]);
                memcpy(to + HR_LINE, &least, 2);
            }
        }
        for (int64_t k = 0; k < num_in; k += 4) {
            uint32_t quad = 0;
            memcpy(&quad, row + k, (size_t)(num_in - k < 4 ? num_in - k : 4));
            if (!floats) quad ^= 0x80808080; /* code + 128 */
            memcpy((uint8_t*)packed + hr_at_octs(&l, out, k / l.group) + hr_place(8, out, k % l.group).low, &quad, 4);
        }
    }
}

template <bool floats>
void unpack_row(const void* packed, int64_t, int64_t num_in, int64_t, int64_t weight_group, int64_t row, float* out) {
    const HrLayout l = layout<floats>(num_in, weight_group);
    const uint8_t* base = (const uint8_t*)packed;
    for (int64_t k = 0; k < num_in; k++) {
        const uint8_t* at = base + at_scale<floats>(l, weight_group, row, k / l.group);
        const uint8_t code = (uint8_t)hr_code(base, &l, row, k);
        float d;
        uint16_t h;
        memcpy(&d, at, 4), memcpy(&h, at, 2);
        if (floats) {
            out[k] = HR_NS::widen_e4m3(code) * 256.0f * d;
            continue;
        }
        const float product = (float)((int)code - 128) * (weight_group ? HR_NS::widen_f16(h) : d);
        uint16_t least = 0;
        if (with_min<floats>(weight_group)) memcpy(&least, at + HR_LINE, 2);
        out[k] = with_min<floats>(weight_group) ? product + HR_NS::widen_f16(least) : product;
    }
}

}  // namespace

extern "C" const HrFormat hr_format_i8 = {"i8/panel32/quad4/f16", HR_PANEL, row_bytes, packed_bytes<false>, pack<false>,
                                          unpack_row<false>};
extern "C" const HrFormat hr_format_f8 = {"f8/panel32/quad4/f32", HR_PANEL, row_bytes, packed_bytes<true>, pack<true>,
                                          unpack_row<true>};
