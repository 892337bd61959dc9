"""The binder of mixtures of experts, for `tape.BINDERS`. Called by `tape`, whose `Frame` it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.backends.cuda.kernels import experts
from headrace.backends.cuda.launch import Launch, Work
from headrace.backends.graph import Node


def _experts(frame: Any, node: Node) -> list[Launch]:
    f, tape = node.fields, frame.tape
    x, logits, out = (frame.rows(f[name]) for name in ("x", "logits", "out"))
    scratch = tape.pairs(f["mixture"])
    return experts.experts(
        x, logits, f["mixture"], out, scratch, frame.sizes, node.dim, len(out), num_programs=tape.num_programs
    )


BINDERS: dict[str, Callable[[Any, Node], Sequence[Work]]] = {"experts": _experts}
