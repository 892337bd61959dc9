"""MXFP4 checkpoints as GPT-OSS has them (OCP Microscaling Formats 1.0): 4-bit floats, 32 of which share a power of two.

The experts of a layer are one tensor: `<...>.experts.<proj>_blocks` uint8 [experts, out, in / 32, 16], two codes a
byte, the lower half first, and `<...>.experts.<proj>_scales` uint8 [experts, out, in / 32], 2^(byte - 127). For a model
file the name of expert e is `<...>.experts.<e>.<proj>`. Other layers may have `<name>.weight_blocks` and `_scales`,
without the first dimension.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight, Tensors
from headrace.quant.formats.fp8 import powers
from headrace.quant.layer_names import left_alone, names_listed
from headrace.quant.packing import checked, four_bit_floats, plain_weight

SPARE = re.compile(r"(?!)")
GROUP = 32
EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)")


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; `<name>.weight` if modules_to_not_convert names it, or if there are no blocks."""
    if left_alone(name, names_listed(config, "modules_to_not_convert")):
        return plain_weight(tensors, name)
    expert = EXPERT.fullmatch(name)
    if expert is not None and tensors.has(f"{expert[1]}.{expert[3]}_blocks"):
        stem, number = f"{expert[1]}.{expert[3]}", int(expert[2])
        blocks = checked(tensors, f"{stem}_blocks", (None, None, None, GROUP // 2), "uint8")
        if number >= blocks.shape[0]:
            raise CheckpointError(f"{stem}_blocks has shape {list(blocks.shape)}, expected more than {number} experts")
        scales = checked(tensors, f"{stem}_scales", tuple(blocks.shape[:3]), "uint8")
        return of_blocks(blocks[number], scales[number], f"{stem}_scales")
    if not tensors.has(f"{name}.weight_blocks"):
        return plain_weight(tensors, name)
    blocks = checked(tensors, f"{name}.weight_blocks", (None, None, GROUP // 2), "uint8")
    scales = checked(tensors, f"{name}.weight_scales", tuple(blocks.shape[:2]), "uint8")
    return of_blocks(blocks, scales, f"{name}.weight_scales")


def of_blocks(blocks: NDArray[np.uint8], scales: NDArray[np.uint8], name: str) -> QWeight:
    """blocks uint8 [out, in / 32, 16] and scales uint8 [out, in / 32]. 255 stands for NaN and is refused."""
    if (scales == 255).any():
        raise CheckpointError(f"{name} has a scale that is not finite; shape {list(scales.shape)}, expected 0 to 254")
    return four_bit_floats(blocks.reshape(len(blocks), -1), powers(scales), GROUP)
