"""torchao checkpoints in safetensors: each layer's parts next to each other, their meaning in the metadata of the file.

The metadata have a JSON text under "<name>.weight", whose `_type` names torchao's class; its tensors are
"<name>._weight_qdata", "_weight_scale", and so on. Read are integers (Int8Tensor, IntxUnpackedToInt8Tensor), 4 bits
with minimums (Int4Tensor; Int4TilePackedTo4dTensor, whose words lie as tensor cores take them), 8-bit floats
(Float8Tensor), and blocks (MXTensor, NVFP4Tensor). Older checkpoints are pickles, which nothing here reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import foreign
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, floats, type_name
from headrace.quant.base import QWeight, Tensors
from headrace.quant.formats.fp8 import FLOATS, of_floats
from headrace.quant.formats.mxfp4 import of_blocks
from headrace.quant.layer_names import left_alone, names_listed
from headrace.quant.packing import (
    checked,
    four_bit_floats,
    good_scales,
    nibbles,
    one_scale,
    plain_weight,
    signed,
    two_sizes,
    unpacked,
)

SPARE = re.compile(r".*\._weight_(act_quant_scale|act_quant_zero_point|act_per_tensor_scale)")
MAX_NOTE = 100_000


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if modules_to_not_convert names it, or if it is stored as one tensor."""
    part = f"{name}._weight_qdata"
    if left_alone(name, names_listed(config, "modules_to_not_convert")) or not tensors.has(part):
        return plain_weight(tensors, name)
    layer = _Layer(tensors, name)
    if layer.kind not in READERS:
        raise layer.wrong("_type", layer.kind, "one of " + ", ".join(READERS))
    weight = READERS[layer.kind](layer)
    if not layer.has("act_pre_scale"):
        return weight
    # Inputs are multiplied by it first: the same as the columns of the weights.
    factors = layer.part("act_pre_scale")
    if factors.size not in (1, weight.shape[1]):
        raise CheckpointError(
            f"{layer.name_of('act_pre_scale')} has shape {list(factors.shape)}, expected [{weight.shape[1]}]"
        )
    wide = good_scales(factors, layer.name_of("act_pre_scale"))
    return QWeight(weight.dequantize() * wide.reshape(1, -1))


class _Layer:
    """The parts of one layer, and the metadata about them."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self.tensors, self.name = tensors, name
        text = tensors.notes(f"{name}._weight_qdata").get(f"{name}.weight", "")
        if not text or len(text) > MAX_NOTE:
            raise CheckpointError(f"the metadata of {name}._weight_qdata's file say nothing of {name}.weight")
        values = foreign.parse_object(text.encode(), f"the note on {name}.weight", foreign.CONFIG)
        if not isinstance(values.get("_data"), dict):
            raise CheckpointError(f"the metadata of {name}.weight are {text!r:.120}, expected _type and _data")
        self.kind, self.values = str(values.get("_type")), values["_data"]

    def name_of(self, part: str) -> str:
        return f"{self.name}._weight_{part}"

    def has(self, part: str) -> bool:
        return self.tensors.has(self.name_of(part))

    def part(self, part: str) -> NDArray[Any]:
        return self.tensors(self.name_of(part))

    def shaped(self, part: str, shape: tuple[int | None, ...], *dtypes: str) -> NDArray[Any]:
        return checked(self.tensors, self.name_of(part), shape, *dtypes)

    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        return two_sizes(self.values.get("block_size"), f"the metadata of {self.name}.weight: block_size")

    def dtype(self, key: str) -> str:
        """A type as the metadata name it."""
        value = self.values.get(key)
        return str(value.get("_data")) if isinstance(value, dict) else str(value)

    def wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"the metadata of {self.name}.weight: {key} is {value!r:.80}, expected {expected}")


def _int8(layer: _Layer) -> QWeight:
    codes = layer.shaped("qdata", (None, None), "int8")
    num_out, num_in = codes.shape
    rows, group = layer.block()
    shape = (-(-num_out // rows), -(-num_in // group))
    scale = layer.name_of("scale")
    scales = good_scales(_spread(layer.shaped("scale", shape), rows, num_out), scale)
    zeros = None
    if layer.has("zero_point"):
        stored = layer.shaped("zero_point", shape, "int8", "int32", "int64", "float32", "bfloat16", "float16")
        zeros = _spread(floats(stored), rows, num_out)
    bits = 8
    if layer.kind == "IntxUnpackedToInt8Tensor":
        target = re.fullmatch(r"int([1-8])", layer.dtype("target_dtype"))
        if target is None:
            raise layer.wrong("target_dtype", layer.values.get("target_dtype"), "int1 to int8")
        bits = max(int(target[1]), 2)
    return signed(codes, scales, zeros, min(group, num_in), bits, layer.name_of("qdata"))


def _spread(part: NDArray[Any], rows: int, num_out: int) -> NDArray[Any]:
    return part.repeat(rows, 0)[:num_out] if rows > 1 else part


def _int4(layer: _Layer) -> QWeight:
    """weight = (code - 8) * scale + zero_point, scales [groups, out], the first of two codes in a byte's lower half."""
    stored = layer.shaped("qdata", (None, None), "int8", "uint8")
    codes = nibbles(np.ascontiguousarray(stored).view(np.uint8), False) ^ 8  # signed to unsigned
    return _with_minimums(layer, codes, layer.part("scale"), layer.part("zero_point"), codes.shape)


