/* How the elements of a step are shared out among the threads of the team. */
#pragma once
#include "include/kernels.h"

namespace HR_NS {

/* Calls f(row, begin, end) until every column of every row has been in one [begin, end). Columns are cut at multiples
 * of `step` only, and never if step >= width. `cost` is what an element takes, a plain addition being 1: little work
 * stays with one thread, because a second one would cost more than it brings. */
template <class F>
HR_INLINE void share(HrTask* task, int64_t rows, int64_t width, int64_t step, int64_t cost, F f) {
    const int64_t total = rows * width, least = 4096 / cost;
    const bool alone = task->num_threads == 1 || total <= least;
    if (total <= 0 || (alone && task->tid != 0)) return;
    int64_t target = alone ? total : total / (8 * task->num_threads);
    if (target < least) target = least;
    int64_t span = width;
    if (target < width) span = (target + step - 1) / step * step;
    if (span > width) span = width;
    const int64_t spans = (width + span - 1) / span;
    const int64_t group = spans > 1 || target < width ? 1 : target / width;
    const int64_t pieces = alone ? 1 : (rows + group - 1) / group * spans;
    for (int64_t p = alone ? 0 : hr_next(task); p < pieces; p = alone ? pieces : hr_next(task)) {
        const int64_t first = p / spans * group, begin = p % spans * span;
        const int64_t last = alone || first + group > rows ? rows : first + group;
        const int64_t end = begin + span < width ? begin + span : width;
        for (int64_t row = first; row < last; row++) f(row, begin, end);
    }
}

/* f(i, n) over the vectors of [begin, end): n is 16 but for the last. */
template <class F>
HR_INLINE void each_vector(int64_t begin, int64_t end, F f) {
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) f(i, (int64_t)16);
    if (i < end) f(i, end - i);
}

/* With n == 16 known when compiled, the plain load and store are used. */
HR_INLINE V load_some(const float* p, int64_t n) { return n == 16 ? load(p) : load_n(p, n); }
HR_INLINE void store_some(float* p, V x, int64_t n) { n == 16 ? store(p, x) : store_n(p, x, n); }

/* False if a lane holds a NaN. */
HR_INLINE bool sound(V x) { return bits(le(x, x)) == 0xffff; }

}  // namespace HR_NS
