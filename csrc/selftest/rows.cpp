/* Problems of the operators that go row by row. */
#include "isa/k_blocks.h"
#include "selftest/problem.h"

void* stored(Problem& p, int64_t type, int64_t count) {
    if (type == HR_F32) return p.floats(count);
    uint16_t* numbers = p.make<uint16_t>(count);
    for (int64_t i = 0; i < count; i++) {
        uint32_t sign = p.random.next() & 0x8000, fraction = p.random.next();
        /* Exponents around that of 1, and now and then a subnormal of f16. */
        uint32_t exponent = (uint32_t)(type == HR_F16 ? p.random.whole(p.random.next() % 16 ? 10 : 0, 16)
                                                      : p.random.whole(120, 128));
        const int bits = type == HR_F16 ? 10 : 7;
        numbers[i] = (uint16_t)(sign | exponent << bits | (fraction & ((1u << bits) - 1)));
    }
    return numbers;
}

uint8_t* k_blocks(Problem& p, int64_t type, int64_t count) {
    const int64_t bytes = hr_format_k.row_bytes(count, type);
    uint8_t* raw = p.make<uint8_t>(bytes);
    for (int64_t i = 0; i < bytes; i++) raw[i] = (uint8_t)(p.random.next() & 0x7b); /* no d is infinite or NaN */
    return raw;
}

namespace {

int64_t rows_of(Problem& p) { return p.dims[HR_DIM_ROWS] = p.random.size(1, p.random.rarely(32, 70, 9)); }
int64_t width_of(Problem& p) { return p.random.size(1, p.random.rarely(32, 5000, p.random.coin() ? 40 : 300)); }
int64_t any_width_of(Problem& p) { return p.random.rarely(64, 0, width_of(p)); }
int64_t vocab_of(Problem& p) { return p.random.rarely(512, 1 << 18, width_of(p)); }

/* The fields of quantised rows, for any operator that has them. */
template <class Args>
void quantised(Problem& p, Args& a, int64_t width) {
    const int64_t groups[] = {32, 64, 128};
    a.group = p.random.coin() ? p.random.rarely(2, 8 * p.random.whole(1, 40), groups[p.random.next() % 3]) : width;
    a.ld_q = (width + 63) / 64 * 64 + (p.random.coin() ? 64 : 0);
    a.ld_s = (width + a.group - 1) / a.group + (p.random.coin() ? 1 : 0);
    a.q = p.make<int8_t>(p.dims[0] * a.ld_q);
    a.scales = p.make<float>(p.dims[0] * a.ld_s);
    a.sums = p.make<int32_t>(p.dims[0] * a.ld_s);
}

/* Room for rows of `width` with a gap between them, and none behind the last. */
int64_t strided(Problem& p, int64_t width) { return width + (p.random.coin() ? p.random.whole(0, 20) : 0); }
int64_t room(int64_t rows, int64_t ld, int64_t width) { return (rows - 1) * ld + width; }

#define OUT(width)                          \
    a.ld_out = strided(p, width);           \
    a.out = p.make<float>(room(rows, a.ld_out, width))
#define IN(width)              \
    a.ld_x = strided(p, width); \
    a.x = p.floats(room(rows, a.ld_x, width))

void embedding(Problem& p) {
    HrArgs_embedding a = {};
    int64_t rows = rows_of(p), vocab = p.random.whole(1, 50);
    a.type = p.random.whole(0, 3), a.scale = p.random.coin() ? 1.0 : 3.25, p.units = vocab;
    a.width = a.type < 3 ? width_of(p) : HR_K_BLOCK * p.random.whole(1, 3);
    if (a.type == 3) a.type = p.random.whole(HR_K_Q2, HR_K_Q6);
    a.ids = p.wholes(rows, 0, vocab - 1);
    a.table = a.type < HR_K_Q2 ? stored(p, a.type, vocab * a.width) : k_blocks(p, a.type, vocab * a.width);
    a.file = -1;
    OUT(a.width);
    p.take(HR_OP_embedding, a);
}

void select_rows(Problem& p) {
    HrArgs_select_rows a = {};
    int64_t rows = rows_of(p);
    a.width = any_width_of(p);
    IN(a.width);
    a.dim = HR_DIM_LOGITS, p.dims[HR_DIM_LOGITS] = p.random.whole(1, rows);
    a.rows = p.wholes(p.dims[HR_DIM_LOGITS], 0, rows - 1);
    rows = p.dims[HR_DIM_LOGITS];
    OUT(a.width);
    p.take(HR_OP_select_rows, a);
}

void permute(Problem& p) {
    HrArgs_permute a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p);
    a.count = p.random.coin() ? 1 : p.random.whole(2, 5);
    int32_t *columns = p.make<int32_t>(a.count * a.width), *begin = p.make<int32_t>(a.count + 1);
    for (int64_t e = 0; e < a.count; e++) {
        int32_t* order = columns + e * a.width;
        for (int64_t i = 0; i < a.width; i++) order[i] = (int32_t)i;
        for (int64_t i = a.width - 1; i > 0; i--) std::swap(order[i], order[p.random.whole(0, i)]);
        begin[e] = (int32_t)(e * rows / a.count);
    }
    begin[a.count] = (int32_t)rows;
    a.columns = columns, a.begin = a.count > 1 ? begin : nullptr;
    IN(a.width);
    const bool q = p.random.coin();
    if (q) quantised(p, a, a.width);
    if (!q || p.random.coin()) { OUT(a.width); }
    p.take(HR_OP_permute, a);
}

