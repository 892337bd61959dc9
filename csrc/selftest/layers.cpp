/* Problems of the linear layers, and of those that touch the KV cache. */
#include <limits>

#include "isa/k_blocks.h"
#include "selftest/problem.h"

namespace {

int64_t rows_of(Problem& p) { return p.dims[0] = p.random.size(1, p.random.rarely(32, 200, p.random.coin() ? 4 : 30)); }
/* Inputs and outputs; seldom so many of the one that few of the others are to be had. */
template <class Args>
void sizes(Problem& p, Args& a, int64_t greatest) {
    a.num_in = p.random.size(1, p.random.rarely(32, 5000, 300));
    a.num_out = p.random.size(1, p.random.coin() || p.dims[0] > 30 || a.num_in > 300 ? 20 : 150);
    if (p.dims[0] <= 13 && p.random.rarely(512, 1, 0)) a.num_in = greatest, a.num_out = p.random.whole(1, 3);
}

/* Quantised activations and packed weights, as the formats' own packers write them. The flag is the group of the
 * weights for i8 (0 where they have none), `mins` for i4. */
template <class Args>
void integer_linear(Problem& p, Args& a, const HrFormat& format, int64_t form, int least, int most,
                    bool grouped) {
    const int64_t choices[] = {32, 64, 128}, rows = rows_of(p);
    a.group = p.random.rarely(2, 8 * p.random.whole(1, 40), choices[p.random.next() % 3]);
    sizes(p, a, 1 << 18);
    if (a.num_in > 5000) a.group = 8 * p.random.whole(1, 4);
    if (&format == &hr_format_i5) a.group = (a.group + 15) / 16 * 16;
    if (p.random.coin() && (!grouped || p.random.edges)) a.group = std::min((a.num_in + 63) / 64 * 64, (int64_t)HR_MAX_GROUP);
    const bool extreme = p.random.rarely(8, 1, 0); /* sums as large as they can be */
    const int64_t groups = (a.num_in + a.group - 1) / a.group;
    const bool mins = form == HR_FORM_MIN;
    const int64_t flag = &format == &hr_format_i8 ? (grouped ? a.group | (mins ? HR_I8_MIN : 0) : 0) : form;
    a.ld_q = (a.num_in + 63) / 64 * 64, a.ld_s = groups + (p.random.coin() ? 1 : 0);
    int8_t* q = p.make<int8_t>(rows * a.ld_q);
    int32_t* sums = p.make<int32_t>(rows * a.ld_s);
    memset(q, 0, (size_t)(rows * a.ld_q));
    memset(sums, 0, (size_t)(rows * a.ld_s) * 4);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < a.num_in; k++) {
            q[row * a.ld_q + k] = (int8_t)(extreme ? 127 : p.random.whole(-127, 127));
            sums[row * a.ld_s + k / a.group] += q[row * a.ld_q + k];
        }
    a.q = q, a.sums = sums, a.scales = p.floats(rows * a.ld_s);

    std::vector<int8_t> codes((size_t)(a.num_out * a.num_in));
    for (int8_t& code : codes) code = (int8_t)(extreme ? least : p.random.whole(least, most));
    const int64_t per_row = grouped ? groups : 1;
    std::vector<float> d((size_t)(a.num_out * per_row)), m(d.size());
    for (float& x : d) x = p.random.number();
    for (float& x : m) x = p.random.number();
    const size_t bytes = format.packed_bytes(a.num_out, a.num_in, a.group, flag);
    char* packed = p.make<char>((int64_t)bytes);
    const int64_t half = a.num_out / 2 / format.panel * format.panel; /* in two parts, as a loader may */
    format.pack(codes.data(), d.data(), mins ? m.data() : nullptr, a.num_in, a.group, flag, 0, half, a.num_out, packed);
    format.pack(codes.data() + half * a.num_in, d.data() + half * per_row, mins ? m.data() + half * per_row : nullptr,
                a.num_in, a.group, flag, half, a.num_out, a.num_out, packed);
    a.weights = packed;
}

