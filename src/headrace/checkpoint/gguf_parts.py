"""The places of tensors in a GGUF file, by the names that a model file has for them.

A tensor of the file may hold the matrices of all experts; a `Part` is the rows of one matrix. Called by
`checkpoint.gguf_config`, which knows the names, and by the readers of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.mapped import VIEWS
from headrace.gguf import GGUF, TENSOR_TYPES, TensorInfo
from headrace.protocol.errors import CheckpointError

MAX_PARTS = 2**17
"""Most matrices and vectors of a model. Each expert's are counted, though one tensor of the file holds many experts."""
BLOCK_BYTES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
IGNORED = frozenset(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))
EXPERTS = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}


class Part(NamedTuple):
    """Rows first ... first + shape[0] - 1 of a tensor of the file; `shape` with the slowest dimension first."""

    info: TensorInfo
    shape: tuple[int, ...]
    first: int = 0


def parts_of(
    file: GGUF,
    layer: Mapping[str, str],
    ends: dict[str, str],
    root: str,
    num_experts: int = 0,
    expert_root: str = "block_sparse_moe.experts",
    of_expert: Mapping[str, str] = EXPERTS,
) -> dict[str, Part]:
    """Return every tensor of the file under the model's name for it, or under the file's name if there is no other."""
    parts: dict[str, Part] = {}

    def add(name: str, part: Part) -> None:
        if name in parts:
            raise CheckpointError(f"{file.name}: two tensors are {name}")
        if len(parts) == MAX_PARTS:
            raise file.fault("number of tensors, each expert's counted", f"above {MAX_PARTS}", f"at most {MAX_PARTS}")
        parts[name] = part

    for name, info in file.tensors.items():
        if name in IGNORED:
            continue
        stem, _, kind = name.rpartition(".")
        shape = tuple(reversed(info.shape))
        match = re.fullmatch(r"blk\.(0|[1-9]\d{0,3})\.([a-z_0-9]+?)(_exps)?(?:\.(0|[1-9]\d{0,3}))?", stem)
        if kind in ("weight", "bias") and stem in ends:
            add(f"{ends[stem]}.{kind}", Part(info, shape))
        elif match is None or (kind not in ("weight", "bias") and f"{match[2]}.{kind}" not in layer):
            add(name, Part(info, shape))
        elif num_experts and match[2] in of_expert and (match[3] or match[4]):
            path = f"{root}.{match[1]}.{expert_root}"
            if match[4] is not None:
                add(f"{path}.{match[4]}.{of_expert[match[2]]}.{kind}", Part(info, shape))
                continue
            num_dims = 3 if kind == "weight" else 2
            if match[3] is None or len(shape) != num_dims or shape[0] != num_experts:
                raise file.fault(f"shape of {name}", info.shape, f"of {num_dims} dimensions, the last {num_experts}")
            rows = shape[1] if kind == "weight" else 1
            for expert in range(num_experts):
                add(f"{path}.{expert}.{of_expert[match[2]]}.{kind}", Part(info, shape[1:], expert * rows))
        elif f"{match[2]}.{kind}" in layer and match[3] is None and match[4] is None:
            add(f"{root}.{match[1]}.{layer[f'{match[2]}.{kind}']}", Part(info, shape))
        elif match[2] in layer and match[3] is None and match[4] is None:
            add(f"{root}.{match[1]}.{layer[match[2]]}.{kind}", Part(info, shape))
        else:
            add(name, Part(info, shape))
    return parts


def raw_rows(file: GGUF, part: Part) -> NDArray[np.uint8]:
    """Return the rows of a matrix as they are stored, mapped: uint8 [rows, bytes of a row]."""
    elements, size = BLOCK_BYTES[part.info.type]
    num_rows, num_in = part.shape
    row_bytes = num_in // elements * size
    begin = part.info.start + part.first * row_bytes
    return np.frombuffer(file.files[part.info.file], np.uint8, num_rows * row_bytes, begin).reshape(num_rows, row_bytes)


def float_rows(raw: NDArray[np.uint8], kind: str) -> NDArray[Any]:
    """View rows of floats of type `kind` (`FLOATS`), stored as uint8 [rows, bytes of a row], as floats [rows, in]."""
    raw = np.ascontiguousarray(raw)
    # An alignment below the element's size is legal in a file, but the kernels read aligned numbers.
    return (raw.copy() if raw.ctypes.data % VIEWS[kind].itemsize else raw).view(VIEWS[kind])


def small_floats(file: GGUF, part: Part, name: str) -> list[float]:
    """Return the numbers of a small tensor. Raises `CheckpointError` unless it is F32."""
    if part.info.type != "F32" or math.prod(part.shape) > MAX_PARTS:
        raise file.fault(f"type of {name}", (part.info.type, part.shape), f"F32 of at most {MAX_PARTS} numbers")
    stored = np.frombuffer(file.files[part.info.file], "<f4", math.prod(part.shape), part.info.start)
    return [float(value) for value in stored]


def divisors(file: GGUF, name: str, turned: int) -> list[float] | None:
    """Return the numbers of a tensor of frequencies' divisors, or None."""
    info = file.tensors.get(name)
    if info is None:
        return None
    if info.type != "F32" or info.shape != (turned // 2,):
        raise file.fault(name, (info.type, info.shape), f"F32 of shape ({turned // 2},)")
    factors = np.frombuffer(file.files[info.file], "<f4", turned // 2, info.start)
    if not bool(np.all((factors >= 1e-6) & (factors <= 1e6))):
        raise file.fault(name, factors.tolist(), "from 1e-6 to 1e6 throughout")
    return [float(factor) for factor in factors]
