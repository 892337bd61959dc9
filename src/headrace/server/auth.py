"""The API key: one gate in front of the whole application, closed unless a path is named public (S-18).

An ASGI middleware that looks at `scope["path"]` alone, so it covers every route there is or will be, and unknown
ones too. Knows nothing of requests or routes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from headrace.errors import HeadraceError
from headrace.server.errors import error_response
from headrace.server.limits import Scope

PUBLIC_PATHS = frozenset({"/health/live"})


class UnauthorizedError(HeadraceError):
    status = 401
    code = "invalid_api_key"


class ApiKeyGate:
    """Lets through what carries `Authorization: Bearer KEY` or `x-api-key: KEY`, and what is public.

    Of each header there may be one, and all that are given must be right. `refusals` are, by the beginning of a path,
    those who tell the error in another shape than OpenAI's.
    """

    def __init__(
        self, app: Any, api_key: str, refusals: Mapping[str, Callable[[BaseException], Response]] | None = None
    ) -> None:
        self._app = app
        self._refusals = dict(refusals or {})
        # Digests have one length, so that the comparison's time tells nothing of the key's.
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS and not self._allowed(scope):
            error = UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
            refuse = next((made for start, made in self._refusals.items() if scope["path"].startswith(start)), None)
            response = error_response(error) if refuse is None else refuse(error)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        bearers = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(bearers) > 1 or len(keys) > 1 or not bearers + keys:
            return False
        schemes = [value.partition(b" ")[0].lower() for value in bearers]
        given = [value.partition(b" ")[2].strip() for value in bearers] + [value.strip() for value in keys]
        right = [hmac.compare_digest(hashlib.sha256(key).digest(), self._digest) for key in given]
        return all(right) and all(scheme == b"bearer" for scheme in schemes)