/* Bias and residual (perhaps the output itself), each or not. */
template <class Args>
void ends(Problem& p, Args& a) {
    const int64_t rows = p.dims[0];
    if (p.random.coin()) a.bias = p.floats(a.num_out);
    a.ld_out = a.num_out + (p.random.coin() ? 5 : 0);
    a.out = p.floats((rows - 1) * a.ld_out + a.num_out);
    if (p.random.coin()) {
        a.ld_res = a.num_out + (p.random.coin() ? 3 : 0), a.residual = p.floats((rows - 1) * a.ld_res + a.num_out);
    } else if (p.random.coin()) {
        a.residual = a.out, a.ld_res = a.ld_out;
    }
}

void linear_i4(Problem& p) {
    HrArgs_linear_i4 a = {};
    a.form = p.random.whole(HR_FORM_MIDDLE, HR_FORM_FP4);
    integer_linear(p, a, hr_format_i4, a.form, 0, 15, true);
    ends(p, a);
    p.take(HR_OP_linear_i4, a);
}

void linear_i5(Problem& p) {
    HrArgs_linear_i5 a = {};
    a.form = p.random.coin();
    integer_linear(p, a, hr_format_i5, a.form, 0, 31, true);
    ends(p, a);
    p.take(HR_OP_linear_i5, a);
}

void linear_i6(Problem& p) {
    HrArgs_linear_i6 a = {};
    a.form = p.random.coin();
    integer_linear(p, a, hr_format_i6, a.form, 0, 63, true);
    ends(p, a);
    p.take(HR_OP_linear_i6, a);
}

void linear_i8(Problem& p) {
    HrArgs_linear_i8 a = {};
    const bool grouped = p.random.coin(), mins = grouped && p.random.coin();
    integer_linear(p, a, hr_format_i8, mins ? HR_FORM_MIN : HR_FORM_MIDDLE, -128, 127, grouped);
    if (grouped) a.weight_group = a.group | (mins ? HR_I8_MIN : 0);
    ends(p, a);
    p.take(HR_OP_linear_i8, a);
}

void linear_k(Problem& p) {
    HrArgs_linear_k a = {};
    const int64_t rows = rows_of(p);
    a.form = p.random.whole(HR_K_Q2, HR_K_Q6), a.group = 32;
    sizes(p, a, 1 << 18);
    a.num_in = a.num_in > 5000 ? a.num_in : HR_K_BLOCK * p.random.whole(1, 4);
    a.ld_q = a.num_in + 64 * p.random.coin(), a.ld_s = a.num_in / 32 + p.random.coin();
    int8_t* q = p.make<int8_t>(rows * a.ld_q);
    int32_t* sums = p.make<int32_t>(rows * a.ld_s);
    for (int64_t i = 0; i < rows * a.ld_q; i++) q[i] = (int8_t)p.random.whole(-127, 127);
    for (int64_t i = 0; i < rows * a.ld_s; i++) {
        sums[i] = 0;
        for (int64_t k = 0; i % a.ld_s < a.num_in / 32 && k < 32; k++) sums[i] += q[i / a.ld_s * a.ld_q + i % a.ld_s * 32 + k];
    }
    a.q = q, a.sums = sums, a.scales = p.floats(rows * a.ld_s);
    const uint8_t* raw = k_blocks(p, a.form, a.num_out * a.num_in);
    char* packed = p.make<char>((int64_t)hr_format_k.packed_bytes(a.num_out, a.num_in, 32, a.form));
    hr_format_k.pack(raw, nullptr, nullptr, a.num_in, 32, a.form, 0, a.num_out, a.num_out, packed);
    a.weights = packed;
    ends(p, a);
    p.take(HR_OP_linear_k, a);
}

