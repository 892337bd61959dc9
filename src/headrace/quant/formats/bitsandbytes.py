"""bitsandbytes checkpoints: NF4 and FP4 (Dettmers et al. 2023, QLoRA), plain or doubly quantised, and LLM.int8().

4 bits: `weight` uint8 [weights / 2, 1], the upper half of a byte first, row after row; `weight.absmax`, a scale for
each block of weights; `weight.quant_map` float32 [16]; `weight.quant_state.bitsandbytes__<type>`, JSON as bytes. Doubly
quantised scales are bytes in `absmax`, with `weight.nested_absmax`, `weight.nested_quant_map` and an offset in the
JSON. 8 bits (Dettmers et al. 2022): `weight` int8 [out, in] and `SCB` float32 [out], the largest magnitude of each row;
from `headrace quantize` also `outlier_columns` int32 [n] and their weights `outlier_weight` bfloat16 [out, n].
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import foreign
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, type_name
from headrace.quant.base import QWeight, SplitWeight, Tensors
from headrace.quant.layer_names import left_alone, names_listed
from headrace.quant.packing import checked, good_scales, nibbles, plain_weight

SPARE = re.compile(r"(?!)")
THRESHOLD = 6.0
"""The value in the paper, section 3.2, and in configs without one."""
TYPES = ("nf4", "fp4")
MAX_STATE_BYTES = 10_000
MAX_NUMBER = 1e30


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if llm_int8_skip_modules names it, or if it is stored as floats."""
    if left_alone(name, names_listed(config, "llm_int8_skip_modules")):
        return plain_weight(tensors, name)
    for kind in TYPES:
        if tensors.has(f"{name}.weight.quant_state.bitsandbytes__{kind}"):
            return _four_bits(tensors, name, kind)
    if tensors.has(f"{name}.SCB"):
        return _int8(tensors, name)
    weight = tensors(f"{name}.weight")
    if type_name(weight) in PLAIN:
        return plain_weight(tensors, name)
    raise CheckpointError(
        f"{name}.weight is stored as {type_name(weight)} with shape {list(weight.shape)}; expected {name}.SCB or "
        f"{name}.weight.quant_state.bitsandbytes__nf4 beside it"
    )


def activations(config: dict[str, Any]) -> str:
    """LLM.int8() multiplies the columns in which any activation reaches llm_int8_threshold in 16 bits, which makes one
    row's product depend on the others'. 16 bits for every column are exact where the method is, and depend on nothing.
    """
    if not config.get("load_in_8bit"):
        return ""
    threshold = config.get("llm_int8_threshold", THRESHOLD)
    if not isinstance(threshold, (int, float)) or isinstance(threshold, bool) or not threshold >= 0:
        raise CheckpointError(
            f"quantization_config: llm_int8_threshold is {threshold!r:.80}, expected a number of at least 0"
        )
    return "16bit" if threshold else ""


def _int8(tensors: Tensors, name: str) -> QWeight:
    codes = checked(tensors, f"{name}.weight", (None, None), "int8")
    if tensors.has(f"{name}.weight_format"):
        layout = tensors(f"{name}.weight_format")
        if layout.size != 1 or layout.any():
            raise CheckpointError(f"{name}.weight_format is {layout.tolist()!r:.80}, expected 0 (row after row)")
    largest = checked(tensors, f"{name}.SCB", (codes.shape[0],))
    scales = (good_scales(largest, f"{name}.SCB") / 127).reshape(-1, 1)
    if not tensors.has(f"{name}.outlier_columns"):
        return QWeight(codes, scales, group=codes.shape[1], bits=8)
    columns = checked(tensors, f"{name}.outlier_columns", (None,), "int32").astype(np.int64)
    num_in = codes.shape[1]
    if ((columns < 0) | (columns >= num_in)).any() or len(set(columns.tolist())) < len(columns):
        raise CheckpointError(
            f"{name}.outlier_columns, shape {list(columns.shape)}, has inputs twice or beyond 0 to {num_in - 1}"
        )
    outliers = checked(tensors, f"{name}.outlier_weight", (codes.shape[0], len(columns)), "bfloat16")
    return SplitWeight(codes, scales, group=num_in, bits=8, columns=columns, kept=outliers)


