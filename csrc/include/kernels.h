/* The one header of the native core: the operators, their arguments, and the table that each ISA fills.
 *
 * Knows pointers, strides and threads; must not know Python, torch, models or requests. Every operator is
 *
 *     void op(const HrArgs_<op>* args, HrTask* task)
 *
 * and is called by all threads of the team at once; the threads share the work out among themselves (`hr_next`, or by
 * `tid`). The caller puts a barrier behind every operator. Arguments are flat structs of 8-byte fields, so that the
 * binding can fill any of them from one schema (HR_OPS below is that schema).
 *
 * THE LAW. A row's bits depend on that row's problem only: never on the number of rows, on its place among them, or on
 * the number of threads; and they are the same for every ISA. So: rows, output columns and heads may be split among
 * threads, a reduction may not. Every float result is defined below by an exact order of IEEE operations (fma where
 * "fma" is written, never elsewhere: the build has -ffp-contract=off). "lanes": 16 partial sums, lane i taking elements
 * i, i + 16, ... in order by fma or add, missing elements left out; then the tree l[i] += l[i+8], l[i] += l[i+4],
 * l[i] += l[i+2], l[i] += l[i+1].
 *
 * A number that is not finite must come out as NaN or infinity again, never be clamped or masked into a sound one:
 * the runner looks at the last hidden state to find the request it belongs to, or where nobody reads that, at what the
 * row put into the cache.
 */
#ifndef HEADRACE_KERNELS_H
#define HEADRACE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { HR_F32 = 0, HR_F16 = 1, HR_BF16 = 2, HR_I8 = 3 };             /* types of tables, weights and the KV cache */
enum { HR_I4 = 4, HR_E4M3 = 5, HR_E5M2 = 6, HR_I8_DOT = 7 };          /* of the KV cache alone */
/* Activations; the last is of `gated` alone: with g = min(x, 7), u = y held in [-7, 7]: g / (1 + exp(-1.702 g)) * (u + 1). */
enum { HR_SILU = 0, HR_GELU = 1, HR_GELU_TANH = 2, HR_RELU = 3, HR_SIGMOID = 4, HR_RELU2 = 5, HR_IDENTITY = 6, HR_CLAMPED_SWIGLU = 7 };
enum { HR_SOFTMAX = 0, HR_SIGMOID_SCORE = 1 };                        /* scores of experts */
/* What a code of i4, i5 or i6 stands for: code - 8 (i5: code - 16, i6: code - 32); code, with minima; or (i4 alone) an entry of a table:
 * NF4's levels (QLoRA, arXiv 2305.14314), twice E2M1's numbers, IQ4_NL's, bitsandbytes' FP4 (isa/linear_layout.h). Levels of
 * NF4 and FP4 are floats up to 1. Of i2 and i3: code - 2 or code - 4; or code - zero, a whole number from 0 to 15 of each group. */
enum { HR_FORM_MIDDLE = 0, HR_FORM_MIN = 1, HR_FORM_NF4 = 2, HR_FORM_E2M1 = 3, HR_FORM_IQ4_NL = 4, HR_FORM_FP4 = 5, HR_FORM_ZERO = 6 };
/* Added to a form of i4 for unpack_row: what int8 activations are multiplied with. */
enum { HR_BESIDE_INT8 = 64 };
enum { HR_I8_MIN = 1 }; /* added to a weight_group, a multiple of 8: minima beside the scales */
/* What the weights of linear_w are, by their packers below. */
enum { HR_KIND_I4 = 0, HR_KIND_I6 = 1, HR_KIND_I8 = 2, HR_KIND_K = 3, HR_KIND_F8 = 4, HR_KIND_I3 = 5, HR_KIND_I2 = 6, HR_KIND_I5 = 7 };
/* GGUF's K-quants, by their number of bits: forms of k, and types of tables (rows as they lie in the file). */
enum { HR_K_Q2 = 12, HR_K_Q3 = 13, HR_K_Q4 = 14, HR_K_Q5 = 15, HR_K_Q6 = 16 };
/* `dims`: those from FREE on are written by operators. */
enum { HR_DIM_ROWS = 0, HR_DIM_SEQS = 1, HR_DIM_LOGITS = 2, HR_DIM_FREE = 3, HR_DIM_PAIRS = 3, HR_DIM_OWN_PAIRS = 4, HR_NUM_DIMS = 5 };
enum { HR_MAX_EXPERTS = 8192, HR_MAX_KEY_DIM = 8192 };
enum { HR_LANES = 16, HR_SPAN = 128 };
enum { HR_MAX_GROUP = 1 << 17 };                                      /* inputs with one scale: 127 * 128 of each fit int32 */
enum { HR_SCRATCH_BYTES = 8 << 20 };                                  /* of each thread; touched only as it is used */

/* A call as one thread sees it. `dims` are the sizes that change from step to step; operators may write those
 * from HR_DIM_FREE on. `counter` is 0 when the operator begins. */
