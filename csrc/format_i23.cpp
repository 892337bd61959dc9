/* Packing of int2 and int3 weights (isa/linear_layout.h). */
#ifndef HR_NS
#define HR_NS hr_format
#endif
#include "include/kernels.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace {

template <int bits>
HrLayout layout(int64_t num_in, int64_t group, int64_t form) {
    return bits == 2 ? hr_layout_i2(num_in, group, form) : hr_layout_i3(num_in, group, form);
}

int64_t row_bytes(int64_t num_in, int64_t) { return num_in; }

template <int bits>
size_t packed_bytes(int64_t num_out, int64_t num_in, int64_t group, int64_t form) {
    return (size_t)(hr_num_panels(num_out) * layout<bits>(num_in, group, form).panel_bytes);
}

/* Where output `out` has its zero of group g: the low nibble, or for block 1 the high one. */
int64_t at_zero(const HrLayout& l, int64_t out, int64_t g) {
    return out / HR_PANEL * l.panel_bytes + g * l.group_bytes + HR_LINE + out % 16;
}

template <int bits>
void pack(const void* codes, const float* d, const float* m, int64_t num_in, int64_t group, int64_t form, int64_t first,
          int64_t last, int64_t num_out, void* packed) {
    const HrLayout l = layout<bits>(num_in, group, form);
    uint8_t* base = (uint8_t*)packed;
    if (last > num_out) last = num_out;
    for (int64_t out = first; out < last; out++) {
        const uint8_t* row = (const uint8_t*)codes + (out - first) * num_in;
        if (out % HR_PANEL == 0) memset(base + out / HR_PANEL * l.panel_bytes, 0, (size_t)l.panel_bytes);
        for (int64_t g = 0; g < l.groups; g++) {
            const int64_t at = (out - first) * l.groups + g;
            const uint16_t h = HR_NS::narrow_f16(d[at]);
            memcpy(base + hr_at_d(&l, out, g), &h, 2);
            if (form == HR_FORM_ZERO) base[at_zero(l, out, g)] |= (uint8_t)(((int)m[at] & 15) << out % HR_PANEL / 16 * 4);
        }
        for (int64_t k = 0; k < num_in; k++) {
            int64_t high;
            base[hr_at_twos(&l, out, k, &high)] |= (uint8_t)((row[k] & 3) << hr_twos_shift(out, k));
            if (bits == 3) base[high] |= (uint8_t)((row[k] >> 2 & 1) << hr_high_shift(out, k));
        }
    }
}

template <int bits>
void unpack_row(const void* packed, int64_t, int64_t num_in, int64_t group, int64_t form, int64_t row, float* out) {
    const HrLayout l = layout<bits>(num_in, group, form);
    const uint8_t* base = (const uint8_t*)packed;
    for (int64_t k = 0; k < num_in; k++) {
        uint16_t h;
        memcpy(&h, base + hr_at_d(&l, row, k / group), 2);
        int zero = 1 << (bits - 1);
        if (form == HR_FORM_ZERO) zero = base[at_zero(l, row, k / group)] >> row % HR_PANEL / 16 * 4 & 15;
        out[k] = (float)(hr_code(base, &l, row, k) - zero) * HR_NS::widen_f16(h);
    }
}

}  // namespace

extern "C" const HrFormat hr_format_i2 = {"i2/panel32/oct8/f16", HR_PANEL, row_bytes, packed_bytes<2>, pack<2>, unpack_row<2>};
extern "C" const HrFormat hr_format_i3 = {"i3/panel32/pair16/f16", HR_PANEL, row_bytes, packed_bytes<3>, pack<3>, unpack_row<3>};
