/* Problems of the layers with a state. */
#include "selftest/problem.h"

namespace {

int64_t strided(Problem& p, int64_t width) { return width + (p.random.coin() ? p.random.whole(0, 20) : 0); }
int64_t room(int64_t rows, int64_t ld, int64_t width) { return (rows - 1) * ld + width; }

/* Chunks of rows, and slots that no two chunks share: the first of a chunk's own is read, any of them are written. */
template <class Args>
int64_t chunks(Problem& p, Args& a, int64_t state_size) {
    const int64_t count = p.random.whole(1, 4), own = 3;
    int32_t *begin = p.make<int32_t>(count + 1), *in = p.make<int32_t>(count);
    begin[0] = 0;
    for (int64_t c = 0; c < count; c++) begin[c + 1] = begin[c] + (int32_t)(p.random.coin() ? 1 : p.random.whole(1, 9));
    const int64_t rows = p.dims[HR_DIM_ROWS] = begin[count];
    p.dims[HR_DIM_SEQS] = count;
    int32_t* out = p.wholes(rows, -1, -1);
    for (int64_t c = 0; c < count; c++) {
        in[c] = p.random.coin() ? -1 : (int32_t)(c * own);
        int32_t to = (int32_t)(c * own + p.random.whole(0, 1));
        for (int32_t r = begin[c]; r < begin[c + 1]; r++)
            if (to < (c + 1) * own && (r + 1 == begin[c + 1] || p.random.next() % 3 == 0)) out[r] = to++;
    }
    a.row_begin = begin, a.state_in = in, a.state_out = out;
    a.state = p.floats(count * own * state_size);
    return rows;
}

void conv(Problem& p) {
    HrArgs_conv a = {};
    a.width = p.random.size(1, p.random.coin() ? 40 : 300), a.size = p.random.whole(1, 5);
    const int64_t rows = chunks(p, a, (a.size - 1) * a.width);
    a.kind = p.random.coin() ? HR_SILU : HR_IDENTITY;
    a.ld_x = strided(p, a.width), a.x = p.floats(room(rows, a.ld_x, a.width));
    a.weight = p.floats(a.size * a.width);
    if (p.random.coin()) a.bias = p.floats(a.width);
    a.ld_out = strided(p, a.width), a.out = p.make<float>(room(rows, a.ld_out, a.width));
    p.take(HR_OP_conv, a);
}

/* Heads and sizes; what is made of `width` numbers a row. */
template <class Args>
int64_t heads(Problem& p, Args& a) {
    a.key_heads = p.random.whole(1, 3), a.heads = a.key_heads * p.random.whole(1, 3), a.tiled = p.random.coin();
    a.key_dim = p.random.size(1, 40), a.value_dim = p.random.size(1, p.random.coin() ? 40 : 140);
    const int64_t rows = chunks(p, a, a.heads * a.key_dim * a.value_dim);
    a.ld_out = strided(p, a.heads * a.value_dim), a.out = p.make<float>(room(rows, a.ld_out, a.heads * a.value_dim));
    return rows;
}

const float* rows_of(Problem& p, int64_t rows, int64_t width, int64_t& ld, float factor = 1.0f, float shift = 0.0f) {
    ld = strided(p, width);
    float* x = p.floats(room(rows, ld, width));
    for (int64_t i = 0; i < room(rows, ld, width); i++) x[i] = x[i] * factor + shift;
    return x;
}

void delta(Problem& p) {
    HrArgs_delta a = {};
    const int64_t rows = heads(p, a);
    a.decay_width = p.random.coin() ? 1 : a.key_dim, a.scale = 0.25;
    a.query = rows_of(p, rows, a.key_heads * a.key_dim, a.ld_query);
    a.key = rows_of(p, rows, a.key_heads * a.key_dim, a.ld_key, 0.05f);
    a.value = rows_of(p, rows, a.heads * a.value_dim, a.ld_value);
    a.decay = rows_of(p, rows, a.heads * a.decay_width, a.ld_decay, 0.3f, -1.0f);
    a.beta = rows_of(p, rows, a.heads, a.ld_beta, 0.1f, 0.5f);
    p.take(HR_OP_delta, a);
}

void scan(Problem& p) {
    HrArgs_scan a = {};
    const int64_t rows = heads(p, a);
    a.x = rows_of(p, rows, a.heads * a.value_dim, a.ld_x);
    a.b = rows_of(p, rows, a.key_heads * a.key_dim, a.ld_b), a.c = rows_of(p, rows, a.key_heads * a.key_dim, a.ld_c);
    a.dt = rows_of(p, rows, a.heads, a.ld_dt, 0.1f, 0.5f);
    float* steps = p.floats(a.heads);
    for (int64_t h = 0; h < a.heads; h++) steps[h] -= 4.0f;
    a.a = steps;
    if (p.random.coin()) a.d = p.floats(a.heads);
    p.take(HR_OP_scan, a);
}

void softplus(Problem& p) {
    HrArgs_softplus a = {};
    const int64_t rows = p.dims[HR_DIM_ROWS] = p.random.size(1, 9);
    a.width = p.random.size(1, 300);
    a.x = rows_of(p, rows, a.width, a.ld_x, 12.0f), a.bias = p.floats(a.width);
    if (p.random.coin()) a.factor = p.floats(a.width);
    a.low = p.random.coin() ? 0.0 : 0.01, a.high = p.random.coin() ? __builtin_inf() : 3.0;
    a.ld_out = strided(p, a.width), a.out = p.make<float>(room(rows, a.ld_out, a.width));
    p.take(HR_OP_softplus, a);
}

}  // namespace

const std::vector<Named> state_problems = {{"conv", conv}, {"delta", delta}, {"scan", scan}, {"softplus", softplus}};
