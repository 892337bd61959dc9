"""Errors in the shape that Anthropic's clients read."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.responses import Response

from headrace.serve import errors

# The statuses whose errors have another type than OpenAI's, beside "server_error".
TYPES = {413: "request_too_large", 503: "overloaded_error"}


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody


def error_body(error: BaseException) -> tuple[int, AnthropicError]:
    """Return status and body for any exception."""
    status, body = errors.error_body(error)
    kind = TYPES.get(status, "api_error" if body.error.type == "server_error" else body.error.type)
    return status, AnthropicError(error=AnthropicErrorBody(type=kind, message=body.error.message))


def refuse(error: BaseException) -> Response:
    """Return the reply for `error`."""
    return errors.error_response(error, shape=error_body)
