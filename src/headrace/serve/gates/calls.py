"""`CallGate`, the ASGI middleware around all routes: sets the context of a call and checks the call before a route
runs.

Every call gets its `CallContext`, and every reply X-Request-Id: the caller's if that is valid in a header (S-22), else
a random one. Then `HeaderGate` checks the headers, `auth.ApiKeyGate` the key, and the deadline is set, from the header
x-request-timeout.

A web page in a browser on this machine can send requests to a server on localhost, and its owner can point a host name
at 127.0.0.1 (DNS rebinding). The headers Host and Origin, which no page can choose, reveal both (S-33). Sizes are
S-19. Knows no routes and no requests. Added by `serve.app`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import socket
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from headrace.engine.context import REQUEST_ID, CallContext, answering, arrived, within
from headrace.engine.tenants import acting_as
from headrace.protocol import bounds
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.errors import ENDINGS, Api, CallError, api_of, error_response
from headrace.serve.gates.auth import ApiKeyGate, class_of, is_public
from headrace.serve.gates.limits import UNSUPPORTED_MEDIA, Scope
from headrace.serve.gates.overload import Overload, work_of

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 * 2**10
MAX_TARGET_BYTES = 8 * 2**10
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Paths whose bodies are not JSON.
FORM_PATHS = frozenset({"/v1/files", "/inspect/recording"})
METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = b"x-request-id, retry-after"
PREFLIGHT_S = 600
FOREIGN = "origin_not_allowed"
ORIGIN_REFUSED = "origin: pages from there may not call this server; see --allowed-origins"
LOCAL = "localhost"
"""As an allowed origin: any page of this machine, whatever its port."""
ORIGINS = "such as https://chat.example or http://localhost:3000, localhost for all of this machine, or *"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@\\]+")
_NAMES = re.compile(r"[\w -]+(?:,[\w -]+)*", re.ASCII)

Headers = dict[bytes, list[bytes]]
ID, PARENT, STATE = b"x-request-id", b"traceparent", b"tracestate"
TIMEOUT = "x-request-timeout"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\w.:-]{0,200})?", re.ASCII)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}", re.ASCII)


def flag_values(texts: Sequence[str] | None) -> list[str]:
    """Return the values of a flag that is repeated, or that holds a JSON list, as vLLM's do. Raises `RequestError`."""
    values: list[str] = []
    for text in texts or ():
        if text.startswith("["):
            try:
                values += msgspec.json.decode(text, type=list[str])
            except msgspec.DecodeError as error:
                raise RequestError("allowed", text, "a value, or a JSON list of values") from error
        else:
            values.append(text)
    return values


def allowed_hosts(host: str, flags: Sequence[str] | None, has_keys: bool) -> frozenset[str] | None:
    """Return the host names of the server, without IP addresses and names under localhost, which are always allowed;
    None for any name.

    Without flags any name is allowed if other machines reach the server and it has keys: its names are not known then,
    and a page that binds a name of its own to the server has no key. The machine's name is safe: who could bind it to
    another address is no page, but the owner of the machine's names.
    """
    names = {name.lower() for name in flag_values(flags)}
    if "*" in names or (not names and has_keys and not is_loopback(host)):
        return None
    return frozenset(names | {"localhost", *hosts_of(host.lower()), socket.gethostname().lower()})


def hosts_of(host: str) -> list[str]:
    """Return the addresses of --host, which has commas between several."""
    return [part.strip() for part in host.split(",")]


def is_loopback(host: str) -> bool:
    """Return whether `host`, or each of several with commas, is reached from this machine only."""
    if "," in host:
        return all(is_loopback(one) for one in hosts_of(host))
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_origins(flags: Sequence[str] | None) -> frozenset[str]:
    """Return the origins as browsers write them, or `*`. Raises `RequestError`."""
    origins = [origin.lower().rstrip("/") for origin in flag_values(flags)]
    for origin in origins:
        if origin not in ("*", "null", LOCAL) and not _ORIGIN.fullmatch(origin):
            raise RequestError("allowed_origins", origin, ORIGINS)
    return frozenset(origins)


