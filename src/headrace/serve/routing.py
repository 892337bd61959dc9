"""Adds functions to the application as routes, and sends their results: a struct, or an answer, whole or streamed.

Each API is a module with a function that adds its routes through `get`, `post` and `add`; `serve.app` calls that
function. `operations` keeps the structs of a route's bodies for the OpenAPI document. The connection is watched while
the engine works: if the client hangs up, its requests end at once (R-04). If it stops reading, the connection is closed
after `STALL_S`, and the batch never waits for it (R-14). A stream that breaks ends with an error event and without
`[DONE]` (R-15, I-25). Knows no API.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.engine import context
from headrace.engine.generation import LARGE_TEXT, free, in_time, off_loop, width
from headrace.serve.errors import ENDINGS, OPENAI, Api, error_event, error_response, json_response
from headrace.serve.gates.limits import ClientGoneError, Receive, Scope, parse_json, read_body

logger = logging.getLogger("headrace.server")

# How long a write to a client may block.
STALL_S = 30.0
HEARTBEAT_S = 10.0
"""Seconds of silence in a stream of events before a heartbeat is sent."""
PIECE = 256
"""Items of a list that are written at a time."""
LEVELS = 8
"""Levels of nested structs and short lists in which long lists are searched for."""
SENT_BYTES = 2**18
TURN_EVENTS, TURN_BYTES = 16, 2**15
"""Events, and their bytes, after which a stream lets other tasks run: one step of 256 answers gives as many events."""
EVENT_STREAM = "text/event-stream"

# One large body is parsed at a time: its values take up to a hundred megabytes.
_parser = ThreadPoolExecutor(1, thread_name_prefix="headrace-parser")

T = TypeVar("T")


class Operation(NamedTuple):
    """One method of one path, for the OpenAPI document.

    `takes` is the struct of the body (None: no body), `gives` the struct of the reply (None: a JSON object without a
    struct, or not JSON), `streams` the media type of the reply under "stream": true, `chunks` the structs of its events
    or lines, and `query` the names of the URL's parameters. A route that is `unserved` only replies with a 501.
    """

    path: str
    method: str
    summary: str
    api: Api
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


class Readable(ABC):
    """An answer in the shape of an API, read once: by `whole`, or by `events` if `stream`.

    `answer` is the `serve.call` answer behind it, `headers` are further headers of the reply.
    """

    headers: Mapping[str, str] = {}
    media_type = EVENT_STREAM

    def __init__(self, answer: Any, stream: bool) -> None:
        self.answer = answer
        self.id: str = answer.id
        self.stream = stream

    @abstractmethod
    async def whole(self) -> Any:
        """Return the reply's struct. Raises the engine's errors."""

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yield the reply in pieces. Raises the engine's errors."""

    def close(self) -> None:
        """Abort the requests that still run. Nothing is read from the answer afterwards."""
        self.answer.close()


