/* How int2, int3, int4, int5, int6, int8 and fp8 weights lie in memory, for the packers and the kernels of every ISA.
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
 * block) and above. i2: such a line alone. i3 and i5: the lines of i2 or i4 of two octs, then a line of both octs' high
 * bits, in the same byte bit 4 * (oct % 2) + 2 * quad + block. Inputs and outputs that do not exist hold anything: they meet
 * zeros, or are not written. So a line of 64 bytes is 16 outputs by 4 inputs, or several such lines after a few ands and
 * shifts: what the dot product instructions take. Groups are multiples of 8 inputs (i3, i5: 16).
 *
 * Scales in two levels (k): a group is a block of 256 inputs, with a header of
 *     d     [32] f16                     one line
 *     dm    [32] f16                     one line (types with minima only)
 *     scale [scales of the block][32] i8                       (types without)
 *     scale [scales of the block][32] u8                       (Q2_K) the minimum in the upper four bits
 *     or, of every four scales j of the block, three lines (Q4_K and Q5_K): scale and minimum are 6 bits, x[j] = [32]
 *     scales, then [32] minima; the lower six bits of the lines are x[0], x[1] and x[2], their upper two x[3]'s lowest,
 *     middle and highest two.
 * and then octs as of i2 to i6. The last level has 16 or 32 inputs. Rows are whole blocks. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
/* Of codes of `bits` bits: those below a code's lowest plane, how many lines of an oct that plane takes, and the octs that
 * lie together. */
constexpr int hr_low_bits(int bits) { return bits == 8 ? 8 : bits < 4 ? 2 : 4; }
constexpr int64_t hr_low_lines(int bits) { return hr_low_bits(bits) / 2; }
constexpr int64_t hr_step_octs(int bits) { return bits == 3 || bits == 5 ? 2 : 1; }
/* Codes of 2 to 6 bits. */
static inline HrLayout hr_layout_i(int bits, int64_t num_in, int64_t group, int64_t form) {
    const int64_t step = 8 * hr_step_octs(bits); /* rows are whole steps */
    const int64_t header = form == HR_FORM_MIN ? 2 * HR_LINE : form == HR_FORM_ZERO ? HR_LINE + 16 : HR_LINE;
    HrLayout l = hr_layout((num_in + step - 1) / step * step, group, header, bits * HR_LINE / 2, 0);
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
    const int64_t subs = HR_K_BLOCK / hr_k_sub(type);
    const int64_t header = type == HR_K_Q2 ? 128 + subs * 32 : hr_k_has_min(type) ? 128 + subs * 48 : 64 + subs * 32;
    HrLayout l = hr_layout(num_in, HR_K_BLOCK, header, hr_k_bits(type) * HR_LINE / 2, 0);
    l.subs = subs;
    return l;
}
static inline int64_t hr_num_panels(int64_t num_out) { return (num_out + HR_PANEL - 1) / HR_PANEL; }

