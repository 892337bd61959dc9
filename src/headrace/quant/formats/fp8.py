"""Checkpoints of 8-bit floats (Micikevicius et al. 2022), E4M3 or E5M2, with their scales next to them.

`weight` float8 [out, in]; `weight_scale_inv` (DeepSeek-V3, transformers' finegrained_fp8) or `weight_scale`: one
number, one for each output, or one for each block of weight_block_size rows and columns, which the weight is multiplied
by. Scales of type E8M0 are bytes that stand for 2^(byte - 127). Inputs are rounded to E4M3 where
activation_scheme says so: "static" by the number `input_scale`, "dynamic" by a scale for each row, or for each block's
columns of it; FBGEMM's checkpoints ("fbgemm_fp8") are dynamic.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, type_name
from headrace.quant.base import Inputs, QWeight, Tensors
from headrace.quant.layer_names import left_alone, names_listed
from headrace.quant.packing import checked, good_scales, one_scale, plain_weight, two_sizes

SPARE = re.compile(r".*\.(input_scale|input_scale_inv|activation_scale|output_scale|[kqv]_scale)")
FLOATS = ("float8_e4m3fn", "float8_e5m2")


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's 8-bit floats as codes; plain floats if the config's lists name it, or if it is stored as floats."""
    stated = config.get("weight_block_size")
    block = None if stated is None else two_sizes(stated, "config.json: quantization_config.weight_block_size")
    if left_alone(name, names_listed(config, "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")):
        return plain_weight(tensors, name)
    weight = checked(tensors, f"{name}.weight", (None, None), *FLOATS, *PLAIN)
    if type_name(weight) in PLAIN:
        return plain_weight(tensors, name)
    scale = f"{name}.weight_scale" if tensors.has(f"{name}.weight_scale") else f"{name}.weight_scale_inv"
    inputs = _inputs(tensors, name, config, block)
    return dataclasses.replace(of_floats(weight, tensors(scale), scale, block), inputs=inputs)


def activations(config: dict[str, Any]) -> str:
    return "fp8" if _scheme(config) else ""


def _scheme(config: dict[str, Any]) -> Any:
    # FBGEMM's kernels always round the inputs, each row by its largest; its bound on that is for none in practice.
    return config.get("activation_scheme", "dynamic" if config.get("quant_method") == "fbgemm_fp8" else None)


def _inputs(tensors: Tensors, name: str, config: dict[str, Any], block: tuple[int, int] | None) -> Inputs | None:
    scheme = _scheme(config)
    if scheme not in (None, "static", "dynamic"):
        raise CheckpointError(f"quantization_config: activation_scheme is {scheme!r:.80}, expected static or dynamic")
    if scheme == "static":
        return static_inputs(tensors, name)
    return None if scheme is None else Inputs(group=0 if block is None else block[1])


def static_inputs(tensors: Tensors, name: str) -> Inputs | None:
    """Inputs by the number `input_scale`; None if it is not stored."""
    scale = f"{name}.input_scale"
    return Inputs(float(one_scale(tensors, scale)[0, 0])) if tensors.has(scale) else None


def of_floats(
    weight: NDArray[Any],
    scales: NDArray[Any],
    scale_name: str,
    block: tuple[int, int] | None,
    group: int | None = None,
) -> QWeight:
    """8-bit floats [out, in] with the scales of tensor `scale_name`, whose shape says how many weights share one.

    block: (rows, columns) that share a scale, if the config has blocks. group: inputs that share one, if it has groups.
    """
    num_out, num_in = weight.shape
    widened = good_scales(powers(scales) if type_name(scales) == "uint8" else scales, scale_name)
    shapes = {(): num_in, (1,): num_in, (1, 1): num_in, (num_out,): num_in, (num_out, 1): num_in}
    rows = 1 if block is None else block[0]
    columns = group or (num_in if block is None else block[1])
    shapes.setdefault((-(-num_out // rows), -(-num_in // columns)), columns)
    shape = tuple(scales.shape)
    if shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{scale_name} has shape {list(scales.shape)}, expected {expected}")
    if shapes[shape] == num_in and widened.size in (1, num_out):
        return QWeight(weight, np.broadcast_to(widened.reshape(-1, 1), (num_out, 1)), group=num_in, bits=8)
    return QWeight(weight, widened.repeat(rows, 0)[:num_out], group=columns, bits=8)


def powers(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Scales of type E8M0: 2^(byte - 127)."""
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(np.float32(1), exponents.astype(np.int32) - 127))