void rms_norm(Problem& p) {
    HrArgs_rms_norm a = {};
    int64_t rows = rows_of(p);
    a.heads = p.random.coin() ? 1 : p.random.whole(2, 4), a.width = width_of(p);
    int64_t wide = a.heads * a.width;
    a.eps = 1e-6, a.offset = p.random.coin() ? 0.0 : 1.0;
    if (p.random.next() % 4) a.weight_step = p.random.coin() * a.width, a.weight = p.floats(a.weight_step ? wide : a.width);
    IN(wide);
    bool q = a.heads == 1 && p.random.coin();
    if (q) quantised(p, a, wide);
    if (!q || p.random.coin()) { OUT(wide); }
    p.take(HR_OP_rms_norm, a);
}

void layer_norm(Problem& p) {
    HrArgs_layer_norm a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p), a.eps = 1e-5;
    if (p.random.next() % 4) a.weight = p.floats(a.width), a.bias = p.random.coin() ? p.floats(a.width) : nullptr;
    IN(a.width);
    bool q = p.random.coin();
    if (q) quantised(p, a, a.width);
    if (!q || p.random.coin()) { OUT(a.width); }
    p.take(HR_OP_layer_norm, a);
}

void add(Problem& p) {
    HrArgs_add a = {};
    int64_t rows = rows_of(p);
    a.width = any_width_of(p);
    IN(a.width);
    a.ld_y = strided(p, a.width), a.y = p.floats(room(rows, a.ld_y, a.width));
    if (p.random.coin()) a.out = (float*)a.x, a.ld_out = a.ld_x;
    else { OUT(a.width); }
    p.take(HR_OP_add, a);
}

void softcap(Problem& p) {
    HrArgs_softcap a = {};
    int64_t rows = rows_of(p);
    a.width = any_width_of(p), a.cap = p.random.coin() ? 1.5 : 30.0;
    IN(a.width);
    OUT(a.width);
    p.take(HR_OP_softcap, a);
}

void quantize(Problem& p) {
    HrArgs_quantize a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p);
    IN(a.width);
    quantised(p, a, a.width);
    p.take(HR_OP_quantize, a);
}

void activation(Problem& p) {
    HrArgs_activation a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p), a.kind = p.random.whole(HR_SILU, HR_IDENTITY);
    IN(a.width);
    bool q = p.random.coin();
    if (q) quantised(p, a, a.width);
    if (!q || p.random.coin()) { OUT(a.width); }
    p.take(HR_OP_activation, a);
}

void xielu(Problem& p) {
    HrArgs_xielu a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p), a.positive = p.random.coin() ? 0.8 : 1.3, a.negative = p.random.coin() ? 0.8 : 0.6, a.beta = 0.5;
    IN(a.width);
    bool q = p.random.coin();
    if (q) quantised(p, a, a.width);
    if (!q || p.random.coin()) { OUT(a.width); }
    p.take(HR_OP_xielu, a);
}

