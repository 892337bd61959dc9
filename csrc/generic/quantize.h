/* Rows quantised as they are made: a group of inputs gets its codes, scale and sum while it is in the first cache. */
#pragma once
#include "generic/share.h"

namespace HR_NS {

struct Quant {
    int8_t* q;
    int64_t ld_q;
    float* scales;
    int32_t* sums;
    int64_t ld_s, group;
};

/* The fields HR_Q_FIELDS of any operator's arguments. */
template <class Args>
HR_INLINE Quant quant_of(const Args* a) {
    return {a->q, a->ld_q, a->scales, a->sums, a->ld_s, a->group};
}

/* Codes of x[0 ... n-1], given the lanes of max |x| and of x * 0. A product that is NaN (0 * infinity, where the group
 * is so small that 127 / amax overflows, or is not finite) has code 0. */
HR_INLINE void quantize_group(const float* x, int64_t n, V amax, V poison, int8_t* q, float* scale, int32_t* sum) {
    const float top = sound(poison) ? hmax(amax) : __builtin_nanf("");
    *scale = top / 127.0f;
    const V inv = set1(top > 0 ? 127.0f / top : 0.0f);
    I total = izero();
    each_vector(0, n, [&](int64_t i, int64_t m) __attribute__((always_inline)) {
        V y = mul(load_some(x + i, m), inv);
        y = select(le(y, y), y, zero());
        const I codes = round_i32(max(set1(-127.0f), min(set1(127.0f), y)));
        total = iadd(total, codes);
        m == 16 ? store_i8(q + i, codes) : store_i8_n(q + i, codes, m);
    });
    *sum = ihsum(total);
}

/* Columns begin ... end-1 of row `row`, value(i, n) giving those from i on: to `out` (the row's first column; may be
 * NULL) and, where there is a q, quantised. `begin` is a multiple of the group. `scratch` holds a group. */
template <class F>
HR_INLINE void emit(const Quant& to, int64_t row, int64_t begin, int64_t end, int64_t width, float* out, float* scratch,
                    F value) {
    if (!to.q) {
        each_vector(begin, end, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            store_some(out + i, value(i, n), n);
        });
        return;
    }
    int8_t* q = to.q + row * to.ld_q;
    for (int64_t at = begin; at < end; at += to.group) {
        const int64_t n = at + to.group < width ? to.group : width - at, g = row * to.ld_s + at / to.group;
        float* y = out ? out + at : scratch;
        V amax = zero(), poison = zero();
        each_vector(0, n, [&](int64_t i, int64_t m) __attribute__((always_inline)) {
            V x = value(at + i, m);
            store_some(y + i, x, m);
            /* What is missing in the last vector may be anything. */
            if (m != 16) x = select(first_n(m), x, zero());
            amax = max(abs(x), amax); /* a NaN in the first is passed over; it shows in poison */
            poison = fma(x, zero(), poison);
        });
        quantize_group(y, n, amax, poison, q + at, to.scales + g, to.sums + g);
    }
    if (end == width) memset(q + width, 0, (size_t)(to.ld_q - width));
}

}  // namespace HR_NS
