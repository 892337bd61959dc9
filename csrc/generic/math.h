/* exp and tanh of sixteen floats, the same bits for every ISA. Within 2 units in the last place; NaN comes out as NaN.
 *
 * exp: Cody and Waite's reduction by multiples of ln 2 (in two parts), then a polynomial of degree 6 on [-ln2/2, ln2/2]
 * (the coefficients of Cephes' expf). Below -87.3 the result is 0, above 88.3 infinity. */
#pragma once

namespace HR_NS {

/* (exp(r) - 1 - r) / r^2 for |r| up to 0.35. */
HR_INLINE V exp_tail(V r) {
    V p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    return fma(p, r, set1(5.0000001201e-1f));
}

HR_INLINE V exp(V x) {
    /* The bounds come first in max and min, so that a NaN in x passes. */
    V y = min(set1(89.0f), max(set1(-88.0f), x));
    I n = round_i32(mul(y, set1(1.44269504088896341f)));
    V f = to_f32(n);
    V r = fma(f, set1(-0.693359375f), y);
    r = fma(f, set1(2.12194440e-4f), r);
    V p = fma(exp_tail(r), mul(r, r), add(r, set1(1.0f)));
    p = mul(p, pow2(n));
    p = select(lt(x, set1(-87.3f)), zero(), p);
    return select(lt(set1(88.3f), x), set1(__builtin_inff()), p);
}

/* 1 - 2 / (1 + exp(2x)); absolute error below 2e-7, which is enough for soft caps. */
HR_INLINE V tanh(V x) { return sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), exp(add(x, x))))); }

/* erf within 6e-8, by two polynomials: up to |x| = 475/512 in x * x, beyond that of log(1 - erf |x|). (N. Juffa,
 * "Efficient faithfully rounded implementation of error function erff()", Stack Overflow question 35148198.) */
HR_INLINE V erf(V x) {
    const V t = abs(x), s = mul(x, x);
    V far = fma(set1(-1.72853470e-5f), t, set1(3.83197126e-4f));
    far = fma(far, s, fma(set1(-3.88396438e-3f), t, set1(2.42546219e-2f)));
    far = fma(far, t, set1(-1.06777877e-1f));
    far = fma(far, t, set1(-6.34846687e-1f));
    far = fma(far, t, set1(-1.28717512e-1f));
    far = fma(far, t, sub(zero(), t));
    far = sub(set1(1.0f), exp(far));
    far = select(lt(x, zero()), sub(zero(), far), far);
    V near = set1(-5.96761703e-4f);
    near = fma(near, s, set1(4.99119423e-3f));
    near = fma(near, s, set1(-2.67681349e-2f));
    near = fma(near, s, set1(1.12819925e-1f));
    near = fma(near, s, set1(-3.76125336e-1f));
    near = fma(near, s, set1(1.28379166e-1f));
    near = fma(near, x, x);
    return select(lt(set1(0.927734375f), t), far, near);
}

/* Activations. What is not finite stays so: negative infinity gives NaN, or itself in relu. */
HR_INLINE V silu(V x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
HR_INLINE V gelu(V x) { return mul(mul(x, set1(0.5f)), add(set1(1.0f), erf(mul(x, set1(0.70710678118654752f))))); }
/* x * (1 + tanh u) / 2 = x / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 x^3) */
HR_INLINE V gelu_tanh(V x) {
    const V u = fma(mul(mul(x, x), set1(0.044715f)), x, x);
    return div(x, add(set1(1.0f), exp(mul(u, set1(-1.5957691216057308f)))));
}
HR_INLINE V relu(V x) { return max(mul(abs(x), zero()), x); }
HR_INLINE V sigmoid(V x) { return fma(x, zero(), div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x))))); }
HR_INLINE V relu2(V x) { return mul(relu(x), relu(x)); }
HR_INLINE V identity(V x) { return x; }
/* GPT-OSS's gate: both inputs held within 7, which must not hide one that is not finite. */
HR_INLINE V clamped_swiglu(V x, V y) {
    const V seven = set1(7.0f), g = min(seven, x), u = max(set1(-7.0f), min(seven, y));
    const V act = div(g, add(set1(1.0f), exp(mul(g, set1(-1.702f)))));
    return add(fma(x, zero(), mul(y, zero())), mul(act, add(u, set1(1.0f))));
}

}  // namespace HR_NS
