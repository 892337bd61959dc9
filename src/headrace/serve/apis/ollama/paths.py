"""The routes of Ollama's API: `/` and `/api/...`."""

from __future__ import annotations

import functools
from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response

from headrace import __version__
from headrace.serve import routing
from headrace.serve.apis.ollama import reply
from headrace.serve.apis.ollama.reply import API, NDJSON
from headrace.serve.apis.ollama.request import ChatRequest, EmbedRequest, GenerateRequest, ShowRequest
from headrace.serve.apis.ollama.service import Ollama
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import CallError
from headrace.serve.routing import Version


def add_routes(app: Starlette, model: ServedModel) -> None:
    """Add `/` and `/api/...`."""
    ollama = Ollama(model)

    def root() -> Response:
        """Something answers here."""
        return Response("headrace is running\n", media_type="text/plain")

    def version() -> Version:
        """headrace's version."""
        return Version(version=__version__)

    def unserved(path: str) -> Response:
        """Not done by this server, whose one model is named when it starts."""
        message = f"{path}: not done here; the model is named when the server starts"
        raise CallError(501, "not_implemented", message)

    # HEAD on the root is how Ollama's own client asks whether somebody is there.
    routing.get(app, "/", root, API, media_type="text/plain")
    lines: dict[str, Any] = {"api": API, "streams": NDJSON}
    chunks: tuple[Any, ...] = (reply.ChatChunk, reply.ChatReply)
    routing.post(app, "/api/chat", ollama.chat, takes=ChatRequest, gives=reply.ChatReply, chunks=chunks, **lines)
    chunks = (reply.GenerateChunk, reply.GenerateReply)
    routing.post(
        app, "/api/generate", ollama.generate, takes=GenerateRequest, gives=reply.GenerateReply, chunks=chunks, **lines
    )
    routing.post(app, "/api/embed", ollama.embed, API, takes=EmbedRequest, gives=reply.EmbedReply)
    older: dict[str, Any] = {"gives": reply.EmbeddingReply, "summary": "The vector of one text."}
    routing.post(app, "/api/embeddings", functools.partial(ollama.embed, older=True), API, takes=EmbedRequest, **older)
    routing.post(app, "/api/show", ollama.show, API, takes=ShowRequest, gives=reply.ShowReply)
    routing.post(
        app, "/api/pull", ollama.pull, takes=ShowRequest, gives=reply.PullReply, chunks=(reply.PullReply,), **lines
    )
    routing.get(app, "/api/tags", ollama.tags, API, gives=reply.OllamaModels)
    routing.get(app, "/api/ps", ollama.ps, API, gives=reply.OllamaModels)
    routing.get(app, "/api/version", version, API, gives=Version)
    for method, name in (("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete")):
        path = f"/api/{name}"
        routing.add(app, path, functools.partial(unserved, path), (method,), API, unserved=True)