typedef struct {
    int32_t tid, num_threads;
    int64_t* dims;
    int64_t* counter;
    void* scratch; /* HR_SCRATCH_BYTES, on a cache line, private to the thread, unspecified contents */
} HrTask;

/* The next piece of work: 0, 1, 2, ... over all threads together. */
static inline int64_t hr_next(HrTask* task) { return __atomic_fetch_add(task->counter, 1, __ATOMIC_RELAXED); }

/* The rows of a step. Chunk c is rows row_begin[c] ... row_begin[c+1]-1 of one sequence, at positions start[c], ...;
 * its block ids are blocks[table_begin[c]], ... Position p lies in slot blocks[p / block_size] * block_size + p %
 * block_size. num_chunks is dims[HR_DIM_SEQS]. For attention a chunk may have no rows. */

/* KV cache of one layer. Slots come in tiles of 16: with t = slot / 16, i = slot % 16,
 *     key   (slot, h, d) at k[((t * kv_heads + h) * head_dim + d) * 16 + i]
 *     value (slot, h, d) at v[((t * kv_heads + h) * 16 + i) * value_dim + d]
 * Where v is NULL, a value is the first value_dim numbers of its key, with the key's scale and least.
 * And for HR_I8, where x = code * scale: k_scale and v_scale (float) at [(t * kv_heads + h) * 16 + i].
 * A token's codes of one head: scale = amax / 127, code = round_to_even(x * (127 / amax)), both 0 if amax is 0.
 * HR_F16, HR_BF16 and HR_E5M2 (the high byte of an f16) are rounded to nearest even, beyond their range to infinity.
 * HR_E4M3 has scales as HR_I8 has them, with 1.75 in place of 127: its code is x * (1.75 / amax) rounded to nearest even
 * to bits 14 ... 7 of an f16 (a 256th of what E4M3 calls it).
 *
 * HR_I4 packs two channels of one token in a byte, so that no two tokens share one:
 *     key   (slot, h, channels 2b and 2b + 1, the low bits first) at k[((t * kv_heads + h) * ceil(head_dim / 2) + b) * 16 + i]
 *     value (slot, h, channels 32g + j and 32g + 16 + j)          at v[((t * kv_heads + h) * 16 + i) * row + 16g + j]
 * with j < 16 and row = 16 * floor(value_dim / 32) + min(value_dim mod 32, 16); channels that are not there are 0.
 * x = code * step + least, bf16 both: with n = (t * kv_heads + h) * 32 + i, step is ((uint16_t*)k_scale)[n] and least [n + 16].
 *     least = bf16(min), step = bf16((max - min) / 15), code = round_to_even((x - least) * (1 / step)) held in 0 ... 15
 * (0 where step is 0). Both are NaN where an x is not finite.
 *
 * HR_I8_DOT has the codes and scales of HR_I8, four together for integer products; v is not NULL:
 *     key   code + 128 (slot, h, d) at k[((t * kv_heads + h) * ceil(head_dim / 4) + d / 4) * 64 + 4 * i + d % 4]
 *     value code       (slot, h, d) at v[((t * kv_heads + h) * 4 + i / 4) * row + 4 * d + i % 4]
 * with row = 4 * value_dim rounded up to a multiple of 64; bytes of channels that are not there may be anything.
 *
 * Where k_mean [kv_heads][head_dim] is given to rope_store, it is subtracted from the keys before they are stored: that
 * moves all scores of a query alike, which a softmax does not see. */

/* Quantised rows ("q"): int8 codes [rows][ld_q], padded with zeros from `width` to ld_q; by row and group of `group`
 * inputs (the last may be shorter) scales float [rows][ld_s] and sums of codes int32 [rows][ld_s].
 *     amax = max |x| over the group, plus the sum of x * 0 (NaN where x is not finite)
 *     scale = amax / 127, inv = amax > 0 ? 127 / amax : 0, code = round_to_even(x * inv) held in [-127, 127]
 * ld_q is a multiple of 64 and at least width rounded up to 64. Where q is NULL nothing is quantised; where out is NULL
 * only q is written. */
#define HR_Q_FIELDS(P, I, F) P(int8_t*, q) I(ld_q) P(float*, scales) P(int32_t*, sums) I(ld_s) I(group)

/* out[r] = table[ids[r]] (widened) * scale; the product is left out for scale == 1. K-quants widened are code * (d * scale of
 * the code) + dm * minimum: only the sum is not exact. Where `file` is not -1, the table lies there from byte `place` on, and
 * rows are read from the descriptor: a mapping would keep 2 MiB in memory for each of them where the page cache has such
 * pages. Rows that can not be read are NaN. */
#define HR_FIELDS_embedding(P, I, F)                                                                                  \
    I(dim) P(const int32_t*, ids) P(const void*, table) I(file) I(place) I(type) I(width) F(scale) P(float*, out) I(ld_out)

