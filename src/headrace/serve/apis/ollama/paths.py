"""The routes of Ollama's API: `/` and `/api/...`."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.serve import routing
from headrace.serve.apis.ollama import reply
from headrace.serve.apis.ollama.errors import refuse
from headrace.serve.apis.ollama.reply import NDJSON, Lines
from headrace.serve.apis.ollama.request import ChatRequest, EmbedRequest, GenerateRequest, ShowRequest
from headrace.serve.apis.ollama.service import Ollama, UnservedError
from headrace.serve.call.parsing import convert
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import json_response
from headrace.serve.gates.streams import until_gone
from headrace.serve.routing import Version


def add_routes(app: Starlette, model: ServedModel) -> None:
    """Add `/` and `/api/...`."""
    ollama = Ollama(model)

    async def send(request: Request, answer: Lines | reply.LoadReply) -> Any:
        if not isinstance(answer, Lines):
            return json_response(answer)
        return await routing.deliver(request, answer, NDJSON, reply.failure)

    async def root(request: Request) -> Response:
        """Something answers here."""
        return Response("headrace is running\n", media_type="text/plain")

    async def chat(request: Request) -> Any:
        """Ollama's chat."""
        return await send(request, await ollama.chat(await routing.body(request)))

    async def generate(request: Request) -> Any:
        """Ollama's completion of one prompt."""
        return await send(request, await ollama.generate(await routing.body(request)))

    async def embed(request: Request) -> Any:
        """Vectors of texts."""
        work = ollama.embed(await routing.body(request), older=False)
        return json_response(await until_gone(request.receive, work))

    async def embeddings(request: Request) -> Any:
        """The vector of one text."""
        work = ollama.embed(await routing.body(request), older=True)
        return json_response(await until_gone(request.receive, work))

    async def tags(request: Request) -> Response:
        """The models that are there."""
        return json_response(ollama.tags())

    async def ps(request: Request) -> Response:
        """The models that are loaded."""
        return json_response(ollama.ps())

    async def version(request: Request) -> Response:
        """headrace's version."""
        return json_response(Version(version=__version__))

    async def show(request: Request) -> Response:
        """One model."""
        return json_response(ollama.show(await routing.body(request)))

    async def pull(request: Request) -> Response:
        """Nothing to do for the model that is served; others can not be had."""
        body = convert(ShowRequest, await routing.body(request))
        ollama.check_name(body)
        done = reply.PullReply(warnings=body.warnings.reply())
        return json_response(done) if body.stream is False else Response(reply.line(done), media_type=NDJSON)

    async def unserved(request: Request) -> Response:
        """Not done by this server, whose one model is named when it starts."""
        raise UnservedError(f"{request.url.path}: not done here; the model is named when the server starts")

    # HEAD on the root is how Ollama's own client asks whether somebody is there.
    routing.get(app, "/", root, refuse, media_type="text/plain")
    lines: dict[str, Any] = {"refuse": refuse, "streams": NDJSON}
    chunks: tuple[Any, ...] = (reply.ChatChunk, reply.ChatReply)
    routing.post(app, "/api/chat", chat, takes=ChatRequest, gives=reply.ChatReply, chunks=chunks, **lines)
    chunks = (reply.GenerateChunk, reply.GenerateReply)
    routing.post(
        app, "/api/generate", generate, takes=GenerateRequest, gives=reply.GenerateReply, chunks=chunks, **lines
    )
    routing.post(app, "/api/embed", embed, refuse, takes=EmbedRequest, gives=reply.EmbedReply)
    routing.post(app, "/api/embeddings", embeddings, refuse, takes=EmbedRequest, gives=reply.EmbeddingReply)
    routing.post(app, "/api/show", show, refuse, takes=ShowRequest, gives=reply.ShowReply)
    routing.post(app, "/api/pull", pull, takes=ShowRequest, gives=reply.PullReply, chunks=(reply.PullReply,), **lines)
    routing.get(app, "/api/tags", tags, refuse, gives=reply.OllamaModels)
    routing.get(app, "/api/ps", ps, refuse, gives=reply.OllamaModels)
    routing.get(app, "/api/version", version, refuse, gives=Version)
    for name in ("push", "create", "copy"):
        routing.post(app, f"/api/{name}", unserved, refuse, unserved=True)
    routing.add(app, "/api/delete", unserved, ("DELETE",), refuse, unserved=True)
