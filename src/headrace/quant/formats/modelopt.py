"""Checkpoints of NVIDIA's ModelOpt: FP8 (E4M3, one scale, or one for a block), MXFP8 (32 share a power of two), and
NVFP4 (4-bit floats, 16 share an 8-bit float).

FP8: `weight` float8, `weight_scale`, and `input_scale`, by which inputs are rounded to E4M3. FP8_PB_WO: `weight_scale`
[blocks of outputs, blocks of inputs], perhaps with a 1 after each. MXFP8: `weight_scale` E8M0
[out, in / 32]. NVFP4: `weight` uint8 [out, in / 2], the lower half of a byte first, `weight_scale` float8
[out, in / 16], `weight_scale_2` one float32. Other layers are stored as plain floats.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, floats, type_name
from headrace.quant.base import QWeight, Tensors
from headrace.quant.formats import fp8
from headrace.quant.packing import checked, four_bit_floats, good_scales, one_scale, plain_weight

SPARE = fp8.SPARE
GROUP = 16
BLOCKS = (128, 64, 32, 16)
"""Outputs, and inputs, of a block of FP8_PB_WO. ModelOpt's own are the first; the settings do not say it."""


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if it is stored as floats."""
    weight = checked(tensors, f"{name}.weight", (None, None), "uint8", *fp8.FLOATS, *PLAIN)
    if type_name(weight) in PLAIN:
        return plain_weight(tensors, name)
    if type_name(weight) != "uint8":
        scales = tensors(f"{name}.weight_scale")
        if scales.ndim == 4 and scales.shape[1] == scales.shape[3] == 1:
            scales = scales.reshape(scales.shape[0], scales.shape[2])
        # MXFP8 has powers of two for 32 inputs each.
        group = 32 if type_name(scales) == "uint8" else None
        block = None if group or scales.ndim != 2 else _block(weight.shape, scales.shape)
        layer = fp8.of_floats(weight, scales, f"{name}.weight_scale", block, group)
        return dataclasses.replace(layer, inputs=fp8.static_inputs(tensors, name))
    num_out, num_in = weight.shape[0], 2 * weight.shape[1]
    if num_in % GROUP:
        raise CheckpointError(
            f"{name}.weight has shape {list(weight.shape)}, expected a multiple of {GROUP // 2} bytes"
        )
    inner = checked(tensors, f"{name}.weight_scale", (num_out, num_in // GROUP), fp8.FLOATS[0])
    scales = good_scales(floats(inner) * one_scale(tensors, f"{name}.weight_scale_2"), f"{name}.weight_scale")
    return four_bit_floats(weight, scales, GROUP)


def _block(weight: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the outputs and inputs that share a scale, by the shapes; None for a scale of a row or of all."""
    if scales[1] == 1:
        return None
    fits = (size for size in BLOCKS if scales == tuple(-(-each // size) for each in weight))
    size = next(fits, BLOCKS[0])
    return size, size
