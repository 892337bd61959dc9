/* The eight tile registers of AMX, each of 16 rows of 64 bytes, or with HR_EMULATED a copy of them in memory: the same
 * kernel on a machine without, and under the sanitizers, which do not see the loads and stores of tiles.
 * Instructions: Intel's Software Developer's Manual, volume 2, TILELOADD, TILESTORED, TDPBSSD. */
#pragma once
#include "isa/avx512_vnni/vec.h"

namespace HR_NS {

/* As LDTILECFG reads it. */
struct alignas(64) TileShapes {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64, "64 bytes");

#ifdef HR_EMULATED

struct Tile {
    int rows, row_bytes;
    int32_t data[16][16];
};
static thread_local Tile tiles[8];

/* All tiles 0 to 3 have 16 rows of 64 bytes (sums), 4 and 5 rows of `depth` bytes, 6 and 7 `depth / 4` rows. */
static inline void set_shapes(const TileShapes& s) {
    for (int i = 0; i < 8; i++) tiles[i].rows = s.rows[i], tiles[i].row_bytes = s.row_bytes[i];
}
static inline void release_tiles() { memset((void*)tiles, 0, sizeof tiles); }
template <int t>
static inline void zero_tile() {
    memset(tiles[t].data, 0, sizeof tiles[t].data);
}
template <int t>
static inline void load_tile(const void* from, int64_t stride) {
    zero_tile<t>();
    for (int i = 0; i < tiles[t].rows; i++) memcpy(tiles[t].data[i], (const char*)from + i * stride, (size_t)tiles[t].row_bytes);
}
template <int t>
static inline void store_tile(void* to, int64_t stride) {
    for (int i = 0; i < tiles[t].rows; i++) memcpy((char*)to + i * stride, tiles[t].data[i], (size_t)tiles[t].row_bytes);
}
template <int sums, int left, int right>
static inline void multiply_tiles() {
    for (int m = 0; m < tiles[sums].rows; m++)
        for (int k = 0; k < tiles[left].row_bytes / 4; k++)
            for (int n = 0; n < tiles[sums].row_bytes / 4; n++) {
                int8_t a[4], b[4];
                memcpy(a, &tiles[left].data[m][k], 4), memcpy(b, &tiles[right].data[k][n], 4);
                int32_t sum = 0;
                for (int i = 0; i < 4; i++) sum += a[i] * b[i];
                tiles[sums].data[m][n] = (int32_t)((uint32_t)tiles[sums].data[m][n] + (uint32_t)sum);
            }
}

#else

/* As assembly: gcc 12's LDTILECFG reads eight bytes of the shapes as the compiler sees it, and its macros paste a tile's number. */
static inline void set_shapes(const TileShapes& s) { __asm__ volatile("ldtilecfg %0" ::"m"(s)); }
static inline void release_tiles() { __asm__ volatile("tilerelease"); }
template <int t>
HR_INLINE void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(t));
}
template <int t>
HR_INLINE void load_tile(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(t) : "memory");
}
template <int t>
HR_INLINE void store_tile(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(t) : "memory");
}
template <int sums, int left, int right>
HR_INLINE void multiply_tiles() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}

#endif

}  // namespace HR_NS
