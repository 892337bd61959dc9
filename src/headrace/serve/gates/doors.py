"""What a call must look like before anybody asks who sent it: its headers, the name it came under, the page it is from.

The outermost ASGI middleware. A web page that somebody on this machine looks at can send requests to a server on
localhost, and can get a name of its own for 127.0.0.1 (DNS rebinding); the headers Host and Origin, which no page can
choose, tell of both (S-33). Sizes and framing are S-19. Knows no keys and no routes.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.gates.auth import Refusals, refusal
from headrace.serve.gates.limits import Scope, UnsupportedMediaError

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 * 2**10
MAX_TARGET_BYTES = 8 * 2**10
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Bodies that are no JSON.
FORM_PATHS = frozenset({"/v1/files"})
METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = b"x-request-id, retry-after"
PREFLIGHT_S = 600
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@\\]+")
_NAMES = re.compile(r"[\w -]+(?:,[\w -]+)*", re.ASCII)

Headers = dict[bytes, list[bytes]]


class HeadersTooLargeError(HeadraceError):
    status = 431
    code = "headers_too_large"


class TargetTooLongError(HeadraceError):
    status = 414
    code = "uri_too_long"


class FramingError(HeadraceError):
    """Where the body ends is told twice, and another server on the way may believe the other (HTTP 400)."""

    status = 400
    code = "bad_framing"


class HostError(HeadraceError):
    """The server does not go by this name (HTTP 421)."""

    status = 421
    code = "host_not_allowed"


class OriginError(HeadraceError):
    """A web page that is not among those which may (HTTP 403)."""

    status = 403
    code = "origin_not_allowed"


def listed(given: Sequence[str] | None) -> list[str]:
    """Values of a flag that may be given more than once, or as vLLM has it, as a JSON list. Raises `RequestError`."""
    made: list[str] = []
    for text in given or ():
        if text.startswith("["):
            try:
                made += msgspec.json.decode(text, type=list[str])
            except msgspec.DecodeError as error:
                raise RequestError("allowed", text, "a value, or a JSON list of values") from error
        else:
            made.append(text)
    return made


def allowed_hosts(host: str, given: Sequence[str] | None) -> frozenset[str] | None:
    """The names that the server goes by beside addresses and localhost; None: any.

    Any name, if none is told and the server listens where other machines reach it: they reach it by any name, and what
    keeps them out is a key.
    """
    names = {name.lower() for name in listed(given)}
    if "*" in names or (not names and not is_loopback(host)):
        return None
    return frozenset(names | {"localhost", host.lower(), socket.gethostname().lower()})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_origins(given: Sequence[str] | None) -> frozenset[str]:
    """Origins as browsers write them, or `*`. Raises `RequestError`."""
    made = [origin.lower().rstrip("/") for origin in listed(given)]
    for origin in made:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise RequestError("allowed_origins", origin, "such as https://chat.example or http://localhost:3000, or *")
    return frozenset(made)


class Doors:
    """Refuses what is malformed, too large, under a strange name, or from a strange page.

    Args:
        hosts: see `allowed_hosts`.
        origins: see `allowed_origins`; the server's own is always allowed.
    """

    def __init__(
        self, app: Any, hosts: Collection[str] | None, origins: Collection[str], refusals: Refusals | None = None
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins
        self._refusals = dict(refusals or {})

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        given = _text(headers, b"origin")
        told = self._told(given, _text(headers, b"host"))
        if told:
            send = _adding(send, [(b"access-control-allow-origin", told.encode()), (b"vary", b"origin")])
        try:
            _check_size(scope)
            _check_framing(headers)
            self._check_host(headers)
            if scope["method"] == "OPTIONS" and given is not None and b"access-control-request-method" in headers:
                await self._preflight(bool(told), headers)(scope, receive, send)
                return
            if scope["method"] not in SAFE_METHODS:
                self._check_origin(scope["path"], headers, told)
        except HeadraceError as error:
            response = refusal(self._refusals, scope["path"], error)
            # What follows on the connection may not be what it seems.
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _told(self, origin: str | None, host: str | None) -> str:
        """What a page of this origin is told that it may be; empty if it may not."""
        if origin is None:
            return ""
        if "*" in self._origins:
            return "*"
        scheme, _, place = origin.lower().partition("://")
        # Behind a proxy that ends TLS, the scheme here is not the page's.
        own = scheme in ("http", "https") and place != "" and place == (host or "").lower()
        return origin if own or origin.lower() in self._origins else ""

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.get(b"host", [])
        if not hosts or self._hosts is None:
            return  # HTTP/1.0 has none, and browsers always have one
        match = _HOST.fullmatch(hosts[0].decode("latin-1"))
        name = match[1].strip("[]").rstrip(".").lower() if match else ""
        if len(hosts) == 1 and (name in self._hosts or name.endswith(".localhost") or _is_address(name)):
            return
        raise HostError("host: the server does not go by this name; see --allowed-hosts")

    def _check_origin(self, path: str, headers: Headers, told: str) -> None:
        """Raises `OriginError`, and `UnsupportedMediaError` for what a page may send without asking first."""
        if b"origin" not in headers:
            if _text(headers, b"sec-fetch-site") in ("cross-site", "same-site"):
                raise OriginError("origin: a page that does not tell where it is from may not call this server")
            return
        if not told or len(headers[b"origin"]) > 1:
            raise OriginError("origin: pages from there may not call this server; see --allowed-origins")
        kind = (_text(headers, b"content-type") or "").partition(";")[0].strip().lower()
        has_body = b"transfer-encoding" in headers or _text(headers, b"content-length") not in (None, "0")
        if has_body and path not in FORM_PATHS and kind != "application/json":
            raise UnsupportedMediaError("content-type: a web page must send application/json")

    def _preflight(self, allowed: bool, headers: Headers) -> Response:
        if not allowed:
            raise OriginError("origin: pages from there may not call this server; see --allowed-origins")
        wanted = _text(headers, b"access-control-request-headers") or ""
        told = {"access-control-allow-methods": METHODS, "access-control-max-age": str(PREFLIGHT_S)}
        if _NAMES.fullmatch(wanted):
            told["access-control-allow-headers"] = wanted
        return Response(status_code=204, headers=told)


def _text(headers: Headers, name: bytes) -> str | None:
    """The first value of a header."""
    return headers[name][0].decode("latin-1").strip() if name in headers else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_size(scope: Scope) -> None:
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise TargetTooLongError(f"the address is too long; it must be at most {MAX_TARGET_BYTES} bytes")
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        bound = f"at most {MAX_HEADERS} of them, of {MAX_HEADER_BYTES} bytes together"
        raise HeadersTooLargeError(f"headers: too many or too large; there must be {bound}")


def _check_framing(headers: Headers) -> None:
    if b"transfer-encoding" in headers and b"content-length" in headers:
        raise FramingError("content-length: not beside transfer-encoding")
    if len(set(headers.get(b"content-length", ()))) > 1:
        raise FramingError("content-length: given twice")


def _adding(send: Any, headers: list[tuple[bytes, bytes]]) -> Any:
    """`send`, which puts headers to every reply."""

    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers, (b"access-control-expose-headers", EXPOSED)]
        await send(message)

    return sending
