"""Reads bodies within limits: on size, time, JSON and nesting (S-12, S-19, S-20).

These limits hold for a body as a whole; the bounds of single fields are in `headrace.protocol.bounds`. All bodies are
read through this module. Knows no routes and no fields. Called by `serve.routing`, the storage and the file uploads.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from headrace import foreign
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.errors import CallError

MAX_BODY_BYTES = 32 * 2**20
"""A photo in base64 takes 5 MB."""
MAX_DEPTH = 64
MAX_KEYS = 10_000
MAX_VALUES = 2**20
"""Values in one body: numbers, texts, lists, objects, true, false and null."""
MAX_TEXTS = 2**18
"""Texts in one body, with the keys of objects, and a text more for every `ESCAPES` escapes."""
ESCAPES = 2
MAX_CONTAINERS = 2**15
"""Lists and objects in one body, the body itself too."""
MAX_DIGITS = 4300
"""Digits of a number; Python reads no more of an integer."""
BODY_IDLE_S = 30.0
MIN_BODY_RATE = 1024
"""Bytes a second of a body over each `BODY_IDLE_S` seconds, but for its end."""
MAX_BODIES_BYTES = 2**28
"""Bytes of all bodies in memory together; the first `FREE_BODY_BYTES` of each do not count."""
FREE_BODY_BYTES = 2**16

UNSUPPORTED_MEDIA = "unsupported_media_type"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGoneError(HeadraceError):
    """The client closed the connection before the reply."""

    status = 499
    code = "client_closed_request"


class _Body:
    """One body in memory. `timeout` bounds the wait for its next bytes; None once it is whole."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.num_bytes = 0
        self.timeout: asyncio.Timeout | None = None
        self.is_dropped = False


class _Bodies:
    """The bodies in memory. Beyond `MAX_BODIES_BYTES` the one that has held most bytes for longest is dropped.

    That is a body that comes slowly, so that slow clients do not hold up fast ones."""

    def __init__(self) -> None:
        self._all: set[_Body] = set()
        self._num_bytes = 0

    def grow(self, body: _Body, num_bytes: int, now: float) -> None:
        """Count a body's bytes so far, and drop a body if they are too many; it may be this one."""
        self._all.add(body)
        num_bytes = max(0, num_bytes - FREE_BODY_BYTES)
        self._num_bytes += num_bytes - body.num_bytes
        body.num_bytes = num_bytes
        if self._num_bytes <= MAX_BODIES_BYTES:
            return
        costliest = max(
            (each for each in self._all if each.timeout is not None),
            key=lambda each: each.num_bytes * (now - each.began),
        )
        self.remove(costliest)
        costliest.is_dropped = True
        costliest.timeout.reschedule(now)  # type: ignore[union-attr]

    def remove(self, body: _Body) -> None:
        self._all.discard(body)
        self._num_bytes -= body.num_bytes
        body.num_bytes = 0


_BODIES: WeakKeyDictionary[asyncio.AbstractEventLoop, _Bodies] = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def read_body(scope: Scope, receive: Receive, most: int = MAX_BODY_BYTES) -> AsyncIterator[bytes]:
    """Yield the whole body, of at most `most` bytes, which counts as one in memory until the block ends.

    Raises `CallError` before reading if the declared length is too large, or as soon as too many bytes have come; also
    for slow bodies, for compressed ones, and for too many at a time. Raises `ClientGoneError`."""
    loop = asyncio.get_running_loop()
    bodies = _BODIES.setdefault(loop, _Bodies())
    body = _Body(loop.time())
    try:
        yield await _read(scope, receive, most, body, bodies)
    finally:
        bodies.remove(body)


