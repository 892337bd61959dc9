"""How alike two texts are, by the numbers that the engine pooled of each, for `LLM.score` and the server's
routes.

Pure functions of numbers. Knows no requests and no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from headrace.protocol.step import EngineInfo
from headrace.text.vectors import Form, check_form, finished, word_weights

Scoring = Literal["cross-encoder", "cosine", "dot"]


class Words(NamedTuple):
    """The numbers of a text's vector that are not 0, by their places."""

    weights: Mapping[int, float]


Comparable = Sequence[float] | Words


class Comparison(NamedTuple):
    """How a model's texts are compared: by `scoring`, of vectors of the form `form`."""

    scoring: Scoring
    form: Form

    def of(self, pooled: Sequence[float]) -> Comparable:
        """Return what is compared of a text, from the engine's numbers."""
        if self.form.is_sparse:
            return Words(dict(zip(*word_weights(pooled, self.form), strict=True)))
        return finished(pooled, self.form)


def comparison(pooling: str | None, info: EngineInfo) -> Comparison:
    """Return how texts are compared: by their angle, unless the model's files name the dot product. Raises
    `RequestError`."""
    cosine = info.vectors.cosine
    return Comparison("cosine" if cosine else "dot", check_form(pooling, None, cosine or None, info))


def likeness(a: Comparable, b: Comparable) -> float:
    """Return the dot product of two vectors, which is the cosine of their angle where they have length one."""
    if isinstance(a, Words) and isinstance(b, Words):
        return math.fsum(weight * b.weights[place] for place, weight in a.weights.items() if place in b.weights)
    if isinstance(a, Words) or isinstance(b, Words):
        raise TypeError("weights of words and a vector")
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
