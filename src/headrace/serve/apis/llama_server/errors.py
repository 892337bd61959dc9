"""Errors in the shape that llama-server's clients read."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from headrace.protocol.errors import HeadraceError
from headrace.serve import errors

UNDER = ("/completion", "/props", "/slots", "/infill", "/apply-template", "/embedding")


class UnservedError(HeadraceError):
    """Something of llama-server's that this server does not do."""

    status = 501
    code = "not_supported_error"


class NoSlotError(HeadraceError):
    """All places of the batch are taken (HTTP 503)."""

    status = 503
    code = "unavailable_error"


class LlamaErrorBody(msgspec.Struct, kw_only=True):
    code: int
    message: str
    type: str


class LlamaError(msgspec.Struct, kw_only=True):
    error: LlamaErrorBody


def error_body(error: BaseException) -> tuple[int, LlamaError]:
    """Return status and body for any exception: OpenAI's shape, but the code is the status."""
    status, body = errors.error_body(error)
    kind = body.error.code if isinstance(error, (UnservedError, NoSlotError)) else body.error.type
    if body.error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return status, LlamaError(error=LlamaErrorBody(code=status, message=body.error.message, type=kind))


def refuse(error: BaseException) -> Response:
    """Return the reply for `error`."""
    return errors.error_response(error, shape=error_body)
