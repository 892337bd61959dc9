"""The routes of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace.serve import routing
from headrace.serve.apis.anthropic.errors import refuse
from headrace.serve.apis.anthropic.reply import MessageEvent, MessageReply, MessagesAnswer, TokenCount, failure
from headrace.serve.apis.anthropic.request import IGNORED, CountTokensRequest, MessagesRequest, chat_call
from headrace.serve.call.parsing import convert
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import json_response


def add_routes(app: Starlette, model: ServedModel) -> None:
    """Add `/v1/messages` and `/v1/messages/count_tokens`."""

    async def messages(request: Request) -> Any:
        """Anthropic's Messages."""
        body = convert(MessagesRequest, await routing.body(request), IGNORED)
        answer = MessagesAnswer(await model.chat(chat_call(body)), body, model.front.info.block_size)
        return await routing.deliver(request, answer, failure=failure, headers={"request-id": answer.id})

    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has."""
        body = convert(CountTokensRequest, await routing.body(request), IGNORED)
        call = chat_call(body)
        warnings = body.warnings.reply()
        _, token_ids = await model.chat_prompt(call)
        return json_response(TokenCount(input_tokens=len(token_ids), warnings=warnings))

    routing.post(
        app,
        "/v1/messages",
        messages,
        refuse,
        takes=MessagesRequest,
        gives=MessageReply,
        streams="text/event-stream",
        chunks=(MessageEvent,),
    )
    routing.post(app, "/v1/messages/count_tokens", count_tokens, refuse, takes=CountTokensRequest, gives=TokenCount)
