"""Binders of the operators on pieces of a row: rotation beside the cache, products by head, xIELU. Merged into
`tape.BINDERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from headrace.backends.base import HeadForm, Heads
from headrace.backends.cuda.kernels import by_head, rope_store, xielu
from headrace.backends.cuda.launch import Launch
from headrace.backends.graph import Node, Value


class Frame(Protocol):
    """What these binders read of a `tape.Frame`."""

    @property
    def sizes(self) -> Tensor: ...

    def rows(self, value: Value) -> Tensor: ...


def _rope(frame: Frame, node: Node) -> list[Launch]:
    f, x = node.fields, frame.rows(node.fields["x"])
    heads, form = Heads(f["num_heads"], 0, f["head_dim"]), HeadForm(f["rope_table"])
    return [rope_store.rope_store(x, heads, None, None, f["rows"].rope_rows, frame.sizes, len(x), form)]


def _by_head(frame: Frame, node: Node) -> list[Launch]:
    f, x, out = node.fields, frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    return [by_head.by_head(x, f["weights"], out, frame.sizes, node.dim, len(out), f["tail"])]


def _xielu(frame: Frame, node: Node) -> list[Launch]:
    f, x, out = node.fields, frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    options = {name: f[name] for name in ("positive", "negative", "beta")}
    return [xielu.xielu(x, out, frame.sizes, node.dim, len(out), **options)]


BINDERS: Mapping[str, Callable[[Frame, Node], Sequence[Launch]]] = {
    "rope": _rope,
    "by_head": _by_head,
    "xielu": _xielu,
}
