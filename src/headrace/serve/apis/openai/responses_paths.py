"""The routes of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response

from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.files import PAGE, large_page
from headrace.serve.apis.openai.reply import Deleted, Page
from headrace.serve.apis.openai.responses import ResponseAnswer, Responses
from headrace.serve.apis.openai.responses_events import Event, InputTokens, ResponseObject
from headrace.serve.apis.openai.responses_input import ResponsesRequest
from headrace.serve.apis.openai.responses_replay import StoredStream
from headrace.serve.call.models import ModelSet
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import CallError

DEFAULT_PAGE = 20
NO_COMPACTION = 'it is opaque state of OpenAI\'s own models; send truncation "auto", or have the model write a summary'


class InputItems(Page, kw_only=True):
    data: list[msgspec.Raw]


def add_routes(app: Starlette, models: ModelSet, responses: Responses) -> None:
    """/v1/responses."""

    async def create(model: ServedModel, body: dict[str, Any]) -> ResponseAnswer | ResponseObject | StoredStream:
        """OpenAI's responses: takes items, replies with items or typed events."""
        answer = await responses.create(model, body)
        if not answer.request.background:
            return answer
        response = responses.run_in_background(answer)
        return answer.follow() if answer.request.stream else response

    async def get(response_id: str, query: Mapping[str, str]) -> Response | StoredStream:
        """A stored response, or the events of its stream."""
        stream = query.get("stream", "false")
        if stream not in ("true", "false"):
            raise RequestError("stream", stream, "true or false")
        after = query.get("starting_after")
        return await (responses.stream(response_id, after) if stream == "true" else responses.read(response_id))

    def compact() -> ResponseObject:
        """Not done by this server."""
        raise CallError(501, "not_supported_error", f"/v1/responses/compact: not supported here; {NO_COMPACTION}")

    async def input_items(response_id: str, query: Mapping[str, str]) -> Response:
        """The input of a stored response."""
        return await large_page(InputItems, await responses.items(response_id), query, DEFAULT_PAGE)

    one = "/v1/responses/{response_id}"
    stream: dict[str, Any] = {"streams": routing.EVENT_STREAM, "chunks": (Event,)}
    routing.post(app, "/v1/responses", models.bound(create), takes=ResponsesRequest, gives=ResponseObject, **stream)
    routing.get(app, one, get, gives=ResponseObject, query=("stream", "starting_after"))
    count = models.bound(responses.count)
    routing.post(app, "/v1/responses/input_tokens", count, takes=ResponsesRequest, gives=InputTokens)
    routing.post(app, "/v1/responses/compact", compact, unserved=True)
    routing.add(app, one, responses.delete, ("DELETE",), gives=Deleted)
    routing.post(app, f"{one}/cancel", responses.cancel, gives=ResponseObject)
    routing.get(app, f"{one}/input_items", input_items, gives=InputItems, query=PAGE)
