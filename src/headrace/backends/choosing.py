"""`Chooser`: a backend's operator that picks the candidates of a draw. Made by a backend, called by `runner`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Chosen: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.float64], int]"
"""Token ids, scaled logits and total of a row."""


class Chooser(Protocol):
    """A backend's operator that picks the candidates of a draw out of rows of `width` logits."""

    @property
    def width(self) -> int: ...

    def __call__(
        self,
        rows: list[NDArray[np.float32]],
        top_k: list[int],
        cuts: list[tuple[float, float, float, float]],
        keys: list[tuple[int, int] | None],
    ) -> list[Chosen]:
        """The candidates of each row [width]. A cut is greatest, temperature, floor, top_p; a key is the seed and the
        position of the row's next draw, None for a row from which nothing is drawn."""
        ...
