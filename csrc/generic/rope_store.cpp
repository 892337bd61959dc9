/* Head norms, rotary positions, and keys and values into the cache. Rows are shared out sixteen at a time, so that two
 * threads seldom write the same tile of the cache. */
#include "include/kernels.h"
#include HR_VEC_H
#include "generic/ops.h"

namespace HR_NS {
namespace {

enum { ROWS = 16 };

void norm_head(float* x, const float* weight, int64_t width, float eps, float offset) {
    V sum = zero();
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) sum = fma(load(x + i), load(x + i), sum);
    if (i < width) sum = fma(load_n(x + i, width - i), load_n(x + i, width - i), sum);
    float rms[16];
    store(rms, sqrt(set1(hsum(sum) / (float)width + eps)));
    for (i = 0; i < width; i += 16) {
        int64_t n = width - i < 16 ? width - i : 16;
        V gain = load_n(weight + i, n);
        if (offset != 0) gain = add(gain, set1(offset));
        store_n(x + i, mul(div(load_n(x + i, n), set1(rms[0])), gain), n);
    }
}

void turn_head(float* x, const float* cos, const float* sin, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i += 16) {
        int64_t n = pairs - i < 16 ? pairs - i : 16;
        V left = load_n(x + i, n), right = load_n(x + pairs + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
        store_n(x + i, fma(left, c, mul(mul(right, s), set1(-1.0f))), n);
        store_n(x + pairs + i, fma(right, c, mul(left, s)), n);
    }
}

/* The greatest |x|; NaN where an x is not finite, so that the scale tells. */
float amax_of(const float* x, int64_t width) {
    V top = zero(), bad = zero();
    for (int64_t i = 0; i < width; i += 16) {
        V y = load_n(x + i, width - i < 16 ? width - i : 16);
        top = max(top, abs(y));
        bad = add(bad, mul(y, zero()));
    }
    return hmax(select(lt(top, set1(__builtin_inff())), top, zero())) + hsum(bad);
}

/* One head's numbers as the cache stores them, `step` elements apart. */
void put(const float* x, int64_t width, int64_t type, void* cache, int64_t at, int64_t step, float* scale) {
    float amax = type == HR_I8 ? amax_of(x, width) : 0.0f, inverse = amax == 0.0f ? 0.0f : 127.0f / amax;
    if (type == HR_I8) *scale = amax / 127.0f;
    for (int64_t i = 0; i < width; i += 16) {
        int64_t n = width - i < 16 ? width - i : 16;
        V y = load_n(x + i, n);
        if (type == HR_F32) {
            for (int64_t j = 0; j < n; j++) ((float*)cache)[at + (i + j) * step] = x[i + j];
        } else if (type == HR_I8) {
            int8_t codes[16];
            store_i8(codes, round_i32(min(max(mul(y, set1(inverse)), set1(-127.0f)), set1(127.0f))));
            for (int64_t j = 0; j < n; j++) ((int8_t*)cache)[at + (i + j) * step] = codes[j];
        } else {
            uint16_t halves[16];
            if (type == HR_F16)
                store_f16(halves, y);
            else
                store_bf16(halves, y);
            for (int64_t j = 0; j < n; j++) ((uint16_t*)cache)[at + (i + j) * step] = halves[j];
        }
    }
}

}  // namespace

void rope_store(const HrArgs_rope_store* a, HrTask* task) {
    const int64_t rows = task->dims[a->dim], size = a->head_dim;
    for (int64_t next = hr_next(task); next * ROWS < rows; next = hr_next(task))
        for (int64_t r = next * ROWS; r < rows && r < next * ROWS + ROWS; r++) {
            float *x = a->x + r * a->ld_x, *keys = x + a->heads * size, *values = keys + a->kv_heads * size;
            const int64_t angles = a->pairs ? a->positions[r] * a->pairs : 0;
            for (int64_t h = 0; h < a->heads + a->kv_heads; h++) {
                const float* weight = h < a->heads ? a->q_norm : a->k_norm;
                if (weight) norm_head(x + h * size, weight, size, (float)a->eps, (float)a->offset);
                if (a->pairs) turn_head(x + h * size, a->cos + angles, a->sin + angles, a->pairs);
            }
            const int64_t first = a->copy_begin ? a->copy_begin[r] : 0, last = a->copy_begin ? a->copy_begin[r + 1] : 0;
            for (int64_t copy = first - 1; copy < last; copy++) {
                const int64_t slot = copy < first ? a->slots[r] : a->copy_slots[copy], i = slot % 16;
                for (int64_t h = 0; h < a->kv_heads; h++) {
                    int64_t tile = slot / 16 * a->kv_heads + h;
                    float* k_scale = a->k_scale ? a->k_scale + tile * 16 + i : nullptr;
                    float* v_scale = a->v_scale ? a->v_scale + tile * 16 + i : nullptr;
                    put(keys + h * size, size, a->kv_type, a->k, tile * size * 16 + i, 16, k_scale);
                    put(values + h * size, size, a->kv_type, a->v, (tile * 16 + i) * size, 1, v_scale);
                }
            }
        }
}

}  // namespace HR_NS