def _tiles(layer: _Layer) -> QWeight:
    """Words [out / 8, in / (32 * n), 32, n] of 8 codes (matrix_to_m16n8k16_Bint4_layout in PyTorch's int4mm.cu).

    Lane t has output t / 4, and of each 32 inputs 2 * (t % 4) + 8 * i and the next, i = 0 ... 3: the even ones in the
    lower half of the word. Outputs and inputs are padded.
    """
    words = layer.shaped("qdata", (None, None, 32, None), "int32")
    tiles, outer, _, inner = words.shape
    lanes = unpacked(words.reshape(-1, 1), 4, 8).reshape(tiles, outer, 8, 4, inner, 2, 4)
    codes = lanes.transpose(0, 2, 1, 4, 6, 3, 5).reshape(8 * tiles, 32 * inner * outer)
    both = layer.shaped("scale_and_zero", (None, 8 * tiles, 2))
    shape = two_sizes(layer.values.get("shape"), f"the metadata of {layer.name}.weight: shape")
    if shape[0] > codes.shape[0] or shape[1] > codes.shape[1]:
        raise layer.wrong("shape", list(shape), f"at most {list(codes.shape)}")
    return _with_minimums(layer, codes, both[:, :, 0], both[:, :, 1], shape)


def _with_minimums(
    layer: _Layer, codes: NDArray[Any], scale: NDArray[Any], zero: NDArray[Any], shape: tuple[int, ...]
) -> QWeight:
    """Codes of which the first `shape` are the layer's, with scales and zeros [groups, out] of (code - 8)."""
    group = layer.block()[1]
    expected = (-(-codes.shape[1] // group), codes.shape[0])
    for part, values in (("scale", scale), ("zero_point", zero)):
        if values.shape != expected:
            raise CheckpointError(f"{layer.name_of(part)} has shape {list(values.shape)}, expected {list(expected)}")
    if type_name(zero) not in PLAIN:
        raise CheckpointError(f"{layer.name_of('zero_point')} is stored as {type_name(zero)}, expected plain floats")
    num_out, num_in = shape
    num_groups = -(-num_in // group)
    scales = np.ascontiguousarray(good_scales(scale, layer.name_of("scale")).T[:num_out, :num_groups])
    zeros = np.ascontiguousarray(floats(zero).T[:num_out, :num_groups])
    if not np.isfinite(zeros).all():
        raise CheckpointError(f"{layer.name_of('zero_point')} has a value that is not finite")
    return QWeight(codes[:num_out, :num_in], scales, mins=zeros - 8 * scales, group=group, bits=4)


def _float8(layer: _Layer) -> QWeight:
    codes = layer.shaped("qdata", (None, None), *FLOATS)
    rows, columns = layer.block()
    return of_floats(codes, layer.part("scale"), layer.name_of("scale"), (min(rows, codes.shape[0]), columns))


def _mx(layer: _Layer) -> QWeight:
    kind, group = layer.dtype("elem_dtype"), layer.values.get("block_size")
    if group != 32 or kind not in (*FLOATS, "float4_e2m1fn_x2"):
        raise layer.wrong("elem_dtype", f"{kind} in blocks of {group!r:.20}", f"{FLOATS[0]} or float4_e2m1fn_x2 of 32")
    if kind in FLOATS:
        codes = layer.shaped("qdata", (None, None), kind)
        scales = _scales(layer, (codes.shape[0], -(-codes.shape[1] // group)), "uint8")
        return of_floats(codes, scales, layer.name_of("scale"), None, group)
    pairs = layer.shaped("qdata", (None, None), "uint8")
    scales = _scales(layer, (pairs.shape[0], 2 * pairs.shape[1] // group), "uint8")
    return of_blocks(pairs, scales, layer.name_of("scale"))


def _nvfp4(layer: _Layer) -> QWeight:
    if layer.values.get("block_size") != 16:
        raise layer.wrong("block_size", layer.values.get("block_size"), "16")
    pairs = layer.shaped("qdata", (None, None), "uint8")
    scales = floats(_scales(layer, (pairs.shape[0], pairs.shape[1] // 8), FLOATS[0]))
    if layer.has("per_tensor_scale"):
        scales = scales * one_scale(layer.tensors, layer.name_of("per_tensor_scale"))
    return four_bit_floats(pairs, good_scales(scales, layer.name_of("scale")), 16)


def _scales(layer: _Layer, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """Scales of that shape, which may be stored as tensor cores take them: 128 x 4 of them as 32 rows of 4 x 4."""
    if not layer.values.get("is_swizzled_scales"):
        return layer.shaped("scale", shape, dtype)
    tall, wide = -(-shape[0] // 128), -(-shape[1] // 4)
    stored = layer.part("scale")
    if type_name(stored) != dtype or stored.size != tall * wide * 512:
        raise CheckpointError(
            f"{layer.name_of('scale')} is {type_name(stored)} with shape {list(stored.shape)}, expected {dtype} with "
            f"{tall * wide * 512} numbers"
        )
    lanes = np.ascontiguousarray(stored).reshape(tall, wide, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(lanes.reshape(tall * 128, wide * 4)[: shape[0], : shape[1]])


READERS: dict[str, Callable[[_Layer], QWeight]] = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _int8,
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _tiles,
    "Float8Tensor": _float8,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
