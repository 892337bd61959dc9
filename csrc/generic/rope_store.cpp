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

/* The greatest |x|; NaN where an x is not finite, so that the scale is NaN too. */
float amax_of(const float* x, int64_t width) {
    V top = zero(), bad = zero();
    for (int64_t i = 0; i < width; i += 16) {
        V y = load_n(x + i, width - i < 16 ? width - i : 16);
        top = max(top, abs(y));
        bad = add(bad, mul(y, zero()));
    }
    return hmax(select(lt(top, set1(__builtin_inff())), top, zero())) + hsum(bad);
}

uint32_t bits_of(float f) {
    uint32_t x;
    memcpy(&x, &f, 4);
    return x;
}

/* |f| <= 1.75 to bits 14 ... 7 of a half; what is subnormal there is rounded by adding a number whose last bit is
 * the step between subnormals. */
uint8_t narrow_e4m3(float f) {
    const uint32_t x = bits_of(f), a = x & 0x7fffffff;
    const uint32_t small = bits_of(__builtin_fabsf(f) + 64.0f) - 0x42800000u;
    const uint32_t normal = (a + 0x7ffff + (a >> 20 & 1) - 0x38000000) >> 20;
    return (uint8_t)((x >> 24 & 0x80) | (a < 0x38800000 ? small : normal));
}

/* To the high byte of a half. */
uint8_t narrow_e5m2(float f) {
    const uint32_t x = bits_of(f), a = x & 0x7fffffff;
    const uint32_t small = bits_of(__builtin_fabsf(f) + 128.0f) - 0x43000000u;
    const uint32_t normal = (a + 0xfffff + (a >> 21 & 1) - 0x38000000) >> 21;
    const uint32_t code = a < 0x38800000 ? small : a > 0x7f800000 ? 0x7e : normal < 0x7c ? normal : 0x7c;
    return (uint8_t)((x >> 24 & 0x80) | code);
}

/* One head in four bits: its codes, and step and least at scale[0] and scale[16]. */
void codes_i4(const float* x, int64_t width, int8_t* codes, uint16_t* scale) {
    V high = set1(-__builtin_inff()), low = set1(-__builtin_inff()), bad = zero();
    for (int64_t i = 0; i < width; i += 16) {
        const int64_t n = width - i < 16 ? width - i : 16;
        const V y = load_n(x + i, n), none = set1(-__builtin_inff()), minus = sub(zero(), y);
        high = max(high, select(first_n(n), y, none)), low = max(low, select(first_n(n), minus, none));
        bad = add(bad, mul(y, zero()));
    }
    const M sane = both(lt(high, set1(__builtin_inff())), lt(low, set1(__builtin_inff())));
    const float nan = hsum(bad), greatest = hmax(select(sane, high, zero())), least = -hmax(select(sane, low, zero()));
    uint16_t halves[32];
    store_bf16(halves, set1((greatest - least) / 15.0f + nan)), store_bf16(halves + 16, set1(least + nan));
    scale[0] = halves[0], scale[16] = halves[16];
    float step[16];
    store(step, load_bf16(halves));
    const V inverse = set1(step[0] > 0.0f ? 1.0f / step[0] : 0.0f), from = load_bf16(halves + 16);
    for (int64_t i = 0; i < width; i += 16) {
        const int64_t n = width - i < 16 ? width - i : 16;
        const V y = mul(sub(load_n(x + i, n), from), inverse);
        store_i8_n(codes + i, round_i32(min(max(y, zero()), set1(15.0f))), n);
    }
}

void put_key_i4(const int8_t* codes, int64_t width, uint8_t* to) {
    for (int64_t d = 0; d < width; d += 2)
        to[d * 8] = (uint8_t)(codes[d] | (d + 1 < width ? codes[d + 1] << 4 : 0));
}

void put_value_i4(const int8_t* codes, int64_t width, uint8_t* to) {
    for (int64_t g = 0; g < width; g += 32)
        for (int64_t d = g; d < width && d < g + 16; d++)
            *to++ = (uint8_t)(codes[d] | (d + 16 < width ? codes[d + 16] << 4 : 0));
}