/* out[r] = x[rows[r]] */
#define HR_FIELDS_select_rows(P, I, F) \
    I(dim) P(const int32_t*, rows) P(const float*, x) I(ld_x) I(width) P(float*, out) I(ld_out)

/* out[r][j] = x[r][columns[e][j]]; no row of out lies in x. columns: [count][width], an order for each expert e, which has the
 * rows begin[e] ... begin[e + 1] - 1; without a begin there is one. */
#define HR_FIELDS_permute(P, I, F)                                                                          \
    I(dim) P(const int32_t*, columns) P(const int32_t*, begin) I(count) P(const float*, x) I(ld_x) I(width) P(float*, out) I(ld_out) HR_Q_FIELDS(P, I, F)

/* For each of `heads` pieces of `width` in a row, whose weights are weight_step numbers apart (0: the same for all): ss = lanes of fma(x, x, .); rms = sqrt(ss / width + eps);
 * y = (x / rms) * gain, gain = offset == 0 ? weight : weight + offset; without a weight y = x / rms. q takes the whole row (heads must be 1). */
#define HR_FIELDS_rms_norm(P, I, F)                                                                              \
    I(dim) P(const float*, x) I(ld_x) P(const float*, weight) I(weight_step) F(eps) F(offset) I(heads) I(width) P(float*, out) I(ld_out) \
    HR_Q_FIELDS(P, I, F)

/* mean = lanes sum / width; d = x - mean; var = lanes of fma(d, d, .) / width; y = fma(d / sqrt(var + eps), weight, bias);
 * without a bias it is 0, without a weight 1 */
#define HR_FIELDS_layer_norm(P, I, F)                                                                        \
    I(dim) P(const float*, x) I(ld_x) P(const float*, weight) P(const float*, bias) F(eps) I(width) P(float*, out) \
    I(ld_out) HR_Q_FIELDS(P, I, F)

/* out = x + y. May be in place. */
#define HR_FIELDS_add(P, I, F) \
    I(dim) P(const float*, x) I(ld_x) P(const float*, y) I(ld_y) I(width) P(float*, out) I(ld_out)

/* out = cap * tanh(x / cap) */
#define HR_FIELDS_softcap(P, I, F) I(dim) P(const float*, x) I(ld_x) I(width) F(cap) P(float*, out) I(ld_out)

#define HR_FIELDS_quantize(P, I, F) I(dim) P(const float*, x) I(ld_x) I(width) HR_Q_FIELDS(P, I, F)

/* y = act(x) */
#define HR_FIELDS_activation(P, I, F) \
    I(dim) P(const float*, x) I(ld_x) I(width) I(kind) P(float*, out) I(ld_out) HR_Q_FIELDS(P, I, F)

/* y = fma(positive * x, x, beta * x) where x > 0, else fma(negative, e, beta * x) with e = exp(x) - 1 - x: below -0.34 by these
 * subtractions, else x * x times the polynomial that exp has there */
#define HR_FIELDS_xielu(P, I, F)                                                                                       \
    I(dim) P(const float*, x) I(ld_x) I(width) F(positive) F(negative) F(beta) P(float*, out) I(ld_out) HR_Q_FIELDS(P, I, F)

/* y[i] = act(x[i]) * x[width + i]; x has 2 * width numbers a row */
#define HR_FIELDS_gated(P, I, F) \
    I(dim) P(const float*, x) I(ld_x) I(width) I(kind) P(float*, out) I(ld_out) HR_Q_FIELDS(P, I, F)

/* y[i] = x[i] * act(gate[i]); of a gate_width of 1, its one number goes with all. Then + residual if that is given. */
#define HR_FIELDS_multiply(P, I, F)                                                                                    \
    I(dim) P(const float*, x) I(ld_x) I(width) P(const float*, gate) I(ld_gate) I(gate_width) I(kind) P(const float*, residual) \
    I(ld_res) P(float*, out) I(ld_out)

/* y = x * factor, then + residual if that is given. */
#define HR_FIELDS_scale(P, I, F) \
    I(dim) P(const float*, x) I(ld_x) I(width) F(factor) P(const float*, residual) I(ld_res) P(float*, out) I(ld_out)

/* x: rows of heads + kv_heads heads of head_dim numbers (queries, keys), then unless v is NULL kv_heads of value_dim (values).
 * Per head: norm as rms_norm if q_norm / k_norm is given; then of queries and keys the numbers first ... first + 2 * pairs - 1 turned by
 * cos/sin[position] [pairs] (none if pairs is 0):
 *     left' = fma(left, cos, -(right * sin)), right' = fma(right, cos, left * sin), partners are first + i and first + i + pairs.
 * Queries are left in place in x, keys and values go to slot slots[r] of the cache, and, unless copy_begin is null, to
 * slots copy_slots[copy_begin[r]] ... copy_slots[copy_begin[r + 1] - 1] too. */
