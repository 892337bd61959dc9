"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}, with the right status.

The one place where an exception becomes a reply. What nobody foresaw is logged with its traceback and told to the
client as an internal error, without a path or a name (S-22).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.engine import context
from headrace.protocol.errors import HeadraceError, QueueFullError, RequestError

logger = logging.getLogger("headrace.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body for any exception."""
    if isinstance(error, HeadraceError):
        status, code, message = error.status, error.code, str(error)
    else:
        logger.error("a request failed in a way nobody foresaw", exc_info=error)
        status, code, message = 500, "internal_error", "internal error; the server's log has more"
        call_id = context.current().call_id
        message += f" of the request {call_id}" if call_id else ""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.field if isinstance(error, RequestError) else None
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException, headers: Mapping[str, str] | None = None) -> Response:
    """The reply that tells `error`."""
    status, body = error_body(error)
    sent = dict(headers or {})
    if isinstance(error, QueueFullError):
        sent["retry-after"] = str(error.retry_after)
    return json_response(body, status, sent)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """msgspec's JSON: always strictly parsable, for it writes no NaN and no Infinity (R-16)."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), media_type="application/json")
