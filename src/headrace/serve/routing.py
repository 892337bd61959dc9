"""Adds an API's functions to the application as routes, and sends their answers and errors.

Each API is a module with a function that adds its routes through `get`, `post` and `add`; `serve.app` calls that
function. `operations` keeps the structs of a route's bodies for the OpenAPI document. Knows no API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine import context
from headrace.engine.generation import off_loop
from headrace.serve.errors import error_response, json_response
from headrace.serve.gates.limits import parse_json, read_body
from headrace.serve.gates.streams import EventStream, until_gone

Endpoint = Callable[[Request], Awaitable[Any]]
Refusal = Callable[[BaseException], Response]


class Operation(NamedTuple):
    """One method of one path, for the OpenAPI document.

    `takes` is the struct of the body (None: no body), `gives` the struct of the reply (None: a JSON object without a
    struct, or not JSON), `streams` the media type of the reply under "stream": true, `chunks` the structs of its events
    or lines, and `query` the names of the URL's parameters. A route that is `unserved` only replies with a 501.
    """

    path: str
    method: str
    summary: str
    refuse: Refusal
    takes: Any = None
    gives: Any = None
    media_type: str = "application/json"
    streams: str | None = None
    chunks: tuple[Any, ...] = ()
    query: tuple[str, ...] = ()
    unserved: bool = False


class Version(msgspec.Struct, kw_only=True):
    """The reply of /version, and of Ollama's /api/version."""

    version: str


class Readable(Protocol):
    """An answer, read once: by `whole`, which returns a struct, or by `events`. `close` aborts its requests."""

    @property
    def id(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    async def whole(self) -> Any: ...

    def events(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...


def get(app: Starlette, path: str, endpoint: Endpoint, refuse: Refusal = error_response, **about: Any) -> None:
    """Add a route for GET and HEAD. `about` are fields of `Operation`."""
    add(app, path, endpoint, ("GET", "HEAD"), refuse, **about)


def post(app: Starlette, path: str, endpoint: Endpoint, refuse: Refusal = error_response, **about: Any) -> None:
    """Add a route for POST. `about` are fields of `Operation`."""
    add(app, path, endpoint, ("POST",), refuse, **about)


def add(
    app: Starlette,
    path: str,
    endpoint: Endpoint,
    methods: Sequence[str],
    refuse: Refusal = error_response,
    **about: Any,
) -> None:
    """Add a route for `methods`. `refuse` returns the reply for an error of `endpoint`."""
    app.add_route(path, guarded(endpoint, refuse), list(methods))
    summary = about.pop("summary", (endpoint.__doc__ or "").strip().partition("\n")[0])
    operations(app).extend(Operation(path, method, summary, refuse, **about) for method in methods if method != "HEAD")


def operations(app: Starlette) -> list[Operation]:
    """Return the operations added so far, in a list that grows with them."""
    if not hasattr(app.state, "operations"):
        app.state.operations = []
    added: list[Operation] = app.state.operations
    return added


def guarded(endpoint: Endpoint, refuse: Refusal = error_response) -> Endpoint:
    """Return `endpoint` with every error turned into a reply."""

    async def guarded(request: Request) -> Any:
        try:
            return await endpoint(request)
        except Exception as error:
            return refuse(error)

    return guarded


async def body(request: Request) -> dict[str, Any]:
    """Return the request's JSON object. Raises `RequestError` and the errors of `limits`."""
    raw = await read_body(request.scope, request.receive)
    return await off_loop(len(raw) // 16, lambda: parse_json(raw))


async def deliver(
    request: Request,
    answer: Readable,
    media_type: str = "text/event-stream",
    failure: Callable[[BaseException], bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send `answer`, whole or streamed, and abort it if the client hangs up or an error is raised.

    `failure` returns the last event of a broken stream; by default OpenAI's.
    """
    all_headers = id_header(answer.id) | dict(headers or {})
    try:
        if answer.stream:
            return EventStream(answer.events(), answer.close, all_headers, media_type, failure)
        return json_response(await until_gone(request.receive, answer.whole()), headers=all_headers)
    except BaseException:
        answer.close()
        raise


def id_header(answer_id: str) -> dict[str, str]:
    """Return the header X-Request-Id with the reply's id if that is valid in a header (S-22).

    Otherwise, and if the caller sent an id of its own, return no header; `gates.calls` then adds the call's id."""
    if context.current().is_callers or not context.REQUEST_ID.fullmatch(answer_id):
        return {}
    return {"x-request-id": answer_id}
