"""The routes of llama-server's API that are not OpenAI's."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace.serve import routing
from headrace.serve.apis.llama_server import reply
from headrace.serve.apis.llama_server.errors import UnservedError, refuse
from headrace.serve.apis.llama_server.request import EmbeddingRequest, LlamaCompletionRequest, TemplateRequest
from headrace.serve.apis.llama_server.service import LlamaServer
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import json_response
from headrace.serve.gates.streams import until_gone


def add_routes(app: Starlette, model: ServedModel) -> None:
    """Add `/completion`, `/embedding`, `/apply-template`, `/props` and `/slots`."""
    llama = LlamaServer(model)

    async def completion(request: Request) -> Any:
        """llama-server's completion."""
        return await routing.deliver(request, await llama.completion(await routing.body(request)))

    async def embedding(request: Request) -> Any:
        """Vectors of texts."""
        work = llama.embedding(await routing.body(request))
        return json_response(await until_gone(request.receive, work))

    async def apply_template(request: Request) -> Response:
        """The prompt that a chat becomes."""
        return json_response(await llama.apply_template(await routing.body(request)))

    async def props(request: Request) -> Response:
        """What is served, and with which defaults."""
        return json_response(llama.props())

    async def slots(request: Request) -> Response:
        """The places of the batch."""
        return json_response(llama.slots(request.query_params.get("fail_on_no_slot", "0") not in ("", "0")))

    async def unserved(request: Request) -> Response:
        """Not done by this server."""
        raise UnservedError(f"{request.url.path}: not done here")

    for path in ("/completion", "/completions"):
        routing.post(
            app,
            path,
            completion,
            refuse,
            takes=LlamaCompletionRequest,
            gives=reply.LlamaResult | list[reply.LlamaResult],
            streams="text/event-stream",
            chunks=(reply.LlamaPart, reply.LlamaResult),
        )
    for path in ("/embedding", "/embeddings"):
        routing.post(app, path, embedding, refuse, takes=EmbeddingRequest, gives=list[reply.LlamaVector])
    routing.post(app, "/apply-template", apply_template, refuse, takes=TemplateRequest, gives=reply.LlamaPrompt)
    routing.get(app, "/props", props, refuse, gives=reply.LlamaProps)
    routing.get(app, "/slots", slots, refuse, gives=list[reply.LlamaSlot], query=("fail_on_no_slot",))
    routing.post(app, "/props", unserved, refuse, unserved=True)
    routing.post(app, "/slots/{slot_id}", unserved, refuse, unserved=True)
    routing.post(app, "/infill", unserved, refuse, unserved=True)
