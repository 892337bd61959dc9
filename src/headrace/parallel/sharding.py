"""The weights of a model as one rank reads them: `RankWeights` shares out the outputs of each layer.

The reader behind it reads whole layers as it always does, but the rank's operators take only its rows of them. Knows
names, shapes and layouts; must not know formats or processes. Called by `engine.library.load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, Heads, Matrix, Ops
from headrace.backends.shares import Layout, Plan
from headrace.models.weights import ByHead, Expert, Linear, Weights

if TYPE_CHECKING:
    from headrace.models.weights import Cut


class Sharing(Ops, Protocol):
    """The operators that make a rank's matrices: `backends.split.SplitOps`.

    splits_experts: whether a rank may have some columns of an expert's matrices; else it has them whole."""

    plan: Plan
    splits_experts: bool

    def sharing(self, layout: Layout | None) -> AbstractContextManager[None]: ...

    def of_expert(self, expert_id: int, num: int) -> AbstractContextManager[None]: ...


class PartialWeights(Weights):
    """`weights`, whose subclasses choose this rank's part of each layer (`matrix`, `ends`)."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def has_prefix(self, prefix: str) -> bool:
        return self._weights.has_prefix(prefix)

    def constant(self, values: Array) -> Array:
        return self._weights.constant(values)

    def constant_table(self, values: Array) -> Array:
        return self._weights.constant_table(values)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        return self._weights.tensor(name, shape)

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return self._weights.numbers(name, shape)

    def table(self, name: str, shape: tuple[int, int]) -> Array:
        return self._weights.table(name, shape)

    def by_head(self, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        return self._weights.by_head(name, num_in, num_heads, key_dim, value_dim)


class RankWeights(PartialWeights):
    """`weights` for the rank whose operators are `ops`."""

    def __init__(self, weights: Weights, ops: Sharing) -> None:
        super().__init__(weights)
        self._ops = ops
        self.has_experts = False

    def matrix(self, linear: Linear) -> Matrix:
        cut = linear.cut
        if isinstance(cut, Expert):
            self.has_experts = True
            if self._ops.plan.whole_experts:
                with self._ops.of_expert(cut.expert_id, cut.num):
                    return self._weights.matrix(linear)
        # A router's few outputs are needed whole at once.
        is_whole = linear.plain or (isinstance(cut, Expert) and not self._ops.splits_experts)
        with self._ops.sharing(None if is_whole else self._layout(linear.num_outs, cut)):
            return self._weights.matrix(linear)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        with self._ops.sharing(self._layout(shape[:1], None)):
            return self._weights.ends(embedding, head, shape, tied=tied)

    def _layout(self, num_outs: Sequence[int], cut: Cut) -> Layout | None:
        plan = self._ops.plan
        if isinstance(cut, Heads):
            return plan.heads(cut.num_heads, cut.num_kv_heads, cut.head_dim, cut.value_size)
        if isinstance(cut, Expert):
            cut = cut.parts
        return plan.layout(cut or num_outs)