class HeaderGate:
    """Refuses calls whose headers are malformed or too large, or name a foreign host or origin.

    Args:
        hosts: see `allowed_hosts`.
        origins: see `allowed_origins`; the server's own is always allowed.
    """

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        self._hosts = hosts
        self._origins = origins

    def reply_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers that every reply to the call has: they let a page of an allowed origin read it."""
        allow_origin = self._allow_origin(_text(headers, b"origin"), _text(headers, b"host"))
        if not allow_origin:
            return []
        return [
            (b"access-control-allow-origin", allow_origin.encode()),
            (b"vary", b"origin"),
            (b"access-control-expose-headers", EXPOSED),
        ]

    def check(self, scope: Scope, headers: Headers) -> Response | None:
        """Check a call. Return the reply to a CORS preflight, or None for other calls. Raises `CallError`."""
        allowed = bool(self.reply_headers(headers))
        _check_size(scope)
        self._check_host(headers)
        if scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers:
            return self._preflight(allowed, headers)
        if not _is_visit(scope, headers):
            self._check_origin(scope["path"], headers, allowed)
        return None

    def _allow_origin(self, origin: str | None, host: str | None) -> str:
        """Return the value of Access-Control-Allow-Origin for an origin; empty if it is not allowed."""
        if origin is None:
            return ""
        if "*" in self._origins:
            return "*"
        scheme, _, place = origin.lower().partition("://")
        # Behind a proxy that ends TLS, the scheme here is not the page's.
        is_own = scheme in ("http", "https") and place != "" and place == (host or "").lower()
        name = _HOST.fullmatch(place) if LOCAL in self._origins and scheme in ("http", "https") else None
        is_local = name is not None and is_loopback(name[1].strip("[]"))
        return origin if is_own or is_local or origin.lower() in self._origins else ""

    def _check_host(self, headers: Headers) -> None:
        """Raises `CallError` unless the Host header is a name of this server."""
        hosts = headers.get(b"host", [])
        if not hosts or self._hosts is None:
            return  # HTTP/1.0 has no Host; browsers always send one
        match = _HOST.fullmatch(hosts[0].decode("latin-1"))
        name = match[1].strip("[]").rstrip(".").lower() if match else ""
        if len(hosts) == 1 and (name in self._hosts or name.endswith(".localhost") or _is_address(name)):
            return
        # Of what is no name, nothing is repeated.
        label, flag = (f"{name[:80]!r}", f" --allowed-hosts {name[:80]}") if name else ("this", " --allowed-hosts NAME")
        message = f"host: {label} is no name of this server; call it by an IP address or localhost, or start it with"
        raise _refusal(421, "host_not_allowed", message + flag)

    def _check_origin(self, path: str, headers: Headers, allowed: bool) -> None:
        """Raises `CallError`, also for bodies that a page may send without a preflight."""
        if b"origin" not in headers:
            if _text(headers, b"sec-fetch-site") in ("cross-site", "same-site"):
                message = "origin: a page that does not tell where it is from may not call this server"
                raise _refusal(403, FOREIGN, message)
            return
        if not allowed or len(headers[b"origin"]) > 1:
            raise _refusal(403, FOREIGN, ORIGIN_REFUSED)
        kind = (_text(headers, b"content-type") or "").partition(";")[0].strip().lower()
        has_body = b"transfer-encoding" in headers or _text(headers, b"content-length") not in (None, "0")
        if has_body and path not in FORM_PATHS and kind != "application/json":
            raise _refusal(415, UNSUPPORTED_MEDIA, "content-type: a web page must send application/json")

    def _preflight(self, allowed: bool, headers: Headers) -> Response:
        """Return the reply to a CORS preflight. Raises `CallError`."""
        if not allowed:
            raise _refusal(403, FOREIGN, ORIGIN_REFUSED)
        names = _text(headers, b"access-control-request-headers") or ""
        reply_headers = {"access-control-allow-methods": METHODS, "access-control-max-age": str(PREFLIGHT_S)}
        if _NAMES.fullmatch(names):
            reply_headers["access-control-allow-headers"] = names
        return Response(headers=reply_headers)


class Life(Protocol):
    """The server's life, as `serve.lifespan` has it. `draining`: the server ends. `overload` refuses calls."""

    draining: bool
    overload: Overload


