/* Packing of K-quants (isa/linear_layout.h) out of the blocks of a GGUF file (isa/k_blocks.h). */
#ifndef HR_NS
#define HR_NS hr_format
#endif
#include "include/kernels.h"
#include "isa/linear_layout.h"
#include "isa/scalar/vec.h"

namespace {

int64_t row_bytes(int64_t num_in, int64_t type) { return num_in / HR_K_BLOCK * hr_k_bytes(type); }

size_t packed_bytes(int64_t num_out, int64_t num_in, int64_t, int64_t type) {
    return (size_t)(hr_num_panels(num_out) * hr_layout_k(num_in, type).panel_bytes);
}

void pack(const void* codes, const float*, const float*, int64_t num_in, int64_t, int64_t type, int64_t first,
          int64_t last, int64_t num_out, void* packed) {
    const HrLayout l = hr_layout_k(num_in, type);
    if (last > num_out) last = num_out;
    for (int64_t out = first; out < last; out++) {
        const uint8_t* raw = (const uint8_t*)codes + (out - first) * row_bytes(num_in, type);
        if (out % HR_PANEL == 0) memset((uint8_t*)packed + out / HR_PANEL * l.panel_bytes, 0, (size_t)l.panel_bytes);
        const int64_t lane = out % HR_PANEL;
        for (int64_t g = 0; g < l.groups; g++, raw += hr_k_bytes(type)) {
            HrKBlock b;
            hr_k_read(type, raw, &b);
            uint8_t* header = (uint8_t*)packed + out / HR_PANEL * l.panel_bytes + g * l.group_bytes;
            memcpy(header + 2 * lane, &b.d, 2);
            if (hr_k_has_min(type)) memcpy(header + HR_LINE + 2 * lane, &b.dm, 2);
            for (int64_t sub = 0; sub < l.subs; sub++) hr_k_put_scales(header, type, lane, sub, b.scale[sub], b.least[sub]);
            for (int64_t k = 0; k < HR_K_BLOCK; k += 8) {
                uint64_t eight;
                memcpy(&eight, b.code + k, 8);
                hr_put_oct(header + l.header, hr_k_bits(type), out, k, eight);
            }
        }
    }
}

void unpack_row(const void* packed, int64_t, int64_t num_in, int64_t, int64_t type, int64_t row, float* out) {
    const HrLayout l = hr_layout_k(num_in, type);
    const uint8_t* base = (const uint8_t*)packed;
    for (int64_t k = 0; k < num_in; k++) {
        const uint8_t* header = base + row / HR_PANEL * l.panel_bytes + k / HR_K_BLOCK * l.group_bytes;
        uint16_t d, dm;
        int scale, least;
        memcpy(&d, header + row % HR_PANEL * 2, 2), memcpy(&dm, header + HR_LINE + row % HR_PANEL * 2, 2);
        hr_k_scales(header, type, row % HR_PANEL, k % HR_K_BLOCK / hr_k_sub(type), &scale, &least);
        const float step = HR_NS::widen_f16(d) * (float)scale;
        const float product = (float)(hr_code(base, &l, row, k) - hr_k_middle(type)) * step;
        out[k] = hr_k_has_min(type) ? product + HR_NS::widen_f16(dm) * (float)least : product;
    }
}

}  // namespace

extern "C" const HrFormat hr_format_k = {"k/panel32/own-bits/f16", HR_PANEL, row_bytes, packed_bytes, pack, unpack_row};