async def _read(scope: Scope, receive: Receive, most: int, counted: _Body, bodies: _Bodies) -> bytes:
    too_large = CallError(413, "body_too_large", f"body: too large; it must be at most {most} bytes")
    too_slow = _too_slow()
    too_many = CallError(
        503, "bodies_too_large", f"body: all that come now exceed {MAX_BODIES_BYTES} bytes", {"retry-after": "5"}
    )
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        why = "content-encoding: compressed bodies are not accepted; send it plain"
        raise CallError(415, UNSUPPORTED_MEDIA, why)
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    clock = asyncio.get_running_loop().time
    end, num_due = clock() + BODY_IDLE_S, MIN_BODY_RATE * BODY_IDLE_S
    while True:
        try:
            async with asyncio.timeout_at(end) as counted.timeout:
                bodies.grow(counted, len(body), clock())
                message = await receive()
        except TimeoutError as error:
            raise (too_many if counted.is_dropped else too_slow) from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client hung up while it sent the body")
        body += message.get("body", b"")
        if len(body) > most:
            raise too_large
        if not message.get("more_body", False):
            counted.timeout = None
            return bytes(body)
        if len(body) >= num_due:
            end, num_due = clock() + BODY_IDLE_S, len(body) + MIN_BODY_RATE * BODY_IDLE_S


async def body_pieces(scope: Scope, receive: Receive, most: int) -> AsyncIterator[bytes]:
    """Yield a body of at most `most` bytes in pieces as they come, for the disk. No piece is kept in memory, and a body
    must come as fast as for `read_body`.

    Raises `CallError`, `ClientGoneError`."""
    too_large = CallError(413, "body_too_large", f"body: too large; there is room for {most} bytes")
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    num_bytes = num_before = 0
    clock = asyncio.get_running_loop().time
    end = clock() + BODY_IDLE_S
    while True:
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError as error:
            raise _too_slow() from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client hung up while it sent the body")
        num_bytes += len(message.get("body", b""))
        if num_bytes > most:
            raise too_large
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
        if num_bytes - num_before >= MIN_BODY_RATE * BODY_IDLE_S:
            end, num_before = clock() + BODY_IDLE_S, num_bytes


def _too_slow() -> CallError:
    pace = f"each {BODY_IDLE_S:g} seconds must bring {MIN_BODY_RATE * BODY_IDLE_S:g} bytes or its end"
    return CallError(408, "body_timeout", f"body: it comes too slowly; {pace}")


def parse_json(body: bytes, is_list: bool = False) -> Any:
    """Return the JSON object in `body`, or with `is_list` the list, parsed strictly: UTF-8, no NaN or Infinity, no
    duplicate keys, bounded size.

    A byte order mark before it is passed over, as RFC 8259 (section 8.1) allows. Raises `RequestError`.
    """
    body, kind = body.removeprefix(codecs.BOM_UTF8), "a JSON list" if is_list else "a JSON object"
    if not body:
        raise RequestError("body", "", kind)
    check_size(body)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=lambda text: int(text),  # a Python function: between two calls of it, other threads may run
        )
    except ValueError as error:  # raised for wrong UTF-8 too, and for integers with thousands of digits
        raise RequestError("body", body[:60].decode("utf-8", "replace"), f"valid JSON ({error})") from error
    if not isinstance(value, list if is_list else dict):
        raise RequestError("body", type(value).__name__, kind)
    if foreign.HALVES.search(body) and (text := foreign.broken_text(value)) is not None:
        raise RequestError("body", text, "text without half a surrogate pair")
    return value


def check_size(body: bytes) -> None:
    """Raise `RequestError` for JSON with too many values or levels, before anything is parsed."""
    limits = foreign.Limits(MAX_BODY_BYTES, MAX_TEXTS, MAX_CONTAINERS, MAX_VALUES, MAX_DEPTH, MAX_DIGITS, ESCAPES)
    try:
        foreign.check_size(body, limits)
    except foreign.JSONSizeError as error:
        raise RequestError("body", error.value, error.bound) from error


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises `RequestError` for too many keys and for duplicates."""
    if len(pairs) > MAX_KEYS:
        raise RequestError("body", len(pairs), f"an object with at most {MAX_KEYS} keys")
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise RequestError(counts.most_common(1)[0][0], "given twice", "given once")
    return value


def _constant(name: str) -> float:
    raise RequestError("body", name, "JSON without NaN and Infinity")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError("body", text, "JSON with numbers that fit a double")
    return value
