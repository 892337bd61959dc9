"""`Neighbours`: the exchange between processes that have some layers of a model each, while the model is loaded.

Measurements at load run a text through all layers, and decide for the model as a whole, so that several processes
decide as one would. Called by backends, for models that have `neighbours` (`parallel.stages.Stage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Neighbours(Protocol):
    """The other processes. All of them make the same calls in the same order."""

    def take(self, num_rows: int, width: int) -> NDArray[np.float32] | None:
        """Return the hidden rows that the layers before give; None where there are none before."""
        ...

    def give(self, rows: NDArray[np.float32]) -> None:
        """Hand hidden rows to the layers behind, if there are any."""
        ...

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all processes, in the order of their layers."""
        ...


def neighbours_of(model: Any) -> Neighbours | None:
    """Return the neighbours of a model that has some layers; None for one that has all."""
    neighbours: Neighbours | None = getattr(model, "neighbours", None)
    return neighbours
