"""Turns exceptions into replies in the shape of OpenAI's API, {"error": {message, type, param, code}}.

All replies to exceptions are made here; the other APIs pass `error_response` a shape of their own. An unexpected
exception is logged with its traceback, and the client gets an internal error without a path or a name (S-22). Every
status that the server sends is a row of `STATUSES`. Knows no routes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from headrace.engine import context
from headrace.protocol.errors import HeadraceError, QueueFullError, RequestError

logger = logging.getLogger("headrace.server")


class Status(NamedTuple):
    """One HTTP status. `kind` is the `type` of its errors; `why` describes it in the OpenAPI document."""

    kind: str
    why: str


STATUSES = {
    400: Status(
        "invalid_request_error",
        "A field is missing, of the wrong type or out of its range, or the prompt does not fit.",
    ),
    401: Status("authentication_error", "The API key is missing or wrong."),
    403: Status("permission_error", "The API key opens other routes, or the web page may not call the server."),
    404: Status("not_found_error", "There is no such model or object."),
    405: Status("invalid_request_error", "The route does not take this method."),
    408: Status(
        "timeout_error", "The deadline passed before the engine began with the call, or the body was too slow."
    ),
    413: Status("invalid_request_error", "The body is too large."),
    414: Status("invalid_request_error", "The address is too long."),
    415: Status("invalid_request_error", "The body is compressed, or a web page's is not JSON."),
    421: Status("invalid_request_error", "The server does not go by the name that it was called by."),
    429: Status("rate_limit_error", "Too many requests wait, or the key's minute is used up; see Retry-After."),
    431: Status("invalid_request_error", "The headers are too large."),
    500: Status("server_error", "The engine failed this request."),
    501: Status("server_error", "Not done by this server."),
    503: Status("server_error", "The engine is loading, or is gone."),
    504: Status("timeout_error", "The deadline passed while the engine computed."),
}


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct, kw_only=True):
    """OpenAI's."""

    error: ErrorBody


Shape = Callable[[BaseException], tuple[int, msgspec.Struct]]
"""A function that returns the status and body for any exception."""


def error_body(error: BaseException) -> tuple[int, Error]:
    """Return status and body for any exception."""
    if isinstance(error, HeadraceError):
        status, code, message = error.status, error.code, str(error)
    else:
        logger.error("a request failed in a way nobody foresaw", exc_info=error)
        status, code, message = 500, "internal_error", "internal error; the server's log has more"
        call_id = context.current().call_id
        message += f" of the request {call_id}" if call_id else ""
    kind = STATUSES[status].kind if status in STATUSES else STATUSES[400 if status < 500 else 500].kind
    param = error.field if isinstance(error, RequestError) else None
    return status, Error(error=ErrorBody(message=message, type=kind, param=param, code=code))


def error_response(
    error: BaseException, headers: Mapping[str, str] | None = None, shape: Shape = error_body
) -> Response:
    """Return the reply for `error`."""
    status, body = shape(error)
    headers = dict(headers or {})
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    return json_response(body, status, headers)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply with `body` as JSON. msgspec never writes NaN or Infinity, so any parser can read it (R-16)."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), media_type="application/json")
