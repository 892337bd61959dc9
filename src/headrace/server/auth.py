"""The API key: one gate in front of the whole application, closed unless a path is named public (S-18).

An ASGI middleware that looks at `scope["path"]` alone, so it covers every route there is or will be, and unknown
ones too. Knows nothing of requests or routes.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from headrace.errors import HeadraceError
from headrace.server.errors import error_response
from headrace.server.limits import Scope

PUBLIC_PATHS = frozenset({"/health/live"})


class UnauthorizedError(HeadraceError):
    status = 401
    code = "invalid_api_key"


class ApiKeyGate:
    """Lets through what carries `Authorization: Bearer KEY`, exactly one of it, and what is public."""

    def __init__(self, app: Any, api_key: str) -> None:
        self._app = app
        # Digests have one length, so that the comparison's time tells nothing of the key's.
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS and not self._allowed(scope):
            error = UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
            await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        right = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return right and scheme.lower() == b"bearer"
