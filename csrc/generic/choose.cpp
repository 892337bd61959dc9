/* What may be drawn from a row of logits, and how likely each token is. */
#include HR_VEC_H
#include "generic/ops.h"
#include "generic/select.h"

namespace HR_NS {

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef float Floats8 __attribute__((vector_size(32)));

enum { BUCKETS = 4096, BUCKETS_OF_ONE = 128 };

/* (x - greatest) / temperature of n <= 8 numbers; the lanes beyond are -infinity. */
HR_INLINE void scale8(const float* x, int64_t n, double greatest, double temperature, Doubles& t) {
    if (n == 8) {
        Floats8 f;
        __builtin_memcpy(&f, x, sizeof f);
        t = (__builtin_convertvector(f, Doubles) - greatest) / temperature;
        return;
    }
    for (int64_t i = 0; i < 8; i++) t[i] = i < n ? ((double)x[i] - greatest) / temperature : -__builtin_inf();
}

/* round(exp(t) * 2^44), t <= 0: see kernels.h. */
HR_INLINE void weigh8(const Doubles& scaled, Longs& w) {
    const double magic = 6755399441055744.0, whole = 4503599627370496.0;
    const Doubles least = {-700, -700, -700, -700, -700, -700, -700, -700};
    Doubles t = scaled > least ? scaled : least;
    const Doubles z = t * 1.4426950408889634 + magic, n = z - magic;
    t = t - n * 0.6931471803691238;
    t = t - n * 1.9082149292705877e-10;
    static const double taylor[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                    1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1.0,
                                    1.0};
    Doubles p = t * 0.0 + taylor[0];
    for (int i = 1; i < 13; i++) p = p * t + taylor[i];
    const Longs power = ((Longs)z - 0x4338000000000000 + (1023 + 44)) << 52;
    w = (Longs)(p * (Doubles)power + whole) - 0x4330000000000000;
}

/* Weights of the n numbers of a list that were chosen already. */
HR_INLINE void weigh_some(const Ranked* from, int64_t n, double greatest, double temperature, Longs& w) {
    float x[8];
    for (int64_t i = 0; i < n; i++) x[i] = from[i].value;
    Doubles t;
    scale8(x, n, greatest, temperature, t);
    weigh8(t, w);
}

/* Best first, equal ones by lower id. */
static void rank(Ranked* list, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;) sink(list, n, i, list[i]);
    for (int64_t left = n; left > 1; left--) {
        const Ranked out = list[0];
        sink(list, left - 1, 0, list[left - 1]);
        list[left - 1] = out;
    }
}

/* How many of the ranked list it takes until `mass` and theirs reach the target. */
static int64_t reach(const Ranked* list, int64_t n, double greatest, double temperature, int64_t mass, double target) {
    for (int64_t i = 0; i < n; i += 8) {
        Longs w;
        const int64_t some = n - i < 8 ? n - i : 8;
        weigh_some(list + i, some, greatest, temperature, w);
        for (int64_t j = 0; j < some; j++) {
            mass += w[j];
            if ((double)mass >= target) return i + j + 1;
        }
    }
    return n;
}

struct Chosen {
    int32_t* ids;
    double* scaled;
    int64_t count;
};

HR_INLINE void emit(Chosen& out, int64_t id, float x, double greatest, double temperature) {
    out.ids[out.count] = (int32_t)id;
    out.scaled[out.count++] = ((double)x - greatest) / temperature;
}

/* top_k > 0: the head by a heap. */
static void choose_few(const float* x, int64_t width, double greatest, double temperature, double floor, int64_t k,
                       double top_p, Ranked* heap, Chosen& out) {
    select_greatest(x, width, k, heap);
    int64_t n = 0;
    while (n < k) {
        const double t = ((double)heap[n].value - greatest) / temperature;
        if (!(t >= floor && t > -__builtin_inf())) break;
        n++;
    }
    if (top_p < 1) {
        int64_t total = 0;
        for (int64_t i = 0; i < n; i += 8) {
            Longs w;
            const int64_t some = n - i < 8 ? n - i : 8;
            weigh_some(heap + i, some, greatest, temperature, w);
            for (int64_t j = 0; j < some; j++) total += w[j];
        }
        n = reach(heap, n, greatest, temperature, 0, top_p * (double)total);
    }
    for (int64_t gap = n / 2; gap > 0; gap /= 2) /* by id (Shell's sort) */
        for (int64_t i = gap; i < n; i++) {
            const Ranked moved = heap[i];
            int64_t at = i;
            for (; at >= gap && heap[at - gap].id > moved.id; at -= gap) heap[at] = heap[at - gap];
            heap[at] = moved;
        }
    for (int64_t i = 0; i < n; i++) emit(out, heap[i].id, heap[i].value, greatest, temperature);
}

HR_INLINE int64_t bucket(double t) {
    const double at = t * -BUCKETS_OF_ONE;
    return at < BUCKETS - 1 ? (int64_t)at : BUCKETS - 1;
}

