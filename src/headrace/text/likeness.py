"""How alike two texts are, by the numbers that the engine pooled of each, for `LLM.score` and the server's
routes.

Pure functions of numbers. Knows no requests and no HTTP.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from headrace.protocol.errors import RequestError
from headrace.protocol.step import ALL_ROWS, EngineInfo
from headrace.text.vectors import Form, check_form, finished, token_form, token_rows, word_weights

Scoring = Literal["cross-encoder", "cosine", "dot", "maxsim"]


class Words(NamedTuple):
    """The numbers of a text's vector that are not 0, by their places."""

    weights: Mapping[int, float]


class Tokens(NamedTuple):
    """A vector for each token of a text."""

    rows: Sequence[Sequence[float]]


Comparable = Sequence[float] | Words | Tokens


class Comparison(NamedTuple):
    """How a model's texts are compared: by `scoring`, of vectors of the form `form`. prompt_names: of the prompts that
    are put before the first and the second text; None for the files' usual one."""

    scoring: Scoring
    form: Form
    prompt_names: tuple[str | None, str | None] = (None, None)

    def of(self, pooled: Sequence[float]) -> Comparable:
        """Return what is compared of a text, from the engine's numbers."""
        if self.form.is_sparse:
            return Words(dict(zip(*word_weights(pooled, self.form), strict=True)))
        if self.scoring == "maxsim":
            return Tokens(token_rows(pooled, self.form, self.form.width))
        return finished(pooled, self.form)


def comparison(pooling: str | None, info: EngineInfo) -> Comparison:
    """Return how texts are compared: by their angle, unless the model's files name the dot product, or it has a vector
    for each token. Raises `RequestError`."""
    if info.pooling == ALL_ROWS:
        if pooling is not None:
            raise RequestError("pooling", pooling, "left out: this model has a vector for each token")
        first, second = (name if name in info.vectors.prompts else None for name in ("query", "document"))
        return Comparison("maxsim", token_form(None, None, info), (first, second))
    cosine = info.vectors.cosine
    return Comparison("cosine" if cosine else "dot", check_form(pooling, None, cosine or None, info))


def likeness(a: Comparable, b: Comparable) -> float:
    """Return the dot product of two vectors, which is the cosine of their angle where they have length one; of the
    tokens of a query and a document the sum, over the query's, of the greatest dot product with one of the document's
    (MaxSim, Khattab and Zaharia 2020)."""
    if isinstance(a, Tokens) and isinstance(b, Tokens):
        # Far too many products for fsum.
        return math.fsum(max(sum(map(operator.mul, row, other)) for other in b.rows) for row in a.rows)
    if isinstance(a, Tokens) or isinstance(b, Tokens):
        raise TypeError("a vector for each token and another kind")
    if isinstance(a, Words) and isinstance(b, Words):
        return math.fsum(weight * b.weights[place] for place, weight in a.weights.items() if place in b.weights)
    if isinstance(a, Words) or isinstance(b, Words):
        raise TypeError("weights of words and a vector")
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