void gated(Problem& p) {
    HrArgs_gated a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p), a.kind = p.random.whole(HR_SILU, HR_CLAMPED_SWIGLU);
    IN(2 * a.width);
    bool q = p.random.coin();
    if (q) quantised(p, a, a.width);
    if (!q || p.random.coin()) { OUT(a.width); }
    p.take(HR_OP_gated, a);
}

template <class Args>
void residual(Problem& p, Args& a) {
    const int64_t rows = p.dims[0];
    if (p.random.coin()) a.ld_res = strided(p, a.width), a.residual = p.floats(room(rows, a.ld_res, a.width));
}

void multiply(Problem& p) {
    HrArgs_multiply a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p), a.kind = p.random.whole(HR_SILU, HR_IDENTITY);
    IN(a.width);
    a.gate_width = p.random.coin() ? 1 : a.width, a.ld_gate = strided(p, a.gate_width);
    a.gate = p.floats(room(rows, a.ld_gate, a.gate_width));
    residual(p, a);
    OUT(a.width);
    p.take(HR_OP_multiply, a);
}

void scale(Problem& p) {
    HrArgs_scale a = {};
    int64_t rows = rows_of(p);
    a.width = any_width_of(p), a.factor = p.random.coin() ? 0.22 : 3.0;
    IN(a.width);
    residual(p, a);
    OUT(a.width);
    p.take(HR_OP_scale, a);
}

void finite(Problem& p) {
    HrArgs_finite a = {};
    int64_t rows = rows_of(p);
    a.width = width_of(p);
    IN(a.width);
    const int64_t at = p.random.whole(0, rows - 1) * a.ld_x + p.random.whole(0, a.width - 1);
    if (p.random.coin()) ((float*)a.x)[at] = __builtin_inff();
    if (p.random.coin()) a.rows = p.wholes(rows, 0, rows - 1);
    a.bound = p.random.coin() ? 1.5 : __builtin_inf();
    a.finite = p.make<int32_t>(rows);
    p.take(HR_OP_finite, a);
}

void top_k(Problem& p) {
    HrArgs_top_k a = {};
    int64_t rows = rows_of(p);
    a.width = vocab_of(p), a.k = p.random.whole(1, a.width);
    IN(a.width);
    for (int64_t i = 0; i < 5; i++) { /* equal ones, and tokens that must never come */
        const int64_t at = p.random.whole(0, rows - 1) * a.ld_x + p.random.whole(0, a.width - 1);
        ((float*)a.x)[at] = i % 2 ? 2.5f : -__builtin_inff();
    }
    a.ids = p.make<int32_t>(rows * a.k), a.values = p.make<float>(rows * a.k), a.finite = p.make<int32_t>(rows);
    p.take(HR_OP_top_k, a);
}

void choose(Problem& p) {
    HrArgs_choose a = {};
    const int64_t rows = rows_of(p);
    a.width = vocab_of(p);
    float* x = p.floats(rows * a.width);
    const float** row_at = p.make<const float*>(rows);
    int64_t* top_k = p.make<int64_t>(rows);
    double *greatest = p.make<double>(rows), *temperature = p.make<double>(rows), *floor = p.make<double>(rows);
    double* top_p = p.make<double>(rows);
    for (int64_t row = 0; row < rows; row++) {
        float* logits = x + row * a.width;
        row_at[row] = logits;
        if (p.random.coin()) logits[p.random.whole(0, a.width - 1)] = -__builtin_inff();
        logits[p.random.whole(0, a.width - 1)] = 2.5f;
        greatest[row] = *std::max_element(logits, logits + a.width);
        temperature[row] = p.random.coin() ? 1.0 : 0.7, floor[row] = p.random.coin() ? -__builtin_inf() : -2.0;
        top_k[row] = p.random.coin() ? 0 : p.random.whole(1, a.width), top_p[row] = p.random.coin() ? 1.0 : 0.8;
    }
    a.rows = row_at, a.greatest = greatest, a.temperature = temperature, a.floor = floor, a.top_k = top_k;
    int64_t* drawn = p.make<int64_t>(rows);
    for (int64_t row = 0; row < rows; row++) drawn[row] = p.random.coin();
    a.drawn = drawn, a.seed = p.make<uint64_t>(rows), a.position = p.make<uint64_t>(rows);
    a.top_p = top_p, a.count = p.make<int64_t>(rows), a.total = p.make<int64_t>(rows);
    a.ids = p.make<int32_t>(rows * a.width), a.scaled = p.make<double>(rows * a.width);
    p.take(HR_OP_choose, a);
}

