"""The routes of OpenAI's API that need the model alone: completions, chats, `/detokenize` and `/v1/models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace.protocol.step import EngineInfo
from headrace.serve import routing
from headrace.serve.apis.openai import completions as calls
from headrace.serve.apis.openai import reply
from headrace.serve.call import schema
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import json_response

Quality = Callable[[EngineInfo], dict[str, Any] | None]
"""Returns what was measured of the model in the form that the engine runs, or None."""


def add_routes(app: Starlette, model: ServedModel, quality: Quality) -> None:
    """Add `/v1/completions`, `/v1/chat/completions`, `/detokenize` and `/v1/models`."""

    async def completions(request: Request) -> Any:
        """OpenAI's text completions."""
        return await routing.deliver(request, await calls.complete(model, await routing.body(request)))

    async def chat_completions(request: Request) -> Any:
        """OpenAI's chat completions."""
        return await routing.deliver(request, await calls.chat(model, await routing.body(request)))

    async def detokenize(request: Request) -> Response:
        """Token ids to text."""
        return json_response(await calls.detokenize(model, await routing.body(request)))

    async def models(request: Request) -> Response:
        """The models that are served."""
        listed = calls.models(model)
        listed.data = [with_quality(card) for card in listed.data]
        return json_response(listed)

    async def model_card(request: Request) -> Response:
        """One model."""
        return json_response(with_quality(calls.model_card(model, request.path_params["name"])))

    def with_quality(card: reply.ModelCard) -> reply.ModelCard:
        measured = quality(model.front.info)
        card.quality = UNSET if measured is None else measured
        return card

    routing.post(
        app,
        "/v1/completions",
        completions,
        takes=schema.CompletionRequest,
        gives=reply.Completion,
        streams="text/event-stream",
        chunks=(reply.CompletionChunk,),
    )
    routing.post(
        app,
        "/v1/chat/completions",
        chat_completions,
        takes=schema.ChatCompletionRequest,
        gives=reply.ChatCompletion,
        streams="text/event-stream",
        chunks=(reply.ChatCompletionChunk,),
    )
    routing.post(app, "/detokenize", detokenize, takes=schema.DetokenizeRequest, gives=reply.Detokenized)
    routing.get(app, "/v1/models", models, gives=reply.ModelList)
    routing.get(app, "/v1/models/{name:path}", model_card, gives=reply.ModelCard)