#define HR_FIELDS_rope_store(P, I, F)                                                                                  \
    I(dim) P(float*, x) I(ld_x) I(heads) I(kv_heads) I(head_dim) I(value_dim) P(const float*, q_norm) P(const float*, k_norm) F(eps) \
    F(offset) P(const float*, cos) P(const float*, sin) I(pairs) I(first) P(const int32_t*, positions) P(const int32_t*, slots) \
    P(const int32_t*, copy_begin) P(const int32_t*, copy_slots)                                                        \
    I(kv_type) P(void*, k) P(void*, v) P(float*, k_scale) P(float*, v_scale) P(const float*, k_mean)

/* out[r][h * step_out + j] = x[r][h * step_x + j], j < width, for each of `heads` pieces of a row; none of out lies in x. */
#define HR_FIELDS_spread(P, I, F) \
    I(dim) P(const float*, x) I(ld_x) I(step_x) I(heads) I(width) P(float*, out) I(ld_out) I(step_out)

/* Attention of queries x (heads first in a row, as rope_store leaves them) -> out [rows][heads * value_dim].
 * Row at position p sees keys max(0, p - window + 1) ... p (window 0: all; below 0: p - p mod -window ... p), and those of the
 * next `ahead` positions that its chunk has; where `seen` is given, keys up to seen[row] instead, which do not fall. For one row and head, with q the query:
 *   score_j = chain over d = 0, 1, ... of fma(q[d], k_j[d], .) starting from 0 (where there are scales, k_j[d] is the
 *             code), times scale (where there are scales: times (scale * k_scale_j)); HR_I4 then fma((scale * least_j),
 *             lanes sum of q, .); softcap c > 0: c * tanh(score / c). Where there is a bias [heads][ld_bias], at last +
 *             bias[h][j - p + ld_bias / 2]: ld_bias is 2 P - 1, and no position of the step is P or more.
 *   m and l begin as -infinity and 0, or, where there are sinks [heads], as the head's sink and 1: it weighs like a key that all
 *   rows see and whose value is 0.
 *   Keys are walked in spans of HR_SPAN positions counted from 0; spans without a visible key are left out.
 *   In a span: m' = max(m, visible scores); alpha = exp(m - m'); w_j = exp(score_j - m'), 0 if hidden;
 *   l = l * alpha + (lanes over the span's keys, lane = j % 16, by plain additions, then the tree) of w_j;
 *   acc[d] = acc[d] * alpha, then over visible keys in order acc[d] = fma(w_j, v_j[d], acc[d]) (where there are scales:
 *   w_j * v_scale_j is rounded first, v_j[d] the code). HR_I4: b = b * alpha + (lanes by fma, then the tree) of
 *   w_j * least_j, from 0. At last out[d] = acc[d] / l, or (acc[d] + b) / l.
 *   HR_I8_DOT: a query's codes are 128 * high + low = round_to_even(q * inv) held in [-16256, 16256], with amax as in
 *   HR_Q_FIELDS, inv = amax > 2^-100 ? 16256 / amax : 0, -64 <= low < 64; score_j = fma(sum of high * code, 128, sum of low * code)
 *   times (((float)scale * (amax / 16256)) * k_scale_j), the sums being exact and rounded to floats. With u_j = w_j * v_scale_j
 *   of the visible keys of a span and top their amax: inv = top > 2^-100 ? 255 / top : 0, code_j = round_to_even(min(u_j * inv,
 *   255) - 128) + 128, and acc[d] = fma(exact sum of code_j * v_j[d], top / 255, acc[d] * alpha).
 * Slots that no visible key occupies hold anything at all, NaN included, and must not matter; of blocks, those wholly behind
 * the window of a chunk's first row may be any numbers. block_size may be any
 * number; only multiples of 16 need be fast (others gather 16 keys into scratch). */
#define HR_FIELDS_attention(P, I, F)                                                                                  \
    I(dim) P(const float*, x) I(ld_x) I(heads) I(kv_heads) I(head_dim) I(value_dim) F(scale) I(window) I(ahead) F(softcap) P(const float*, sinks) P(const float*, bias) I(ld_bias) I(kv_type) \
    P(const void*, k) P(const void*, v) P(const float*, k_scale) P(const float*, v_scale) I(block_size)                 \
    P(const int32_t*, row_begin) P(const int32_t*, start) P(const int32_t*, seen) P(const int32_t*, table_begin) P(const int32_t*, blocks) \
    P(float*, out) I(ld_out)