/* Packed weights of every kind, with x as floats. */
void linear_w(Problem& p) {
    HrArgs_linear_w a = {};
    static const HrFormat* const formats[] = {&hr_format_i4, &hr_format_i6, &hr_format_i8, &hr_format_k, &hr_format_f8,
                                              &hr_format_i3, &hr_format_i2, &hr_format_i5};
    const int64_t rows = rows_of(p);
    a.kind = p.random.whole(HR_KIND_I4, HR_KIND_I5);
    sizes(p, a, (4 << 20) / 4 / 13 + p.random.whole(0, 1));
    a.group = 8 * p.random.whole(1, p.random.coin() ? 4 : 40);
    const bool k = a.kind == HR_KIND_K, i4 = a.kind == HR_KIND_I4, i5 = a.kind == HR_KIND_I5, i6 = a.kind == HR_KIND_I6 || i5;
    if (k) a.num_in = (a.num_in + HR_K_BLOCK - 1) / HR_K_BLOCK * HR_K_BLOCK, a.group = 32;
    const bool few = a.kind == HR_KIND_I2 || a.kind == HR_KIND_I3;
    if (a.kind == HR_KIND_I3 || i5) a.group = 2 * a.group;
    a.form = few ? p.random.coin() * HR_FORM_ZERO : i4 ? p.random.whole(0, HR_FORM_FP4) : i6 ? p.random.whole(0, 1) : k ? p.random.whole(HR_K_Q2, HR_K_Q6)
                                                                      : p.random.coin() ? a.group : 0;
    if (a.kind == HR_KIND_I8 && a.form && p.random.coin()) a.form |= HR_I8_MIN;
    const HrFormat& format = *formats[a.kind];
    const int64_t count = a.num_out * a.num_in, groups = (a.num_in + a.group - 1) / a.group;
    std::vector<int8_t> codes((size_t)count);
    for (int8_t& code : codes) {
        code = (int8_t)(i4 ? p.random.whole(0, 15) : i6 ? p.random.whole(0, i5 ? 31 : 63) : p.random.whole(-128, 127));
        if (a.kind == HR_KIND_F8 && (code & 127) == 127) code = 0; /* NaN */
    }
    std::vector<float> d((size_t)(a.num_out * groups)), m(d.size());
    for (float& x : d) x = p.random.number();
    for (float& x : m) x = few ? (float)p.random.whole(0, 15) : p.random.number();
    const void* from = k ? (const void*)k_blocks(p, a.form, count) : codes.data();
    char* packed = p.make<char>((int64_t)format.packed_bytes(a.num_out, a.num_in, a.group, a.form));
    const bool has_min = i4 || i6 ? a.form == HR_FORM_MIN : few || (a.kind == HR_KIND_I8 && a.form & HR_I8_MIN);
    format.pack(from, d.data(), has_min ? m.data() : nullptr, a.num_in, a.group, a.form, 0, a.num_out, a.num_out, packed);
    a.weights = packed;
    a.ld_x = a.num_in + (p.random.coin() ? 7 : 0), a.x = p.floats((rows - 1) * a.ld_x + a.num_in);
    ends(p, a);
    p.take(HR_OP_linear_w, a);
}

void linear_f(Problem& p) {
    HrArgs_linear_f a = {};
    const int64_t rows = rows_of(p);
    sizes(p, a, (4 << 20) / 4 / 13 + p.random.whole(0, 1)); /* thirteen rows fit the kernels' memory, or do not */
    a.type = p.random.whole(0, 2);
    a.ld_x = a.num_in + (p.random.coin() ? 7 : 0), a.x = p.floats((rows - 1) * a.ld_x + a.num_in);
    const void* codes = stored(p, a.type, a.num_out * a.num_in);
    char* packed = p.make<char>((int64_t)hr_format_f.packed_bytes(a.num_out, a.num_in, 0, a.type));
    hr_format_f.pack(codes, nullptr, nullptr, a.num_in, 0, a.type, 0, a.num_out, a.num_out, packed);
    a.weights = packed;
    ends(p, a);
    p.take(HR_OP_linear_f, a);
}

struct Cache {
    int64_t type, kv_heads, head_dim, value_dim, num_slots, key_rows, value_row;
    void *k, *v; /* no v where values are a part of the keys */
    float *k_scale, *v_scale;
};