void route(Problem& p) {
    HrArgs_route a = {};
    int64_t rows = rows_of(p);
    a.num_experts = p.random.size(1, p.random.rarely(32, 600, 70)), a.top_k = p.random.whole(1, a.num_experts < 8 ? a.num_experts : 8);
    IN(a.num_experts);
    a.score = p.random.coin() ? HR_SOFTMAX : HR_SIGMOID_SCORE, a.renormalise = p.random.coin();
    a.num_groups = 1, a.top_groups = 1, a.group_top = 1, a.scale = p.random.coin() ? 1.0 : 2.5;
    if (p.random.coin()) a.bias = p.floats(a.num_experts);
    if (p.random.coin()) a.factors = p.floats(a.num_experts);
    if (a.num_experts % 4 == 0 && p.random.coin()) {
        a.num_groups = 4, a.top_groups = p.random.whole(1, 4), a.group_top = p.random.whole(1, 2);
        a.top_k = p.random.whole(1, std::min<int64_t>(8, a.num_experts / 4 * a.top_groups));
    }
    a.ids = p.make<int32_t>(rows * a.top_k), a.weights = p.make<float>(rows * a.top_k);
    p.take(HR_OP_route, a);
}

void moe_group(Problem& p) {
    HrArgs_moe_group a = {};
    int64_t rows = rows_of(p);
    a.num_experts = p.random.whole(1, 20), a.top_k = p.random.whole(1, a.num_experts < 4 ? a.num_experts : 4);
    int32_t* ids = p.make<int32_t>(rows * a.top_k);
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = p.random.whole(0, a.num_experts - 1);
        for (int64_t i = 0; i < a.top_k; i++) ids[row * a.top_k + i] = (int32_t)((first + i) % a.num_experts);
    }
    const int64_t pairs = rows * a.top_k;
    a.ids = ids, a.weights = p.floats(pairs), a.begin = p.make<int32_t>(a.num_experts + 1);
    a.rows = p.make<int32_t>(pairs), a.places = p.make<int32_t>(pairs), a.pair_weights = p.make<float>(pairs);
    if (p.random.coin()) {
        a.first = p.random.whole(0, a.num_experts - 1), a.num_own = p.random.whole(1, a.num_experts - a.first);
        a.own_begin = p.make<int32_t>(a.num_own + 1);
    }
    p.take(HR_OP_moe_group, a);
}

void moe_gather(Problem& p) {
    HrArgs_moe_gather a = {};
    int64_t rows = rows_of(p), from = rows + p.random.whole(0, 5);
    const int64_t before = p.random.coin() ? p.random.whole(0, 9) : 0;
    a.width = width_of(p), a.list = p.wholes(before + rows, 0, from - 1);
    if (before) a.from = p.wholes(1, before, before);
    if (p.random.coin()) {
        a.ld_x = strided(p, a.width), a.x = p.floats(room(from, a.ld_x, a.width));
        if (p.random.coin()) a.weights = p.floats(before + rows);
        OUT(a.width);
    } else {
        a.ld_q = (a.width + 63) / 64 * 64, a.ld_s = (a.width + 63) / 64;
        a.q = (int8_t*)p.wholes(from * a.ld_q / 4, INT32_MIN / 2, INT32_MAX / 2);
        a.scales = p.floats(from * a.ld_s), a.sums = p.wholes(from * a.ld_s, -9, 9);
        a.to_q = p.make<int8_t>(rows * a.ld_q);
        a.to_scales = p.make<float>(rows * a.ld_s), a.to_sums = p.make<int32_t>(rows * a.ld_s);
    }
    p.take(HR_OP_moe_gather, a);
}

void moe_combine(Problem& p) {
    HrArgs_moe_combine a = {};
    int64_t rows = rows_of(p);
    a.width = any_width_of(p), a.top_k = p.random.whole(1, 6);
    const int64_t pairs = rows * a.top_k;
    a.places = p.wholes(pairs, 0, pairs - 1), a.ld_x = strided(p, a.width);
    a.x = p.floats(room(pairs, a.ld_x, a.width));
    if (p.random.coin()) a.weights = p.floats(pairs);
    residual(p, a);
    OUT(a.width);
    p.take(HR_OP_moe_combine, a);
}

