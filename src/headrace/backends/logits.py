"""The rows of logits that a program gives, and the draws of tokens from them.

Knows rows and numbers; must not know requests, models or devices. Called by `base`, by backends and by `runner`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Draw(NamedTuple):
    """How a token is drawn from a row: the fields of a `sampling.filters.Cut`, the noise's key, and the allowed tokens.

    temperature 0: the likeliest, without noise. mask: bit t % 32 of word t // 32 is set if token t is allowed; None for
    all.
    """

    temperature: float
    floor: float = -math.inf
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    position: int = 0
    mask: NDArray[np.uint32] | None = None


class Logits(Protocol):
    """Logits of the chosen rows [S], valid until the next call of the program. The numbers of a row may lie on a device
    until they are fetched."""

    @property
    def finite(self) -> list[bool]:
        """finite[i]: no NaN and no +inf in row i, and not -inf alone."""
        ...

    @property
    def best(self) -> list[int]:
        """best[i]: the likeliest token id, the lowest of equals."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether `fetch` of rows that follow each other costs nothing, so that all may be fetched."""
        ...

    def fetch(self, indices: list[int] | None = None) -> NDArray[np.float32]:
        """Return rows of logits [n, V] in host memory, for reading; all of them without `indices`."""
        ...

    def draw(self, indices: list[int], draws: list[Draw]) -> list[int]:
        """Draw a token from each of these rows where they lie: the sampler's token, or -1 if the host must draw it."""
        ...


class HostLogits(NamedTuple):
    """`Logits` that lie in host memory: rows [S, V] float32."""

    rows: NDArray[np.float32]
    finite: list[bool]
    best: list[int]
    on_host: bool = True

    def fetch(self, indices: list[int] | None = None) -> NDArray[np.float32]:
        if indices is None:
            return self.rows
        first = indices[0] if indices else 0
        stop = first + len(indices)
        return self.rows[first:stop] if indices == list(range(first, stop)) else self.rows[indices]

    def draw(self, indices: list[int], draws: list[Draw]) -> list[int]:
        return [-1] * len(indices)