/* Where output `out` has its d of group g (m is 32 further), and where its panel has the octs of that group. */
static inline int64_t hr_at_d(const HrLayout* l, int64_t out, int64_t g) {
    return out / HR_PANEL * l->panel_bytes + g * l->group_bytes + out % HR_PANEL * 2;
}
static inline int64_t hr_at_octs(const HrLayout* l, int64_t out, int64_t g) {
    return out / HR_PANEL * l->panel_bytes + g * l->group_bytes + l->header;
}
/* Where the code of input k of a group is, behind the group's first oct: the bytes of its lower bits and of those above. */
struct HrPlace {
    int64_t low, high;
    int low_shift, high_shift;
};
static inline HrPlace hr_place(int bits, int64_t out, int64_t k) {
    const int64_t lines = hr_low_lines(bits), oct = k / 8;
    const int quad = (int)(k % 8 / 4), block = (int)(out % HR_PANEL / 16), at = 2 * quad + block;
    const int half = hr_step_octs(bits) == 2 ? (int)(oct % 2) : 0;
    const int64_t first = (oct - half) * bits * HR_LINE / 2 + out % 16 * 4 + k % 4;
    HrPlace p;
    p.low = first + (half * lines + (lines == 4 ? at : lines == 2 ? block : 0)) * HR_LINE;
    p.low_shift = lines == 4 ? 0 : lines == 2 ? 4 * quad : 2 * at;
    p.high = first + hr_step_octs(bits) * lines * HR_LINE;
    p.high_shift = bits == 6 ? 2 * at : 4 * half + at;
    return p;
}
static inline int hr_bits(const HrLayout* l) { return (int)(2 * l->oct_bytes / HR_LINE); }
/* The code itself, as it is stored. */
static inline int hr_code(const uint8_t* base, const HrLayout* l, int64_t out, int64_t k) {
    const int bits = hr_bits(l), low = hr_low_bits(bits);
    const uint8_t* octs = base + hr_at_octs(l, out, k / l->group);
    const HrPlace p = hr_place(bits, out, k % l->group);
    const int code = octs[p.low] >> p.low_shift & ((1 << low) - 1);
    return bits == low ? code : code | (octs[p.high] >> p.high_shift & ((1 << (bits - low)) - 1)) << low;
}
/* Codes of 2 to 6 bits of inputs k ... k + 7 of a group to where nothing but zeros is yet. */
static inline void hr_put_oct(uint8_t* octs, int bits, int64_t out, int64_t k, uint64_t eight) {
    const HrPlace p = hr_place(bits, out, k);
    const int low = hr_low_bits(bits), rest = bits - low;
    const uint32_t first = (uint32_t)eight, second = (uint32_t)(eight >> 32);
    uint32_t x, mask = 0x01010101u * ((1u << low) - 1);
    memcpy(&x, octs + p.low, 4);
    x |= (first & mask) << p.low_shift | (second & mask) << (p.low_shift + 4);
    memcpy(octs + p.low, &x, 4);
    if (!rest) return;
    mask = 0x01010101u * ((1u << rest) - 1);
    memcpy(&x, octs + p.high, 4);
    x |= (first >> low & mask) << p.high_shift | (second >> low & mask) << (p.high_shift + 2 * rest);
    memcpy(octs + p.high, &x, 4);
}
/* Scale and minimum number `sub` of a block, k alone. `header` is the block's. */
static inline void hr_k_scales(const uint8_t* header, int64_t type, int64_t lane, int64_t sub, int* scale, int* least) {
    if (!hr_k_has_min(type)) {
        *scale = (int8_t)header[HR_LINE + sub * HR_PANEL + lane], *least = 0;
        return;
    }
    const uint8_t* at = header + 2 * HR_LINE + (type == HR_K_Q2 ? sub * HR_PANEL : sub / 4 * 3 * HR_LINE) + lane;
    if (type == HR_K_Q2) {
        *scale = *at & 15, *least = *at >> 4;
        return;
    }
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
    uint8_t* at = header + 2 * HR_LINE + (type == HR_K_Q2 ? sub * HR_PANEL : sub / 4 * 3 * HR_LINE) + lane;
    if (type == HR_K_Q2) {
        *at = (uint8_t)(scale | least << 4);
        return;
    }
    const int from[2] = {scale, least};
    for (int i = 0; i < 2; i++, at += HR_PANEL) {
        if (sub % 4 < 3) at[sub % 4 * HR_LINE] |= (uint8_t)from[i];
        else for (int j = 0; j < 3; j++) at[j * HR_LINE] |= (uint8_t)((from[i] >> 2 * j & 3) << 6);
    }
}
static inline int64_t hr_at_channel(const HrLayout* l, int64_t out) {
    return (out / HR_PANEL + 1) * l->panel_bytes - 4 * HR_PANEL + out % HR_PANEL * 4;
}
