"""The routes of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette

from headrace.serve import routing
from headrace.serve.apis.anthropic.reply import API, MessageEvent, MessageReply, MessagesAnswer, TokenCount
from headrace.serve.apis.anthropic.request import CountTokensRequest, MessagesRequest, chat_call, read
from headrace.serve.call.models import ModelSet
from headrace.serve.call.service import ServedModel


def add_routes(app: Starlette, models: ModelSet) -> None:
    """Add `/v1/messages` and `/v1/messages/count_tokens`."""

    async def messages(model: ServedModel, body: dict[str, Any]) -> MessagesAnswer:
        """Anthropic's Messages."""
        request = read(MessagesRequest, body)
        answer = await model.chat(chat_call(request))
        request.model = model.true_name(request.model)
        return MessagesAnswer(answer, request, model.front.info.block_size)

    async def count_tokens(model: ServedModel, body: dict[str, Any]) -> TokenCount:
        """The number of tokens in a message's prompt."""
        request = read(CountTokensRequest, body)
        call = chat_call(request)
        warnings = request.warnings.reply()
        _, token_ids = await model.chat_prompt(call)
        return TokenCount(input_tokens=len(token_ids), warnings=warnings)

    stream: dict[str, Any] = {"streams": routing.EVENT_STREAM, "chunks": (MessageEvent,)}
    routing.post(app, "/v1/messages", models.bound(messages), API, takes=MessagesRequest, gives=MessageReply, **stream)
    counter = models.bound(count_tokens)
    routing.post(app, "/v1/messages/count_tokens", counter, API, takes=CountTokensRequest, gives=TokenCount)
