"""Large linear layers cut into pieces of their outputs, which threads compute at a time: `Team`.

The pieces of a layer follow from its shape alone, and each is one product by one thread, so the number of threads
changes no bit. Knows tensors; must not know models. Made by `loading`, used by `model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.torch_ref.rowwise import LANES, one_thread, padded

PIECE = 2**20
"""Weights of a piece: a product of some 0.2 ms, many times what it costs to hand it to a thread."""


class Team:
    """The threads of a model's large layers. Outside of `working` there is none but the caller's."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._size = 1

    def cut(self, theirs: Any) -> None:
        """Have the team compute a model's large linear layers."""
        for layer in theirs.modules():
            is_plain = type(layer) is torch.nn.Linear and "forward" not in vars(layer)  # a quantised head has another
            if is_plain and layer.weight.numel() >= 2 * PIECE:
                layer.forward = _Pieces(layer, self)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let as many threads compute as torch has for the caller; each operator has one."""
        size = torch.get_num_threads()
        if size != self._size:
            self.close()
            self._size, self._pool = size, ThreadPoolExecutor(size, "pieces") if size > 1 else None
        with one_thread():
            yield

    def products(self, x: Tensor, parts: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Return x times the weights of each part, plus its bias."""
        if self._pool is None:
            return [F.linear(x, weight, bias) for weight, bias in parts]
        return list(self._pool.map(lambda part: _product(x, *part), parts))

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._size = None, 1


class _Pieces:
    """The forward function of a layer in pieces."""

    def __init__(self, layer: torch.nn.Linear, team: Team) -> None:
        num_out, num_in = layer.weight.shape
        size = padded(max(LANES, PIECE // num_in))  # so that each begins on a cache line
        self._parts = [
            (layer.weight[i : i + size], None if layer.bias is None else layer.bias[i : i + size])
            for i in range(0, num_out, size)
        ]
        self._team = team

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat(self._team.products(x, self._parts), dim=-1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.inference_mode(), one_thread():
        return F.linear(x, weight, bias)
