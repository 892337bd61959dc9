/* Which mode and codes each form of a linear layer has (include/kernels.h). `Tiles::linear<mode, codes>` computes it, or returns
 * false. Include after the tiles. */
#pragma once
#include "isa/linear_drive.h"

namespace HR_NS {

template <class Tiles>
HR_INLINE bool linear_of(const HrArgs_linear_i4* a, HrTask* task) {
    const HrLayout l = hr_layout_i(4, a->num_in, a->group, a->form);
    if (a->form == HR_FORM_MIN) return Tiles::template linear<HR_MODE_MIN, HR_CODES_4>(as_linear(a, task, l, 0, nullptr), task);
    if (a->form == HR_FORM_MIDDLE) return Tiles::template linear<HR_MODE_GROUP, HR_CODES_4>(as_linear(a, task, l, 8, nullptr), task);
    const Linear p = as_linear(a, task, l, 128, hr_book(a->form), hr_unit(a->form));
    return Tiles::template linear<HR_MODE_GROUP, HR_CODES_BOOK>(p, task);
}

template <class Tiles, int bits, int codes, class Args>
HR_INLINE bool linear_of_bits(const Args* a, HrTask* task) {
    const bool least = a->form == HR_FORM_MIN;
    const Linear p = as_linear(a, task, hr_layout_i(bits, a->num_in, a->group, a->form), least ? 0 : 1 << (bits - 1), nullptr);
    return least ? Tiles::template linear<HR_MODE_MIN, codes>(p, task) : Tiles::template linear<HR_MODE_GROUP, codes>(p, task);
}
template <class Tiles>
HR_INLINE bool linear_of(const HrArgs_linear_i5* a, HrTask* task) {
    return linear_of_bits<Tiles, 5, HR_CODES_5>(a, task);
}
template <class Tiles>
HR_INLINE bool linear_of(const HrArgs_linear_i6* a, HrTask* task) {
    return linear_of_bits<Tiles, 6, HR_CODES_6>(a, task);
}

template <class Tiles>
HR_INLINE bool linear_of(const HrArgs_linear_i8* a, HrTask* task) {
    const Linear p = as_linear(a, task, hr_layout_i8(a->num_in, a->group, a->weight_group), 128, nullptr);
    if (a->weight_group & HR_I8_MIN) return Tiles::template linear<HR_MODE_MIN, HR_CODES_8>(p, task);
    if (a->weight_group) return Tiles::template linear<HR_MODE_GROUP, HR_CODES_8>(p, task);
    return Tiles::template linear<HR_MODE_CHANNEL, HR_CODES_8>(p, task);
}

template <class Tiles>
HR_INLINE bool linear_of(const HrArgs_linear_k* a, HrTask* task) {
    const Linear p = as_linear(a, task, hr_layout_k(a->num_in, a->form), hr_k_middle(a->form), nullptr);
    switch (a->form) {
        case HR_K_Q2: return Tiles::template linear<HR_MODE_K16_MIN, HR_CODES_2>(p, task);
        case HR_K_Q3: return Tiles::template linear<HR_MODE_K16, HR_CODES_3>(p, task);
        case HR_K_Q4: return Tiles::template linear<HR_MODE_K32_MIN, HR_CODES_4>(p, task);
        case HR_K_Q5: return Tiles::template linear<HR_MODE_K32_MIN, HR_CODES_5>(p, task);
        default: return Tiles::template linear<HR_MODE_K16, HR_CODES_6>(p, task);
    }
}

}  // namespace HR_NS
