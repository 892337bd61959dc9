"""The gate in front of the whole application, closed unless a path is named public (S-18).

An ASGI middleware that looks at `scope["path"]` alone, as the router does, so it covers every route there is or will
be, and unknown ones too. What a path needs is a class of keys; what is not told apart here needs the administrator's.
It names the caller for everything behind it, and counts its requests. Knows keys and classes, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from headrace.engine.tenants import Rates, Tenant, acting_as
from headrace.protocol.errors import HeadraceError
from headrace.serve.errors import error_response
from headrace.serve.gates.keys import Key, KeyRing
from headrace.serve.gates.limits import Scope

Refusals = Mapping[str, Callable[[BaseException], Response]]
"""Who tells an error in another shape than OpenAI's, by the beginning of the path."""

PUBLIC_PATHS = frozenset({"/health/live"})
ANY = "any"
"""The class of what every key opens."""
_ANY_PATHS = frozenset({"/", "/version", "/ping", "/health", "/openapi.json", "/docs"})
_METRICS_PATHS = frozenset({"/metrics", "/load", "/slots"})
# What would change the server or its models, though not all of it is done here.
_ADMIN_PATHS = frozenset({"/api/push", "/api/create", "/api/copy", "/api/delete"})
_INFER_PATHS = frozenset(
    "/tokenize /detokenize /completion /completions /embedding /embeddings /apply-template /props /infill /score "
    "/rerank".split()
)
_INFER_UNDER = ("/v1/", "/v2/", "/api/")


class UnauthorizedError(HeadraceError):
    status = 401
    code = "invalid_api_key"


class ForbiddenError(HeadraceError):
    """The key is right and opens other doors (HTTP 403)."""

    status = 403
    code = "permission_denied"


def class_of(method: str, path: str) -> str:
    """The class of keys that opens a path: one of `keys.CLASSES`, or `ANY`."""
    if path in _ANY_PATHS or path.startswith("/health/"):
        return ANY
    reads = method in ("GET", "HEAD")
    if path in _METRICS_PATHS and reads:
        return "metrics"
    if path in _ADMIN_PATHS or (path == "/props" and not reads):
        return "admin"
    return "infer" if path in _INFER_PATHS or path.startswith(_INFER_UNDER) else "admin"


def refusal(refusals: Refusals, path: str, error: BaseException) -> Response:
    """The reply that tells `error` in the shape of the API that `path` belongs to."""
    return next((made for start, made in refusals.items() if path.startswith(start)), error_response)(error)


class ApiKeyGate:
    """Lets through what is public, and what carries a key of `ring` that opens the path, as `Authorization: Bearer KEY`
    or `x-api-key: KEY`. An empty ring lets everything through.

    Of each header there may be one, and all that are given must be right.
    """

    def __init__(self, app: Any, ring: KeyRing, rates: Rates, refusals: Refusals | None = None) -> None:
        self._app = app
        self._ring = ring
        self._rates = rates
        self._refusals = dict(refusals or {})

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path, method = scope["path"], scope["method"]
        try:
            tenant = self._tenant(scope)
            with acting_as(tenant):
                if method not in ("GET", "HEAD") and class_of(method, path) == "infer":
                    self._rates.count_request()
        except HeadraceError as error:
            response = refusal(self._refusals, path, error)
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        with acting_as(tenant):
            await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant:
        """Who calls. Raises `UnauthorizedError`, `ForbiddenError`."""
        if not self._ring or scope["path"] in PUBLIC_PATHS:
            return Tenant()
        key = self._key(scope)
        if key is None:
            raise UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
        wanted = class_of(scope["method"], scope["path"])
        if wanted != ANY and wanted not in key.classes:
            raise ForbiddenError(f"this needs a key of the class {wanted}")
        return Tenant(key.name, "admin" in key.classes)

    def _key(self, scope: Scope) -> Key | None:
        bearers = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(bearers) > 1 or len(keys) > 1 or not bearers + keys:
            return None
        schemes = [value.partition(b" ")[0].lower() for value in bearers]
        given = [value.partition(b" ")[2].strip() for value in bearers] + [value.strip() for value in keys]
        found = [self._ring.find(text) for text in given]
        if any(scheme != b"bearer" for scheme in schemes) or len(set(found)) > 1:
            return None
        return found[0]
