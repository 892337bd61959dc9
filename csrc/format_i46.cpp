/* Packing of int4 and int6 weights (isa/linear_layout.h). */
#ifndef HR_NS
#define HR_NS hr_format
#endif
#include "include/kernels.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace {

template <int bits>
HrLayout layout(int64_t num_in, int64_t group, int64_t form) {
    return bits == 4 ? hr_layout_i4(num_in, group, form) : hr_layout_i6(num_in, group, form);
}

int64_t row_bytes(int64_t num_in, int64_t) { return num_in; }

template <int bits>
size_t packed_bytes(int64_t num_out, int64_t num_in, int64_t group, int64_t form) {
    return (size_t)(hr_num_panels(num_out) * layout<bits>(num_in, group, form).panel_bytes);
}

template <int bits>
void pack(const void* codes, const float* d, const float* m, int64_t num_in, int64_t group, int64_t form, int64_t first,
          int64_t last, int64_t num_out, void* packed) {
    const HrLayout l = layout<bits>(num_in, group, form);
    const bool has_min = form == HR_FORM_MIN;
    if (last > num_out) last = num_out;
    for (int64_t out = first; out < last; out++) {
        const uint8_t* row = (const uint8_t*)codes + (out - first) * num_in;
        if (out % HR_PANEL == 0) memset((uint8_t*)packed + out / HR_PANEL * l.panel_bytes, 0, (size_t)l.panel_bytes);
        for (int64_t g = 0; g < l.groups; g++) {
            uint8_t* line = (uint8_t*)packed + hr_at_d(&l, out, g);
            const int64_t at = (out - first) * l.groups + g;
            const uint16_t h = HR_NS::narrow_f16(d[at]), hm = has_min ? HR_NS::narrow_f16(m[at]) : 0;
            memcpy(line, &h, 2);
            if (has_min) memcpy(line + HR_LINE, &hm, 2);
        }
        const int64_t block = out % HR_PANEL / 16;
        for (int64_t k = 0; k < num_in; k += 8) {
            uint64_t eight = 0;
            memcpy(&eight, row + k, (size_t)(num_in - k < 8 ? num_in - k : 8));
            const uint32_t quads = (uint32_t)(eight & 0x0f0f0f0f) | (uint32_t)(eight >> 32 & 0x0f0f0f0f) << 4;
            uint8_t* to = (uint8_t*)packed + hr_at_code(&l, out, k);
            memcpy(to, &quads, 4);
            if (bits == 6) {
                uint32_t high;
                memcpy(&high, to + (2 - block) * HR_LINE, 4);
                high |= ((uint32_t)(eight >> 4 & 0x03030303) | (uint32_t)(eight >> 36 & 0x03030303) << 4) << 2 * block;
                memcpy(to + (2 - block) * HR_LINE, &high, 4);
            }
        }
    }
}

template <int bits>
void unpack_row(const void* packed, int64_t, int64_t num_in, int64_t group, int64_t form, int64_t row, float* out) {
    const HrLayout l = layout<bits>(num_in, group, form);
    const uint8_t* base = (const uint8_t*)packed;
    const bool narrow = form >= HR_BESIDE_INT8;
    if (narrow) form -= HR_BESIDE_INT8;
    for (int64_t k = 0; k < num_in; k++) {
        uint16_t h[2] = {0, 0};
        memcpy(h, base + hr_at_d(&l, row, k / group), 2);
        if (form == HR_FORM_MIN) memcpy(h + 1, base + hr_at_d(&l, row, k / group) + HR_LINE, 2);
        const int code = hr_code(base, &l, row, k);
        const float d = HR_NS::widen_f16(h[0]);
        if (form == HR_FORM_MIN) {
            const float product = (float)code * d;
            out[k] = product + HR_NS::widen_f16(h[1]);
        } else {
            const float level = bits == 4 ? hr_level(form, code) : (float)(code - 32);
            out[k] = (narrow ? (float)hr_book(form)[code] * hr_unit(form) : level) * d;
        }
    }
}

}  // namespace

extern "C" const HrFormat hr_format_i4 = {"i4/panel32/oct8/f16", HR_PANEL, row_bytes, packed_bytes<4>, pack<4>, unpack_row<4>};
extern "C" const HrFormat hr_format_i6 = {"i6/panel32/oct8/f16", HR_PANEL, row_bytes, packed_bytes<6>, pack<6>, unpack_row<6>};