async def body(request: Request, may_lack: bool = False, is_list: bool = False) -> Any:
    """Return the request's JSON object; with `may_lack` no body is an empty one. `is_list`: its JSON list.

    Raises `RequestError` and the errors of `limits`."""
    async with contextlib.AsyncExitStack() as memory:
        raw = await in_time(memory.enter_async_context(read_body(request.scope, request.receive)), "its body was read")
        if may_lack and not raw:
            return {}
        parse = lambda: parse_json(raw, is_list=True) if is_list else parse_json(raw)  # noqa: E731
        return await in_time(off_loop(len(raw) // 16, parse, _parser), "its body was parsed")


def get(app: Starlette, path: str, function: Callable[..., Any], api: Api = OPENAI, **about: Any) -> None:
    """Add a route for GET and HEAD; see `add`."""
    add(app, path, function, ("GET", "HEAD"), api, **about)


def post(app: Starlette, path: str, function: Callable[..., Any], api: Api = OPENAI, **about: Any) -> None:
    """Add a route for POST; see `add`."""
    add(app, path, function, ("POST",), api, **about)


def add(
    app: Starlette,
    path: str,
    function: Callable[..., Any],
    methods: Sequence[str],
    api: Api = OPENAI,
    read: Callable[[Request], Awaitable[Any]] = body,
    **about: Any,
) -> None:
    """Add a route for `methods`.

    `function` gets the parameters of the path, then the body as `read` returns it if the route takes one, then the
    URL's parameters if the route has some. It returns a struct, a `Readable` or a `Response`, or an awaitable of one;
    an exception becomes a reply in the shape of `api`. The first line of its docstring is the summary of the route.
    `about` are fields of `Operation`.
    """
    documented = function.func if isinstance(function, functools.partial) else function
    summary = about.pop("summary", (documented.__doc__ or "").strip().partition("\n")[0])
    added = [Operation(path, method, summary, api, **about) for method in methods if method != "HEAD"]
    operation, takes_body = added[0], added[0].takes is not None or read is not body

    async def endpoint(request: Request) -> Any:
        if operation.streams and request.method == "HEAD":
            return StreamHead(operation.streams)
        try:
            arguments = [*request.path_params.values()]
            if takes_body:
                arguments.append(await read(request))
            if operation.query:
                arguments.append(request.query_params)
            result = function(*arguments)
            if inspect.isawaitable(result):
                # A stream is watched when it is sent.
                result = await (result if operation.streams else until_gone(request.receive, result))
            if isinstance(result, Readable):
                return await deliver(request, result, api)
            if isinstance(result, Response):
                return result
            return await large_response(result, num_entries(result))
        except ENDINGS:
            raise
        except BaseException as error:
            return error_response(error, api)

    app.add_route(path, endpoint, list(methods))
    operations(app).extend(added)


def operations(app: Starlette) -> list[Operation]:
    """Return the operations added so far, in a list that grows with them."""
    if not hasattr(app.state, "operations"):
        app.state.operations = []
    added: list[Operation] = app.state.operations
    return added


def no_route(app: Starlette, request: Request, status: int) -> str:
    """Return the error message for a call of a path or a method that no route has."""
    path = request.url.path[:100]
    if status == 405:
        return f"{path} takes {' or '.join(methods(app, request.url.path))}, not {request.method}"
    paths = {operation.path for operation in operations(app) if not operation.unserved}
    near = difflib.get_close_matches(path, paths, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no {path} here; {hint}GET /docs lists all routes"


def methods(app: Starlette, path: str) -> list[str]:
    """Return the methods of all routes that match a path."""
    fit = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted({method for route in fit for method in route.methods or ()})


async def deliver(request: Request, answer: Readable, api: Api) -> Any:
    """Send `answer`, whole or streamed, and abort it if the client hangs up or an error is raised."""
    headers = id_header(answer.id) | dict(answer.headers)
    try:
        if answer.stream:
            return EventStream(answer, headers, api)
        reply, size = await until_gone(request.receive, answer.whole()), answer.answer.size
        answer.close()
        return await large_response(reply, size, headers)
    except BaseException:
        answer.close()
        raise


async def large_response(body: object, size: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return `json_response` of a body of about `size` tokens, written and freed on a thread if it is large."""
    if size < LARGE_TEXT:
        return json_response(body, headers=headers)
    parts = await off_loop(size, lambda: _written(body, False))
    return PieceResponse(parts, dict(headers or {}))


async def large_event(
    body: object, size: int, head: bytes = b"data: ", tail: bytes = b"\n\n", keeps_body: bool = False
) -> bytes:
    """Return `event` of a body of about `size` tokens, written on a thread if it is large, and then freed unless
    `keeps_body`."""
    if size < LARGE_TEXT:
        return head + msgspec.json.encode(body) + tail
    return await off_loop(size, lambda: b"".join((head, *_written(body, keeps_body), tail)))


def _written(body: object, keeps_body: bool) -> list[bytes]:
    """Return the JSON of `body` in parts of about `SENT_BYTES`, and free the body's long lists."""
    parts, rest, num_bytes = [], [], 0
    for piece in json_pieces(body):
        rest.append(piece)
        num_bytes += len(piece)
        if num_bytes >= SENT_BYTES:
            parts.append(b"".join(rest))
            rest, num_bytes = [], 0
    if not keeps_body:
        free_lists(body)
    return [*parts, b"".join(rest)]


def num_entries(value: object, levels: int = LEVELS) -> int:
    """Return the number of values in the lists of a reply, nested lists included; the count may stop early if there are
    many."""
    if isinstance(value, list):
        nested = bool(value) and isinstance(value[0], list | msgspec.Struct)
        total = len(value)
        for item in value if nested and levels and total < LARGE_TEXT else ():
            total += num_entries(item, levels - 1)
            if total >= LARGE_TEXT:
                break
        return total
    if levels and isinstance(value, msgspec.Struct):
        return sum(num_entries(getattr(value, name), levels - 1) for name in value.__struct_fields__)
    return 0


def free_lists(body: object) -> None:
    """Free the long lists of a reply that is read no more, in slices; call this on a thread."""
    free(list(_lists(body)))


def _lists(value: Any, levels: int = LEVELS) -> Iterator[list[Any]]:
    """Yield the lists in a reply whose items have values of their own, the inner ones first."""
    if isinstance(value, list) and value and isinstance(value[-1], msgspec.Struct | dict):
        for item in value if levels and len(value) <= PIECE else ():
            yield from _lists(item, levels - 1)
        yield value
    elif levels and isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _lists(getattr(value, name), levels - 1)


def json_pieces(value: Any, levels: int = LEVELS) -> Iterator[bytes]:
    """Yield the JSON that msgspec writes for `value`, with long lists in pieces, so that no call holds the
    interpreter's lock for long (`bytes.join` releases it). Looks for such lists in as many levels of structs and short
    lists."""
    if isinstance(value, msgspec.Raw):
        view = memoryview(value)
        for start in range(0, len(view), SENT_BYTES):
            yield bytes(view[start : start + SENT_BYTES])
    elif isinstance(value, list | tuple) and value:
        begin, num = b"[", PIECE if width(value) < PIECE else 1
        for start in range(0, len(value), num):
            part = value[start : start + num]
            if (num == 1 or (levels and len(value) <= PIECE)) and isinstance(part[0], msgspec.Struct | msgspec.Raw):
                for item in part:
                    yield begin
                    yield from json_pieces(item, max(levels - 1, 1))
                    begin = b","
            else:
                yield begin + msgspec.json.encode(part)[1:-1]
                begin = b","
        yield b"]"
    elif levels and isinstance(value, msgspec.Struct) and _is_plain(value.__struct_config__):
        begin = b"{"
        for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            field = getattr(value, name)
            if field is not msgspec.UNSET:
                yield begin + msgspec.json.encode(key) + b":"
                yield from json_pieces(field, levels - 1)
                begin = b","
        yield b"}" if begin == b"," else b"{}"
    else:
        yield msgspec.json.encode(value)


def _is_plain(config: Any) -> bool:
    return not (config.array_like or config.omit_defaults or config.tag is not None)


class PieceResponse(Response):
    """A response of JSON whose body is passed on in parts, as fast as the client reads."""

    def __init__(self, parts: Sequence[bytes | memoryview], headers: dict[str, str]) -> None:
        headers["content-length"] = str(sum(map(len, parts)))
        super().__init__(headers=headers, media_type="application/json")
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
            # For a client that reads as fast as this writes, `send` never waits, and other tasks would not run.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_in_parts(parts: Iterable[memoryview]) -> Response:
    """Return the response of a JSON text."""
    cut = [part[start : start + SENT_BYTES] for part in parts for start in range(0, len(part), SENT_BYTES)]
    return PieceResponse(cut, {})


def id_header(answer_id: str) -> dict[str, str]:
    """Return the header X-Request-Id with the reply's id if that is valid in a header (S-22).

    Otherwise, and if the caller sent an id, return no header; `gates.calls` then adds the call's id."""
    if context.current().is_callers or not context.REQUEST_ID.fullmatch(answer_id):
        return {}
    return {"x-request-id": answer_id}


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do `work` unless the client hangs up first; then cancel it. Raises `ClientGoneError`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client hung up")
    finally:
        for each in (task, watch):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnect(receive: Receive) -> None:
    """Wait until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def stream_headers(media_type: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of every stream. Starlette's default headers would declare a length."""
    return [
        (b"content-type", f"{media_type}; charset=utf-8".encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


class StreamHead(Response):
    """The reply to HEAD where GET streams: the headers alone. Nothing is computed or watched for it."""

    def __init__(self, media_type: str) -> None:
        super().__init__()
        self.raw_headers = stream_headers(media_type)


class EventStream(Response):
    """An ASGI response of server-sent events, or of lines of JSON. Closes the answer at the end, also after errors."""

    def __init__(self, answer: Readable, headers: Mapping[str, str], api: Api) -> None:
        super().__init__(media_type=answer.media_type)
        self._answer = answer
        self._api = api
        self._last_sent = time.monotonic()
        self._sending = asyncio.Lock()
        self._sent_headers = stream_headers(answer.media_type)
        self._sent_headers += [(name.encode(), value.encode("ascii", "replace")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Any) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGoneError:
            logger.debug("a client left in the middle of its stream")
        except TimeoutError:
            logger.warning("a client did not read its stream for %g s; it was given up", STALL_S)
        finally:
            self._answer.close()

    async def _send_all(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._sent_headers})
        heart = asyncio.create_task(self._beat(send)) if self._api.heartbeat else None
        try:
            num_events = num_bytes = 0
            async with contextlib.aclosing(self._answer.events()) as events:  # type: ignore[type-var]
                try:
                    async for event in events:
                        await self._send(send, event, more=True)
                        num_events, num_bytes = num_events + 1, num_bytes + len(event)
                        if num_events >= TURN_EVENTS or num_bytes >= TURN_BYTES:
                            num_events = num_bytes = 0
                            await asyncio.sleep(0)
                except (TimeoutError, *ENDINGS):
                    raise
                except BaseException as error:
                    await self._send(send, error_event(error, self._api), more=True)
        finally:
            if heart is not None:
                heart.cancel()
        await self._send(send, b"", more=False)

    async def _beat(self, send: Any) -> None:
        """Send a heartbeat whenever nothing was sent for `HEARTBEAT_S` seconds: a long prompt gives no token for
        minutes."""
        while True:
            silent = time.monotonic() - self._last_sent
            if silent < HEARTBEAT_S:
                await asyncio.sleep(HEARTBEAT_S - silent)
            else:
                await self._send(send, self._api.heartbeat, more=True)

    async def _send(self, send: Any, body: bytes, more: bool) -> None:
        # A heartbeat waits for the end of an event, and no write copies many megabytes. For a client that reads as fast
        # as this writes, `send` never waits, and other tasks would not run.
        async with self._sending:
            for start in range(0, len(body) or 1, SENT_BYTES):
                if start:
                    await asyncio.sleep(0)
                self._last_sent = time.monotonic()
                async with asyncio.timeout(STALL_S):
                    part = body[start : start + SENT_BYTES]
                    await send({"type": "http.response.body", "body": part, "more_body": more})
