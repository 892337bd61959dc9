"""Reads bodies within limits: on size, time, JSON and nesting (S-12, S-19, S-20).

These limits hold for a body as a whole; the bounds of single fields are in `headrace.protocol.bounds`. All bodies are
read through this module. Knows no routes and no fields. Called by `serve.routing`, the storage and the file uploads.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.errors import CallError

MAX_BODY_BYTES = 8 * 2**20
MAX_DEPTH = 64
MAX_KEYS = 10_000
BODY_IDLE_S = 30.0
MIN_BODY_RATE = 1024
"""Bytes a second that a body must reach on average after the first `BODY_IDLE_S` seconds."""

UNSUPPORTED_MEDIA = "unsupported_media_type"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGoneError(HeadraceError):
    """The client closed the connection before the reply."""

    status = 499
    code = "client_closed_request"


async def read_body(scope: Scope, receive: Receive, most: int = MAX_BODY_BYTES) -> bytes:
    """Return the whole body, of at most `most` bytes.

    Raises `CallError` before reading if the declared length is too large, or as soon as too many bytes have come; also
    for slow bodies and compressed ones. Raises `ClientGoneError`."""
    too_large = CallError(413, "body_too_large", f"body: too large; it must be at most {most} bytes")
    too_slow = CallError(408, "body_timeout", f"body: it comes too slowly, or nothing came for {BODY_IDLE_S:g} seconds")
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        why = "content-encoding: compressed bodies are not accepted; send it plain"
        raise CallError(415, UNSUPPORTED_MEDIA, why)
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    started = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(BODY_IDLE_S):
                message = await receive()
        except TimeoutError as error:
            raise too_slow from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client hung up while it sent the body")
        body += message.get("body", b"")
        if len(body) > most:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)
        if time.monotonic() - started > BODY_IDLE_S + len(body) / MIN_BODY_RATE:
            raise too_slow


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`, parsed strictly: UTF-8, no NaN or Infinity, no duplicate keys, bounded nesting.

    Raises `RequestError`.
    """
    if not body:
        raise RequestError("body", "", "a JSON object")
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)
    except RecursionError as error:
        raise RequestError("body", "deeply nested JSON", f"JSON at most {MAX_DEPTH} levels deep") from error
    except ValueError as error:  # also of wrong UTF-8, and of integers with thousands of digits
        raise RequestError("body", body[:60].decode("utf-8", "replace"), f"valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise RequestError("body", type(value).__name__, "a JSON object")
    _check_shape(value, surrogates=b"\\u" in body)
    return value


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


def _check_shape(value: Any, surrogates: bool) -> None:
    """Check the depth, and all text: half a surrogate pair can not be encoded, and tokenizers fail on it."""
    level = [value]
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                following += item.values()
                if surrogates:
                    following += item
            elif isinstance(item, list):
                following += item
            elif surrogates and isinstance(item, str):
                _check_text(item)
        level = [item for item in following if isinstance(item, (dict, list, str))]
        if not level:
            return
    for item in level:
        if not isinstance(item, str):
            raise RequestError("body", "deeply nested JSON", f"JSON at most {MAX_DEPTH} levels deep")
        if surrogates:
            _check_text(item)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("body", text[error.start : error.end], "text without half a surrogate pair") from error
