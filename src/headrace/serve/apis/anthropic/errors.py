"""Errors in the shape that Anthropic's clients read."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from headrace.protocol.errors import QueueFullError
from headrace.serve.errors import error_body, json_response

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def failure(error: BaseException) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    return _told(*error_body(error))


def refuse(error: BaseException) -> Response:
    """The reply that tells `error`."""
    status, body = error_body(error)
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
    return json_response(_told(status, body), status, headers)


def _told(status: int, body: dict[str, Any]) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
