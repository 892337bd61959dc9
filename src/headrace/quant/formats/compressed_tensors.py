"""compressed-tensors checkpoints, as llm-compressor writes them: integers packed or not, 8-bit and 4-bit floats.

`config_groups` say which layers are quantised and how, `ignore` which are not. The formats: pack-quantized (int32
`weight_packed`, 2 to 8 bits, codes stored with an offset, `weight_shape`), int-quantized and naive-quantized (int8
`weight`), float-quantized and mxfp8-quantized (float8 `weight`), mxfp4- and nvfp4-pack-quantized (two 4-bit floats a
byte, the lower half first), marlin-24 (two of four codes in Marlin's words). Where `sparsity_config` says
sparse-24-bitmask, a layer may have `compressed`, `bitmask` and `shape` in place of its weight. `weight_scale` is one
number, or one for each output, group or block; `weight_zero_point` likewise.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, floats, type_name
from headrace.quant.base import Inputs, QWeight, Tensors
from headrace.quant.formats.fp8 import FLOATS, of_floats, static_inputs
from headrace.quant.formats.mxfp4 import of_blocks
from headrace.quant.layer_names import is_listed, names_listed
from headrace.quant.packing import (
    by_index,
    checked,
    four_bit_floats,
    good_scales,
    group_of,
    num_words,
    one_scale,
    plain_weight,
    signed,
    two_sizes,
    unpacked,
    whole,
)
from headrace.quant.sparsity import expanded, of_marlin

SPARE = re.compile(
    r".*\.(input_scale|input_zero_point|input_global_scale|input_g_idx|output_scale|output_zero_point|weight_shape"
    r"|[qkv]_scale|[qkv]_zero_point)"
)
EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|word_embeddings|embeddings|wte|tok_embeddings)")
"""Names of the tables of embeddings, which a config's targets call "Embedding"."""
MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
MARLIN_24, BITMASK_24 = "marlin-24", "sparse-24-bitmask"
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
    MARLIN_24,
    MXFP4,
    "mxfp8-quantized",
    NVFP4,
)


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if `ignore` names it, if no target does, or if it is stored as floats."""
    _verify_config(config)
    if tensors.has(f"{name}.bitmask"):
        tensors = _Expanded(tensors, name)
    group = None if is_listed(name, names_listed(config, "ignore")) else _args_of(name, config)
    if group is None:
        return plain_weight(tensors, name)
    args, layout, rounded = group
    if layout == MARLIN_24:
        in_groups = args.get("strategy") == "group"
        return of_marlin(tensors, name, _bits(args), whole(args, "group_size") if in_groups else None)
    if tensors.has(f"{name}.weight_packed"):
        if args.get("type") == "float":
            return four_bit_blocks(tensors, name, layout)
        return _packed(tensors, name, args)
    weight = checked(tensors, f"{name}.weight", (None, None), *FLOATS, "int8", *PLAIN)
    if weight.dtype in PLAIN:
        if tensors.has(f"{name}.weight_scale"):
            raise CheckpointError(
                f"{name}.weight is stored as {weight.dtype} beside {name}.weight_scale, expected 8-bit codes: "
                "quantization_status is not compressed"
            )
        return plain_weight(tensors, name)
    if type_name(weight) == "int8":
        return _int8(tensors, name, weight, args)
    block, size = _block(args), args.get("group_size")
    columns = whole(args, "group_size") if args.get("strategy") in ("group", "tensor_group") and size else None
    scale = f"{name}.weight_scale"
    scales = tensors(scale)
    layer = of_floats(weight, scales, scale, block, columns)
    # MXFP8's inputs have powers of two as scales, which `Inputs` does not.
    inputs = None if type_name(scales) == "uint8" else _inputs(tensors, name, rounded)
    return dataclasses.replace(layer, inputs=inputs)


def activations(config: dict[str, Any]) -> str:
    """fp8 if any group rounds its inputs to 8-bit floats."""
    groups = config.get("config_groups")
    each = [group.get("input_activations") for group in groups.values()] if isinstance(groups, dict) else []
    return "fp8" if any(isinstance(args, dict) and _is_f8(args) for args in each) else ""


def _is_f8(args: dict[str, Any]) -> bool:
    return args.get("type") == "float" and args.get("num_bits", 8) == 8


def _inputs(tensors: Tensors, name: str, args: Any) -> Inputs | None:
    """The numbers to which a group's input_activations are rounded; None where that is not 8-bit floats."""
    if not isinstance(args, dict) or not _is_f8(args):
        return None
    if not args.get("dynamic"):
        return static_inputs(tensors, name)
    in_groups = args.get("strategy") in ("group", "tensor_group") and args.get("group_size")
    return Inputs(group=whole(args, "group_size") if in_groups else 0)