void spread(Problem& p) {
    HrArgs_spread a = {};
    const int64_t rows = rows_of(p);
    a.heads = p.random.whole(1, 6), a.width = p.random.size(1, 70);
    a.step_x = strided(p, a.width), a.step_out = strided(p, a.width);
    IN((a.heads - 1) * a.step_x + a.width);
    OUT((a.heads - 1) * a.step_out + a.width);
    p.take(HR_OP_spread, a);
}

/* Some of the rows in tiles of up to four, and the adapters of three slots. */
template <class Args>
void adapters(Problem& p, Args& a, int64_t rows, int64_t num_in, const int64_t* begins) {
    int32_t *tiles = p.make<int32_t>(1 + 3 * rows), *list = p.make<int32_t>(rows);
    for (int64_t i = 0; i < rows; i++) list[i] = (int32_t)i;
    for (int64_t i = rows - 1; i > 0; i--) std::swap(list[i], list[p.random.whole(0, i)]);
    tiles[0] = 0;
    for (int32_t at = p.random.coin(); at < rows;) {
        int32_t* tile = tiles + 1 + 3 * tiles[0]++;
        tile[0] = at, tile[1] = (int32_t)std::min(rows - at, p.random.whole(1, 4)), tile[2] = (int32_t)p.random.whole(0, 2);
        at += tile[1] + p.random.coin();
    }
    struct Part { const void *a, *b; int32_t rank, type; double scale; const float* gains; };
    Part* parts = p.make<Part>(3 * a.parts);
    for (int64_t i = 0; i < 3 * a.parts; i++) {
        const int64_t type = p.random.whole(0, 2), rank = p.random.whole(0, a.max_rank), ld = (num_in + 15) / 16 * 16;
        const int64_t width = begins ? (begins[i % a.parts + 1] - begins[i % a.parts] + 15) / 16 * 16 : 0;
        parts[i] = {begins ? nullptr : stored(p, type, rank * ld),
                    begins ? stored(p, type, rank * width) : nullptr, (int32_t)rank, (int32_t)type, p.random.number(),
                    begins && p.random.coin() ? p.floats(2 * width) : nullptr};
    }
    a.tiles = tiles, a.list = list, a.table = parts;
}

void adapt_in(Problem& p) {
    HrArgs_adapt_in a = {};
    const int64_t rows = rows_of(p);
    a.parts = p.random.whole(1, 3), a.max_rank = p.random.whole(1, 20), a.num_in = width_of(p);
    adapters(p, a, rows, a.num_in, nullptr);
    IN(a.num_in);
    OUT(a.parts * a.max_rank);
    p.take(HR_OP_adapt_in, a);
}

void adapt_out(Problem& p) {
    HrArgs_adapt_out a = {};
    const int64_t rows = rows_of(p);
    a.parts = p.random.whole(1, 3), a.max_rank = p.random.whole(1, 20);
    int64_t* begins = p.make<int64_t>(a.parts + 1);
    begins[0] = p.random.whole(0, 5);
    for (int64_t i = 0; i < a.parts; i++) begins[i + 1] = begins[i] + width_of(p);
    a.begins = begins;
    adapters(p, a, rows, 0, begins);
    IN(a.parts * a.max_rank);
    const int64_t width = begins[a.parts];
    if (p.random.coin()) a.ld_res = strided(p, width), a.residual = p.floats(room(rows, a.ld_res, width));
    a.ld_out = strided(p, width), a.out = p.floats(room(rows, a.ld_out, width));
    p.take(HR_OP_adapt_out, a);
}

}  // namespace

const std::vector<Named> row_problems = {
#define ROW(op) {#op, op},
    ROW(embedding) ROW(select_rows) ROW(permute) ROW(rms_norm) ROW(layer_norm) ROW(add) ROW(softcap) ROW(quantize)
    ROW(activation) ROW(xielu) ROW(gated) ROW(multiply) ROW(scale) ROW(finite) ROW(top_k) ROW(choose) ROW(route)
    ROW(moe_group) ROW(moe_gather) ROW(moe_combine) ROW(spread) ROW(adapt_in) ROW(adapt_out)
};
