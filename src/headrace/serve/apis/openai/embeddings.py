"""OpenAI's /v1/embeddings, and vLLM's /pooling, /score and /rerank on top of it.

`serve.call.embedding` makes the vectors. Knows requests and replies; `add_routes` puts the routes on an app.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette

from headrace.engine.generation import off_loop
from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.completions import as_prompts
from headrace.serve.apis.openai.reply import Explanations
from headrace.serve.call.embedding import VectorOptions, Vectors, vectors
from headrace.serve.call.parsing import Body, WarningLines, convert
from headrace.serve.call.schema import check_labels
from headrace.serve.call.service import ServedModel
from headrace.text.inputs import new_request_id
from headrace.text.vectors import likeness, packed, prompt_name


class EmbeddingRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. `pooling`, `normalize` and the fields after them are not OpenAI's."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    explain: bool | None = None


class PoolingRequest(EmbeddingRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /pooling: `task` names the kind of result, as in vLLM."""

    task: str | None = None


class ScoreRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score: one text against others, or texts in pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    pooling: str | None = None
    truncate_prompt_tokens: int | None = None
    explain: bool | None = None


class RerankRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank: documents by their likeness to a query."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    pooling: str | None = None
    truncate_prompt_tokens: int | None = None
    explain: bool | None = None


class Vector(msgspec.Struct, kw_only=True):
    """`embedding` is base64 of float32 numbers where the request has this format."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class VectorUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Vector]
    model: str
    usage: VectorUsage
    explain: Explanations = UNSET
    warnings: WarningLines = UNSET


class PooledVector(msgspec.Struct, kw_only=True):
    """`data` is base64 of float32 numbers where the request has this format."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class PoolingReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    data: list[PooledVector]
    model: str
    usage: VectorUsage
    explain: Explanations = UNSET
    warnings: WarningLines = UNSET


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    data: list[Score]
    model: str
    usage: VectorUsage
    explain: Explanations = UNSET
    warnings: WarningLines = UNSET


class RankedDocument(msgspec.Struct, kw_only=True):
    text: str


