"""vLLM's /score, /rerank and /classify; Cohere's and Jina's rerankers have the second of these shapes.

`serve.call.scoring` computes the numbers. Knows requests and replies; `add_routes` puts the routes on an app.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette

from headrace.engine.generation import off_loop
from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.completions import as_prompts
from headrace.serve.apis.openai.embeddings import VectorUsage
from headrace.serve.apis.openai.reply import Explanations
from headrace.serve.call.embedding import VectorOptions
from headrace.serve.call.parsing import Body, WarningLines, convert
from headrace.serve.call.scoring import Fields, Scores, class_rows, scores
from headrace.serve.call.service import ServedModel
from headrace.text.inputs import new_request_id
from headrace.text.likeness import Scoring


class ScoringBody(Body, forbid_unknown_fields=True, kw_only=True):
    """The fields that scores and classes have in common. `use_activation` (older: `activation`): false gives the
    numbers before the activation, of a classifier or cross-encoder."""

    model: str | None = None
    pooling: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    explain: bool | None = None

    @property
    def activates(self) -> bool:
        return self.use_activation is not False and self.activation is not False


class TextObject(msgspec.Struct, forbid_unknown_fields=True):
    """A text as Cohere and Jina write it, too."""

    text: str


class PairsBody(ScoringBody, forbid_unknown_fields=True, kw_only=True):
    """The fields that scores of pairs have in common. `instruction`: says what is looked for, to a reranker that reads
    one (Qwen3-Reranker)."""

    instruction: str | None = None


class ScoreRequest(PairsBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score: one text against others, or texts in pairs. The texts are text_1 and text_2, data_1 and data_2,
    or queries and documents."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class RerankRequest(PairsBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank: documents by how well they fit a query."""

    query: str
    documents: list[str | TextObject]
    top_n: int | None = None
    return_documents: bool | None = None


class ClassifyRequest(ScoringBody, forbid_unknown_fields=True, kw_only=True):
    """POST /classify: the classes of a text, of several, or of token ids."""

    input: str | list[Any]
    add_special_tokens: bool | None = None


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(msgspec.Struct, kw_only=True):
    """`scoring` says whether a cross-encoder read both texts at once, or their vectors were compared."""

    id: str
    object: Literal["list"] = "list"
    created: int
    data: list[Score]
    model: str
    scoring: Scoring
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
    """`scoring`: as in `ScoreReply`."""

    id: str
    results: list[RankedResult]
    model: str
    scoring: Scoring
    usage: VectorUsage
    explain: Explanations = UNSET
    warnings: WarningLines = UNSET


class TextClass(msgspec.Struct, kw_only=True):
    """The likeliest class of a text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[TextClass]
    usage: VectorUsage
    explain: Explanations = UNSET
    warnings: WarningLines = UNSET


class ScoreRoutes:
    """The routes without HTTP. Raises `HeadraceError`s of all kinds."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def score(self, body: dict[str, Any]) -> ScoreReply:
        """How well texts fit each other."""
        request = convert(ScoreRequest, body)
        fields, ones, others = _texts(request)
        if len(ones) not in (1, len(others)):
            bound = f"one text, or as many as {fields.second} has ({len(others)})"
            raise RequestError(fields.first, len(ones), bound)
        rated = await self._scores(request, ones, others, fields)
        return ScoreReply(
            id=f"score-{new_request_id()}",
            created=int(time.time()),
            data=[Score(index=i, score=score) for i, score in enumerate(rated.values)],
            model=self.model.reply_name(request.model),
            scoring=rated.scoring,
            usage=_usage(rated.num_tokens),
            explain=self._explain(request, rated.request_ids),
            warnings=request.warnings.reply(),
        )

    async def rerank(self, body: dict[str, Any]) -> RerankReply:
        """Documents by how well they fit a query."""
        request = convert(RerankRequest, body)
        texts = [each if isinstance(each, str) else each.text for each in request.documents]
        top_n = len(texts) if request.top_n is None else request.top_n
        if top_n < 0:
            raise RequestError("top_n", top_n, "at least 0; 0 is all of them")
        rated = await self._scores(request, [request.query], texts, Fields("query", "documents"))
        order = rated.order[: top_n or None]
        results = [RankedResult(index=i, relevance_score=rated.values[i]) for i in order]
        if request.return_documents is not False:
            for result in results:
                result.document = RankedDocument(text=texts[result.index])
        return RerankReply(
            id=f"rerank-{new_request_id()}",
            results=results,
            model=self.model.reply_name(request.model),
            scoring=rated.scoring,
            usage=_usage(rated.num_tokens),
            explain=self._explain(request, rated.request_ids),
            warnings=request.warnings.reply(),
        )

    async def classify(self, body: dict[str, Any]) -> ClassifyReply:
        """The classes of texts."""
        request = convert(ClassifyRequest, body)
        options = self._options(request)._replace(add_special_tokens=request.add_special_tokens is not False)
        texts = as_prompts(request.input, "input")
        rated = await class_rows(self.model.front, texts, options, "input", use_activation=request.activates)

        def entries() -> list[TextClass]:
            best = [max(range(len(row)), key=row.__getitem__) for row in rated.rows]
            return [
                TextClass(index=i, label=rated.labels[place], probs=row, num_classes=len(row))
                for i, (place, row) in enumerate(zip(best, rated.rows, strict=True))
            ]

        return ClassifyReply(
            id=f"classify-{new_request_id()}",
            created=int(time.time()),
            model=self.model.reply_name(request.model),
            data=await off_loop(rated.size, entries),
            usage=_usage(rated.num_tokens),
            explain=self._explain(request, rated.request_ids),
            warnings=request.warnings.reply(),
        )

    async def _scores(self, request: PairsBody, ones: Sequence[str], others: Sequence[str], fields: Fields) -> Scores:
        options, front = self._options(request)._replace(instruction=request.instruction or ""), self.model.front
        return await scores(front, ones, others, options, fields, use_activation=request.activates)

    def _options(self, request: ScoringBody) -> VectorOptions:
        self.model.check_model(request.model)
        return VectorOptions(
            pooling=request.pooling,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            adapter=self.model.adapter(request.model),
        )

    def _explain(self, request: ScoringBody, request_ids: Sequence[str]) -> Explanations:
        return self.model.explain(list(request_ids)) if request.explain else UNSET


def _texts(request: ScoreRequest) -> tuple[Fields, list[str], list[str]]:
    """Return the texts of a request, and the names of the fields that have them."""
    names = [Fields("text_1", "text_2"), Fields("data_1", "data_2"), Fields("queries", "documents")]
    for fields in names:
        first, second = (getattr(request, name) for name in fields)
        if first is not None or second is not None:
            for name, value in zip(fields, (first, second), strict=True):
                if value is None:
                    raise RequestError(name, None, "a text, or a list of texts")
            ones, others = ([each] if isinstance(each, str) else list(each) for each in (first, second))
            return fields, ones, others
    raise RequestError("text_1", None, "a text, or a list of texts")


def _usage(num_tokens: int) -> VectorUsage:
    return VectorUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def add_routes(app: Starlette, routes: ScoreRoutes) -> None:
    """/v1/score, /v1/rerank and /classify."""
    routing.post(app, "/v1/score", routes.score, takes=ScoreRequest, gives=ScoreReply)
    routing.post(app, "/v1/rerank", routes.rerank, takes=RerankRequest, gives=RerankReply)
    routing.post(app, "/classify", routes.classify, takes=ClassifyRequest, gives=ClassifyReply)