/* A cache full of NaN, which no result may show. */
Cache cache_of(Problem& p, int64_t num_slots) {
    Cache c = {};
    c.type = p.random.whole(0, 7), c.kv_heads = p.random.whole(1, 3);
    c.head_dim = p.random.rarely(2, p.random.size(1, p.random.rarely(16, 300, 40)), p.random.whole(1, 5) * 8);
    c.value_dim = p.random.coin() ? c.head_dim : p.random.whole(1, p.random.coin() ? c.head_dim : c.head_dim + 20);
    const bool shares = c.value_dim <= c.head_dim && c.type != HR_I8_DOT && p.random.coin();
    c.num_slots = (num_slots + 15) / 16 * 16, p.units = c.num_slots / 16;
    const bool packed = c.type == HR_I4, dot = c.type == HR_I8_DOT;
    c.key_rows = packed ? (c.head_dim + 1) / 2 : dot ? (c.head_dim + 3) / 4 * 4 : c.head_dim;
    c.value_row = packed ? c.value_dim / 32 * 16 + (c.value_dim % 32 < 16 ? c.value_dim % 32 : 16) : dot ? (c.value_dim + 15) / 16 * 16 : c.value_dim;
    for (void** half : {&c.k, &c.v}) {
        if (half == &c.v && shares) break;
        const int64_t count = c.num_slots * c.kv_heads * (half == &c.k ? c.key_rows : c.value_row);
        if (c.type == HR_F32) {
            float* numbers = p.make<float>(count);
            for (int64_t i = 0; i < count; i++) numbers[i] = std::numeric_limits<float>::quiet_NaN();
            *half = numbers;
        } else if (c.type >= HR_I8) {
            *half = p.make<int8_t>(count);
            if (c.type == HR_E5M2) memset(*half, 0x7e, (size_t)count);
        } else {
            uint16_t* numbers = p.make<uint16_t>(count);
            for (int64_t i = 0; i < count; i++) numbers[i] = c.type == HR_F16 ? 0x7e00 : 0x7fc0;
            *half = numbers;
        }
    }
    for (float** half : {&c.k_scale, &c.v_scale}) {
        if (half == &c.v_scale && shares) break;
        *half = p.make<float>(c.num_slots * c.kv_heads);
        for (int64_t i = 0; i < c.num_slots * c.kv_heads; i++) (*half)[i] = std::numeric_limits<float>::quiet_NaN();
    }
    return c;
}

void store_one(Problem& p, const Cache& c, void* to, int64_t at) {
    if (c.type == HR_F32) ((float*)to)[at] = p.random.number();
    else if (c.type == HR_I8) ((int8_t*)to)[at] = (int8_t)p.random.whole(-127, 127);
    else if (c.type == HR_I8_DOT) ((int8_t*)to)[at] = (int8_t)(p.random.whole(-127, 127) ^ (to == c.k ? -128 : 0));
    else if (c.type == HR_I4) ((uint8_t*)to)[at] = (uint8_t)p.random.next();
    else if (c.type > HR_I4) ((uint8_t*)to)[at] = (uint8_t)((p.random.next() & 0x80) | p.random.whole(0, 0x5b));
    else {
        const uint32_t half = c.type == HR_F16 ? 0x3800 : 0x3f00;
        ((uint16_t*)to)[at] = (uint16_t)((p.random.next() & 0x8000) | half | (p.random.next() & 0xff));
    }
}

/* A token's numbers in one slot. */
void fill_slot(Problem& p, const Cache& c, int64_t slot) {
    const int64_t t = slot / 16, i = slot % 16;
    for (int64_t h = 0; h < c.kv_heads; h++) {
        const int64_t head = t * c.kv_heads + h;
        const bool dot = c.type == HR_I8_DOT;
        const int64_t key = head * c.key_rows * 16, value = head * 16 * c.value_row;
        for (int64_t d = 0; d < c.key_rows; d++) store_one(p, c, c.k, key + (dot ? d / 4 * 64 + 4 * i + d % 4 : d * 16 + i));
        for (int64_t d = 0; c.v && d < c.value_row; d++)
            store_one(p, c, c.v, value + (dot ? i / 4 * 4 * c.value_row + 4 * d + i % 4 : i * c.value_row + d));
        for (float* scale : {c.k_scale, c.v_scale}) {
            if (!scale) break;
            if (c.type == HR_I4)
                ((uint16_t*)scale)[head * 32 + i] = 0x3d00, ((uint16_t*)scale)[head * 32 + 16 + i] = 0xbe80;
            else
                scale[head * 16 + i] = 0.01f + (float)(p.random.next() % 100) * 1e-3f;
        }
    }
}

