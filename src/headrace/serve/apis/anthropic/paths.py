"""The routes of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.anthropic.errors import failure, refuse
from headrace.serve.apis.anthropic.reply import MessagesAnswer, event
from headrace.serve.apis.anthropic.request import IGNORED, NAMES, CountTokensRequest, MessagesRequest, chat_body
from headrace.serve.apis.openai.completions import OpenAI
from headrace.serve.call.parsing import convert, renamed
from headrace.serve.call.reply_forms import MessageReply, TokenCount
from headrace.serve.errors import json_response


def add_routes(app: FastAPI, api: OpenAI) -> None:
    """Add `/v1/messages` and `/v1/messages/count_tokens`."""

    async def messages(request: Request) -> Any:
        """Anthropic's Messages."""
        asked = convert(MessagesRequest, await routing.body(request), IGNORED)
        try:
            answer = await api.chat(chat_body(asked))
        except RequestError as error:
            raise renamed(error, NAMES) from error
        made = MessagesAnswer(answer, asked, api.front.info.block_size)
        headers = {"request-id": made.id}
        return await routing.deliver(request, made, failure=lambda error: event(failure(error)), headers=headers)

    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has."""
        asked = convert(CountTokensRequest, await routing.body(request), IGNORED)
        try:
            _, token_ids = await api.chat_prompt(chat_body(asked))
        except RequestError as error:
            raise renamed(error, NAMES) from error
        return json_response(
            {"input_tokens": len(token_ids)} | ({"warnings": asked.warnings} if asked.warnings else {})
        )

    routing.post(
        app, "/v1/messages", messages, refuse, takes=MessagesRequest, gives=MessageReply, streams="text/event-stream"
    )
    routing.post(app, "/v1/messages/count_tokens", count_tokens, refuse, takes=CountTokensRequest, gives=TokenCount)