/* Linear layers. y[r][n] over n < num_out; then + bias[n] if bias is given, then + residual[r][n] if that is given
 * (residual may be out itself). `weights` is what the format's pack wrote.
 *
 * linear_i4, _i5, _i6, _i8: acc = 0; over groups g of the *activations* in order, isum exact in int32:
 *     linear_i4, _i5, _i6:           isum = sum of a * what the code stands for under `form`
 *                                   acc = fma((float)isum * sa, d[n][g], acc); with minima then
 *                                   acc = fma((float)suma * sa, m[n][g], acc)        (weight = code * d + m)
 *     linear_i8, weight_group > 0:  acc = fma((float)isum * sa, d[n][g], acc)         (weight = code * d, code signed); with
 *                                   minima (weight_group is the group plus HR_I8_MIN) then as linear_i4
 *     linear_i8, weight_group = 0:  acc = fma((float)isum, sa, acc); at the end y = acc * d[n]
 *   with sa, suma the scale and sum of the row's group; under NF4 and FP4 the levels are the nearest of 127ths, counted in
 *   them, and sa is the scale * (1 / 127). Groups of activations and weights are the same (`group`, at most
 *   HR_MAX_GROUP),
 *   except that weight_group = 0 means one d for each output.
 *     linear_k:                     as linear_i4, over the groups of the weights, of 16 or 32 inputs, which all lie in one of
 *                                   the activations' 32 (`group` is 32; suma is the sum of the codes of those 16 or 32);
 *                                   d = d of the block * scale, m = dm of the block * minimum, both exact. num_in is a
 *                                   multiple of 256
 * linear_f: y = chain over k = 0, 1, ... of fma(x[k], w[n][k], .) starting from 0; type says how weights are stored.
 * linear_w: the same of weights that are codes, packed as `kind` says: w is what the packer's unpack_row gives. Activations are
 *   not quantised; group and form are the packer's group and flag. */
#define HR_FIELDS_linear_i4(P, I, F)                                                                                   \
    I(dim) P(const int8_t*, q) I(ld_q) P(const float*, scales) P(const int32_t*, sums) I(ld_s) I(group)                 \
    P(const void*, weights) I(num_in) I(num_out) I(form) P(const float*, bias) P(const float*, residual) I(ld_res) P(float*, out) I(ld_out)
#define HR_FIELDS_linear_i5(P, I, F) HR_FIELDS_linear_i4(P, I, F)
#define HR_FIELDS_linear_i6(P, I, F) HR_FIELDS_linear_i4(P, I, F)
#define HR_FIELDS_linear_k(P, I, F) HR_FIELDS_linear_i4(P, I, F)
#define HR_FIELDS_linear_i8(P, I, F)                                                                                   \
    I(dim) P(const int8_t*, q) I(ld_q) P(const float*, scales) P(const int32_t*, sums) I(ld_s) I(group)                 \
    P(const void*, weights) I(num_in) I(num_out) I(weight_group) P(const float*, bias) P(const float*, residual) I(ld_res) P(float*, out) I(ld_out)
#define HR_FIELDS_linear_f(P, I, F)                                                                                    \
    I(dim) P(const float*, x) I(ld_x) P(const void*, weights) I(type) I(num_in) I(num_out) P(const float*, bias)        \
    P(const float*, residual) I(ld_res) P(float*, out) I(ld_out)

#define HR_FIELDS_linear_w(P, I, F)                                                                                    \
    I(dim) P(const float*, x) I(ld_x) P(const void*, weights) I(kind) I(group) I(form) I(num_in) I(num_out)            \
    P(const float*, bias) P(const float*, residual) I(ld_res) P(float*, out) I(ld_out)

/* Mixture of experts. A pair is a row and one of the experts that it chose; pairs lie expert by expert, rows ascending.
 *
 * ids[r], weights[r]: the top_k experts of a row with the greatest choice, equal ones by lower id. With
 *     score SOFTMAX: e[i] = exp(x[i] - max x), s[i] = e[i] / lanes sum of e;  SIGMOID: e[i] = s[i] = 1 / (1 + exp(-x[i]))
 * the choice is x[i], or s[i] + bias[i] with a bias. Of num_groups > 1 groups of num_experts / num_groups experts only those
 * top_groups take part whose group_top (1 or 2) greatest choices have the greatest sum, equal ones the lower group.
 * weight = e / sum, times scale unless that is 1, times factors[i] where they are given; sum is, with renormalise, that of the chosen e (lanes, in the order of ids),
 * else that of all e (SOFTMAX), or 1 (SIGMOID). */
#define HR_FIELDS_route(P, I, F)                                                                                        \
    I(dim) P(const float*, x) I(ld_x) I(num_experts) I(top_k) I(score) P(const float*, bias) I(num_groups) I(top_groups) \
    I(group_top) I(renormalise) F(scale) P(const float*, factors) P(int32_t*, ids) P(float*, weights)
/* begin[e] ... begin[e + 1] - 1 are the pairs of expert e; rows[p], pair_weights[p]: the row of a pair and its weight;
 * places[r * top_k + j]: the pairs of a row, ascending. dims[HR_DIM_PAIRS] = their number. num_experts is at most HR_MAX_EXPERTS.
 * Of a rank that has the experts first ... first + num_own - 1 alone: own_begin[i] = begin[first + i] - begin[first] for i <= num_own,
 * and dims[HR_DIM_OWN_PAIRS] = own_begin[num_own]; where own_begin is NULL, 0. */
