"""Layers with a state on a GPU: their operators, which are a part of `ops.CudaOps`, and the binders of their nodes.

Knows values, nodes and kernels; must not know models. Called by models through `ops`, and by `tape`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from headrace.backends.cuda.kernels import conv, recur, softplus
from headrace.backends.cuda.kernels.recur import StateRows
from headrace.backends.cuda.launch import Launch
from headrace.backends.graph import SEQS, Node, Value
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.step import StepRows


class Frame(Protocol):
    """A bucket of rows, as `tape.Frame` is one."""

    @property
    def most(self) -> Mapping[int, int]: ...

    @property
    def sizes(self) -> Tensor: ...

    def rows(self, value: Value) -> Tensor: ...


class CudaRecurrentOps:
    """`states.RecurrentOps`, as nodes."""

    @abstractmethod
    def _put(self, op: str, width: int, dim: int, item_bytes: int = 0, **fields: Any) -> Value:
        """Put a node, as `CudaOps` does."""

    def softplus(
        self, x: Value, bias: Tensor, factor: Tensor | None = None, low: float = 0.0, high: float = math.inf
    ) -> Value:
        bounds = {"low": low, "high": high}
        return self._put("softplus", x.width, x.dim, item_bytes=4, x=x, bias=bias, factor=factor, **bounds)

    def conv(
        self, x: Value, weight: Tensor, bias: Tensor | None, kind: Literal["silu", "identity"], rows: StepRows,
        state: Tensor,
    ) -> Value:  # fmt: skip
        fields: dict[str, Any] = {"weight": weight, "bias": bias, "kind": kind, "rows": rows, "state": state}
        return self._put("conv", x.width, x.dim, x=x, **fields)

    def delta(self, inputs: DeltaInputs, heads: StateHeads, rows: StepRows, state: Tensor, scale: float) -> Value:
        fields: dict[str, Any] = inputs._asdict() | {"heads": heads, "rows": rows, "state": state, "scale": scale}
        return self._put("delta", heads.num_heads * heads.value_dim, inputs.value.dim, **fields)

    def scan(self, inputs: ScanInputs, heads: StateHeads, rows: StepRows, state: Tensor) -> Value:
        fields: dict[str, Any] = inputs._asdict() | {"heads": heads, "rows": rows, "state": state}
        return self._put("scan", heads.num_heads * heads.value_dim, inputs.x.dim, **fields)


def _state_rows(frame: Frame, rows: StepRows) -> StateRows:
    return StateRows(frame.sizes, rows.row_begin, rows.state_in, rows.state_out)


def _softplus(frame: Frame, node: Node) -> list[Launch]:
    f, x, out = node.fields, frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    bounds = {"low": f["low"], "high": f["high"]}
    return [softplus.softplus(x, f["bias"], f["factor"], out, frame.sizes, len(out), dim=node.dim, **bounds)]


def _conv(frame: Frame, node: Node) -> list[Launch]:
    f, x, out = node.fields, frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    rows = _state_rows(frame, f["rows"])
    return conv.conv(x, f["weight"], f["bias"], f["kind"], out, f["state"], rows, len(out), frame.most[SEQS])


def _delta(frame: Frame, node: Node) -> list[Launch]:
    f, rows = node.fields, _state_rows(frame, node.fields["rows"])
    inputs = DeltaInputs(*(frame.rows(f[name]) for name in DeltaInputs._fields))
    return [recur.delta(inputs, f["heads"], frame.rows(f["out"]), f["state"], rows, frame.most[SEQS], f["scale"])]


def _scan(frame: Frame, node: Node) -> list[Launch]:
    f, rows = node.fields, _state_rows(frame, node.fields["rows"])
    x, b, c, dt = (frame.rows(f[name]) for name in ("x", "b", "c", "dt"))
    inputs = ScanInputs(x, b, c, dt, f["a"], f["d"])
    return [recur.scan(inputs, f["heads"], frame.rows(f["out"]), f["state"], rows, frame.most[SEQS])]


BINDERS: dict[str, Callable[[Frame, Node], Sequence[Launch]]] = {
    "softplus": _softplus,
    "conv": _conv,
    "delta": _delta,
    "scan": _scan,
}
