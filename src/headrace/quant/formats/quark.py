"""AMD Quark's checkpoints ("real_quantized"): 8-bit floats and integers, 4-bit integers, and MXFP4.

`global_quant_config` says how the weights are stored, `layer_quant_config` the same of layers whose names match a
pattern of file names, `exclude` which layers are plain. `weight` and `weight_scale`: 8-bit floats and int8 [out, in]
with one scale, one for each output or group; 4-bit integers eight to an int32, [in, out / 8] in groups (scales and zero
points [groups, ...]) or [out, in / 8]; fp4 two to a byte, the lower half first, with E8M0 scales. Under pack_method
"reorder" the eight codes of a word belong to places 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, floats, type_name
from headrace.quant.base import QWeight, Tensors
from headrace.quant.formats.awq import PLACES
from headrace.quant.formats.fp8 import FLOATS, of_floats
from headrace.quant.formats.mxfp4 import GROUP, of_blocks
from headrace.quant.layer_names import fits, is_listed, names_listed
from headrace.quant.packing import checked, good_scales, plain_weight, signed, two_sizes, unpacked

SPARE = re.compile(r".*\.((input|output|bias)_(scale|zero_point)(_2)?|[kqv]_scale|weight_zero_point)")
DTYPES = {"fp8_e4m3": FLOATS[0], "fp8_e5m2": FLOATS[1]}


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if `exclude` names it, or if it is stored as floats."""
    spec = _spec_of(name, config)
    if spec is None or _is_left(name, names_listed(config, "exclude")):
        return plain_weight(tensors, name)
    if tensors.has(f"{name}.weight") and type_name(tensors(f"{name}.weight")) in PLAIN:
        return plain_weight(tensors, name)
    kind, group = str(spec.get("dtype")), spec.get("group_size")
    in_groups = spec.get("qscheme") == "per_group"
    if in_groups and (type(group) is not int or group < 1):
        raise CheckpointError(f"quantization_config: group_size is {group!r:.40}, expected a whole number above 0")
    if kind in DTYPES:
        weight = checked(tensors, f"{name}.weight", (None, None), DTYPES[kind])
        block = None
        if spec.get("qscheme") == "per_block":
            block = two_sizes(spec.get("block_size"), "quantization_config: block_size")
        scale = f"{name}.weight_scale"
        return of_floats(weight, tensors(scale), scale, block)
    if kind == "fp4" and spec.get("scale_format") == "e8m0" and group == GROUP:
        pairs = checked(tensors, f"{name}.weight", (None, None), "uint8")
        scales = checked(tensors, f"{name}.weight_scale", (pairs.shape[0], 2 * pairs.shape[1] // GROUP), "uint8")
        return of_blocks(pairs, scales, f"{name}.weight_scale")
    if kind in ("int4", "uint4", "int8", "uint8"):
        return _integers(tensors, name, kind, group if in_groups else None, _order(config))
    raise CheckpointError(
        f"quantization_config: weight: dtype is {kind!r:.40} (scale_format {spec.get('scale_format')!r:.20}, "
        f"group_size {group!r:.20}), expected {', '.join(DTYPES)}, int4, uint4, int8, uint8, or fp4 with e8m0 scales "
        f"of {GROUP}"
    )


def _integers(tensors: Tensors, name: str, kind: str, group: int | None, order: list[int]) -> QWeight:
    """group: inputs that share a scale, None for one scale, or one for each output."""
    bits = int(kind[-1])
    codes = _codes(tensors, f"{name}.weight", kind, order)
    codes = np.ascontiguousarray(codes.T) if group else codes
    num_out, num_in = codes.shape
    scale, zero = f"{name}.weight_scale", f"{name}.weight_zero_point"
    if group:
        num_groups = -(-num_in // group)
        scales = np.ascontiguousarray(good_scales(checked(tensors, scale, (num_groups, num_out)), scale).T)
    else:
        scales = _of_outputs(good_scales(tensors(scale), scale), num_out, scale)
    zeros = None
    if tensors.has(zero):
        stored = tensors(zero)
        if type_name(stored) not in ("int32", "int8", "uint8", *PLAIN):
            raise CheckpointError(f"{zero} is stored as {type_name(stored)}, expected int32, int8 or floats")
        if type_name(stored) == "int32" and bits == 4 and stored.ndim and stored.shape[-1] * 8 == num_out:
            stored = _codes(tensors, zero, kind, order)
        zeros = floats(stored)
        zeros = zeros.T if group else _of_outputs(zeros, num_out, zero)
        if zeros.shape != scales.shape:
            raise CheckpointError(f"{zero} has shape {list(tensors(zero).shape)}, expected one for each scale")
    size = group or num_in
    if kind.startswith("u"):
        middle = np.zeros_like(scales) if zeros is None else np.ascontiguousarray(zeros, np.float32)
        return QWeight(codes, scales, middle, group=size, bits=bits)
    return signed(codes.view(np.int8), scales, zeros, size, bits, f"{name}.weight")


def _codes(tensors: Tensors, name: str, kind: str, order: list[int]) -> NDArray[Any]:
    """uint8 [rows, n], or int8 for signed codes."""
    if kind.endswith("8"):
        return checked(tensors, name, (None, None), kind)
    words = tensors(name)
    if type_name(words) != "int32" or words.ndim not in (1, 2):
        raise CheckpointError(f"{name} is stored as {type_name(words)} with shape {list(words.shape)}, expected int32")
    rows = words.reshape(-1, words.shape[-1])
    stored = unpacked(rows, 4, 8 * rows.shape[1]).reshape(*rows.shape, 8)[:, :, order].reshape(len(rows), -1)
    codes = np.ascontiguousarray(stored) if kind == "uint4" else ((stored ^ 8).astype(np.int8) - 8)
    return codes.reshape(-1) if words.ndim == 1 else codes


def _of_outputs(part: NDArray[np.float32], num_out: int, name: str) -> NDArray[np.float32]:
    """One number, or one for each output, as [out, 1]."""
    if part.size not in (1, num_out):
        raise CheckpointError(f"{name} has shape {list(part.shape)}, expected [] or [{num_out}]")
    return np.ascontiguousarray(np.broadcast_to(part.reshape(-1, 1), (num_out, 1)))


def _order(config: dict[str, Any]) -> list[int]:
    """The places of a word's eight codes."""
    export = config.get("export") or {}
    method = export.get("pack_method", "reorder") if isinstance(export, dict) else export
    if method not in ("reorder", "order"):
        raise CheckpointError(f"quantization_config: export: pack_method is {method!r:.60}, expected reorder or order")
    return list(PLACES) if method == "reorder" else list(range(8))


def _spec_of(name: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """How the layer's weights are stored; None for plain."""
    by_pattern = config.get("layer_quant_config") or {}
    if not isinstance(by_pattern, dict):
        raise CheckpointError(
            f"quantization_config: layer_quant_config is {by_pattern!r:.80}, expected settings by pattern"
        )
    layer = next((settings for pattern, settings in by_pattern.items() if fits(pattern, name)), None)
    layer = config.get("global_quant_config") if layer is None else layer
    spec = layer.get("weight") if isinstance(layer, dict) else layer
    if layer is not None and (not isinstance(layer, dict) or not isinstance(spec, dict | None)):
        raise CheckpointError(
            f"quantization_config: weight of {name} is {spec!r:.80}, expected an object (weights in two stages are not "
            "supported)"
        )
    return spec


def _is_left(name: str, listed: list[str]) -> bool:
    """Whether a list has the layer, by a name, a pattern of file names, or a regular expression after "re:"."""
    return is_listed(name, listed) or any(fits(text, name) for text in listed)
