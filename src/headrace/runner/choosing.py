"""`NativeSelect`: the sampler's `Select` by an operator of the backend.

It gives the same ids and bits as `sampling.filters.select`, but leaves out tokens that cannot win the draw; for a long
head it calls that function. It joins two layers that must not import each other. Made by `engine.library.load`.
"""

from __future__ import annotations

import math

from headrace.backends.choosing import Chooser
from headrace.sampling.filters import F32, ONE, Candidates, Cut, base_of, select

MAX_HEAD = 1024
"""A heap of more is slower than a partition of the whole row."""


class NativeSelect:
    """`Select` for rows of as many logits as `chooser` takes."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def __call__(self, rows: list[F32], greatest: list[float], cuts: list[Cut]) -> list[Candidates]:
        width = self._chooser.width
        native = [i for i, cut in enumerate(cuts) if not MAX_HEAD < cut.top_k < width]
        chosen = self._chooser(
            [rows[i] for i in native],
            [cuts[i].top_k for i in native],
            [(greatest[i], cuts[i].temperature, cuts[i].floor, cuts[i].top_p) for i in native],
            [cuts[i].key for i in native],
        )
        candidates = {}
        for i, (token_ids, scaled, total) in zip(native, chosen, strict=True):
            # The bar of kernels.h, and a little more for rounding.
            bar = math.log(total * 2.0**-ONE) - 3.0 + 1e-6 if total else -math.inf
            candidates[i] = Candidates(token_ids, scaled, base_of(greatest[i], cuts[i].temperature), bar)
        return [candidates[i] if i in candidates else select(rows[i], greatest[i], cuts[i]) for i in range(len(rows))]