/* No top_k: mass by buckets of the scaled logit; the one in which the target is reached is ranked. */
static void choose_many(const float* x, int64_t width, double greatest, double temperature, double floor, double top_p,
                        void* scratch, Chosen& out) {
    Ranked last = {-__builtin_inff(), 0};
    if (top_p < 1) {
        int64_t* mass = (int64_t*)scratch;
        Ranked* members = (Ranked*)(mass + BUCKETS);
        for (int64_t i = 0; i < BUCKETS; i++) mass[i] = 0;
        int64_t total = 0;
        for (int64_t i = 0; i < width; i += 8) {
            Doubles t;
            Longs w;
            scale8(x + i, width - i < 8 ? width - i : 8, greatest, temperature, t);
            weigh8(t, w);
            for (int64_t j = 0; j < 8; j++) {
                if (w[j] == 0 || !(t[j] >= floor)) continue;
                mass[bucket(t[j])] += w[j];
                total += w[j];
            }
        }
        const double target = top_p * (double)total;
        int64_t before = 0, at = 0;
        while ((double)(before + mass[at]) < target) before += mass[at++];
        int64_t n = 0;
        for (int64_t i = 0; i < width; i++) {
            const double t = ((double)x[i] - greatest) / temperature;
            if (t >= floor && t > -__builtin_inf() && bucket(t) == at) members[n++] = {x[i], (int32_t)i};
        }
        rank(members, n);
        last = members[reach(members, n, greatest, temperature, before, target) - 1];
    }
    for (int64_t i = 0; i < width; i++) {
        if (top_p < 1 && !(x[i] > last.value || (x[i] == last.value && i <= last.id))) continue;
        const double t = ((double)x[i] - greatest) / temperature;
        if (t >= floor && t > -__builtin_inf()) emit(out, i, x[i], greatest, temperature);
    }
}

typedef uint64_t Words8 __attribute__((vector_size(64)));
enum { BATCH = 16 };

/* Philox4x32-10 of counters (block, position, purpose 0): two 64-bit words each, of an even and an odd id. */
HR_INLINE void philox(const uint64_t* blocks, uint64_t seed, uint64_t position, uint64_t* even, uint64_t* odd) {
    const Words8 low = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
    for (int part = 0; part < BATCH; part += 8) {
        Words8 c0, c1 = (low & 0) + (uint32_t)position, c2 = (low & 0) + (position >> 32), c3 = low & 0;
        __builtin_memcpy(&c0, blocks + part, sizeof c0);
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; round++) {
            const Words8 p0 = (c0 & low) * 0xD2511F53u, p1 = (c2 & low) * 0xCD9E8D57u;
            c0 = (p1 >> 32) ^ c1 ^ k0, c2 = (p0 >> 32) ^ c3 ^ k1;
            c1 = p1 & low, c3 = p0 & low;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        const Words8 first = c0 << 32 | c1, second = c2 << 32 | c3;
        __builtin_memcpy(even + part, &first, sizeof first);
        __builtin_memcpy(odd + part, &second, sizeof second);
    }
}

/* Leaves only those that can win, see kernels.h; returns the sum of all weights. */
static int64_t leave_winners(Chosen& all, uint64_t seed, uint64_t position, int64_t* mass) {
    int64_t total = 0;
    for (int64_t i = 0; i < all.count; i += 8) {
        const int64_t some = all.count - i < 8 ? all.count - i : 8;
        Doubles t;
        Longs w;
        for (int64_t j = 0; j < 8; j++) t[j] = j < some ? all.scaled[i + j] : -__builtin_inf();
        weigh8(t, w);
        for (int64_t j = 0; j < some; j++) total += mass[i + j] = w[j];
    }
    /* exp(3) / total, and 2^52 for the uniform numbers' whole part; a little more, for what rounding did. */
    const double reach = 20.085536923187668 / (double)total * 4503599627370496.0 * (1 + 1e-9);
    int64_t num_winners = 0;
    for (int64_t i = 0; i < all.count;) {
        uint64_t blocks[BATCH] = {0};
        int64_t num = 0, end = i;
        for (; end < all.count; end++) {
            const uint64_t block = (uint32_t)all.ids[end] >> 1;
            if (num && blocks[num - 1] == block) continue;
            if (num == BATCH) break;
            blocks[num++] = block;
        }
        uint64_t even[BATCH], odd[BATCH];
        philox(blocks, seed, position, even, odd);
        for (int64_t at = -1; i < end; i++) {
            const int32_t id = all.ids[i];
            if (at < 0 || blocks[at] != (uint32_t)id >> 1) at++;
            const uint64_t word = id & 1 ? odd[at] : even[at];
            if ((double)((1ull << 52) - (word >> 12)) - 0.5 > ((double)mass[i] + 1.0) * reach) continue;
            all.ids[num_winners] = id;
            all.scaled[num_winners++] = all.scaled[i];
        }
    }
    all.count = num_winners;
    return total;
}

void choose(const HrArgs_choose* a, HrTask* task) {
    share(task, task->dims[a->dim], a->width, a->width, 1, [&](int64_t row, int64_t, int64_t) {
        const float* x = a->rows[row];
        const double greatest = a->greatest[row], temperature = a->temperature[row], floor = a->floor[row];
        const int64_t k = a->top_k[row];
        Chosen out = {a->ids + row * a->width, a->scaled + row * a->width, 0};
        if (k > 0 && k < a->width)
            choose_few(x, a->width, greatest, temperature, floor, k, a->top_p[row], (Ranked*)task->scratch, out);
        else
            choose_many(x, a->width, greatest, temperature, floor, a->top_p[row], task->scratch, out);
        a->total[row] = 0;
        if (a->drawn[row] && out.count > 512)
            a->total[row] = leave_winners(out, a->seed[row], a->position[row], (int64_t*)task->scratch);
        a->count[row] = out.count;
    });
}

}  // namespace HR_NS
