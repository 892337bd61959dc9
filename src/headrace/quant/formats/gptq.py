"""GPTQ checkpoints (Frantar et al. 2023), as AutoGPTQ, GPTQModel and Optimum write them, of 2 to 8 bits.

`qweight` int32 [in * bits / 32, out], codes packed along the inputs; `qzeros` int32 [groups, out * bits / 32], packed
along the outputs; `scales` [groups, out]; `g_idx` int32 [in], the group of each input (act-order). The first version of
the layout stores zero points less one, the second (checkpoint_format "gptq_v2") as they are. GPTQModel's `dynamic` has
patterns of names, and the first match decides: "-:" before it leaves the layer plain, else its settings take precedence
over the config's.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight, Tensors
from headrace.quant.layer_names import first_match
from headrace.quant.packing import (
    by_index,
    checked,
    good_scales,
    group_of,
    num_words,
    overridden,
    plain_weight,
    unpacked,
    whole,
)

SPARE = re.compile(r"(?!)")
BITS = range(2, 9)
LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""The number to add to a stored zero point, for each checkpoint_format."""


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; `<name>.weight` if there is no `<name>.qweight`, as for many heads and routers."""
    override = None if not config.get("dynamic") else first_match(config["dynamic"], name, "dynamic")
    settings = config
    if override is not None and override is not False:
        settings = overridden(config, override, "dynamic", "bits", "group_size")
    # First, so that a config that makes no sense is refused even if all weights are plain.
    bits, group = whole(settings, "bits"), group_of(settings, "group_size")
    layout = config.get("checkpoint_format", config.get("format", "gptq"))
    if bits not in BITS:
        raise CheckpointError(f"config.json: quantization_config.bits is {bits}, expected 2 to 8")
    if not isinstance(layout, str) or layout not in LAYOUTS or config.get("is_marlin_format"):
        raise CheckpointError(
            f"config.json: quantization_config.checkpoint_format is {layout!r:.80}, expected one of {tuple(LAYOUTS)}"
        )
    if override is False or (not tensors.has(f"{name}.qweight") and tensors.has(f"{name}.weight")):
        return plain_weight(tensors, name)
    packed = checked(tensors, f"{name}.qweight", (None, None), "int32")
    num_out, num_in = packed.shape[1], packed.shape[0] * 32 // bits
    if num_in * bits != packed.shape[0] * 32:
        raise CheckpointError(f"{name}.qweight has shape {list(packed.shape)}, expected a multiple of {bits} rows")
    group = num_in if group == -1 else group
    num_groups = -(-num_in // group)
    scales = checked(tensors, f"{name}.scales", (num_groups, num_out))
    stored = checked(tensors, f"{name}.qzeros", (num_groups, num_words(num_out, bits)), "int32")
    zeros = unpacked(stored, bits, num_out)
    # Symmetric codes have their zero in the middle; some writers of the first layout store it without taking one off.
    if not (settings.get("sym") is True and (zeros == 2 ** (bits - 1)).all()):
        zeros = (zeros + LAYOUTS[layout]) & (2**bits - 1)
    parts = np.ascontiguousarray(good_scales(scales, f"{name}.scales").T), np.ascontiguousarray(zeros.T, np.float32)
    codes = unpacked(packed.T, bits, num_in)
    if not tensors.has(f"{name}.g_idx"):
        return QWeight(codes, *parts, group=group, bits=bits)
    g_idx = checked(tensors, f"{name}.g_idx", (num_in,), "int32", "int64")
    return by_index(codes, *parts, g_idx, group, bits, f"{name}.g_idx")
