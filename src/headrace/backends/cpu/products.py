"""The fields of records that several operators share, and the fields of a product of rows with a matrix.

Also `Pair`, a product that is measured when the model is loaded.
Knows the kernels' fields (csrc/include/kernels.h); must not know models. Called by `ops` and `experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Activation
from headrace.backends.cpu.codes import Quantised
from headrace.backends.cpu.matrix import CpuMatrix, CpuStack
from headrace.backends.graph import Value

KINDS: dict[Activation, int] = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4, "relu2": 5, "identity": 6, "clamped_swiglu": 7,
}  # fmt: skip
KIND_CODES = {"i4": 0, "i6": 1, "i8": 2, "k": 3, "f8": 4, "i3": 5, "i2": 6, "i5": 7}
"""HR_KIND of csrc/include/kernels.h."""
FLOAT_KINDS = ("f", "f8", "i3", "i2")
"""Kinds that are multiplied with floats alone."""
NO_Q: dict[str, Any] = {"q": None, "ld_q": 0, "scales": None, "sums": None, "ld_s": 0, "group": 0}
NO_RESIDUAL: dict[str, Any] = {"residual": None, "ld_res": 0}


class Pair(NamedTuple):
    """A product computed both ways: with int8 activations (`narrow`) and with floats; `last` is its last node.

    matrices: one, or one for each expert, where expert e has the rows begin[e] ... begin[e + 1] - 1. column: the
    product's first column in `wide`.
    """

    matrices: Sequence[CpuMatrix | CpuStack]
    narrow: Value
    wide: Value
    last: int
    begin: NDArray[np.int32] | None = None
    column: int = 0


def product(matrix: CpuMatrix, x: Value, codes: Quantised | None) -> tuple[str, dict[str, Any]]:
    """Return the operator of a product with `codes` of x, or with x itself, and its fields but for the output's."""
    fields = {"weights": matrix.data, "num_in": matrix.num_in, "num_out": matrix.num_out, "bias": matrix.bias}
    fields |= NO_RESIDUAL
    if codes is not None:
        form = "weight_group" if matrix.kind == "i8" else "form"
        return f"linear_{matrix.kind}", fields | codes.fields() | {form: matrix.flag}
    fields |= {"x": x.at, "ld_x": x.ld}
    if matrix.kind == "f":
        return "linear_f", fields | {"type": matrix.flag}
    return "linear_w", fields | {"kind": KIND_CODES[matrix.kind], "group": matrix.act_group, "form": matrix.flag}
