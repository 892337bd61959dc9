/* Layers whose memory is a state: convolution, the delta rule, Mamba2's scan. A piece of work is some columns of one chunk
 * (and head): its state is copied into scratch, advances there row by row, and is copied out behind the rows that say so. */
#include HR_VEC_H
#include "generic/math.h"
#include "generic/ops.h"
#include "generic/share.h"

namespace HR_NS {

/* Columns of a piece. */
static const int64_t COLUMNS = 64, LANES = HR_LANES, VECTORS = COLUMNS / LANES;

/* Calls f(chunk, unit) for every unit of every chunk. */
template <class F>
HR_INLINE void share_chunks(HrTask* task, int64_t units, F f) {
    const int64_t pieces = task->dims[HR_DIM_SEQS] * units;
    for (int64_t p = hr_next(task); p < pieces; p = hr_next(task)) f(p / units, p % units);
}

/* `rows` pieces of `width` floats, `stride` apart, into rows of COLUMNS floats filled up with zeros; zeros without `from`. */
HR_INLINE void take_state(const float* from, int64_t rows, int64_t stride, int64_t width, float* to) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < COLUMNS; i += LANES) {
            const int64_t n = width - i < 0 ? 0 : width - i < LANES ? width - i : LANES;
            store(to + r * COLUMNS + i, from ? load_n(from + r * stride + i, n) : zero());
        }
}

HR_INLINE void give_state(const float* from, int64_t rows, int64_t stride, int64_t width, float* to) {
    for (int64_t r = 0; r < rows; r++)
        each_vector(0, width, [&](int64_t i, int64_t n) { store_some(to + r * stride + i, load(from + r * COLUMNS + i), n); });
}

template <V (*act)(V)>
static void convolve(const HrArgs_conv* a, HrTask* task) {
    const int64_t past = a->size - 1, width = a->width, slot_size = past * width;
    float* before = (float*)task->scratch; /* the inputs before the chunk, the oldest first */
    share_chunks(task, (width + COLUMNS - 1) / COLUMNS, [&](int64_t chunk, int64_t unit) {
        const int64_t at = unit * COLUMNS, count = width - at < COLUMNS ? width - at : COLUMNS;
        const int64_t first = a->row_begin[chunk], last = a->row_begin[chunk + 1];
        const int64_t slot = a->state_in[chunk];
        take_state(slot < 0 ? nullptr : a->state + slot * slot_size + at, past, width, count, before);
        /* Input number i of the chunk, those before it being -past ... -1. */
        const auto input = [&](int64_t i) {
            return i < 0 ? before + (past + i) * COLUMNS : a->x + (first + i) * a->ld_x + at;
        };
        for (int64_t i = 0; i < last - first; i++) {
            float* out = a->out + (first + i) * a->ld_out + at;
            each_vector(0, count, [&](int64_t c, int64_t n) {
                V y = a->bias ? load_some(a->bias + at + c, n) : zero();
                for (int64_t k = 0; k < a->size; k++)
                    y = fma(load_some(a->weight + k * width + at + c, n), load_some(input(i + k - past) + c, n), y);
                store_some(out + c, act(y), n);
            });
            const int64_t to = a->state_out[first + i];
            if (to < 0) continue;
            for (int64_t k = 0; k < past; k++) {
                const float* x = input(i + 1 + k - past);
                float* y = a->state + to * slot_size + k * width + at;
                each_vector(0, count, [&](int64_t c, int64_t n) { store_some(y + c, load_some(x + c, n), n); });
            }
        }
    });
}

void conv(const HrArgs_conv* a, HrTask* task) {
    a->kind == HR_SILU ? convolve<silu>(a, task) : convolve<identity>(a, task);
}

/* What delta and scan share. step(row, head, key_head, at, count, state) advances `state` [key_dim][COLUMNS] by one row, and
 * writes columns at ... at + count - 1 of the row's output. */
template <class Args, class F>
HR_INLINE void recur(const Args* a, HrTask* task, F step) {
    const int64_t blocks = (a->value_dim + COLUMNS - 1) / COLUMNS, head_size = a->key_dim * a->value_dim;
    float* state = (float*)task->scratch;
    share_chunks(task, a->heads * blocks, [&](int64_t chunk, int64_t unit) {
        const int64_t head = unit / blocks, at = unit % blocks * COLUMNS;
        const int64_t count = a->value_dim - at < COLUMNS ? a->value_dim - at : COLUMNS;
        const auto place = [&](int64_t slot) { return a->state + (slot * a->heads + head) * head_size + at; };
        const int64_t slot = a->state_in[chunk];
        take_state(slot < 0 ? nullptr : place(slot), a->key_dim, a->value_dim, count, state);
        for (int64_t row = a->row_begin[chunk]; row < a->row_begin[chunk + 1]; row++) {
            step(row, head, a->tiled ? head % a->key_heads : head / (a->heads / a->key_heads), at, count, state);
            const int64_t to = a->state_out[row];
            if (to >= 0) give_state(state, a->key_dim, a->value_dim, count, place(to));
        }
    });
}

HR_INLINE void load_columns(const float* x, int64_t count, V* columns) {
    for (int64_t j = 0; j < VECTORS; j++) {
        const int64_t n = count - j * LANES;
        columns[j] = load_n(x + (n > 0 ? j * LANES : 0), n < 0 ? 0 : n < LANES ? n : LANES);
    }
}

