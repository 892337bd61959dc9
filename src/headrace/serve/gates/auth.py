"""`ApiKeyGate`, an ASGI middleware: requires an API key for every path that is not public (S-18).

The gate reads `scope["path"]` alone, as the router does, so it covers all routes, unknown ones too. Every path needs a
class of keys; a path without a class of its own needs the administrator's. The gate sets the current tenant for the
code behind it and counts the tenant's requests. It knows keys and classes, and no requests. Added by `serve.app`.
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
"""The functions that shape errors for APIs other than OpenAI's, by the prefix of the path."""

PUBLIC_PATHS = frozenset({"/health/live"})
ANY = "any"
"""The class of paths that every key opens."""
_ANY_PATHS = frozenset({"/", "/version", "/ping", "/health", "/openapi.json", "/docs"})
_METRICS_PATHS = frozenset({"/metrics", "/load", "/slots"})
# Calls that change the server or its models, supported here or not.
_ADMIN_PATHS = frozenset({"/api/push", "/api/create", "/api/copy", "/api/delete"})
_INFER_PATHS = frozenset(
    "/tokenize /detokenize /completion /completions /embedding /embeddings /apply-template /props /infill /score "
    "/rerank".split()
)
_INFER_UNDER = ("/v1/", "/v2/", "/api/")


class UnauthorizedError(HeadraceError):
    """The API key is missing or wrong (HTTP 401)."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(HeadraceError):
    """The key is valid, but not for this path (HTTP 403)."""

    status = 403
    code = "permission_denied"


def class_of(method: str, path: str) -> str:
    """Return the class of keys that opens a path: one of `keys.CLASSES`, or `ANY`."""
    if path in _ANY_PATHS or path.startswith("/health/"):
        return ANY
    reads = method in ("GET", "HEAD")
    if path in _METRICS_PATHS and reads:
        return "metrics"
    if path in _ADMIN_PATHS or (path == "/props" and not reads):
        return "admin"
    return "infer" if path in _INFER_PATHS or path.startswith(_INFER_UNDER) else "admin"


def refusal(refusals: Refusals, path: str, error: BaseException) -> Response:
    """Return the reply for `error` in the shape of the API that `path` belongs to."""
    return next((shape for prefix, shape in refusals.items() if path.startswith(prefix)), error_response)(error)


class ApiKeyGate:
    """Passes on calls of public paths, and calls with a key of `ring` that opens the path.

    The key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Each header may come once; if both come, both must
    hold the same key. With an empty ring all calls pass.
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
        """Return the tenant who calls. Raises `UnauthorizedError`, `ForbiddenError`."""
        if not self._ring or scope["path"] in PUBLIC_PATHS:
            return Tenant()
        key = self._key(scope)
        if key is None:
            raise UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
        path_class = class_of(scope["method"], scope["path"])
        if path_class != ANY and path_class not in key.classes:
            raise ForbiddenError(f"this needs a key of the class {path_class}")
        return Tenant(key.name, "admin" in key.classes)

    def _key(self, scope: Scope) -> Key | None:
        """Return the key that the headers hold, or None if there is none, it is wrong, or two differ."""
        bearers = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(bearers) > 1 or len(keys) > 1 or not bearers + keys:
            return None
        schemes = [value.partition(b" ")[0].lower() for value in bearers]
        texts = [value.partition(b" ")[2].strip() for value in bearers] + [value.strip() for value in keys]
        matches = [self._ring.find(text) for text in texts]
        if any(scheme != b"bearer" for scheme in schemes) or len(set(matches)) > 1:
            return None
        return matches[0]