#define HR_FIELDS_moe_group(P, I, F)                                                                                 \
    I(dim) P(const int32_t*, ids) P(const float*, weights) I(top_k) I(num_experts) P(int32_t*, begin) P(int32_t*, rows) \
    P(int32_t*, places) P(float*, pair_weights) I(first) I(num_own) P(int32_t*, own_begin)
/* Row i of the target is row list[i] of the source: codes, scales and sums (q), or floats (x) where q is NULL, times
 * weights[i] if these are given. Where `from` is given, list and weights begin at their number *from. */
#define HR_FIELDS_moe_gather(P, I, F)                                                                                \
    I(dim) P(const int32_t*, list) P(const int32_t*, from) P(const float*, weights) P(const float*, x) I(ld_x) I(width) P(float*, out) I(ld_out) \
    P(const int8_t*, q) I(ld_q) P(const float*, scales) P(const int32_t*, sums) I(ld_s) P(int8_t*, to_q) P(float*, to_scales) \
    P(int32_t*, to_sums)
/* Linear layers of the kind `op` (a number of the list HR_OPS), one for each of `count` experts: args[i] are the arguments of
 * expert experts[i], of which dim and residual are 0, and whose row 0 is pair 0. It computes the pairs of its expert. The
 * tape fills in fn. counters: (count + 1) * 8 numbers, 0 before and after. Without a begin all of them compute all rows of dim. */
#define HR_FIELDS_linear_each(P, I, F)                                                                                \
    I(dim) I(op) P(const void*, fn) P(const void*, args) P(const int32_t*, experts) I(count) P(const int32_t*, begin)  \
    P(int64_t*, counters)
/* y = chain over a row's pairs p = places[r * top_k + j], ascending, of fma(weights[p], x[p], .) from 0, or of additions
 * without weights; out = y + residual if that is given. */
#define HR_FIELDS_moe_combine(P, I, F)                                                                             \
    I(dim) P(const int32_t*, places) P(const float*, weights) I(top_k) P(const float*, x) I(ld_x) I(width)          \
    P(const float*, residual) I(ld_res) P(float*, out) I(ld_out)

/* Adapters of a linear layer whose outputs are `parts` layers, part p those from begins[p] on. tiles: their number, and for each
 * tile its first place in `list`, 1 to 4 rows, and their slot; a row is in one tile at most. table [slots][parts] of {const void* a,
 * const void* b, int32 rank, int32 type, double scale, const float* gains}: a [rank][num_in], b [rank][width of the part] of HR_F32, HR_F16 or HR_BF16, both with rows
 * padded by zeros to multiples of 16 numbers. Rank 0: the slot has no adapter there. adapt_in writes for each row of a tile
 *     out[r][p * max_rank + i] = (lanes of fma(a[i][k], x[r][k], .)) * scale
 * adapt_out adds to y = out[r][begins[p] + j] the chain over i of fma(x[r][p * max_rank + i], b[i][j], .) from 0; of a part with
 * gains [2][width, padded as b is] that chain's end is c = fma(scale, fma(gains[0][j], y - residual, gains[1][j]), c): the
 * residual, if that is given, is already in y. */
#define HR_FIELDS_adapt_in(P, I, F)                                                                                   \
    I(dim) P(const int32_t*, tiles) P(const int32_t*, list) P(const void*, table) I(parts) I(max_rank) P(const float*, x) I(ld_x) \
    I(num_in) P(float*, out) I(ld_out)
#define HR_FIELDS_adapt_out(P, I, F)                                                                                  \
    I(dim) P(const int32_t*, tiles) P(const int32_t*, list) P(const void*, table) I(parts) I(max_rank) P(const int64_t*, begins) \
    P(const float*, x) I(ld_x) P(const float*, residual) I(ld_res) P(float*, out) I(ld_out)

/* Layers with a state: float32, a slot for each state. Chunk c begins with the state of slot state_in[c] (-1: zeros), which
 * advances row by row; the state after row r goes to slot state_out[r] unless that is -1. That slot may be the one that the chunk
 * reads; no other chunk may read or write it. The bits of a row depend on its sequence up to it alone, however it is cut.
 *
 * conv: the inputs of channel j of a sequence are x_0, x_1, ..., those before it 0, and its state the last size - 1 of them:
 *     y = bias[j] (without one 0), then in order k = 0 ... size - 1: y = fma(weight[k][j], x_(t - size + 1 + k), y); out = act(y)
 * with the kind HR_SILU or HR_IDENTITY. state: [slots][size - 1][width]. */
#define HR_STATE_FIELDS(P) P(float*, state) P(const int32_t*, row_begin) P(const int32_t*, state_in) P(const int32_t*, state_out)
#define HR_FIELDS_conv(P, I, F)                                                                                        \
    I(dim) P(const float*, x) I(ld_x) I(width) I(size) P(const float*, weight) P(const float*, bias) I(kind) HR_STATE_FIELDS(P) \
    P(float*, out) I(ld_out)
