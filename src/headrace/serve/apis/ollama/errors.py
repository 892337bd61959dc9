"""Errors in the shape that Ollama's clients read."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from headrace.serve import errors


class OllamaError(msgspec.Struct, kw_only=True):
    error: str


def error_body(error: BaseException) -> tuple[int, OllamaError]:
    """Return status and body for any exception."""
    status, body = errors.error_body(error)
    return status, OllamaError(error=body.error.message)


def refuse(error: BaseException) -> Response:
    """Return the reply for `error`."""
    return errors.error_response(error, shape=error_body)
