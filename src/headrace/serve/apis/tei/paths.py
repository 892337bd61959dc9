"""The routes of Text Embeddings Inference: `/embed`, `/embed_sparse`, `/rerank`, `/predict`, `/similarity` and `/info`.

`/rerank` is vLLM's route too: a body with `texts` is TEI's. `serve.call` computes the numbers. Knows requests and
replies; `add_routes` puts the routes on an app.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette

from headrace import __version__
from headrace.engine.generation import off_loop
from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.completions import as_prompts
from headrace.serve.apis.openai.scores import RerankReply, RerankRequest, TextObject
from headrace.serve.call.embedding import VectorOptions, sparse_vectors, vectors
from headrace.serve.call.models import ModelSet
from headrace.serve.call.parsing import Body, convert
from headrace.serve.call.scoring import ClassRows, Fields, class_rows, scores
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import Api, ErrorBody
from headrace.text.inputs import Prompt


class TeiError(msgspec.Struct, kw_only=True):
    """TEI's reply to a call that failed."""

    error: str
    error_type: str


def _error(status: int, body: ErrorBody) -> TeiError:
    kind = "Overloaded" if status == 429 else "Validation" if status < 500 else "Backend"
    return TeiError(error=body.message, error_type=kind)


API = Api(TeiError, _error, prefixes=("/predict", "/similarity", "/info", "/embed_sparse"))


class TeiBody(Body, forbid_unknown_fields=True, kw_only=True):
    """The fields that all requests have in common. `model` is not TEI's, whose servers have one each."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None


class EmbedRequest(TeiBody, forbid_unknown_fields=True, kw_only=True):
    """POST /embed: texts, or lists of token ids."""

    inputs: str | list[Any]
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class SparseRequest(TeiBody, forbid_unknown_fields=True, kw_only=True):
    """POST /embed_sparse: texts, or lists of token ids."""

    inputs: str | list[Any]
    prompt_name: str | None = None


class TextsRequest(TeiBody, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank: texts by how well they fit a query. `raw_scores`: before the activation."""

    query: str
    texts: list[str]
    raw_scores: bool | None = None
    return_text: bool | None = None