/* state: [slots][heads][key_dim][value_dim]; key_dim is at most HR_MAX_KEY_DIM. Head h of the values goes with head h / (heads /
 * key_heads) of queries and keys, or if `tiled` with head h mod key_heads; heads is a multiple of key_heads. For a head S, with q, k of key_dim and v of value_dim numbers:
 *     S[d][j] = S[d][j] * exp(decay[d]), of a decay_width of 1 the head's one number, else key_dim of them
 *     u[j] = (v[j] - chain over d of fma(S[d][j], k[d], .) from 0) * beta
 *     S[d][j] = fma(k[d], u[j], S[d][j])
 *     out[j] = (chain over d of fma(S[d][j], q[d], .) from 0) * scale */
#define HR_FIELDS_delta(P, I, F)                                                                                       \
    I(dim) P(const float*, query) I(ld_query) P(const float*, key) I(ld_key) P(const float*, value) I(ld_value)           \
    P(const float*, decay) I(ld_decay) I(decay_width) P(const float*, beta) I(ld_beta) I(heads) I(key_heads) I(tiled)   \
    I(key_dim) I(value_dim) F(scale) HR_STATE_FIELDS(P) P(float*, out) I(ld_out)
/* As delta, with b and c in place of k and q, and a[h] and d[h] (may be NULL) of the head:
 *     S[n][j] = fma(b[n], x[j] * dt, S[n][j] * exp(dt * a)); y = chain over n of fma(S[n][j], c[n], .) from 0
 *     out[j] = y, or fma(d, x[j], y) */
#define HR_FIELDS_scan(P, I, F)                                                                                       \
    I(dim) P(const float*, x) I(ld_x) P(const float*, b) I(ld_b) P(const float*, c) I(ld_c) P(const float*, dt) I(ld_dt)  \
    P(const float*, a) P(const float*, d) I(heads) I(key_heads) I(tiled) I(key_dim) I(value_dim) HR_STATE_FIELDS(P)               \
    P(float*, out) I(ld_out)
/* y = log(1 + exp(x + bias)) held in [low, high], times factor[j] if that is given. */
#define HR_FIELDS_softplus(P, I, F)                                                                                   \
    I(dim) P(const float*, x) I(ld_x) I(width) P(const float*, bias) P(const float*, factor) F(low) F(high) P(float*, out) I(ld_out)

/* finite[r] = 1 if every |x| of row rows[r], or without a list of row r, is less than `bound` (infinite: if every x is finite), else 0. */
#define HR_FIELDS_finite(P, I, F) I(dim) P(const int32_t*, rows) P(const float*, x) I(ld_x) I(width) F(bound) P(int32_t*, finite)
/* The k greatest of a row, greatest first, equal ones by lower index; ids, values [rows][k]; finite as above, except
 * that -infinity counts as finite here (a token that must never come). NaN: finite 0, ids and values unspecified. */
#define HR_FIELDS_top_k(P, I, F) \
    I(dim) P(const float*, x) I(ld_x) I(width) I(k) P(int32_t*, ids) P(float*, values) P(int32_t*, finite)

/* The ids, ascending, that temperature, floor, top_k (0: all) and top_p (1: all) leave of the logits rows[r] [width],
 * whose maximum is greatest[r]; none is NaN or +infinity. In double: scaled = (x - greatest) / temperature; kept are
 * those with scaled >= floor and above -infinity, among the top_k greatest, and in the shortest head of the ranking (by x,
 * equal ones by lower id) whose weights' sum, as a double, is at least top_p times the sum of the weights of all that floor
 * and top_k kept. weight = round_to_even(exp(scaled) * 2^44), an integer, with t = max(scaled, -700):
 *     n = round_to_even(t * log2 e); t -= n * 0.6931471803691238; t -= n * 1.9082149292705877e-10
 *     exp = (Taylor's polynomial of degree 12 by Horner, products and sums rounded one by one) * 2^n
 * ids, scaled: [rows][width], count[r] of them are written. width is at most 2^18.
 *
 * Where drawn[r] is not 0 and more than 512 are kept, only those are written that can win the draw of keyed noise (Philox4x32-10
 * as in docs/adr/0013-keyed-noise.md, purpose 0, of seed[r] and position[r]) with a sum of at least log(sum of weights *
 * 2^-44) - 3, and total[r] is that sum of weights; else total[r] is 0. (With u the uniform number, -log u >= 1 - u, so a
 * winner has 1 - u <= exp(scaled - sum).) */
#define HR_FIELDS_choose(P, I, F)                                                                                      \
    I(dim) P(const float* const*, rows) I(width) P(const double*, greatest) P(const double*, temperature)                \
    P(const double*, floor) P(const int64_t*, top_k) P(const double*, top_p) P(const int64_t*, drawn)                   \
    P(const uint64_t*, seed) P(const uint64_t*, position) P(int32_t*, ids) P(double*, scaled) P(int64_t*, count)        \
    P(int64_t*, total)

