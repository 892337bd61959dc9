/* exp and tanh of sixteen floats, the same bits for every ISA. Within 2 units in the last place; NaN comes out as NaN.
 *
 * exp: Cody and Waite's reduction by multiples of ln 2 (in two parts), then a polynomial of degree 6 on [-ln2/2, ln2/2]
 * (the coefficients of Cephes' expf). Below -87.3 the result is 0, above 88.3 infinity. */
#pragma once

namespace HR_NS {

HR_INLINE V exp(V x) {
    /* The bounds come first in max and min, so that a NaN in x passes. */
    V y = min(set1(89.0f), max(set1(-88.0f), x));
    I n = round_i32(mul(y, set1(1.44269504088896341f)));
    V f = to_f32(n);
    V r = fma(f, set1(-0.693359375f), y);
    r = fma(f, set1(2.12194440e-4f), r);
    V p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    p = mul(p, pow2(n));
    p = select(lt(x, set1(-87.3f)), zero(), p);
    return select(lt(set1(88.3f), x), set1(__builtin_inff()), p);
}

/* 1 - 2 / (1 + exp(2x)); absolute error below 2e-7, which is what soft caps ask for. */
HR_INLINE V tanh(V x) { return sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), exp(add(x, x))))); }

}  // namespace HR_NS