class EitherRequest(RerankRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank: the fields of /v1/rerank, or with `texts` in place of `documents` those of TEI."""

    documents: list[str | TextObject] | None = None  # type: ignore[assignment]
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None


class PredictRequest(TeiBody, forbid_unknown_fields=True, kw_only=True):
    """POST /predict: the classes of a text, of a pair of texts, or of a list of either, each in a list."""

    inputs: str | list[Any]
    raw_scores: bool | None = None


class Sentences(msgspec.Struct, forbid_unknown_fields=True):
    """One text, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /similarity: how alike texts are to one."""

    inputs: Sentences
    parameters: TeiBody | None = None
    model: str | None = None


class SparseValue(msgspec.Struct, kw_only=True):
    """The weight of a token of the vocabulary."""

    index: int
    value: float


class Rank(msgspec.Struct, kw_only=True):
    index: int
    text: str | UnsetType = UNSET
    score: float


class Prediction(msgspec.Struct, kw_only=True):
    score: float
    label: str


class TeiInfo(msgspec.Struct, kw_only=True):
    """GET /info. `model_type` has one key: embedding, reranker or classifier."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool = False
    version: str


async def embed(model: ServedModel, body: dict[str, Any]) -> list[list[float]]:
    """Texts as vectors, in TEI's form."""
    request = convert(EmbedRequest, body)
    options = _options(model, request)._replace(
        normalize=request.normalize is not False, dimensions=request.dimensions, prompt_name=request.prompt_name
    )
    return (await vectors(model.front, as_prompts(request.inputs, "inputs"), options, "inputs")).rows


async def embed_sparse(model: ServedModel, body: dict[str, Any]) -> list[list[SparseValue]]:
    """The weights of the vocabulary's tokens that are not 0, for each text (SPLADE), in TEI's form."""
    request = convert(SparseRequest, body)
    options = _options(model, request)._replace(normalize=None, prompt_name=request.prompt_name)
    texts = as_prompts(request.inputs, "inputs")
    rows, _ = await sparse_vectors(model.front, texts, options, "inputs")

    def entries() -> list[list[SparseValue]]:
        return [[SparseValue(index=i, value=x) for i, x in zip(*row, strict=True)] for row in rows]

    return await off_loop(sum(len(row.places) for row in rows), entries)


async def rank(model: ServedModel, body: dict[str, Any]) -> list[Rank]:
    """Texts by how well they fit a query, in TEI's form."""
    request = convert(TextsRequest, body)
    options, raw = _options(model, request), request.raw_scores or False
    fields = Fields("query", "texts")
    rated = await scores(model.front, [request.query], request.texts, options, fields, use_activation=not raw)
    texts = request.texts if request.return_text else [UNSET] * len(request.texts)
    return [Rank(index=i, text=texts[i], score=rated.values[i]) for i in rated.order]


async def predict(model: ServedModel, body: dict[str, Any]) -> list[Prediction] | list[list[Prediction]]:
    """The classes of texts, the likeliest first."""
    request = convert(PredictRequest, body)
    options, is_single = _options(model, request), not any(isinstance(each, list) for each in request.inputs)
    # As in TEI, a list of two texts is a pair.
    texts = [_one_or_pair(each, i) for i, each in enumerate([request.inputs] if is_single else request.inputs)]
    predictions: dict[int, list[Prediction]] = {}
    for places in ([i for i, text in enumerate(texts) if isinstance(text, tuple) is pair] for pair in (False, True)):
        if places or not texts:
            part: list[Prompt | tuple[str, str]] = [texts[i] for i in places]
            rated = await class_rows(model.front, part, options, "inputs", use_activation=not request.raw_scores)
            work = functools.partial(_predictions, rated)
            predictions |= dict(zip(places, await off_loop(rated.size, work), strict=True))
    return predictions[0] if is_single else [predictions[i] for i in range(len(texts))]


def _predictions(rated: ClassRows) -> list[list[Prediction]]:
    """Return the classes of each text, the likeliest first."""
    labels = rated.labels
    return [
        [Prediction(score=row[j], label=labels[j]) for j in sorted(range(len(row)), key=lambda j: (-row[j], j))]
        for row in rated.rows
    ]


def _one_or_pair(value: Any, place: int) -> str | tuple[str, str]:
    match value:
        case str():
            return value
        case [str() as text]:
            return text
        case [str() as first, str() as second]:
            return first, second
    raise RequestError(f"inputs[{place}]", value, "a list of one or two texts")


async def similarity(model: ServedModel, body: dict[str, Any]) -> list[float]:
    """How alike texts are to one: the cosines of the angles between their vectors."""
    request = convert(SimilarityRequest, body)
    parameters = request.parameters or TeiBody()
    parameters.model = request.model
    texts = [request.inputs.source_sentence, *request.inputs.sentences]
    bounds.check("scored_texts", request.inputs.sentences, "inputs.sentences")
    options = _options(model, parameters)
    rated = await scores(
        model.front, texts[:1], texts[1:], options, Fields("inputs.source_sentence", "inputs.sentences")
    )
    return rated.values


def info(model: ServedModel, query: Mapping[str, str]) -> TeiInfo:
    """The model and its bounds, in TEI's form."""
    model.check_model(query.get("model"))
    facts, most = model.front.info, bounds.BOUNDS["prompt_list"].high
    kind: dict[str, Any] = {"embedding": {"pooling": facts.pooling or "last"}}
    if facts.classes is not None:
        labels = {str(i): label for i, label in enumerate(facts.classes.labels)}
        ids = {label: i for i, label in enumerate(facts.classes.labels)}
        kind = {"reranker" if len(labels) == 1 else "classifier": {"id2label": labels, "label2id": ids}}
    return TeiInfo(
        model_id=model.reply_name(None),
        model_dtype=facts.dtype,
        model_type=kind,
        max_concurrent_requests=model.front.client.admission.max_reqs,
        max_input_length=facts.max_prompt_len,
        max_batch_tokens=facts.max_num_batched_tokens,
        max_client_batch_size=int(most),
        version=__version__,
    )


def _options(model: ServedModel, request: TeiBody) -> VectorOptions:
    """Return the options of a request. Raises `RequestError` for a side at which texts are not cut here."""
    model.check_model(request.model)
    side = "Left" if model.front.info.generates else "Right"
    if request.truncate and (request.truncation_direction or side).capitalize() != side:
        raise RequestError(
            "truncation_direction", request.truncation_direction, f"{side}, at which this model's texts are cut"
        )
    cut = -1 if request.truncate else None
    return VectorOptions(truncate_prompt_tokens=cut, adapter=model.adapter(request.model))


def add_routes(app: Starlette, models: ModelSet, rerank: Callable[[dict[str, Any]], Awaitable[RerankReply]]) -> None:
    """Add TEI's routes. `rerank` replies to the bodies of `/rerank` that are not TEI's."""
    ranked = models.bound(rank)

    async def rerank_either(body: dict[str, Any]) -> list[Rank] | RerankReply:
        """Documents by how well they fit a query; `texts` in place of `documents`: in TEI's form."""
        return await (ranked(body) if "texts" in body else rerank(body))

    routing.post(app, "/embed", models.bound(embed), API, takes=EmbedRequest, gives=list[list[float]])
    sparse = list[list[SparseValue]]
    routing.post(app, "/embed_sparse", models.bound(embed_sparse), API, takes=SparseRequest, gives=sparse)
    routing.post(app, "/rerank", rerank_either, takes=EitherRequest, gives=RerankReply | list[Rank])
    replies = list[Prediction | list[Prediction]]
    routing.post(app, "/predict", models.bound(predict), API, takes=PredictRequest, gives=replies)
    routing.post(app, "/similarity", models.bound(similarity), API, takes=SimilarityRequest, gives=list[float])
    routing.get(app, "/info", models.bound(info, wakes=False), API, gives=TeiInfo, query=("model",))