/* The columns of all ranks of a group, each of which has computed some (ranks.h). spans [count][4], of all ranks in order:
 * the rank, first column there, first column of the whole row, number of columns; out[r] gets all `width` columns. No number is changed, and none is added to
 * another. Floats x, or where x is NULL codes as HR_Q_FIELDS has them, whose spans begin at multiples of `group`. Where `from` is
 * given, this rank has no other rows than *from ... *from + dims[HR_DIM_OWN_PAIRS] - 1, which are rows 0, 1, ... of what it gives;
 * only where ranks share memory. */
#define HR_FIELDS_gather(P, I, F)                                                                                        \
    I(dim) P(void*, ranks) P(const int32_t*, from) P(const int64_t*, spans) I(count) I(width) P(const float*, x) I(ld_x) P(float*, out) I(ld_out) \
    P(const int8_t*, q) I(ld_q) P(const float*, scales) P(const int32_t*, sums) I(ld_s) I(group)                         \
    P(int8_t*, to_q) I(ld_to_q) P(float*, to_scales) P(int32_t*, to_sums) I(ld_to_s)

#define HR_OPS(X)                                                                                                        \
    X(embedding) X(select_rows) X(rms_norm) X(layer_norm) X(add) X(softcap) X(quantize) X(activation) X(gated)   \
    X(rope_store) X(attention) X(linear_i4) X(linear_i5) X(linear_i6) X(linear_i8) X(linear_k) X(linear_w) X(linear_f) X(route) X(moe_group) X(moe_gather)   \
    X(linear_each) X(moe_combine) X(multiply) X(scale) X(finite) X(top_k) X(choose) X(permute) X(xielu)  \
    X(conv) X(delta) X(scan) X(softplus) X(spread) X(gather) X(adapt_in) X(adapt_out)

#define HR_P(type, name) type name;
#define HR_I(name) int64_t name;
#define HR_F(name) double name;
#define HR_STRUCT(op) typedef struct { HR_FIELDS_##op(HR_P, HR_I, HR_F) } HrArgs_##op;
HR_OPS(HR_STRUCT)
#undef HR_STRUCT

#define HR_ENUM(op) HR_OP_##op,
enum { HR_OPS(HR_ENUM) HR_NUM_OPS };
#undef HR_ENUM

typedef void (*HrOpFn)(const void* args, HrTask* task);

/* CPU features that a table needs, the operating system's consent included. */
enum {
    HR_CPU_AVX2 = 1 << 0,     /* and FMA and F16C */
    HR_CPU_AVX512 = 1 << 1,   /* F, BW, DQ, VL */
    HR_CPU_VNNI512 = 1 << 2,
    HR_CPU_AVX_VNNI = 1 << 3,
    HR_CPU_AMX_INT8 = 1 << 4,
    HR_CPU_DOTPROD = 1 << 5,
    HR_CPU_I8MM = 1 << 6
};

/* One for each ISA. A NULL entry is inherited from the table before it; scalar has none. */
typedef struct {
    const char* isa;
    uint64_t needs;
    HrOpFn op[HR_NUM_OPS];
} HrKernelTable;

/* Packing: one layout for each format, the same for all ISAs, so that packed files can be mapped on any machine.
 * Outputs are packed in panels of `panel` (the last one padded), each a contiguous run of bytes, so parts of a matrix
 * can be packed one by one: rows first ... last-1, where first is a multiple of the panel.
 *
 * codes: int8 [num_out][num_in], unsigned from 0 for i2 to i6, signed -128 ... 127 for i8, E4M3 for f8; d and m: float [num_out][groups] (i8 and f8
 * with weight_group 0: d [num_out]), rounded to f16 by the packer unless weight_group is 0 (the caller made them exact) or
 * the kind is f8. f8: no code may be NaN.
 * k: codes are rows of blocks as they lie in a GGUF file. linear_f: codes are the weights themselves, of the stored type. */
typedef struct {
    const char* layout; /* changes when the bytes do */
    int64_t panel;
    int64_t (*row_bytes)(int64_t num_in, int64_t flag); /* of `codes` */
    size_t (*packed_bytes)(int64_t num_out, int64_t num_in, int64_t group, int64_t flag);
    void (*pack)(const void* codes, const float* d, const float* m, int64_t num_in, int64_t group, int64_t flag,
                 int64_t first, int64_t last, int64_t num_out, void* packed);
    /* Row `row` back as floats [num_in], exactly (code * d + m or code * d with one rounding per operation). */
    void (*unpack_row)(const void* packed, int64_t num_out, int64_t num_in, int64_t group, int64_t flag, int64_t row,
                       float* out);
} HrFormat;
/* flag: form for i2 to i6 and k (m of HR_FORM_ZERO: the zeros), weight_group for i8 (with HR_I8_MIN where there are minima) and f8, type for f (group unused there). In `pack`, codes, d and m point at row `first`. */
extern const HrFormat hr_format_i2, hr_format_i3, hr_format_i4, hr_format_i5, hr_format_i6, hr_format_i8, hr_format_f8, hr_format_k, hr_format_f;

#ifdef __cplusplus
}
#endif
#endif
