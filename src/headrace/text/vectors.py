"""Turns the engine's pooled numbers into an embedding, alike for `LLM.embed` and for the server's routes.

Pure functions of numbers, in float64 until the last rounding. Knows no requests and no HTTP.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import POOLINGS, Activation, Classes, EngineInfo, Pooling

EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False)


class EmbeddingOutput(msgspec.Struct):
    """A vector, as vLLM gives it."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct):
    """The vector of one prompt, as vLLM gives it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    num_cached_tokens: int = 0


class ScoringOutput(msgspec.Struct):
    """The likeness of two texts, as vLLM gives it."""

    score: float


class ScoringRequestOutput(msgspec.Struct):
    """The score of one pair of texts, as vLLM gives it. `prompt_token_ids` has the token ids of both texts."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


class ClassificationOutput(msgspec.Struct):
    """The probabilities of a text's classes, as vLLM gives them."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ClassificationRequestOutput(msgspec.Struct):
    """The classes of one prompt, as vLLM gives them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool
    num_cached_tokens: int = 0


def finished(
    pooled: Sequence[float], kind: str, num_tokens: int, dimensions: int | None = None, normalize: bool = True
) -> list[float]:
    """Return the embedding from the engine's pooled numbers: averaged, cut to `dimensions`, scaled to length one,
    rounded to float32. Cutting makes sense for models that were trained for it (Kusupati et al. 2022)."""
    divisor = num_tokens if kind == "mean" else 1
    vector = [x / divisor for x in pooled[:dimensions]]
    if normalize:
        norm = math.sqrt(math.fsum(x * x for x in vector))
        vector = [x / norm for x in vector] if norm else vector
    return array("f", vector).tolist()


def check_form(pooling: str | None, dimensions: int | None, info: EngineInfo) -> Pooling:
    """Return the kind of pooling, by default that of the model's files, or "last". Raises `RequestError`."""
    if info.classes is not None:
        raise RequestError("model", info.model, "a model of vectors; this one has classes (/classify, /rerank, /score)")
    if dimensions is not None and not 1 <= dimensions <= info.hidden_size:
        raise RequestError("dimensions", dimensions, f"from 1 to {info.hidden_size}, the model's own")
    for kind in POOLINGS:
        if kind == (pooling or info.pooling or "last"):
            return kind
    raise RequestError("pooling", pooling, "last, mean or cls")


def activated(numbers: Sequence[float], activation: Activation) -> list[float]:
    """Return the numbers of a text's classes after the activation, rounded to float32."""
    if activation == "sigmoid":
        numbers = [1.0 / (1.0 + math.exp(-x)) if x >= 0 else 1.0 - 1.0 / (1.0 + math.exp(x)) for x in numbers]
    elif activation == "softmax":
        top = max(numbers)
        powers = [math.exp(x - top) for x in numbers]
        total = math.fsum(powers)
        numbers = [power / total for power in powers]
    return array("f", numbers).tolist()


def check_classes(info: EngineInfo, purpose: str) -> Classes:
    """Return the classes of a classifier. Raises `RequestError` for a model without any."""
    if info.classes is None:
        raise RequestError(
            "model", info.model, f"a classifier, since {purpose} is asked for; this model has no classes"
        )
    return info.classes


def check_reranker(info: EngineInfo) -> Classes | None:
    """Return the one class of a cross-encoder, or None for a model of vectors, whose texts are compared by their
    angle. Raises `RequestError` for a classifier with more classes."""
    classes = info.classes
    if classes is not None and len(classes.labels) != 1:
        raise RequestError(
            "model", info.model, f"a model with one class to score by; this one has {len(classes.labels)}"
        )
    return classes


def packed(vector: Sequence[float]) -> str:
    """Return a vector as base64 of little-endian float32."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def likeness(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors of length one."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
