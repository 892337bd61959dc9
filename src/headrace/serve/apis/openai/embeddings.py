"""OpenAI's /v1/embeddings, and vLLM's /pooling.

`serve.call.embedding` makes the vectors. Knows requests and replies; `add_routes` puts the routes on an app.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette

from headrace.engine.generation import off_loop
from headrace.protocol.errors import RequestError
from headrace.protocol.step import ALL_ROWS
from headrace.serve import routing
from headrace.serve.apis.openai.completions import as_prompts
from headrace.serve.apis.openai.reply import Explanations
from headrace.serve.call.embedding import TokenVectors, VectorOptions, Vectors, token_vectors, vectors
from headrace.serve.call.parsing import Body, WarningLines, convert
from headrace.serve.call.schema import check_labels
from headrace.serve.call.scoring import class_rows
from headrace.serve.call.service import ServedModel
from headrace.text.inputs import new_request_id
from headrace.text.vectors import packed, prompt_name


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
    """POST /pooling: `task` names the kind of result, as in vLLM; `use_activation` (older: `activation`): false gives a
    classifier's numbers before the activation."""

    task: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def activates(self) -> bool:
        return self.use_activation is not False and self.activation is not False


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
    """`data` is a vector, or with the task token_embed one for each token; or base64 of float32 numbers, all rows one
    after the other, where the request has this format."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str


class PoolingReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    data: list[PooledVector]
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
        """Texts as vectors, as a vector for each token, or as the numbers of classes, in the form of vLLM's pooling."""
        request = convert(PoolingRequest, body)
        info = self.model.front.info
        of_tokens = info.pooling == ALL_ROWS
        tasks = ("classify",) if info.classes is not None else ("embed", "token_embed")[of_tokens:]
        if request.task not in (None, *tasks):
            raise RequestError("task", request.task, f"{' or '.join(tasks)}, which this model has")
        embedded: Vectors | TokenVectors
        of_tokens |= request.task == "token_embed"
        rows, embedded = await (self._token_rows if of_tokens else self._rows)(request)
        data = [PooledVector(index=i, data=cast(Any, row)) for i, row in enumerate(rows)]
        return PoolingReply(
            id=f"pool-{new_request_id()}",
            created=int(time.time()),
            data=data,
            model=self.model.reply_name(request.model),
            usage=_usage(embedded),
            explain=self._explain(request, embedded),
            warnings=request.warnings.reply(),
        )

    async def _token_rows(self, request: PoolingRequest) -> tuple[list[list[list[float]] | str], TokenVectors]:
        """Return the vectors of the tokens of a request's texts, as `_rows` does those of the texts."""
        options = self._options(request)
        embedded = await token_vectors(self.model.front, as_prompts(request.input, "input"), options)
        if request.encoding_format != "base64":
            return list(embedded.rows), embedded
        work = functools.partial(_packed_tokens, embedded)
        return await off_loop(embedded.size, work), embedded

    async def _rows(self, request: EmbeddingRequest) -> tuple[list[list[float] | str], Vectors]:
        """Return the vectors of a request's texts in the format that it names, and as they were computed."""
        options = self._options(request)
        texts = as_prompts(request.input, "input")
        if isinstance(request, PoolingRequest) and self.model.front.info.classes is not None:
            rated = await class_rows(self.model.front, texts, options, "input", use_activation=request.activates)
            embedded = Vectors(rated.rows, rated.num_tokens, rated.request_ids)
        else:
            embedded = await vectors(self.model.front, texts, options)
        if request.encoding_format != "base64":
            return list(embedded.rows), embedded
        return await off_loop(embedded.size, lambda: [packed(row) for row in embedded.rows]), embedded

    def _options(self, request: EmbeddingRequest) -> VectorOptions:
        """Return the options of a request. Raises `RequestError`."""
        check_labels(request)
        self.model.check_model(request.model)
        if request.encoding_format not in (None, "float", "base64"):
            raise RequestError("encoding_format", request.encoding_format, "float or base64")
        return VectorOptions(
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

    def _explain(self, request: EmbeddingRequest, *parts: Vectors | TokenVectors) -> Explanations:
        if not request.explain:
            return UNSET
        return self.model.explain([request_id for part in parts for request_id in part.request_ids])


def _packed_tokens(embedded: TokenVectors) -> list[list[list[float]] | str]:
    return [packed([x for row in rows for x in row]) for rows in embedded.rows]


def _usage(*parts: Vectors | TokenVectors) -> VectorUsage:
    num_tokens = sum(part.num_tokens for part in parts)
    return VectorUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def add_routes(app: Starlette, embeddings: Embeddings) -> None:
    """/v1/embeddings and /pooling."""
    routing.post(app, "/v1/embeddings", embeddings.create, takes=EmbeddingRequest, gives=EmbeddingReply)
    routing.post(app, "/pooling", embeddings.pool, takes=PoolingRequest, gives=PoolingReply)
