"""Routes of the page's files. They are public: a page holds no data, for its data come from routes that need a key.

`/` is the chat where the `Accept` header names HTML, and Ollama's reply elsewhere. Called by `serve.app`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.serve import routing
from headrace.serve.errors import OPENAI

FOLDER = Path(__file__).parent
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A browser compares the tag each time, so that a new server never runs with an old page.
    "cache-control": "no-cache",
}


def add_routes(app: Starlette) -> None:
    """Add `/inspect` and the files under `/inspector/`, and let `/`, which is a route already, reply to browsers with
    the page. The files are read once."""
    senders = {
        path.relative_to(FOLDER).as_posix(): sender(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in MEDIA_TYPES
    }
    shell = senders["index.html"]

    async def file(request: Request) -> Response:
        send = senders.get(request.path_params["name"])
        if send is None:
            raise HTTPException(404)
        return await send(request)

    for path, endpoint, summary in (
        ("/inspect", shell, "The page that shows the engine at work."),
        ("/inspector/{name:path}", file, "A file of the page."),
    ):
        app.add_route(path, endpoint, ["GET"])
        routing.operations(app).append(routing.Operation(path, "GET", summary, OPENAI, media_type="text/html"))
    routes = app.router.routes
    place, plain = next((i, route) for i, route in enumerate(routes) if isinstance(route, Route) and route.path == "/")

    async def home(request: Request) -> Response:
        accepted = ",".join(request.headers.getlist("accept"))
        reply: Response = await (shell if "text/html" in accepted else plain.endpoint)(request)
        return reply

    routes[place] = Route("/", home, methods=list(plain.methods or ()))


def sender(path: Path) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that replies with the file."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"etag": tag}

    async def send(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=MEDIA_TYPES[path.suffix], headers=headers)

    return send