class CallGate:
    """Passes on the calls that both gates allow.

    Args:
        most: seconds that any call may take; 0 for no bound.
        apis: the APIs other than OpenAI's, whose errors have another shape.
        life: the server's; while it drains, each connection ends with its reply, and under overload calls are refused.
    """

    def __init__(
        self,
        app: Any,
        headers: HeaderGate,
        keys: ApiKeyGate,
        most: float,
        apis: Sequence[Api],
        life: Life,
    ) -> None:
        self._app = app
        self._headers, self._keys, self._most, self._apis = headers, keys, most, apis
        self._life = life

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        arrival_time = time.monotonic()
        headers = by_name(scope)
        context = context_of(headers, scope["path"])
        added = self._headers.reply_headers(headers)
        api = api_of(self._apis, scope["path"])
        has_begun = False

        async def sending(message: dict[str, Any]) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message.get("headers", ()), *added]
                if all(name != ID for name, _ in message["headers"]):
                    message["headers"].append((ID, context.call_id.encode()))
                if self._life.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        with answering(context), arrived(arrival_time), contextlib.ExitStack() as call:
            reply: Any = self._app
            try:
                preflight = self._headers.check(scope, headers)
                if preflight is None:
                    # First, so that what is refused costs its caller none of its rate.
                    self._life.overload.check(work_of(scope["method"], scope["path"]))
                    call.enter_context(acting_as(self._keys.tenant(scope)))
                    call.enter_context(within(time_of_call(headers, self._most), arrival_time))
                else:
                    reply = preflight
            except HeadraceError as error:
                reply = error_response(error, api)
            try:
                await reply(scope, receive, sending)
            except ENDINGS:
                raise
            except BaseException as error:
                if has_begun:
                    raise
                reply = error_response(error, api)
                await reply(scope, receive, sending)


def by_name(scope: Scope) -> Headers:
    """Return the values of each header of a call."""
    headers: Headers = {}
    for name, value in scope["headers"]:
        headers.setdefault(name, []).append(value)
    return headers


def _refusal(status: int, code: str, message: str) -> CallError:
    # The call's body is not read.
    return CallError(status, code, message, {"connection": "close"})


def _text(headers: Headers, name: bytes) -> str | None:
    """Return the first value of a header, or None."""
    return headers[name][0].decode("latin-1").strip() if name in headers else None


def _is_visit(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser opens this address to show it, as it may for a link on any page. Routes of the class
    admin are no such places: some of them measure the machine, or read the weights."""
    method, path = scope["method"], scope["path"]
    is_place = is_public(path) or class_of(method, path) != "admin"
    return is_place and method in SAFE_METHODS and _text(headers, b"sec-fetch-mode") == "navigate"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_size(scope: Scope) -> None:
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        message = f"the address is too long; it must be at most {MAX_TARGET_BYTES} bytes"
        raise _refusal(414, "uri_too_long", message)
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        bound = f"at most {MAX_HEADERS} of them, of {MAX_HEADER_BYTES} bytes together"
        raise _refusal(431, "headers_too_large", f"headers: too many or too large; there must be {bound}")


def context_of(headers: Headers, path: str) -> CallContext:
    """Return the context of a call. Malformed and repeated headers are left out."""
    texts = {name: [value.decode("latin-1") for value in headers.get(name, ())] for name in (ID, PARENT, STATE)}
    ids = [text for text in texts[ID] if REQUEST_ID.fullmatch(text)]
    parents = [text for text in texts[PARENT] if _TRACEPARENT.fullmatch(text)]
    trace = {}
    if len(parents) == 1 == len(texts[PARENT]):
        trace["traceparent"] = parents[0]
        states = ",".join(texts[STATE])
        if _TRACESTATE.fullmatch(states):
            trace["tracestate"] = states
    return CallContext(ids[0] if ids else str(uuid.uuid4()), bool(ids), path, trace)


def time_of_call(headers: Headers, most: float) -> float | None:
    """Return the seconds that a call may take: the value of its header, at most `most`; None for no bound. Raises
    `RequestError`."""
    values = headers.get(TIMEOUT.encode(), [])
    if not values:
        return most or None
    text = values[0].decode("latin-1")
    try:
        seconds = float(text) if len(values) == 1 else math.nan
    except ValueError:
        seconds = math.nan
    bounds.check("timeout", seconds, TIMEOUT)
    return min(most, seconds) if most else seconds
