"""Records a product by head: each head's numbers times the head's matrix (the latents of MLA).

The products of all heads are one record, `linear_each` without lists of rows, so that 128 heads need no more barriers
than one. They take floats, whatever form the weights have. Knows buffers and matrices; must not know models. Called by
`ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.backends.cpu.experts import COUNTERS_APART
from headrace.backends.cpu.matrix import CpuMatrix, CpuStack
from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.products import product
from headrace.backends.graph import Graph, Value
from headrace.backends.native import op_code
from headrace.protocol.errors import CheckpointError


def by_head(graph: Graph, x: Value, matrices: Sequence[CpuMatrix | CpuStack], tail: int) -> Value:
    """See `Ops.by_head`."""
    whole = [matrix for matrix in matrices if isinstance(matrix, CpuMatrix)]
    shapes = {(matrix.num_in, matrix.num_out) for matrix in matrices}
    odd = any(matrix.outliers is not None or matrix.permutation is not None for matrix in whole)
    if len(whole) < len(matrices) or len(shapes) > 1 or odd:
        raise CheckpointError(
            f"{matrices[0].name} and the other heads of the layer: the native kernels take matrices of one shape, "
            "without outliers or an order of their inputs; dequantise them, or use backend torch_ref"
        )
    ((num_in, num_out),) = shapes
    heads, steps = len(whole), (num_in + tail, num_out + tail)
    out = graph.value(heads * steps[1], x.dim)
    if tail:
        source, target = graph.columns(x, num_in, x.width - num_in), graph.columns(out, num_out, out.width - num_out)
        fields: dict[str, Any] = {"x": graph.read(source), "ld_x": x.ld, "step_x": steps[0], "heads": heads}
        fields |= {"width": tail, "out": target.at, "ld_out": out.ld, "step_out": steps[1]}
        graph.put("spread", x.dim, None, fields)
    tables: dict[str, list[int]] = {}
    for head, matrix in enumerate(whole):
        tables.setdefault(product(matrix, x, None)[0], []).append(head)
    for op, of_kind in tables.items():
        calls = []
        for head in of_kind:
            part, place = graph.columns(x, head * steps[0], num_in), graph.columns(out, head * steps[1], num_out)
            graph.read(part)
            calls.append(product(whole[head], part, None)[1] | {"out": place.at, "ld_out": out.ld})
        graph.touch(out.buffer)
        fields = {
            "op": op_code(op),
            "fn": None,
            "args": ("table", op, calls),
            "experts": np.array(of_kind, np.int32),
            "count": len(of_kind),
            "begin": None,
            "counters": aligned(8 * COUNTERS_APART * (len(of_kind) + 1)),
        }
        graph.put(
            "linear_each", x.dim, None, fields, note=whole[0].name,
            read_bytes=sum(whole[head].data.nbytes for head in of_kind), row_ops=2 * num_in * num_out * len(of_kind),
        )  # fmt: skip
    return out
