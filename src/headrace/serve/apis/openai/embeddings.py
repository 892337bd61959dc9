"""OpenAI's /v1/embeddings, and vLLM's /score and /rerank on top of it.

`serve.call.embedding` makes the vectors. Knows requests and replies; `add_routes` puts the routes on an app.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.completions import as_prompts
from headrace.serve.call import reply_forms
from headrace.serve.call.embedding import vectors
from headrace.serve.call.parsing import Body, convert
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import json_response
from headrace.serve.gates.streams import until_gone
from headrace.text.inputs import new_request_id
from headrace.text.vectors import likeness, packed


class EmbeddingRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. `pooling`, `normalize` and what follows are not OpenAI's."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ScoreRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score: one text against others, or texts in pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    pooling: str | None = None
    truncate_prompt_tokens: int | None = None


class RerankRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank: documents by their likeness to a query."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    pooling: str | None = None
    truncate_prompt_tokens: int | None = None


class Embeddings:
    """The routes without HTTP. Raises `HeadraceError`s of all kinds."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /v1/embeddings."""
        request = convert(EmbeddingRequest, body)
        self.model.check_model(request.model)
        if request.encoding_format not in (None, "float", "base64"):
            raise RequestError("encoding_format", request.encoding_format, "float or base64")
        embedded = await vectors(
            self.model.front,
            as_prompts(request.input, "input"),
            pooling=request.pooling,
            dimensions=request.dimensions,
            normalize=request.normalize is not False,
            add_special_tokens=request.add_special_tokens is not False,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
        )
        shown = packed if request.encoding_format == "base64" else list
        data = [{"object": "embedding", "index": i, "embedding": shown(row)} for i, row in enumerate(embedded.rows)]
        return self._reply(request, embedded.num_tokens, {"object": "list", "data": data})

    async def score(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /v1/score."""
        request = convert(ScoreRequest, body)
        self.model.check_model(request.model)
        ones, others = _as_list(request.text_1), _as_list(request.text_2)
        if len(ones) not in (1, len(others)):
            raise RequestError("text_1", len(ones), f"one text, or as many as text_2 has ({len(others)})")
        more: dict[str, Any] = {"pooling": request.pooling, "truncate_prompt_tokens": request.truncate_prompt_tokens}
        first = await vectors(self.model.front, ones, field="text_1", **more)
        second = await vectors(self.model.front, others, field="text_2", **more)
        rows = first.rows * len(others) if len(ones) == 1 else first.rows
        pairs = zip(rows, second.rows, strict=True)
        data = [{"index": i, "object": "score", "score": likeness(a, b)} for i, (a, b) in enumerate(pairs)]
        fields = {"id": f"score-{new_request_id()}", "object": "list", "data": data}
        return self._reply(request, first.num_tokens + second.num_tokens, fields)

    async def rerank(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /v1/rerank."""
        request = convert(RerankRequest, body)
        self.model.check_model(request.model)
        top_n = len(request.documents) if request.top_n is None else request.top_n
        if top_n < 0:
            raise RequestError("top_n", top_n, "at least 0; 0 is all of them")
        more: dict[str, Any] = {"pooling": request.pooling, "truncate_prompt_tokens": request.truncate_prompt_tokens}
        query = await vectors(self.model.front, [request.query], field="query", **more)
        embedded = await vectors(self.model.front, request.documents, field="documents", **more)
        scores = [likeness(query.rows[0], row) for row in embedded.rows]
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: top_n or None]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if request.return_documents is not False:
            results = [result | {"document": {"text": request.documents[result["index"]]}} for result in results]
        fields = {"id": f"rerank-{new_request_id()}", "results": results}
        return self._reply(request, query.num_tokens + embedded.num_tokens, fields)

    def _reply(self, request: Body, num_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return fields | {"model": self.model.name, "usage": usage} | request.warnings.reply()


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def add_routes(app: FastAPI, embeddings: Embeddings) -> None:
    """/v1/embeddings, /v1/score and /v1/rerank."""

    async def create(request: Request) -> Response:
        """Texts as vectors."""
        body = await routing.body(request)
        return json_response(await until_gone(request.receive, embeddings.create(body)))

    async def score(request: Request) -> Response:
        """How alike texts are."""
        body = await routing.body(request)
        return json_response(await until_gone(request.receive, embeddings.score(body)))

    async def rerank(request: Request) -> Response:
        """Documents by their likeness to a query."""
        body = await routing.body(request)
        return json_response(await until_gone(request.receive, embeddings.rerank(body)))

    routing.post(app, "/v1/embeddings", create, takes=EmbeddingRequest, gives=reply_forms.Embedded)
    for path in ("/v1/score", "/score"):
        routing.post(app, path, score, takes=ScoreRequest, gives=reply_forms.Scores)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        routing.post(app, path, rerank, takes=RerankRequest, gives=reply_forms.Ranking)
