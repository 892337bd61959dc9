"""Predicts how often int8 activations change the likeliest token, and which products to spare for a bound on it.

The noise of int8 products adds up: variances at the logits are the sum of what each product adds. A token changes where
noise exceeds the gap between the two likeliest. The gaps of a text and the noise in them give a rate that varies far
less than a count of changed tokens. Knows numbers; must not know matrices or models. Called by `backends.cpu.losses`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_RATE = 0.0035
"""Greatest share of tokens that int8 activations may change, predicted on the sample. On other text it may be twice as
much: no more than 1% shall change (docs/quantisation.md has the counts)."""
BROAD_RATE = 0.1
"""Small rates grow as the deviation of the noise does. The slope is taken from this rate, to which several gaps of a
short text contribute; the gaps that noise exceeds at MAX_RATE are one or none."""
LEAST_SAID = 12
"""Rows that make a sample of gaps."""
HALVINGS = 40
"""Of the interval of noise: more than float64 can show."""

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class Noise(NamedTuple):
    """The noise that one product adds: the mean square of its error as a share of its size, and the cost of floats in
    its place: its multiplications for each token. is_head: the product makes logits."""

    square: float
    cost: float
    is_head: bool


class Spread(NamedTuple):
    """The noise at the logits. limit: the variance of gaps at which tokens change at MAX_RATE; body and head: the
    variances from all products but the head's, and from the head's. rate: the changes of both together."""

    limit: float
    body: float
    head: float
    rate: float


def likeliest(logits: F32) -> NDArray[np.int64]:
    """Return the two likeliest tokens [S, 2] of each row of logits [S, V]."""
    best = np.empty((len(logits), 2), np.int64)
    for tokens, values in zip(best, logits, strict=True):
        first = int(values.argmax())
        others = [
            part.argmax() + at for at, part in ((0, values[:first]), (first + 1, values[first + 1 :])) if part.size
        ]
        tokens[:] = first, max(others, key=lambda token: values[token])
    return best


def said(best: NDArray[np.int64], token_ids: Sequence[int], rows: Sequence[int]) -> NDArray[np.bool_]:
    """Return after which rows [S] the model would have gone on as the text does, by its two likeliest tokens [S, 2].

    An answer of its own has no other rows; where a text surprises it, the two likeliest are closer. All rows, if these
    are fewer than `LEAST_SAID`."""
    agrees = best[:, 0] == [token_ids[row + 1] for row in rows]
    return agrees if agrees.sum() >= LEAST_SAID else np.ones(len(best), np.bool_)


def gaps(logits: F32, best: NDArray[np.int64]) -> F64:
    """Return by how much the logits [S, V] of the first of two tokens [S, 2] exceed the second's."""
    of_best: F64 = np.take_along_axis(logits, best, axis=1).astype(np.float64)
    return of_best[:, 0] - of_best[:, 1]


def spread(plain: F64, noisy: F64, of_head: F64) -> Spread:
    """Compare the gaps [S] with floats, with int8 in all products, and with int8 in the head alone."""
    total, head = (float(np.square(values - plain).mean()) for values in (noisy, of_head))
    low, high = 0.0, float(plain.max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rate(plain.tolist(), middle) > BROAD_RATE else (middle, high)
    per_deviation = BROAD_RATE / low if low else math.inf
    limit = (MAX_RATE / per_deviation) ** 2
    return Spread(limit, max(total - head, 0.0), head, min(math.sqrt(total) * per_deviation, 1.0))


def rate(gaps: Sequence[float], deviation: float) -> float:
    """Return the share of gaps that normal noise of this deviation exceeds."""
    if not deviation:
        return 0.0
    return math.fsum(math.erfc(gap / deviation / math.sqrt(2)) / 2 for gap in gaps) / len(gaps)


def chosen(products: Sequence[Noise], at_logits: Spread) -> set[Noise]:
    """Return the products that take floats, so that the noise of the others stays within the limit: first the ones
    that add most for their cost. Without finite numbers all of them do."""
    parts = {False: at_logits.body, True: at_logits.head}
    sums = {kind: math.fsum(noise.square for noise in products if bool(noise.is_head) is kind) for kind in parts}

    def added(noise: Noise) -> float:
        kind = bool(noise.is_head)
        return parts[kind] * noise.square / sums[kind] if noise.square else 0.0

    left, floats = at_logits.body + at_logits.head, set[Noise]()
    for noise in sorted(products, key=lambda noise: -added(noise) / noise.cost):
        if left <= at_logits.limit:
            break
        left -= added(noise)
        floats.add(noise)
    return floats