void rope_store(Problem& p) {
    HrArgs_rope_store a = {};
    const int64_t rows = p.dims[0] = p.random.size(1, p.random.rarely(32, 70, 9)), num_positions = 30;
    const int64_t num_copies = p.random.coin() ? p.random.whole(0, 12) : 0;
    Cache c = cache_of(p, p.random.whole(rows + num_copies, rows + 60));
    a.kv_heads = c.kv_heads, a.heads = c.kv_heads * p.random.whole(1, 4), a.head_dim = c.head_dim, a.kv_type = c.type;
    if (p.random.rarely(8, 1, 0)) a.kv_heads = 0; /* queries alone */
    a.value_dim = c.value_dim;
    const int64_t width = (a.heads + a.kv_heads) * a.head_dim + (c.v ? a.kv_heads * a.value_dim : 0);
    a.ld_x = width + (p.random.coin() ? 9 : 0), a.x = p.floats((rows - 1) * a.ld_x + width);
    if (p.random.coin()) a.q_norm = p.floats(a.head_dim), a.k_norm = p.floats(a.head_dim);
    a.eps = 1e-6, a.offset = p.random.coin() ? 1.0 : 0.0;
    a.pairs = p.random.whole(0, 2) * a.head_dim / 4, a.first = p.random.whole(0, a.head_dim - 2 * a.pairs);
    a.cos = p.floats(num_positions * (a.pairs + 1)), a.sin = p.floats(num_positions * (a.pairs + 1));
    a.positions = p.wholes(rows, 0, num_positions - 1);
    int32_t* slots = p.make<int32_t>(rows);
    const int64_t first = p.random.whole(0, c.num_slots - rows - num_copies);
    for (int64_t row = 0; row < rows; row++) slots[row] = (int32_t)(first + (rows % 7 ? row * 7 + 3 : row) % rows);
    if (num_copies) { /* to slots behind those, of rows one by one */
        int32_t *begin = p.make<int32_t>(rows + 1), *copies = p.make<int32_t>(num_copies);
        for (int64_t row = 0; row <= rows; row++) begin[row] = (int32_t)(row * num_copies / rows);
        for (int64_t i = 0; i < num_copies; i++) copies[i] = (int32_t)(first + rows + i);
        a.copy_begin = begin, a.copy_slots = copies;
    }
    a.slots = slots, a.k = c.k, a.v = c.v;
    if (p.random.coin()) a.k_mean = p.floats(c.kv_heads * a.head_dim);
    if (c.type >= HR_I8 && c.type != HR_E5M2) a.k_scale = c.k_scale, a.v_scale = c.v_scale;
    p.take(HR_OP_rope_store, a);
}

void attention(Problem& p) {
    HrArgs_attention a = {};
    const int64_t sizes[] = {16, 32, 4, 7, 1, 48}, seqs = p.dims[HR_DIM_SEQS] = p.random.whole(1, 3);
    a.block_size = sizes[p.random.next() % (p.random.edges ? 6 : 4)];
    const int64_t longest = p.random.rarely(2, p.random.rarely(32, 1100, 80), 330), blocks_each = (longest + a.block_size - 1) / a.block_size;
    Cache c = cache_of(p, seqs * blocks_each * a.block_size);
    a.kv_heads = c.kv_heads, a.head_dim = c.head_dim, a.value_dim = c.value_dim, a.kv_type = c.type;
    a.heads = c.kv_heads * p.random.rarely(64, c.head_dim > 16 ? 5 : p.random.whole(190, 195), p.random.whole(1, 4));
    a.scale = 0.25, a.window = p.random.coin() ? 0 : p.random.size(1, 200) * (p.random.coin() ? 1 : -1), a.softcap = p.random.coin() ? 0.0 : 5.0, a.ahead = p.random.coin() ? 0 : p.random.size(1, 200);
    int32_t *row_begin = p.make<int32_t>(seqs + 1), *start = p.make<int32_t>(seqs), *blocks = p.make<int32_t>(seqs * blocks_each);
    int32_t *table_begin = p.make<int32_t>(seqs), *seen = p.random.coin() ? p.make<int32_t>(3 * 80) : nullptr; /* as of pictures */
    row_begin[0] = 0;
    for (int64_t s = 0; s < seqs; s++) {
        int64_t chunk = p.random.coin() ? 1 : p.random.size(2, p.random.rarely(32, 75, 40));
        if (p.random.next() % 8 == 0 && (row_begin[s] || s + 1 < seqs)) chunk = 0; /* none of its rows is read */
        start[s] = (int32_t)p.random.whole(0, p.random.coin() ? std::min<int64_t>(20, longest - chunk) : longest - chunk);
        row_begin[s + 1] = row_begin[s] + (int32_t)chunk;
        for (int64_t r = chunk; seen && r-- > 0;) seen[row_begin[s] + r] = r + 1 < chunk && p.random.coin() ? seen[row_begin[s] + r + 1] : start[s] + (int32_t)r;
        table_begin[s] = (int32_t)(s * blocks_each);
        for (int64_t b = 0; b < blocks_each; b++)
            blocks[s * blocks_each + b] = (int32_t)((blocks_each - 1 - b) * seqs + s);
        for (int64_t at = 0; at < start[s] + chunk; at++) {
            bool seen = a.window > 0 ? at > start[s] - a.window : a.window == 0 || at >= start[s] - start[s] % -a.window; /* by the first row of the chunk, or a later one */
            const int64_t slot = blocks[s * blocks_each + at / a.block_size] * a.block_size + at % a.block_size;
            if (seen) fill_slot(p, c, slot);
        }
    }
    const int64_t rows = p.dims[HR_DIM_ROWS] = row_begin[seqs];
    a.ld_x = (a.heads + 2 * a.kv_heads) * a.head_dim, a.x = p.floats(rows * a.ld_x);
    a.ld_out = a.heads * a.value_dim, a.out = p.make<float>(rows * a.ld_out);
    a.k = c.k, a.v = c.v, a.row_begin = row_begin, a.start = start, a.seen = seen, a.table_begin = table_begin, a.blocks = blocks;
    if (c.type >= HR_I8 && c.type != HR_E5M2) a.k_scale = c.k_scale, a.v_scale = c.v_scale;
    if (p.random.coin()) a.sinks = p.floats(a.heads);
    if (p.random.coin()) a.ld_bias = 2 * longest - 1, a.bias = p.floats(a.heads * a.ld_bias);
    p.take(HR_OP_attention, a);
}

