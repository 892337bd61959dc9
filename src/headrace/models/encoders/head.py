"""The head of a classifier: turns the pooled vector of a text into a number for each class.

It is small, and is computed by numpy on the host, one text after the other: the bits of a text are its own on every
backend. Knows numbers only. Called by the model files; `Runner` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.protocol.step import Pooling

if TYPE_CHECKING:
    from headrace.models.config import ModelConfig

F64 = NDArray[np.float64]


def _gelu(x: F64) -> F64:
    return x * 0.5 * (1.0 + np.array([math.erf(each / math.sqrt(2)) for each in x.tolist()]))


ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "": lambda x: x,
    "tanh": lambda x: np.array([math.tanh(each) for each in x.tolist()]),
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "sigmoid": lambda x: 1.0 / (1.0 + np.array([math.exp(min(-each, 700.0)) for each in x.tolist()])),
    "silu": lambda x: x / (1.0 + np.array([math.exp(min(-each, 700.0)) for each in x.tolist()])),
}


MAX_CLASSES = 2**16


def labels(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the classes, by number. As transformers has it, there are two where config.json says nothing.
    Raises `CheckpointError`."""
    tokens = config.values.get("classifier_from_token")
    if tokens:
        # Of two tokens the probability of the second is the one class.
        return tuple(map(str, tokens[1:] if len(tokens) == 2 else tokens))
    stated = config.values.get("id2label")
    if not stated:
        num = config.integer("num_labels", 2, high=MAX_CLASSES)
        return tuple(f"LABEL_{i}" for i in range(num))
    if not isinstance(stated, dict) or set(stated) != {str(i) for i in range(len(stated))} or len(stated) > MAX_CLASSES:
        raise CheckpointError(
            f"config.json: id2label is {stated!r:.80}, expected a name for each of the numbers 0, 1, ... of at most "
            f"{MAX_CLASSES} classes"
        )
    return tuple(str(stated[str(i)])[:1000] for i in range(len(stated)))


class Norm(NamedTuple):
    """A layer norm behind a dense layer. bias: None if it has none."""

    weight: F64
    bias: F64 | None
    eps: float

    def __call__(self, x: F64) -> F64:
        x = x - x.mean()
        x = x / math.sqrt((x * x).mean() + self.eps) * self.weight
        return x if self.bias is None else x + self.bias


class Dense(NamedTuple):
    """norm(activation(weight x + bias)), of numbers in float64. weight [out, in]."""

    weight: F64
    bias: F64 | None = None
    activation: str = ""
    norm: Norm | None = None

    def __call__(self, x: F64) -> F64:
        # A library's product may cut the sum among threads; this one is a plain loop.
        x = np.einsum("oi,i->o", self.weight, x)
        x = ACTIVATIONS[self.activation](x if self.bias is None else x + self.bias)
        return x if self.norm is None else self.norm(x)


@dataclass(frozen=True)
class Head:
    """Dense layers, the last of which has an output for each class. pooling: the kind of vector that they read."""

    layers: tuple[Dense, ...]
    pooling: Pooling = "cls"

    def __call__(self, pooled: F64) -> F64:
        """The pooled vector of a text [H] -> [classes], float64."""
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


@dataclass(frozen=True)
class WordWeights:
    """SPLADE's weights of the vocabulary's tokens (Formal et al. 2021): log(1 + relu(logit)), of the greatest logit of
    a text's rows, or summed over the rows. num_logs: 2 for log(1 + log(1 + relu(logit))) (Shen et al. 2025).

    The `bias` [V] of the logits is added here, in float64: rows come without it.
    """

    bias: F64
    sums: bool = False
    num_logs: int = 1

    def weights(self, row: F64) -> F64:
        """The logits of a row, or the greatest of all rows [V] -> the weights [V]."""
        row = row + self.bias
        places = np.flatnonzero(row > 0)
        above = row[places]
        for _ in range(self.num_logs):
            above = np.log1p(above)
        weights = np.zeros(len(row))
        weights[places] = above
        return weights

    def __call__(self, pooled: F64) -> F64:
        """The pooled numbers of a text [V] -> V, the places of the weights that are not 0, and these weights. Numbers
        that are not finite come back as they are."""
        if not np.isfinite(pooled).all():
            return pooled
        weights = pooled if self.sums else self.weights(pooled)
        # As they are given out: rounded to float32, in which a weight may be 0.
        places = np.flatnonzero(weights.astype(np.float32))
        return np.concatenate([[len(weights)], places, weights[places]])


class Numbers(Protocol):
    """Tensors by name, as `Weights` has them."""

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]: ...


def dense(weights: Numbers, name: str, shape: tuple[int, int], activation: str = "", *, bias: bool = True) -> Dense:
    """Read the dense layer `name` [out, in]. Raises `CheckpointError`."""
    if activation not in ACTIVATIONS:
        known = ", ".join(filter(None, ACTIVATIONS))
        raise CheckpointError(f"config.json: the head's activation is {activation!r:.80}, expected one of {known}")
    numbers = weights.numbers(f"{name}.bias", shape[:1]).astype(np.float64) if bias else None
    return Dense(weights.numbers(f"{name}.weight", shape).astype(np.float64), numbers, activation)


def last_token_head(rows: NDArray[np.float32]) -> Head:
    """Return the head of a decoder's classes, a row each [classes, H], which reads the last token."""
    return Head((Dense(rows.astype(np.float64)),), "last")
