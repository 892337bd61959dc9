/* Rows quantised as they are computed: a group of inputs gets its codes, scale and sum while it is in the first cache. */
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

/* Codes of x[0 ... n-1] and their sum. A product that is NaN (0 * infinity, where the group is so small that 127 / amax
 * overflows, or is not finite) has code 0. */
HR_INLINE int32_t write_codes(const float* x, int64_t n, float inv, int8_t* q) {
    const V factor = set1(inv);
    I total = izero();
    each_vector(0, n, [&](int64_t i, int64_t m) __attribute__((always_inline)) {
        V y = mul(load_some(x + i, m), factor);
        y = select(le(y, y), y, zero());
        const I codes = round_i32(max(set1(-127.0f), min(set1(127.0f), y)));
        total = iadd(total, codes);
        m == 16 ? store_i8(q + i, codes) : store_i8_n(q + i, codes, m);
    });
    return ihsum(total);
}

/* y[0 ... n-1] = value(at ...); returns amax of the group as the contract has it. */
template <class F>
HR_INLINE float write_values(float* y, int64_t at, int64_t n, F value) {
    V amax = zero(), poison = zero();
    each_vector(0, n, [&](int64_t i, int64_t m) __attribute__((always_inline)) {
        V x = value(at + i, m);
        store_some(y + i, x, m);
        /* What is missing in the last vector may be anything. */
        if (m != 16) x = select(first_n(m), x, zero());
        amax = max(abs(x), amax); /* a NaN in the first is passed over; it shows in poison */
        poison = fma(x, zero(), poison);
    });
    return sound(poison) ? hmax(amax) : __builtin_nanf("");
}

/* Columns begin ... end-1 of row `row`, value(i, n) giving those from i on: to `out` (the row's first column; may be
 * NULL) and, where there is a q, quantised. `begin` is a multiple of the group. `scratch` holds 2048 numbers, or a
 * group.
 *
 * Up to sixteen groups go together: one group alone would wait for its maximum and its divisions. */
template <class F>
HR_INLINE void emit(const Quant& to, int64_t row, int64_t begin, int64_t end, int64_t width, float* out, float* scratch,
                    F value) {
    if (!to.q) {
        each_vector(begin, end, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            store_some(out + i, value(i, n), n);
        });
        return;
    }
    const int64_t group = to.group, fit = 2048 / group, batch = fit > 16 ? 16 : fit > 1 ? fit : 1;
    int8_t* q = to.q + row * to.ld_q;
    for (int64_t at = begin; at < end; at += batch * group) {
        const int64_t stop = at + batch * group < end ? at + batch * group : end;
        const int64_t count = (stop - at + group - 1) / group, first = row * to.ld_s + at / group;
        float* y = out ? out + at : scratch;
        alignas(64) float amax[16] = {0}, inv[16];
        for (int64_t g = 0; g < count; g++) {
            const int64_t from = at + g * group, n = from + group < stop ? group : stop - from;
            amax[g] = write_values(y + g * group, from, n, value);
        }
        const V top = load(amax), full = set1(127.0f);
        store_n(to.scales + first, div(top, full), count);
        store(inv, select(lt(zero(), top), div(full, top), zero()));
        for (int64_t g = 0; g < count; g++) {
            const int64_t from = at + g * group, n = from + group < stop ? group : stop - from;
            to.sums[first + g] = write_codes(y + g * group, n, inv[g], q + from);
        }
    }
    if (end == width) memset(q + width, 0, (size_t)(to.ld_q - width));
}

}  // namespace HR_NS
