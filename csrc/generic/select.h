/* The k greatest numbers of a row. */
#pragma once
#include "generic/share.h"

namespace HR_NS {

struct Ranked {
    float value;
    int32_t id;
};

/* Whether a has to go before b: smaller, or equal and of a higher index. */
HR_INLINE bool goes_first(Ranked a, Ranked b) { return a.value < b.value || (a.value == b.value && a.id > b.id); }

/* Puts x into the heap's place `at` and lets it sink; the root is the one that goes first. */
HR_INLINE void sink(Ranked* heap, int64_t size, int64_t at, Ranked x) {
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= size) break;
        if (child + 1 < size && goes_first(heap[child + 1], heap[child])) child++;
        if (!goes_first(heap[child], x)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = x;
}

/* heap[0 ... k-1] become the k greatest of x, greatest first, equal ones by lower index; k <= width. Returns lanes of
 * x * 0: NaN if anything is not finite. With a NaN in x what is selected is unspecified, but k different indices. */
HR_INLINE V select_greatest(const float* x, int64_t width, int64_t k, Ranked* heap) {
    V poison[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < k; i++) heap[i] = {x[i], (int32_t)i};
    each_vector(0, k, [&](int64_t i, int64_t n) { poison[0] = fma(load_some(x + i, n), zero(), poison[0]); });
    for (int64_t i = k / 2; i-- > 0;) sink(heap, k, i, heap[i]);
    V bar = set1(heap[0].value);
    /* Indices rise, so one that equals the root is no better than it. */
    const auto look = [&](int64_t i, V v) {
        for (uint32_t m = bits(lt(bar, v)); m; m &= m - 1) {
            const int64_t at = i + __builtin_ctz(m);
            if (!(x[at] > heap[0].value)) continue;
            sink(heap, k, 0, {x[at], (int32_t)at});
            bar = set1(heap[0].value);
        }
    };
    int64_t i = k;
    for (; i + 64 <= width; i += 64) {
        const V a = load(x + i), b = load(x + i + 16), c = load(x + i + 32), d = load(x + i + 48);
        poison[0] = fma(a, zero(), poison[0]);
        poison[1] = fma(b, zero(), poison[1]);
        poison[2] = fma(c, zero(), poison[2]);
        poison[3] = fma(d, zero(), poison[3]);
        if (__builtin_expect(bits(lt(bar, max(max(a, b), max(c, d)))) == 0, 1)) continue;
        look(i, a), look(i + 16, b), look(i + 32, c), look(i + 48, d);
    }
    for (; i < width; i += 16) {
        const int64_t n = width - i < 16 ? width - i : 16;
        const V v = load_n(x + i, n);
        poison[0] = fma(v, zero(), poison[0]);
        look(i, select(first_n(n), v, set1(-__builtin_inff())));
    }
    for (int64_t left = k; left > 1; left--) {
        const Ranked out = heap[0];
        sink(heap, left - 1, 0, heap[left - 1]);
        heap[left - 1] = out;
    }
    return add(add(poison[0], poison[1]), add(poison[2], poison[3]));
}

}  // namespace HR_NS
