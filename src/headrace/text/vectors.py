"""Turns the engine's pooled numbers into an embedding, alike for `LLM.embed` and for the server's routes.

Pure functions of numbers, in float64 until the last rounding. Knows no requests and no HTTP.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import (
    ALL_ROWS,
    POOLINGS,
    SPARSE_POOLINGS,
    Activation,
    Classes,
    EngineInfo,
    Pooling,
)
from headrace.text.inputs import Prompt
from headrace.text.outputs import RequestState

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


class PoolingOutput(msgspec.Struct):
    """A vector for each token of a text."""

    data: list[list[float]]


class PoolingRequestOutput(msgspec.Struct):
    """The vectors of one prompt's tokens, as vLLM gives them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
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


class Form(NamedTuple):
    """How the engine's pooled numbers become a vector: they are cut to `dimensions`, and scaled to length one with
    `normalize`. width: the count of numbers before the cut."""

    pooling: Pooling
    dimensions: int | None = None
    normalize: bool = True
    width: int = 0

    @property
    def is_sparse(self) -> bool:
        return self.pooling in SPARSE_POOLINGS


class WordWeights(NamedTuple):
    """A vector of which most numbers are 0: `values[i]` is number `places[i]`; places ascend."""

    places: list[int]
    values: list[float]


def finished(pooled: Sequence[float], form: Form) -> list[float]:
    """Return the embedding from the engine's pooled numbers, rounded to float32. Cutting makes sense for models that
    were trained for it (Kusupati et al. 2022)."""
    if form.is_sparse:
        vector = [0.0] * form.width
        for place, value in zip(*word_weights(pooled, form), strict=True):
            vector[place] = value
        return vector
    return _scaled(pooled[: form.dimensions], form)


def word_weights(pooled: Sequence[float], form: Form) -> WordWeights:
    """Return the numbers that are not 0 of a vector that `is_sparse`, rounded to float32."""
    middle = (len(pooled) + 1) // 2
    return WordWeights(list(map(int, pooled[1:middle])), _scaled(pooled[middle:], form))


def _scaled(numbers: Sequence[float], form: Form) -> list[float]:
    if form.normalize:
        norm = math.sqrt(math.fsum(x * x for x in numbers))
        numbers = [x / norm for x in numbers] if norm else numbers
    return array("f", numbers).tolist()


def check_form(pooling: str | None, dimensions: int | None, normalize: bool | None, info: EngineInfo) -> Form:
    """Return how vectors are made: by the model's files where a call says nothing, of its last row where neither does.
    Raises `RequestError`."""
    if dimensions is not None and info.pooling in SPARSE_POOLINGS:
        bound = "left out: a vector has a weight for each token of the vocabulary"
        raise RequestError("dimensions", dimensions, bound)
    if info.pooling == ALL_ROWS:
        bound = "a model with a vector for each text: this one has one for each token (token_embed, /score)"
        raise RequestError("model", info.model, bound)
    if info.vectors.one_kind and pooling not in (None, info.pooling):
        bound = f"{info.pooling}, which the model's Dense layers read, or whose width its vectors have"
        raise RequestError("pooling", pooling, bound)
    kind = pooling or info.pooling or "last"
    if kind not in (*POOLINGS, info.pooling):
        raise RequestError("pooling", pooling, f"one of {', '.join(POOLINGS)}")
    return _form(kind, dimensions, normalize, info)


def _form(kind: Pooling, dimensions: int | None, normalize: bool | None, info: EngineInfo) -> Form:
    if info.classes is not None:
        raise RequestError("model", info.model, "a model of vectors; this one has classes (/classify, /rerank, /score)")
    if dimensions is not None and not 1 <= dimensions <= info.hidden_size:
        raise RequestError("dimensions", dimensions, f"from 1 to {info.hidden_size}, the model's own")
    scaled = info.vectors.normalize if normalize is None else normalize
    return Form(kind, dimensions or info.vectors.dimensions, scaled, info.hidden_size)


