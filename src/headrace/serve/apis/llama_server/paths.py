"""The routes of llama-server's API that are not OpenAI's."""

from __future__ import annotations

import functools
from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response

from headrace.serve import routing
from headrace.serve.apis.llama_server import reply
from headrace.serve.apis.llama_server.reply import API, UNSERVED
from headrace.serve.apis.llama_server.request import EmbeddingRequest, LlamaCompletionRequest, TemplateRequest
from headrace.serve.apis.llama_server.service import LlamaServer
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import CallError


def add_routes(app: Starlette, model: ServedModel) -> None:
    """Add `/completion`, `/embedding`, `/apply-template`, `/props` and `/slots`."""
    llama = LlamaServer(model)

    def unserved(path: str, slot_id: str = "") -> Response:
        """Not done by this server."""
        raise CallError(501, UNSERVED, f"{path}{slot_id}: not done here")

    completion: dict[str, Any] = {
        "takes": LlamaCompletionRequest,
        "gives": reply.LlamaResult | list[reply.LlamaResult],
        "streams": routing.EVENT_STREAM,
        "chunks": (reply.LlamaPart, reply.LlamaResult),
    }
    for path in ("/completion", "/completions"):
        routing.post(app, path, llama.completion, API, **completion)
    for path in ("/embedding", "/embeddings"):
        routing.post(app, path, llama.embedding, API, takes=EmbeddingRequest, gives=list[reply.LlamaVector])
    routing.post(app, "/apply-template", llama.apply_template, API, takes=TemplateRequest, gives=reply.LlamaPrompt)
    routing.get(app, "/props", llama.props, API, gives=reply.LlamaProps)
    routing.get(app, "/slots", llama.slots, API, gives=list[reply.LlamaSlot], query=("fail_on_no_slot",))
    for path, parameter in (("/props", ""), ("/slots/", "{slot_id}"), ("/infill", "")):
        routing.post(app, path + parameter, functools.partial(unserved, path), API, unserved=True)
