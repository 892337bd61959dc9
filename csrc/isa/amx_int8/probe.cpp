#include "generic/ops.h"
#include "include/limits.h"
#include "isa/amx_int8/tiles.h"

namespace HR_NS {

/* Four sums that wait for nothing of each other, of numbers without a pattern: zeros take less power, and so less time. */
static void int8(int64_t turns) {
    alignas(64) uint8_t numbers[2048];
    uint32_t x = 1;
    for (int i = 0; i < 2048; i++) numbers[i] = (uint8_t)((x = x * 1664525 + 1013904223) >> 24);
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.row_bytes[i] = 64;
    set_shapes(shapes);
    load_tile<4>(numbers, 64), load_tile<5>(numbers + 1024, 64), load_tile<6>(numbers, 64), load_tile<7>(numbers + 1024, 64);
    for (int64_t i = 0; i < turns; i++)
        multiply_tiles<0, 4, 6>(), multiply_tiles<1, 4, 7>(), multiply_tiles<2, 5, 6>(), multiply_tiles<3, 5, 7>();
    release_tiles();
}

extern const HrProbe probe;
#ifdef HR_EMULATED
const HrProbe probe = {"amx_emulated", nullptr, int8, 4 * 32768, nullptr, 0};
#else
const HrProbe probe = {"amx_int8", nullptr, int8, 4 * 32768, nullptr, 0};
#endif

}  // namespace HR_NS