def check_sparse(info: EngineInfo) -> None:
    """Raise `RequestError` for a model whose vectors are no weights of words."""
    if info.pooling not in SPARSE_POOLINGS:
        raise RequestError("model", info.model, "a model with a head for masked words and SPLADE's pooling (SPLADE)")


def token_form(dimensions: int | None, normalize: bool | None, info: EngineInfo) -> Form:
    """Return how the vectors of a text's tokens are made, each as that of a text is (ColBERT, Khattab and Zaharia
    2020). Raises `RequestError`."""
    if "+" in info.pooling or info.pooling in SPARSE_POOLINGS:
        kinds = "several kinds of pooling side by side" if "+" in info.pooling else "weights of words"
        raise RequestError("task", "token_embed", f"embed: the model's vectors are {kinds}")
    return _form(ALL_ROWS, dimensions, normalize, info)


def token_rows(pooled: Sequence[float], form: Form, width: int) -> list[list[float]]:
    """Return the vector of each token from the engine's numbers, `width` for each."""
    return [finished(pooled[at : at + width], form) for at in range(0, len(pooled), width)]


def token_outputs(
    answered: Sequence[tuple[str | None, RequestState]], form: Form, info: EngineInfo
) -> list[PoolingRequestOutput]:
    """Return the vectors of the tokens of each prompt, given by its text and its state."""
    outputs = []
    for place, (text, state) in enumerate(answered):
        rows = PoolingOutput(token_rows(state.pooled, form, info.hidden_size))
        token_ids = state.request.prompt_token_ids
        outputs.append(PoolingRequestOutput(str(place), text, token_ids, rows, True, state.num_cached_tokens))
    return outputs


def prompted(texts: Sequence[Prompt], name: str | None, info: EngineInfo) -> list[Prompt]:
    """Return the texts behind the prompt `name` of the model's files: None for the usual one, "" for none. Token ids
    stay as they are. Raises `RequestError`."""
    known = info.vectors.prompts
    if name and name not in known:
        names = f"one of {', '.join(known):.1000}" if known else "left out: the model's files have no prompts"
        raise RequestError("prompt_name", name, names)
    prefix = known.get(info.vectors.prompt_name if name is None else name, "")
    if not prefix:
        return list(texts)
    joined: list[Prompt] = []
    for text in texts:
        content = text.get("prompt") if isinstance(text, dict) and "prompt_token_ids" not in text else text
        if isinstance(content, str):
            text = prefix + content
        elif name:
            raise RequestError("prompt_name", name, "left out for token ids: a prompt is put before a text")
        joined.append(text)
    return joined


KINDS_OF_INPUT = {"search_query": ("query",), "search_document": ("document", "passage", "corpus")}


def prompt_name(name: str | None, input_type: str | None, info: EngineInfo) -> str | None:
    """Return the name of the prompt that a request asks for by either field. `input_type` has a name of the files, or
    one of Cohere's, under which the files have the names that sentence-transformers looks for. Raises
    `RequestError`."""
    if input_type is None:
        return name
    if name is not None:
        raise RequestError("input_type", input_type, "left out: prompt_name names the prompt")
    known = info.vectors.prompts
    for each in (input_type, *KINDS_OF_INPUT.get(input_type, ())):
        if each in known:
            return each
    expected = ", ".join([*known, *(key for key, names in KINDS_OF_INPUT.items() if known.keys() & set(names))])
    bound = f"one of {expected:.1000}" if known else "left out: the model's files have no prompts"
    raise RequestError("input_type", input_type, bound)


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


def check_classes(info: EngineInfo, route: str) -> Classes:
    """Return the classes of a classifier. Raises `RequestError` for a model without any."""
    if info.classes is None:
        bound = (
            f"a classifier, for {route}: this model has no classes. structured_outputs with a choice makes a decoder "
            "answer with one of several labels"
        )
        raise RequestError("model", info.model, bound)
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
