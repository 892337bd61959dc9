"""`/tokenize`, which two APIs have: llama-server's body has a content, vLLM's a prompt or messages. Called by `app`."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response

from headrace.serve import routing
from headrace.serve.apis.llama_server import service as llama_server
from headrace.serve.apis.openai import completions
from headrace.serve.call import schema
from headrace.serve.call.models import ModelSet
from headrace.serve.call.replies import Tokenized
from headrace.serve.call.service import ServedModel


def add_routes(app: Starlette, models: ModelSet) -> None:
    """Add `/tokenize`."""

    async def tokenize(model: ServedModel, body: dict[str, Any]) -> Response:
        """Convert text, or messages, to token ids."""
        if body.get("content") is not None:
            reply = await llama_server.tokenize(model, schema.parse(schema.TokenizeRequest, body))
        else:
            reply = await completions.tokenize(model, body)
        return await routing.large_response(reply, reply.count)

    routing.post(app, "/tokenize", models.bound(tokenize), takes=schema.TokenizeRequest, gives=Tokenized)
