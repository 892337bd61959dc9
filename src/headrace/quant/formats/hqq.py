"""HQQ's checkpoints (Badri and Shaji 2023) in safetensors, as transformers and hqq's `save_to_safetensors` write them.

A layer is the tensor `W_q` and its facts, each a tensor: `nbits`, `shape`, `group_size`, `axis`, `packing`, `scale`,
`zero`. The weights are reshaped to [-1, group_size] (axis 1) or [group_size, -1] (axis 0), and the rows of that are
packed: the first of n stripes lies in the highest bits. weight = (code - zero) * scale. Its qmodel.pt is a pickle,
which nothing here reads.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import floats, type_name
from headrace.quant.base import QWeight, Tensors
from headrace.quant.layer_names import left_alone, names_listed
from headrace.quant.packing import checked, good_scales, plain_weight

SPARE = re.compile(
    r".*\.(nbits|group_size|shape|axis|packing|unpack_view_dtype|view_as_float|quant_scale|quant_zero|compute_dtype"
    r"|offload_meta|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero)"
)
PACKINGS = {"8bit_u8": (1, 8), "4bit_u8": (2, 4), "3bit_32": (10, 3), "2bit_u8": (4, 2), "1bit_u8": (8, 1)}
"""Codes of an item, and bits of each."""


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if skip_modules names it, or if there is no `W_q`."""
    if left_alone(name, names_listed(config, "skip_modules")) or not tensors.has(f"{name}.W_q"):
        return plain_weight(tensors, name)
    for part in ("quant_scale", "quant_zero"):
        if tensors.has(f"{name}.{part}") and _whole(tensors, f"{name}.{part}"):
            raise CheckpointError(
                f"{name}.{part} is 1: scales and zeros that are quantised themselves are not supported"
            )
    shape = checked(tensors, f"{name}.shape", (2,), "int64", "int32").tolist()
    num_out, num_in = int(shape[0]), int(shape[1])
    axis, bits = _whole(tensors, f"{name}.axis"), _whole(tensors, f"{name}.nbits")
    count = num_out * num_in
    if not (0 < num_out < 2**31 and 0 < num_in < 2**31) or axis not in (0, 1) or not 1 <= bits <= 8:
        raise CheckpointError(f"{name}.shape is {shape}, axis {axis}, nbits {bits}; expected [out, in], 0 or 1, 1 to 8")
    group = shape[1 - axis] if axis == 0 else num_in
    if tensors.has(f"{name}.group_size"):
        group = _whole(tensors, f"{name}.group_size")
    if group < 1 or count % group:
        raise CheckpointError(f"{name}.group_size is {group}, expected a divisor of {num_out} x {num_in}")
    rows, columns = (count // group, group) if axis == 1 else (group, count // group)
    codes = _unpacked(tensors, name, rows, columns)
    each = (rows, 1) if axis == 1 else (1, columns)
    scales = good_scales(checked(tensors, f"{name}.scale", each), f"{name}.scale")
    zeros = floats(checked(tensors, f"{name}.zero", each))
    if not np.isfinite(zeros).all():
        raise CheckpointError(f"{name}.zero has a value that is not finite; shape {list(each)}")
    if axis == 1 and num_in % group == 0:
        parts = scales.reshape(num_out, -1), zeros.reshape(num_out, -1)
        return QWeight(codes.reshape(num_out, num_in), *parts, group=group, bits=max(bits, 2))
    # The groups are of outputs, or end in the middle of a row.
    return QWeight(((codes.astype(np.float32) - zeros) * scales).reshape(num_out, num_in))


def _unpacked(tensors: Tensors, name: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Codes [rows, columns] out of `W_q`, which may be viewed as floats."""
    letters = checked(tensors, f"{name}.packing", (None,), "uint8")
    packing = bytes(letters[:16].tolist()).decode("ascii", "replace")
    if packing not in PACKINGS or letters.size > 16:
        raise CheckpointError(
            f"{name}.packing, shape {list(letters.shape)}, is {packing!r:.80}, expected one of {', '.join(PACKINGS)}"
        )
    per_item, bits = PACKINGS[packing]
    kind = np.dtype("<i4" if packing.endswith("32") else "u1")
    stored = np.ascontiguousarray(tensors(f"{name}.W_q"))
    steps = -(-rows // per_item)
    if stored.nbytes != steps * columns * kind.itemsize or type_name(stored) == "bool":
        raise CheckpointError(
            f"{name}.W_q is {type_name(stored)} with shape {list(stored.shape)}, expected {steps * columns} items of "
            f"{kind.itemsize} bytes for {rows} x {columns} codes in {packing}"
        )
    items = stored.reshape(-1).view(kind).reshape(steps, columns)
    mask = (1 << bits) - 1
    stripes = [(items >> (bits * (per_item - 1 - i)) & mask).astype(np.uint8) for i in range(per_item)]
    return np.concatenate(stripes)[:rows]


def _whole(tensors: Tensors, name: str) -> int:
    """A fact that is stored as a tensor of one number."""
    value = tensors(name)
    if value.size != 1 or type_name(value) not in ("uint8", "int32", "int64"):
        raise CheckpointError(f"{name} is {type_name(value)} with shape {list(value.shape)}, expected one whole number")
    return int(value.reshape(-1)[0])