def _four_bits(tensors: Tensors, name: str, kind: str) -> QWeight:
    state = _State(tensors, f"{name}.weight.quant_state.bitsandbytes__{kind}", kind)
    num_out, num_in = state.shape
    count, size = num_out * num_in, state.whole("blocksize")
    packed = tensors(f"{name}.weight")
    if type_name(packed) in PLAIN and packed.ndim == 2 and packed.shape[1] == 1:  # bnb_4bit_quant_storage
        packed = np.ascontiguousarray(packed).view(np.uint8)
    if type_name(packed) != "uint8" or packed.size != -(-count // 2):
        raise CheckpointError(
            f"{name}.weight is {type_name(packed)} with shape {list(packed.shape)}, expected {-(-count // 2)} bytes "
            f"for {num_out} x {num_in} weights"
        )
    codebook = checked(tensors, f"{name}.weight.quant_map", (16,), "float32")
    if not np.isfinite(codebook).all():
        raise CheckpointError(f"{name}.weight.quant_map has a value that is not finite; expected 16 numbers")
    scales = _scales(tensors, name, state, -(-count // size))
    codes = nibbles(packed.reshape(1, -1), True)[0, :count].reshape(num_out, num_in)
    if num_in % size == 0:
        return QWeight(codes, scales.reshape(num_out, -1), group=size, bits=4, codebook=codebook)
    if count % size == 0 and size % num_in == 0:
        of_rows = scales.repeat(size // num_in).reshape(num_out, 1)
        return QWeight(codes, of_rows, group=num_in, bits=4, codebook=codebook)
    # Blocks begin in the middle of a row, so that no scale belongs to a group of one row.
    flat = QWeight(codes.reshape(1, -1), scales.reshape(1, -1), group=size, bits=4, codebook=codebook)
    return QWeight(flat.dequantize().reshape(num_out, num_in))


def _scales(tensors: Tensors, name: str, state: _State, num_blocks: int) -> NDArray[np.float32]:
    """Scales float32 [blocks], which may be quantised themselves."""
    absmax, nested = f"{name}.weight.absmax", f"{name}.weight.nested_absmax"
    if not tensors.has(nested):
        return good_scales(checked(tensors, absmax, (num_blocks,), "float32"), absmax)
    codes = checked(tensors, absmax, (num_blocks,), "uint8")
    size = state.whole("nested_blocksize")
    outer = good_scales(checked(tensors, nested, (-(-num_blocks // size),), "float32"), nested)
    table = checked(tensors, f"{name}.weight.nested_quant_map", (256,), "float32")
    inner = QWeight(codes.reshape(1, -1), outer.reshape(1, -1), group=size, bits=8, codebook=table)
    return good_scales(inner.dequantize()[0] + state.number("nested_offset"), absmax)


class _State:
    """The JSON that bitsandbytes stores next to a weight."""

    def __init__(self, tensors: Tensors, name: str, kind: str) -> None:
        self.name = name
        stored = checked(tensors, name, (None,), "uint8")
        if stored.size > MAX_STATE_BYTES:
            raise CheckpointError(f"{name} has shape {list(stored.shape)}, expected at most {MAX_STATE_BYTES} bytes")
        values = foreign.parse_object(stored.tobytes(), name, foreign.CONFIG)
        if values.get("quant_type") != kind:
            raise CheckpointError(f"{name} says {values!r:.120}, expected an object with quant_type {kind!r}")
        self._values: dict[str, Any] = values
        shape = values.get("shape")
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**31 for n in shape)):
            raise CheckpointError(f"{name} has shape {shape!r:.80}, expected [out, in]")
        self.shape = (shape[0], shape[1])

    def whole(self, key: str) -> int:
        value = self._values.get(key)
        if type(value) is not int or not 0 < value < 2**31:
            raise CheckpointError(f"{self.name}: {key} is {value!r:.80}, expected a whole number above 0")
        return value

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER:
            return float(value)
        raise CheckpointError(f"{self.name}: {key} is {value!r:.80}, expected a number")