class _Expanded:
    """`Tensors` in which the layer `name` has a `weight` out of its bitmask."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self._tensors, self._name = tensors, f"{name}.weight"
        self._weight = expanded(tensors, name, *FLOATS, "int8", *PLAIN)
        self.notes = tensors.notes

    def __call__(self, name: str) -> NDArray[Any]:
        return self._weight if name == self._name else self._tensors(name)

    def has(self, name: str) -> bool:
        return name == self._name or self._tensors.has(name)


def _packed(tensors: Tensors, name: str, args: dict[str, Any]) -> QWeight:
    bits = _bits(args)
    shape = checked(tensors, f"{name}.weight_shape", (2,), "int64", "int32").tolist()
    num_out, num_in = int(shape[0]), int(shape[1])
    if not (0 < num_out < 2**31 and 0 < num_in < 2**31):
        raise CheckpointError(f"{name}.weight_shape is {shape}, expected [out, in]")
    words = checked(tensors, f"{name}.weight_packed", (num_out, None), "int32")
    codes = _codes(words, bits, num_in, f"{name}.weight_packed")
    scales, size = _scales(tensors, name, args, (num_out, num_in))
    zero = f"{name}.weight_zero_point"
    zeros = np.full_like(scales, 2.0 ** (bits - 1))
    if not args.get("symmetric", True) and tensors.has(zero):
        stored = checked(tensors, zero, (None, scales.shape[1]), "int32", "int8")
        if type_name(stored) == "int8":
            zeros = zeros + floats(checked(tensors, zero, (num_out, scales.shape[1]), "int8"))
        else:
            zeros = np.ascontiguousarray(_codes(stored.T, bits, num_out, zero).T, np.float32)
    index = f"{name}.weight_g_idx"
    if not tensors.has(index):
        return QWeight(codes, scales, zeros, group=size, bits=bits)
    g_idx = checked(tensors, index, (num_in,), "int32", "int64")
    return by_index(codes, scales, zeros, g_idx, size, bits, index)


def _codes(words: NDArray[np.int32], bits: int, count: int, name: str) -> NDArray[np.uint8]:
    """int32 [rows, n] -> uint8 [rows, count]. Older writers split no code between two words."""
    per_word = 32 // bits
    if words.shape[1] == num_words(count, bits):
        return unpacked(words, bits, count)
    if words.shape[1] != -(-count // per_word):
        raise CheckpointError(
            f"{name} has {words.shape[1]} words for {count} codes of {bits} bits, expected {num_words(count, bits)}; "
            f"shape {list(words.shape)}"
        )
    mask = (1 << bits) - 1
    parts = [((words >> (bits * i)) & mask).astype(np.uint8) for i in range(per_word)]
    return np.stack(parts, -1).reshape(len(words), -1)[:, :count]


def _int8(tensors: Tensors, name: str, codes: NDArray[np.int8], args: dict[str, Any]) -> QWeight:
    bits = _bits(args)
    shape = (codes.shape[0], codes.shape[1])
    scales, size = _scales(tensors, name, args, shape)
    zero, zeros = f"{name}.weight_zero_point", None
    if not args.get("symmetric", True) and tensors.has(zero):
        block = _block(args)
        stored = tensors(zero)
        zeros = floats(_spread(stored, zero, args, shape, block))
    return signed(codes, scales, zeros, size, bits, f"{name}.weight")


def four_bit_blocks(tensors: Tensors, name: str, layout: str) -> QWeight:
    """The layer's `weight_packed` and `weight_scale` in the layout MXFP4 or NVFP4."""
    packed = checked(tensors, f"{name}.weight_packed", (None, None), "uint8")
    num_out, num_in = packed.shape[0], 2 * packed.shape[1]
    if layout == MXFP4:
        scales = checked(tensors, f"{name}.weight_scale", (num_out, num_in // 32), "uint8")
        return of_blocks(packed.reshape(num_out, -1, 16), scales, f"{name}.weight_scale")
    if layout != NVFP4:
        raise CheckpointError(f"quantization_config: format {layout!r:.80} of 4-bit floats, expected {MXFP4}")
    scales = checked(tensors, f"{name}.weight_scale", (num_out, num_in // 16), FLOATS[0])
    outer = one_scale(tensors, f"{name}.weight_global_scale")
    return four_bit_floats(packed, good_scales(floats(scales) / outer, f"{name}.weight_scale"), 16)


def _scales(
    tensors: Tensors, name: str, args: dict[str, Any], shape: tuple[int, int]
) -> tuple[NDArray[np.float32], int]:
    """float32 [out, groups], and the inputs of a group."""
    scale, block = f"{name}.weight_scale", _block(args)
    scales = good_scales(_spread(tensors(scale), scale, args, shape, block), scale)
    return scales, block[1] if block else shape[1] if scales.shape[1] == 1 else whole(args, "group_size")


def _spread(
    part: NDArray[Any], name: str, args: dict[str, Any], shape: tuple[int, int], block: tuple[int, int] | None
) -> NDArray[Any]:
    """Scales or zero points of the tensor, its outputs, groups or blocks as [out, groups]."""
    num_out, num_in = shape
    strategy = args.get("strategy") or ("group" if args.get("group_size") else "tensor")
    if strategy == "tensor" and part.size == 1:
        return np.broadcast_to(part.reshape(1, 1), (num_out, 1))
    if strategy == "channel" and tuple(part.shape) in ((num_out, 1), (num_out,)):
        return part.reshape(num_out, 1)
    expected = [1] if strategy == "tensor" else [num_out, 1]
    if strategy in ("group", "tensor_group"):
        size = whole(args, "group_size")
        expected = [num_out, -(-num_in // size) if size > 0 else 1]
    if block is not None:
        expected = [-(-num_out // block[0]), -(-num_in // block[1])]
    if list(part.shape) != expected or strategy in ("tensor", "channel"):
        raise CheckpointError(f"{name} has shape {list(part.shape)}, expected {expected} ({strategy!r:.40})")
    return part if block is None else part.repeat(block[0], 0)[:num_out]


def _bits(args: dict[str, Any]) -> int:
    bits = whole(args, "num_bits", 8)  # compressed-tensors' own default
    if not 2 <= bits <= 8:
        raise CheckpointError(f"config.json: quantization_config: num_bits is {bits}, expected 2 to 8")
    return bits


def _block(args: dict[str, Any]) -> tuple[int, int] | None:
    if args.get("strategy") != "block":
        return None
    return two_sizes(args.get("block_structure"), "quantization_config: block_structure")


def _verify_config(config: dict[str, Any]) -> None:
    layout = config.get("format")
    if layout is not None and layout not in FORMATS:
        raise CheckpointError(f"quantization_config: format {layout!r:.80} is not supported")
    if config.get("transform_config"):
        raise CheckpointError("quantization_config: transform_config (rotated weights) is not supported")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") not in ("dense", BITMASK_24):
        raise CheckpointError(f"quantization_config: sparsity_config {sparsity!r:.80} is not supported")


def _args_of(name: str, config: dict[str, Any]) -> tuple[dict[str, Any], str, Any] | None:
    """How the layer's weights are quantised, in which format, and how its inputs are; None if they are not.

    A target that names the layer precedes its kind, and that its last parts.
    """
    groups = config.get("config_groups", {} if config.get("sparsity_config") else None)
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"quantization_config: config_groups is {groups!r:.80}, expected objects by name")
    kind = "Embedding" if EMBEDDING.fullmatch(name) else "Linear"
    by_kind = by_end = None
    for group in groups.values():
        targets = names_listed(group, "targets")
        if is_listed(name, targets):
            return _weights_of(group, config)
        if kind in targets and by_kind is None:
            by_kind = group
        if by_end is None and any(name.endswith(f".{target}") for target in targets):
            by_end = group
    group = by_kind or by_end
    return None if group is None else _weights_of(group, config)


def _weights_of(group: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], str, Any] | None:
    args = group.get("weights")
    if args is None:
        return None
    if not isinstance(args, dict):
        raise CheckpointError(f"quantization_config: weights are {args!r:.80}, expected an object")
    _bits(args)
    if args.get("group_size") is not None:
        group_of(args, "group_size")
    return args, str(group.get("format") or config.get("format")), group.get("input_activations")
