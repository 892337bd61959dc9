/* How int2, int3, int4, int6, int8 and fp8 weights lie in memory, for the packers and the kernels of every ISA.
 *
 * A panel is 32 outputs in two blocks of 16, one contiguous run of bytes, read once from front to back:
 *     for each group of inputs:  d   [32] f16               one line of 64 bytes (i8, f8 with weight_group 0: absent)
 *                                d   [32] f32               f8 instead
 *                                m   [32] f16               one line (with minima only)
 *                                zero [16] u8               (i2 and i3 with zeros only) of output % 16, the high nibble of block 1
 *                                oct [inputs / 8, rounded up]
 *     at the end:                d   [32] f32               i8, f8 with weight_group 0 only
 * An oct is 8 inputs of 32 outputs. i8: [quad of 4 inputs][block][output][input], code + 128; f8: the code. i4:
 * [block][output][input of the quad], the low nibble from the first quad and the high one from the second.
 * i6: the low four bits as i4, then a line of the high two: byte [output % 16][input of the quad], bits 2 * (2 * quad +
 * block) and above. i2: such a line alone. i3: those lines of two octs, then a line of both octs' high bits, in the same byte
 * bit 4 * (oct % 2) + 2 * quad + block. Inputs and outputs that do not exist hold anything: they meet zeros, or are not written. So a line of
 * 64 bytes is 16 outputs by 4 inputs, or several such lines after a few ands and shifts: what the dot product
 * instructions take. Groups are multiples of 8 inputs (i3: 16).
 *
 * Scales in two levels (k): a group is a block of 256 inputs, with a header of
 *     d     [32] f16                     one line
 *     dm    [32] f16                     one line (types with minima only)
 *     scale [scales of the block][32] i8                       (types without)
 *     or, of every four scales j of the block, three lines (types with minima): scale and minimum are 6 bits, x[j] = [32]
 *     scales, then [32] minima; the lower six bits of the lines are x[0], x[1] and x[2], their upper two x[3]'s lowest,
 *     middle and highest two.
 * and then octs as of i4 or i6. The last level has 16 or 32 inputs. Rows are whole blocks. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "include/kernels.h"
#include "isa/k_blocks.h"

enum { HR_PANEL = 32, HR_LINE = 64 };

/* What the codes of i4 stand for under the forms from HR_FORM_NF4 on; NF4's and FP4's levels to the nearest of 127ths. */
static const int8_t hr_books[4][16] = {
    {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 85, 127, 42, 64, 21, 32, 0, -1, -85, -127, -42, -64, -21, -32}};
