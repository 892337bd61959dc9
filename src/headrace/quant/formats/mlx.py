"""Checkpoints of Apple's MLX, as mlx-lm converts them: codes of 2 to 8 bits in groups with scales and biases, and
blocks of 4- and 8-bit floats.

`weight` uint32 [out, in * bits / 32], codes one behind the other from the lowest bit; `scales` and `biases`
[out, in / group_size]: weight = code * scale + bias. In the modes mxfp4, mxfp8 and nvfp4 the codes are floats, the
scales bytes, E8M0 or (nvfp4) E4M3, and there are no biases. The settings may have an entry for a layer by its name: its
own settings, or false for plain floats. Embeddings are quantised like all other matrices.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import E4M3, floats
from headrace.quant.base import QWeight, Tensors
from headrace.quant.formats.fp8 import powers
from headrace.quant.layer_names import entry_of
from headrace.quant.packing import (
    E2M1,
    checked,
    good_scales,
    num_words,
    overridden,
    plain_weight,
    unpacked,
    whole,
)

SPARE = re.compile(r"(?!)")
BITS = (2, 3, 4, 5, 6, 8)
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits of a code and inputs of a block, for each mode of floats."""


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if its entry is false, or if it has no scales."""
    entry = entry_of(config, name)
    if entry is False or not tensors.has(f"{name}.scales"):
        return plain_weight(tensors, name)
    if isinstance(entry, dict):
        config = overridden(config, entry, name, "bits", "group_size", "mode")
    mode = config.get("mode", "affine")
    if isinstance(mode, str) and mode in MODES:
        return _floats(tensors, name, mode)
    if mode != "affine":
        raise CheckpointError(
            f"config.json: quantization.mode is {mode!r:.80}, expected affine or one of {', '.join(MODES)}"
        )
    bits, group = whole(config, "bits"), whole(config, "group_size", 64)
    if bits not in BITS or group < 1:
        raise CheckpointError(
            f"config.json: quantization: bits {bits}, group_size {group}; expected one of {BITS}, and 1 or more"
        )
    codes = _codes(tensors, name, bits, group)
    each = codes.shape[0], codes.shape[1] // group
    scales = good_scales(checked(tensors, f"{name}.scales", each), f"{name}.scales")
    mins = floats(checked(tensors, f"{name}.biases", each))
    if not np.isfinite(mins).all():
        raise CheckpointError(f"{name}.biases has a value that is not finite; shape {list(each)}")
    return QWeight(codes, scales, mins=mins, group=group, bits=bits)


def _floats(tensors: Tensors, name: str, mode: str) -> QWeight:
    bits, group = MODES[mode]
    codes = _codes(tensors, name, bits, group)
    stored = checked(tensors, f"{name}.scales", (codes.shape[0], codes.shape[1] // group), "uint8")
    wide = floats(stored.view(E4M3)) if mode == "nvfp4" else powers(stored)
    scales = good_scales(wide, f"{name}.scales")
    if bits == 8:
        return QWeight(codes.view(E4M3), scales, group=group, bits=8)
    return QWeight(codes, scales, group=group, bits=4, codebook=np.array(E2M1, np.float32))


def _codes(tensors: Tensors, name: str, bits: int, group: int) -> NDArray[np.uint8]:
    """The codes [out, in] of a layer, whose inputs are those of its scales."""
    scales = tensors(f"{name}.scales")
    num_in = group * (scales.shape[1] if scales.ndim == 2 else 0)
    words = checked(tensors, f"{name}.weight", (None, num_words(num_in, bits)), "uint32")
    return unpacked(words, bits, num_in)