/* state[d] += key[d] * u, and sum[j] = the chain over d of fma(state[d], query[d], .). */
HR_INLINE void add_and_read(float* state, const float* key, const float* query, int64_t size, const V* u, V* sum) {
    for (int64_t j = 0; j < VECTORS; j++) sum[j] = zero();
    for (int64_t d = 0; d < size; d++) {
        const V k = set1(key[d]), q = set1(query[d]);
        for (int64_t j = 0; j < VECTORS; j++) {
            float* p = state + d * COLUMNS + j * LANES;
            const V s = fma(k, u[j], load(p));
            store(p, s);
            sum[j] = fma(s, q, sum[j]);
        }
    }
}

void delta(const HrArgs_delta* a, HrTask* task) {
    const int64_t size = a->key_dim;
    float* decays = (float*)task->scratch + size * COLUMNS;
    const V scale = set1((float)a->scale);
    recur(a, task, [&](int64_t row, int64_t head, int64_t key_head, int64_t at, int64_t count, float* state) {
        const float *key = a->key + row * a->ld_key + key_head * size, *query = a->query + row * a->ld_query + key_head * size;
        const float* log_decay = a->decay + row * a->ld_decay + head * a->decay_width;
        if (a->decay_width == 1) {
            const V one = exp(set1(*log_decay));
            each_vector(0, size, [&](int64_t d, int64_t n) { store_some(decays + d, one, n); });
        } else {
            each_vector(0, size, [&](int64_t d, int64_t n) { store_some(decays + d, exp(load_some(log_decay + d, n)), n); });
        }
        V held[VECTORS], u[VECTORS], sum[VECTORS];
        for (int64_t j = 0; j < VECTORS; j++) held[j] = zero();
        for (int64_t d = 0; d < size; d++) {
            const V decay = set1(decays[d]), k = set1(key[d]);
            for (int64_t j = 0; j < VECTORS; j++) {
                float* p = state + d * COLUMNS + j * LANES;
                const V s = mul(load(p), decay);
                store(p, s);
                held[j] = fma(s, k, held[j]);
            }
        }
        const V beta = set1(a->beta[row * a->ld_beta + head]);
        load_columns(a->value + row * a->ld_value + head * a->value_dim + at, count, u);
        for (int64_t j = 0; j < VECTORS; j++) u[j] = mul(sub(u[j], held[j]), beta);
        add_and_read(state, key, query, size, u, sum);
        float* out = a->out + row * a->ld_out + head * a->value_dim + at;
        each_vector(0, count, [&](int64_t i, int64_t n) { store_some(out + i, mul(sum[i / LANES], scale), n); });
    });
}

void scan(const HrArgs_scan* a, HrTask* task) {
    const int64_t size = a->key_dim;
    recur(a, task, [&](int64_t row, int64_t head, int64_t group, int64_t at, int64_t count, float* state) {
        const float *b = a->b + row * a->ld_b + group * size, *c = a->c + row * a->ld_c + group * size;
        const V dt = set1(a->dt[row * a->ld_dt + head]), decay = exp(mul(dt, set1(a->a[head])));
        V x[VECTORS], u[VECTORS], sum[VECTORS];
        load_columns(a->x + row * a->ld_x + head * a->value_dim + at, count, x);
        for (int64_t j = 0; j < VECTORS; j++) u[j] = mul(x[j], dt);
        for (int64_t i = 0; i < size * COLUMNS; i += LANES) store(state + i, mul(load(state + i), decay));
        add_and_read(state, b, c, size, u, sum);
        const V skip = set1(a->d ? a->d[head] : 0.0f);
        float* out = a->out + row * a->ld_out + head * a->value_dim + at;
        each_vector(0, count, [&](int64_t i, int64_t n) {
            const V y = sum[i / LANES];
            store_some(out + i, a->d ? fma(skip, x[i / LANES], y) : y, n);
        });
    });
}

/* log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), and log1p(y) = 2 artanh(y / (2 + y)) by its series, up to y = 1. */
HR_INLINE V log_one_and_exp(V x) {
    const V y = exp(sub(zero(), abs(x))), z = div(y, add(set1(2.0f), y)), s = mul(z, z);
    V p = set1(1.0f / 15);
    p = fma(p, s, set1(1.0f / 13));
    p = fma(p, s, set1(1.0f / 11));
    p = fma(p, s, set1(1.0f / 9));
    p = fma(p, s, set1(1.0f / 7));
    p = fma(p, s, set1(1.0f / 5));
    p = fma(p, s, set1(1.0f / 3));
    p = fma(p, s, set1(1.0f));
    return fma(mul(z, set1(2.0f)), p, max(zero(), x));
}

void softplus(const HrArgs_softplus* a, HrTask* task) {
    const V low = set1((float)a->low), high = set1((float)a->high);
    share(task, task->dims[a->dim], a->width, 16, 16, [&](int64_t row, int64_t begin, int64_t end) {
        const float* x = a->x + row * a->ld_x;
        float* out = a->out + row * a->ld_out;
        each_vector(begin, end, [&](int64_t i, int64_t n) {
            const V v = add(load_some(x + i, n), load_some(a->bias + i, n));
            /* + v * 0: the bounds must not hide a number that is not finite. */
            V y = fma(v, zero(), max(low, min(high, log_one_and_exp(v))));
            if (a->factor) y = mul(y, load_some(a->factor + i, n));
            store_some(out + i, y, n);
        });
    });
}

}  // namespace HR_NS
