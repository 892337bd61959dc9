#include "generic/ops.h"
#include "isa/avx512_vnni/linear_tile.h"

namespace HR_NS {

void linear_k(const HrArgs_linear_k* a, HrTask* task) {
    const Linear p = as_linear(a, task, hr_layout_k(a->num_in, a->form), hr_k_middle(a->form), nullptr);
    switch (a->form) {
        case HR_K_Q2: return linear<Avx512, HR_MODE_K16_MIN, HR_CODES_2>(p, task);
        case HR_K_Q3: return linear<Avx512, HR_MODE_K16, HR_CODES_3>(p, task);
        case HR_K_Q4: return linear<Avx512, HR_MODE_K32_MIN, HR_CODES_4>(p, task);
        case HR_K_Q5: return linear<Avx512, HR_MODE_K32_MIN, HR_CODES_5>(p, task);
        default: return linear<Avx512, HR_MODE_K16, HR_CODES_6>(p, task);
    }
}

}  // namespace HR_NS