static inline const int8_t* hr_book(int64_t form) { return form >= HR_FORM_NF4 ? hr_books[form - HR_FORM_NF4] : 0; }
/* What an entry of the book counts in. */
static inline float hr_unit(int64_t form) { return form == HR_FORM_NF4 || form == HR_FORM_FP4 ? 1.0f / 127 : 1.0f; }
/* What a code of i4 stands for exactly. */
static inline float hr_level(int64_t form, int code) {
    static const float nf4[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                  -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                  0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                                  0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    static const float fp4[8] = {0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f};
    if (form == HR_FORM_NF4) return nf4[code];
    if (form == HR_FORM_FP4) return code < 8 ? fp4[code] : -fp4[code - 8];
    return (float)(form >= HR_FORM_NF4 ? hr_books[form - HR_FORM_NF4][code] : code - (form == HR_FORM_MIDDLE ? 8 : 0));
}

struct HrLayout {
    int64_t num_in, group, groups; /* groups of scales: 1 group of all inputs if there are none */
    int64_t subs;                  /* scales of a group: more than 1 with two levels */
    int64_t group_octs, octs;      /* of a whole group, of a row */
    int64_t header, oct_bytes;     /* bytes before the octs of a group, and of each oct */
    int64_t group_bytes, panel_bytes;
};

static inline HrLayout hr_layout(int64_t num_in, int64_t group, int64_t header, int64_t oct_bytes, int64_t trailer) {
    HrLayout l;
    l.num_in = num_in, l.group = group, l.groups = (num_in + group - 1) / group, l.subs = 1;
    l.group_octs = (group + 7) / 8, l.octs = (num_in + 7) / 8;
    l.header = header, l.oct_bytes = oct_bytes;
    l.group_bytes = header + l.group_octs * oct_bytes;
    l.panel_bytes = l.groups * header + l.octs * oct_bytes + trailer;
    return l;
}
static inline HrLayout hr_layout_i4(int64_t num_in, int64_t group, int64_t form) {
    return hr_layout(num_in, group, form == HR_FORM_MIN ? 2 * HR_LINE : HR_LINE, 2 * HR_LINE, 0);
}
static inline HrLayout hr_layout_i6(int64_t num_in, int64_t group, int64_t form) {
    return hr_layout(num_in, group, form == HR_FORM_MIN ? 2 * HR_LINE : HR_LINE, 3 * HR_LINE, 0);
}
static inline HrLayout hr_layout_i2(int64_t num_in, int64_t group, int64_t form) {
    return hr_layout(num_in, group, form == HR_FORM_ZERO ? HR_LINE + 16 : HR_LINE, HR_LINE, 0);
}
/* Rows are whole pairs of octs. */
static inline HrLayout hr_layout_i3(int64_t num_in, int64_t group, int64_t form) {
    const int64_t header = form == HR_FORM_ZERO ? HR_LINE + 16 : HR_LINE;
    HrLayout l = hr_layout((num_in + 15) / 16 * 16, group, header, 3 * HR_LINE / 2, 0);
    l.num_in = num_in;
    return l;
}
/* `group` is that of the activations; it leaves no trace in the bytes if weight_group is 0. weight_group may have HR_I8_MIN. */
static inline HrLayout hr_layout_i8(int64_t num_in, int64_t group, int64_t weight_group) {
    const int64_t header = weight_group & HR_I8_MIN ? 2 * HR_LINE : HR_LINE;
    return weight_group ? hr_layout(num_in, weight_group & ~(int64_t)HR_I8_MIN, header, 4 * HR_LINE, 0)
                        : hr_layout(num_in, group, 0, 4 * HR_LINE, 2 * HR_LINE);
}
/* As of int8, with scales of 32 bits. */
static inline HrLayout hr_layout_f8(int64_t num_in, int64_t weight_group) {
    return weight_group ? hr_layout(num_in, weight_group, 2 * HR_LINE, 4 * HR_LINE, 0)
                        : hr_layout(num_in, num_in > 8 ? num_in : 8, 0, 4 * HR_LINE, 2 * HR_LINE);
}
static inline HrLayout hr_layout_k(int64_t num_in, int64_t type) {
    const int64_t subs = HR_K_BLOCK / hr_k_sub(type), header = hr_k_has_min(type) ? 128 + subs * 48 : 64 + subs * 32;
    HrLayout l = hr_layout(num_in, HR_K_BLOCK, header, hr_k_bits(type) * HR_LINE / 2, 0);
    l.subs = subs;
    return l;
}
static inline int64_t hr_num_panels(int64_t num_out) { return (num_out + HR_PANEL - 1) / HR_PANEL; }

/* Where output `out` has its d of group g (m is 32 further), and the byte of its input k: bits 0-3 or 4-7 for i4, i6. */
static inline int64_t hr_at_d(const HrLayout* l, int64_t out, int64_t g) {
    return out / HR_PANEL * l->panel_bytes + g * l->group_bytes + out % HR_PANEL * 2;
}
static inline int64_t hr_at_code(const HrLayout* l, int64_t out, int64_t k) {
    int64_t lane = out % HR_PANEL, oct = k % l->group / 8;
    int64_t quad = l->oct_bytes == 4 * HR_LINE ? k / 4 % 2 * 2 * HR_LINE : 0;
    return out / HR_PANEL * l->panel_bytes + k / l->group * l->group_bytes + l->header + oct * l->oct_bytes + quad +
           lane / 16 * HR_LINE + lane % 16 * 4 + k % 4;
}
/* Byte 0 of the two bits of i2 and i3; *high: byte 0 of the bit above them, i3 alone. Bits of both: 2 * (2 * quad + block). */
static inline int64_t hr_at_twos(const HrLayout* l, int64_t out, int64_t k, int64_t* high) {
    const int64_t oct = k % l->group / 8, lane = out % 16 * 4 + k % 4;
    const int64_t group = out / HR_PANEL * l->panel_bytes + k / l->group * l->group_bytes + l->header;
    *high = group + oct / 2 * 3 * HR_LINE + 2 * HR_LINE + lane;
    return group + (l->oct_bytes == HR_LINE ? oct * HR_LINE : oct / 2 * 3 * HR_LINE + oct % 2 * HR_LINE) + lane;
}
static inline int hr_twos_shift(int64_t out, int64_t k) { return (int)(2 * (2 * (k % 8 / 4) + out % HR_PANEL / 16)); }
static inline int hr_high_shift(int64_t out, int64_t k) { return (int)(4 * (k / 8 % 2)) + hr_twos_shift(out, k) / 2; }
/* The code itself, as it is stored. */
static inline int hr_code(const uint8_t* base, const HrLayout* l, int64_t out, int64_t k) {
    if (l->oct_bytes < 2 * HR_LINE) {
        int64_t high;
        const int two = base[hr_at_twos(l, out, k, &high)] >> hr_twos_shift(out, k) & 3;
        return l->oct_bytes == HR_LINE ? two : two | (base[high] >> hr_high_shift(out, k) & 1) << 2;
    }
    const uint8_t* at = base + hr_at_code(l, out, k);
    if (l->oct_bytes == 4 * HR_LINE) return *at;
    const int quad = (int)(k % 8 / 4), low = *at >> 4 * quad & 15, block = (int)(out % HR_PANEL / 16);
    if (l->oct_bytes == 2 * HR_LINE) return low;
    const uint8_t high = at[(2 - block) * HR_LINE];
    return low | (high >> 2 * (2 * quad + block) & 3) << 4;
}
/* Scale and minimum number `sub` of a block, k alone. `header` is the block's. */
static inline void hr_k_scales(const uint8_t* header, int64_t type, int64_t lane, int64_t sub, int* scale, int* least) {
    if (!hr_k_has_min(type)) {
        *scale = (int8_t)header[HR_LINE + sub * HR_PANEL + lane], *least = 0;
        return;
    }
    const uint8_t* at = header + 2 * HR_LINE + sub / 4 * 3 * HR_LINE + lane;
    int* const to[2] = {scale, least};
    for (int i = 0; i < 2; i++, at += HR_PANEL)
        *to[i] = sub % 4 < 3 ? at[sub % 4 * HR_LINE] & 63
                             : at[0] >> 6 | at[HR_LINE] >> 6 << 2 | at[2 * HR_LINE] >> 6 << 4;
}
static inline void hr_k_put_scales(uint8_t* header, int64_t type, int64_t lane, int64_t sub, int scale, int least) {
    if (!hr_k_has_min(type)) {
        header[HR_LINE + sub * HR_PANEL + lane] = (uint8_t)scale;
        return;
    }
    uint8_t* at = header + 2 * HR_LINE + sub / 4 * 3 * HR_LINE + lane;
    const int from[2] = {scale, least};
    for (int i = 0; i < 2; i++, at += HR_PANEL) {
        if (sub % 4 < 3) at[sub % 4 * HR_LINE] |= (uint8_t)from[i];
        else for (int j = 0; j < 3; j++) at[j * HR_LINE] |= (uint8_t)((from[i] >> 2 * j & 3) << 6);
    }
}
static inline int64_t hr_at_channel(const HrLayout* l, int64_t out) {
    return (out / HR_PANEL + 1) * l->panel_bytes - 4 * HR_PANEL + out % HR_PANEL * 4;
}
