"""What a backend gives: memory, and the operators that models are written in.

`Ops` is the whole vocabulary of a model file; `Backend` makes the ops and the KV cache. Both are protocols: a backend
is a folder beside this file, found by its name, and need not inherit anything. Knows tensors and shapes; must not know
requests, the scheduler or the names of models. Called by `models` (ops) and by `runner` (memory).

Every operator keeps the determinism law: a row's bits depend on that row's problem only, never on the other rows, their
number, the row's place among them, or the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headrace.quant.base import QWeight

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


class Matrix(Protocol):
    """A linear layer's weights as the backend likes them, bias included. Opaque to models."""

    @property
    def num_in(self) -> int: ...

    @property
    def num_out(self) -> int: ...

    def dense(self) -> Tensor:
        """The weights as a plain float32 [num_out, num_in], for tests and tools."""
        ...


class Rows(Protocol):
    """What attention must know of a step's rows. `runner.inputs.ForwardBatch` is one.

    Chunk c is the rows of one sequence at positions starts[c] ... starts[c] + lens[c] - 1; chunks follow each other.
    `block_tables` is [num_chunks, max_blocks] int64, padded with 0. `notes` keeps what is worked out once a step
    instead of once a layer, under keys that name their owner.
    """

    starts: list[int]
    lens: list[int]
    block_tables: Tensor
    notes: dict[Any, Any]


class Ops(Protocol):
    """Operators. R rows, H hidden size, D head size; `x` has the backend's dtype, sums are kept in float32."""

    def matrix(self, weights: Sequence[QWeight], bias: Tensor | None = None) -> Matrix:
        """Prepare one linear layer out of one or more weights [out, in], stacked along their outputs."""
        ...

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        """x [R, in] -> [R, out]."""
        ...

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids [R] and table [V, H] -> [R, H]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x [..., H] / sqrt(mean(x^2) + eps) * (offset + weight [H]) (Zhang, Sennrich 2019)."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x [R, H] - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016)."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the first 2 * P of D numbers in each head: x [R, heads, D], cos and sin [R, P]; pairs are (i, i + P)."""
        ...

    def store(self, key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Write key and value [R, kv_heads, D] to slots of cache [2, num_blocks, block_size, kv_heads, D]."""
        ...

    def attention(
        self, query: Tensor, cache: Tensor, rows: Rows, scale: float, window: int | None = None, softcap: float = 0.0
    ) -> Tensor:
        """Causal attention of query [R, heads, D] over the cached positions of each row's sequence -> [R, heads, D].

        heads may be any multiple of the cache's kv_heads (GQA, MQA). `window` counts the visible positions, the
        row's own included. `softcap` c > 0 replaces scores s by c * tanh(s / c).
        """
        ...

    def activation(self, x: Tensor, kind: Activation) -> Tensor:
        """Elementwise, any shape."""
        ...

    def gated(self, x: Tensor, kind: Activation) -> Tensor:
        """x [R, 2 * I] -> act(x[:, :I]) * x[:, I:] (Shazeer 2020)."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""
        ...

    def route(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Router logits [R, E] -> weights [R, top_k] float32 summing to 1 over the chosen, expert ids [R, top_k]."""
        ...

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        kind: Activation,
    ) -> Tensor:
        """Sum over a row's experts, in ascending expert id, of weight * down(gated(gate_up(x))). -> [R, H]."""
        ...

    def copy_blocks(self, cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) of cache [layers, 2, num_blocks, ...], one pair after the other."""
        ...


class Backend(Protocol):
    """Memory and operators of one kind of device."""

    name: str
    device: torch.device
    dtype: torch.dtype
    ops: Ops

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> Tensor:
        """A zeroed cache [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim] of `dtype`."""
        ...

    def available_memory(self) -> int:
        """Bytes that could be allocated on the device now."""
        ...

    def num_threads(self, model_bytes: int) -> int:
        """Threads of the CPU to compute with, for a checkpoint of that size. Bits do not depend on them."""
        ...
