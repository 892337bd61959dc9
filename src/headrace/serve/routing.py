"""How an API's functions become routes: bodies read within limits, errors told in the API's own shape, answers sent.

Each API is a module with a function that adds its routes through `get`, `post` and `add`; `serve.app` calls them.
What a route takes and gives is kept beside it for the OpenAPI document. Knows no API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fastapi import FastAPI, Request
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

    `takes` is the struct of the body (None: it has none), `gives` the struct of the reply (None: a JSON object, or
    not JSON at all), `streams` the media type of the reply under "stream": true, `query` the names of parameters in
    the URL; `unserved`: the route only tells that this is not done here.
    """

    path: str
    method: str
    summary: str
    refuse: Refusal
    takes: Any = None
    gives: Any = None
    media_type: str = "application/json"
    streams: str | None = None
    query: tuple[str, ...] = ()
    unserved: bool = False


class Readable(Protocol):
    """An answer: read by `whole` or by `events`, once. `close` aborts what still runs."""

    @property
    def id(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    async def whole(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...


def get(app: FastAPI, path: str, endpoint: Endpoint, refuse: Refusal = error_response, **about: Any) -> None:
    """GET and HEAD. `about` are fields of `Operation`."""
    add(app, path, endpoint, ("GET", "HEAD"), refuse, **about)


def post(app: FastAPI, path: str, endpoint: Endpoint, refuse: Refusal = error_response, **about: Any) -> None:
    """POST. `about` are fields of `Operation`."""
    add(app, path, endpoint, ("POST",), refuse, **about)


def add(
    app: FastAPI, path: str, endpoint: Endpoint, methods: Sequence[str], refuse: Refusal = error_response, **about: Any
) -> None:
    """A route of any methods. Whatever `endpoint` raises, `refuse` makes a reply of."""
    app.add_api_route(path, guarded(endpoint, refuse), methods=list(methods), response_model=None)
    summary = about.pop("summary", (endpoint.__doc__ or "").strip().partition("\n")[0])
    made = [Operation(path, method, summary, refuse, **about) for method in methods if method != "HEAD"]
    operations(app).extend(made)


def operations(app: FastAPI) -> list[Operation]:
    """All that were added so far."""
    if not hasattr(app.state, "operations"):
        app.state.operations = []
    found: list[Operation] = app.state.operations
    return found


def guarded(endpoint: Endpoint, refuse: Refusal = error_response) -> Endpoint:
    """`endpoint`, with every error turned into a reply."""

    async def guarded(request: Request) -> Any:
        try:
            return await endpoint(request)
        except Exception as error:
            return refuse(error)

    return guarded


async def body(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises `RequestError` and the errors of `limits`."""
    read = await read_body(request.scope, request.receive)
    return await off_loop(len(read) // 16, lambda: parse_json(read))


async def deliver(
    request: Request,
    answer: Readable,
    media_type: str = "text/event-stream",
    failure: Callable[[BaseException], bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send `answer`, whole or streamed, while watching that the client is there; close it however that ends.

    `failure` makes the last event of a stream that broke; OpenAI's, if not given.
    """
    sent = id_header(answer.id) | dict(headers or {})
    try:
        if answer.stream:
            return EventStream(answer.events(), answer.close, sent, media_type, failure)
        return json_response(await until_gone(request.receive, answer.whole()), headers=sent)
    except BaseException:
        answer.close()
        raise


def id_header(answer_id: str) -> dict[str, str]:
    """X-Request-Id: the caller's own, for its logs, else the reply's id if that can stand in a header (S-22). Where
    there is neither, `calls` puts what the log calls it."""
    if context.current().is_callers or not context.REQUEST_ID.fullmatch(answer_id):
        return {}
    return {"x-request-id": answer_id}
