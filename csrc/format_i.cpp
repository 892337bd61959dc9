/* Packing of codes of 2 to 6 bits (isa/linear_layout.h). */
#ifndef HR_NS
#define HR_NS hr_format
#endif
#include "include/kernels.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace {

int64_t row_bytes(int64_t num_in, int64_t) { return num_in; }

template <int bits>
size_t packed_bytes(int64_t num_out, int64_t num_in, int64_t group, int64_t form) {
    return (size_t)(hr_num_panels(num_out) * hr_layout_i(bits, num_in, group, form).panel_bytes);
}

/* Where output `out` has its zero of group g: the low nibble, or for block 1 the high one. */
int64_t at_zero(const HrLayout& l, int64_t out, int64_t g) {
    return out / HR_PANEL * l.panel_bytes + g * l.group_bytes + HR_LINE + out % 16;
}

template <int bits>
void pack(const void* codes, const float* d, const float* m, int64_t num_in, int64_t group, int64_t form, int64_t first,
          int64_t last, int64_t num_out, void* packed) {
    const HrLayout l = hr_layout_i(bits, num_in, group, form);
    uint8_t* base = (uint8_t*)packed;
    if (last > num_out) last = num_out;
    for (int64_t out = first; out < last; out++) {
        const uint8_t* row = (const uint8_t*)codes + (out - first) * num_in;
        if (out % HR_PANEL == 0) memset(base + out / HR_PANEL * l.panel_bytes, 0, (size_t)l.panel_bytes);
        for (int64_t g = 0; g < l.groups; g++) {
            const int64_t at = (out - first) * l.groups + g;
            const uint16_t h = HR_NS::narrow_f16(d[at]), least = form == HR_FORM_MIN ? HR_NS::narrow_f16(m[at]) : 0;
            memcpy(base + hr_at_d(&l, out, g), &h, 2);
            if (form == HR_FORM_MIN) memcpy(base + hr_at_d(&l, out, g) + HR_LINE, &least, 2);
            if (form == HR_FORM_ZERO) base[at_zero(l, out, g)] |= (uint8_t)(((int)m[at] & 15) << out % HR_PANEL / 16 * 4);
        }
        for (int64_t k = 0; k < num_in; k += 8) {
            uint64_t eight = 0;
            memcpy(&eight, row + k, (size_t)(num_in - k < 8 ? num_in - k : 8));
            hr_put_oct(base + hr_at_octs(&l, out, k / group), bits, out, k % group, eight);
        }
    }
}

template <int bits>
void unpack_row(const void* packed, int64_t, int64_t num_in, int64_t group, int64_t form, int64_t row, float* out) {
    const HrLayout l = hr_layout_i(bits, num_in, group, form);
    const uint8_t* base = (const uint8_t*)packed;
    const bool narrow = form >= HR_BESIDE_INT8;
    if (narrow) form -= HR_BESIDE_INT8;
    for (int64_t k = 0; k < num_in; k++) {
        uint16_t h[2] = {0, 0};
        memcpy(h, base + hr_at_d(&l, row, k / group), 2);
        const int code = hr_code(base, &l, row, k);
        const float d = HR_NS::widen_f16(h[0]);
        if (form == HR_FORM_MIN) {
            memcpy(h + 1, base + hr_at_d(&l, row, k / group) + HR_LINE, 2);
            const float product = (float)code * d;
            out[k] = product + HR_NS::widen_f16(h[1]);
        } else if (form == HR_FORM_MIDDLE || form == HR_FORM_ZERO) {
            int zero = 1 << (bits - 1);
            if (form == HR_FORM_ZERO) zero = base[at_zero(l, row, k / group)] >> row % HR_PANEL / 16 * 4 & 15;
            out[k] = (float)(code - zero) * d;
        } else {
            out[k] = (narrow ? (float)hr_book(form)[code] * hr_unit(form) : hr_level(form, code)) * d;
        }
    }
}

}  // namespace

#define HR_FORMAT(bits, layout)                                                                                    \
    extern "C" const HrFormat hr_format_i##bits = {layout,     HR_PANEL,   row_bytes, packed_bytes<bits>, \
                                                   pack<bits>, unpack_row<bits>};
HR_FORMAT(2, "i2/panel32/oct8/f16")
HR_FORMAT(3, "i3/panel32/pair16/f16")
HR_FORMAT(4, "i4/panel32/oct8/f16")
HR_FORMAT(5, "i5/panel32/pair16/f16")
HR_FORMAT(6, "i6/panel32/oct8/f16")
