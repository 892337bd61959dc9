#include "generic/ops.h"
#include "include/limits.h"
#include "isa/amx_int8/tiles.h"

namespace HR_NS {

/* Tiles of zeros, of which four sums wait for nothing of each other. */
static void int8(int64_t turns) {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.row_bytes[i] = 64;
    set_shapes(shapes);
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