/* One head's numbers as the cache stores them, `step` elements apart. */
void put(const float* x, int64_t width, int64_t type, void* cache, int64_t at, int64_t step, float* scale) {
    const float most = type == HR_I8 ? 127.0f : 1.75f;
    const bool scaled = type == HR_I8 || type == HR_E4M3;
    float amax = scaled ? amax_of(x, width) : 0.0f, inverse = amax == 0.0f ? 0.0f : most / amax;
    if (scaled) *scale = amax / most;
    for (int64_t i = 0; i < width; i += 16) {
        int64_t n = width - i < 16 ? width - i : 16;
        V y = load_n(x + i, n);
        if (type == HR_F32) {
            for (int64_t j = 0; j < n; j++) ((float*)cache)[at + (i + j) * step] = x[i + j];
        } else if (type == HR_I8) {
            int8_t codes[16];
            store_i8(codes, round_i32(min(max(mul(y, set1(inverse)), set1(-127.0f)), set1(127.0f))));
            for (int64_t j = 0; j < n; j++) ((int8_t*)cache)[at + (i + j) * step] = codes[j];
        } else if (type == HR_E4M3) {
            float held[16];
            store(held, min(max(mul(y, set1(inverse)), set1(-most)), set1(most)));
            for (int64_t j = 0; j < n; j++) ((uint8_t*)cache)[at + (i + j) * step] = narrow_e4m3(held[j]);
        } else if (type == HR_E5M2) {
            for (int64_t j = 0; j < n; j++) ((uint8_t*)cache)[at + (i + j) * step] = narrow_e5m2(x[i + j]);
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

/* A token's key, and its value unless that is a part of it, of one head into a slot. Scratch: two keys, or a key and a
 * value, as floats. */
void put_token(const HrArgs_rope_store* a, const float* key, const float* value, int64_t h, int64_t slot,
               float* scratch) {
    const int64_t size = a->head_dim, width = a->value_dim, tile = slot / 16 * a->kv_heads + h, i = slot % 16;
    if (a->k_mean) {
        for (int64_t d = 0; d < size; d++) scratch[d] = key[d] - a->k_mean[h * size + d];
        key = scratch;
    }
    if (a->kv_type == HR_I4) {
        const int64_t key_rows = (size + 1) / 2, value_row = width / 32 * 16 + (width % 32 < 16 ? width % 32 : 16);
        int8_t* codes = (int8_t*)(scratch + size);
        codes_i4(key, size, codes, (uint16_t*)a->k_scale + tile * 32 + i);
        put_key_i4(codes, size, (uint8_t*)a->k + tile * key_rows * 16 + i);
        if (!a->v) return;
        codes_i4(value, width, codes, (uint16_t*)a->v_scale + tile * 32 + i);
        put_value_i4(codes, width, (uint8_t*)a->v + (tile * 16 + i) * value_row);
        return;
    }
    if (a->kv_type == HR_I8_DOT) {
        const int64_t words = (size + 3) / 4, row = (width + 15) / 16 * 64;
        int8_t* codes = (int8_t*)(scratch + size);
        uint8_t* keys = (uint8_t*)a->k + tile * words * 64 + 4 * i;
        int8_t* values = (int8_t*)a->v + (tile * 4 + i / 4) * row + i % 4;
        put(key, size, HR_I8, codes, 0, 1, a->k_scale + tile * 16 + i);
        for (int64_t d = 0; d < size; d++) keys[d / 4 * 64 + d % 4] = (uint8_t)(codes[d] + 128);
        put(value, width, HR_I8, codes, 0, 1, a->v_scale + tile * 16 + i);
        for (int64_t d = 0; d < width; d++) values[4 * d] = codes[d];
        return;
    }
    float* k_scale = a->k_scale ? a->k_scale + tile * 16 + i : nullptr;
    float* v_scale = a->v_scale ? a->v_scale + tile * 16 + i : nullptr;
    put(key, size, a->kv_type, a->k, tile * size * 16 + i, 16, k_scale);
    if (a->v) put(value, width, a->kv_type, a->v, (tile * 16 + i) * width, 1, v_scale);
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
                if (a->pairs) turn_head(x + h * size + a->first, a->cos + angles, a->sin + angles, a->pairs);
            }
            const int64_t first = a->copy_begin ? a->copy_begin[r] : 0, last = a->copy_begin ? a->copy_begin[r + 1] : 0;
            for (int64_t copy = first - 1; copy < last; copy++) {
                const int64_t slot = copy < first ? a->slots[r] : a->copy_slots[copy];
                for (int64_t h = 0; h < a->kv_heads; h++)
                    put_token(a, keys + h * size, values + h * a->value_dim, h, slot, (float*)task->scratch);
            }
        }
}

}  // namespace HR_NS
