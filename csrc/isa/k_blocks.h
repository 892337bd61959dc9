/* GGUF's K-quants, of 256 weights with scales in two levels, as they lie in a file: weight = code * (d * scale) +
 * minimum_d * minimum, where the products are exact. Layouts: ggml's block structs (llama.cpp, pull request 1684). */
#pragma once
#include <stdint.h>
#include <string.h>

#include "include/kernels.h"

enum { HR_K_BLOCK = 256 };

/* One block. code counts from 0 and means code - middle; sub: inputs that share a scale; dm: f16, its sign turned. */
struct HrKBlock {
    uint16_t d, dm;
    int8_t scale[16], least[16];
    uint8_t code[HR_K_BLOCK];
};

static inline int64_t hr_k_sub(int64_t type) { return type == HR_K_Q4 || type == HR_K_Q5 ? 32 : 16; }
static inline int hr_k_has_min(int64_t type) { return type == HR_K_Q2 || type == HR_K_Q4 || type == HR_K_Q5; }
static inline int hr_k_bits(int64_t type) { return (int)(type - HR_K_Q2 + 2); }
static inline int hr_k_middle(int64_t type) { return type == HR_K_Q3 ? 4 : type == HR_K_Q6 ? 32 : 0; }
static inline int64_t hr_k_bytes(int64_t type) {
    switch (type) {
        case HR_K_Q2: return 84;
        case HR_K_Q3: return 110;
        case HR_K_Q4: return 144;
        case HR_K_Q5: return 176;
        default: return 210;
    }
}

/* Fields of `bits` bits, to be put in at `shift`: of every 32 bytes first all lowest ones, then all next ones, ... */
static inline void hr_k_planes(const uint8_t* q, int bits, uint8_t* code, int shift) {
    for (int e = 0; e < HR_K_BLOCK; e += 32) {
        const uint8_t* from = q + e * bits / 256 * 32;
        for (int i = 0; i < 32; i++) code[e + i] |= (uint8_t)((from[i] >> e / 32 * bits % 8 & ((1 << bits) - 1)) << shift);
    }
}
/* Of every `size` bytes all low nibbles, then all high ones. */
static inline void hr_k_nibbles(const uint8_t* q, uint8_t* code, int size) {
    for (int e = 0; e < HR_K_BLOCK; e += 2 * size, q += size)
        for (int i = 0; i < size; i++) code[e + i] = q[i] & 15, code[e + size + i] = q[i] >> 4;
}

static inline void hr_k_read(int64_t type, const uint8_t* raw, HrKBlock* b) {
    static const int16_t where[] = {80, 108, 0, 0, 208};
    memset(b, 0, sizeof *b);
    memcpy(&b->d, raw + where[type - HR_K_Q2], 2);
    if (hr_k_has_min(type)) memcpy(&b->dm, raw + where[type - HR_K_Q2] + 2, 2), b->dm ^= 0x8000;
    if (type == HR_K_Q2) {
        hr_k_planes(raw + 16, 2, b->code, 0);
        for (int j = 0; j < 16; j++) b->scale[j] = raw[j] & 15, b->least[j] = (int8_t)(raw[j] >> 4);
    } else if (type == HR_K_Q3) {
        const uint8_t* s = raw + 96;
        hr_k_planes(raw + 32, 2, b->code, 0);
        hr_k_planes(raw, 1, b->code, 2);
        for (int j = 0; j < 16; j++) {
            const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4, high = s[8 + j % 4] >> j / 4 * 2 & 3;
            b->scale[j] = (int8_t)((low | high << 4) - 32);
        }
    } else if (type == HR_K_Q6) {
        hr_k_nibbles(raw, b->code, 64);
        hr_k_planes(raw + 128, 2, b->code, 4);
        memcpy(b->scale, raw + 192, 16);
    } else {
        const uint8_t* s = raw + 4;
        for (int j = 0; j < 4; j++) {
            b->scale[j] = s[j] & 63, b->least[j] = s[4 + j] & 63;
            b->scale[4 + j] = (int8_t)((s[8 + j] & 15) | s[j] >> 6 << 4);
            b->least[4 + j] = (int8_t)(s[8 + j] >> 4 | s[4 + j] >> 6 << 4);
        }
        hr_k_nibbles(raw + (type == HR_K_Q5 ? 48 : 16), b->code, 32);
        if (type == HR_K_Q5) hr_k_planes(raw + 16, 1, b->code, 4);
    }
}