/* Experts that are copies of one layer in all but their output: each has some of its rows. */
template <class Args>
void each(Problem& p, const Args& layer, int64_t op) {
    HrArgs_linear_each a = {};
    const int64_t rows = p.dims[0], experts = p.random.whole(1, 5);
    int32_t *begin = p.make<int32_t>(experts + 1), *ids = p.make<int32_t>(experts);
    for (int64_t e = 0; e <= experts; e++) begin[e] = (int32_t)(e == experts ? rows : rows * p.random.whole(e, e + 1) / experts);
    std::sort(begin, begin + experts + 1), begin[0] = 0;
    a.count = p.random.whole(1, experts), a.op = op, a.begin = begin;
    if (p.random.rarely(8, 1, 0)) a.begin = nullptr, a.count = 1; /* all rows; several would write the same ones */
    for (int64_t i = 0; i < a.count; i++) ids[i] = (int32_t)i;
    Args* args = p.make<Args>(a.count);
    for (int64_t i = 0; i < a.count; i++) args[i] = layer, args[i].dim = 0, args[i].residual = nullptr;
    a.experts = ids, a.args = args, a.counters = p.make<int64_t>(8 * (a.count + 1));
    memset(a.counters, 0, 64 * (size_t)(a.count + 1));
    p.take(HR_OP_linear_each, a);
}

template <class Args>
Args taken(Problem& p, Builder build) {
    Args args;
    build(p);
    memcpy(&args, p.args.data(), sizeof args);
    return args;
}

void linear_each(Problem& p) {
    switch (p.random.next() % 5) {
        case 0: return each(p, taken<HrArgs_linear_i4>(p, linear_i4), HR_OP_linear_i4);
        case 1: return each(p, taken<HrArgs_linear_i8>(p, linear_i8), HR_OP_linear_i8);
        case 2: return each(p, taken<HrArgs_linear_w>(p, linear_w), HR_OP_linear_w);
        case 3: return each(p, taken<HrArgs_linear_i5>(p, linear_i5), HR_OP_linear_i5);
        default: return each(p, taken<HrArgs_linear_f>(p, linear_f), HR_OP_linear_f);
    }
}

}  // namespace

const std::vector<Named> layer_problems = {
#define LAYER(op) {#op, op},
    LAYER(linear_i4) LAYER(linear_i5) LAYER(linear_i6) LAYER(linear_i8) LAYER(linear_k) LAYER(linear_w) LAYER(linear_f) LAYER(rope_store) LAYER(attention) LAYER(linear_each)
};