class RankedResult(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    id: str
    results: list[RankedResult]
    model: str
    usage: VectorUsage
    explain: Explanations = UNSET
    warnings: WarningLines = UNSET


class Embeddings:
    """The routes without HTTP. Raises `HeadraceError`s of all kinds."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def create(self, body: dict[str, Any]) -> EmbeddingReply:
        """Texts as vectors."""
        request = convert(EmbeddingRequest, body)
        rows, embedded = await self._rows(request)
        data = [Vector(index=i, embedding=row) for i, row in enumerate(rows)]
        return EmbeddingReply(
            data=data,
            model=self.model.reply_name(request.model),
            usage=_usage(embedded),
            explain=self._explain(request, embedded),
            warnings=request.warnings.reply(),
        )

    async def pool(self, body: dict[str, Any]) -> PoolingReply:
        """Texts as vectors, in the form of vLLM's pooling."""
        request = convert(PoolingRequest, body)
        if request.task not in (None, "embed"):
            raise RequestError("task", request.task, "embed: a decoder gives one vector for each text, and no classes")
        rows, embedded = await self._rows(request)
        data = [PooledVector(index=i, data=row) for i, row in enumerate(rows)]
        return PoolingReply(
            id=f"pool-{new_request_id()}",
            created=int(time.time()),
            data=data,
            model=self.model.reply_name(request.model),
            usage=_usage(embedded),
            explain=self._explain(request, embedded),
            warnings=request.warnings.reply(),
        )

    async def _rows(self, request: EmbeddingRequest) -> tuple[list[list[float] | str], Vectors]:
        """Return the vectors of a request's texts in the format that it names, and as they were computed."""
        check_labels(request)
        self.model.check_model(request.model)
        if request.encoding_format not in (None, "float", "base64"):
            raise RequestError("encoding_format", request.encoding_format, "float or base64")
        options = VectorOptions(
            pooling=request.pooling,
            dimensions=request.dimensions,
            normalize=request.normalize,
            prompt_name=prompt_name(request.prompt_name, request.input_type, self.model.front.info),
            add_special_tokens=request.add_special_tokens is not False,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            adapter=self.model.adapter(request.model),
        )
        embedded = await vectors(self.model.front, as_prompts(request.input, "input"), options)
        if request.encoding_format != "base64":
            return list(embedded.rows), embedded
        return await off_loop(embedded.size, lambda: [packed(row) for row in embedded.rows]), embedded

    async def score(self, body: dict[str, Any]) -> ScoreReply:
        """The likeness of texts."""
        request = convert(ScoreRequest, body)
        self.model.check_model(request.model)
        ones, others = _as_list(request.text_1), _as_list(request.text_2)
        if len(ones) not in (1, len(others)):
            raise RequestError("text_1", len(ones), f"one text, or as many as text_2 has ({len(others)})")
        first = await self._vectors(request, ones, "text_1")
        second = await self._vectors(request, others, "text_2")
        rows = first.rows * len(others) if len(ones) == 1 else first.rows
        pairs = zip(rows, second.rows, strict=True)
        scores = await off_loop(second.size, lambda: [likeness(a, b) for a, b in pairs])
        data = [Score(index=i, score=score) for i, score in enumerate(scores)]
        return ScoreReply(
            id=f"score-{new_request_id()}",
            data=data,
            model=self.model.reply_name(request.model),
            usage=_usage(first, second),
            explain=self._explain(request, first, second),
            warnings=request.warnings.reply(),
        )

    async def rerank(self, body: dict[str, Any]) -> RerankReply:
        """Documents by their likeness to a query."""
        request = convert(RerankRequest, body)
        self.model.check_model(request.model)
        top_n = len(request.documents) if request.top_n is None else request.top_n
        if top_n < 0:
            raise RequestError("top_n", top_n, "at least 0; 0 is all of them")
        query = await self._vectors(request, [request.query], "query")
        documents = await self._vectors(request, request.documents, "documents")
        [query_row] = query.rows
        scores = await off_loop(documents.size, lambda: [likeness(query_row, row) for row in documents.rows])
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: top_n or None]
        results = [RankedResult(index=i, relevance_score=scores[i]) for i in order]
        if request.return_documents is not False:
            for result in results:
                result.document = RankedDocument(text=request.documents[result.index])
        return RerankReply(
            id=f"rerank-{new_request_id()}",
            results=results,
            model=self.model.reply_name(request.model),
            usage=_usage(query, documents),
            explain=self._explain(request, query, documents),
            warnings=request.warnings.reply(),
        )

    async def _vectors(self, request: ScoreRequest | RerankRequest, texts: list[str], field: str) -> Vectors:
        most, adapter = request.truncate_prompt_tokens, self.model.adapter(request.model)
        normalize = self.model.front.info.vectors.cosine or None
        options = VectorOptions(request.pooling, normalize=normalize, truncate_prompt_tokens=most, adapter=adapter)
        return await vectors(self.model.front, texts, options, field)

    def _explain(self, request: EmbeddingRequest | ScoreRequest | RerankRequest, *parts: Vectors) -> Explanations:
        if not request.explain:
            return UNSET
        return self.model.explain([request_id for part in parts for request_id in part.request_ids])


def _usage(*parts: Vectors) -> VectorUsage:
    num_tokens = sum(part.num_tokens for part in parts)
    return VectorUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def add_routes(app: Starlette, embeddings: Embeddings) -> None:
    """/v1/embeddings, /pooling, /v1/score and /v1/rerank."""
    routing.post(app, "/v1/embeddings", embeddings.create, takes=EmbeddingRequest, gives=EmbeddingReply)
    routing.post(app, "/pooling", embeddings.pool, takes=PoolingRequest, gives=PoolingReply)
    routing.post(app, "/v1/score", embeddings.score, takes=ScoreRequest, gives=ScoreReply)
    routing.post(app, "/v1/rerank", embeddings.rerank, takes=RerankRequest, gives=RerankReply)
