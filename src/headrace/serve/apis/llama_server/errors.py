"""Errors in the shape that llama-server's clients read."""

from __future__ import annotations

from starlette.responses import Response

from headrace.protocol.errors import HeadraceError, QueueFullError
from headrace.serve.errors import error_body, json_response

UNDER = ("/completion", "/props", "/slots", "/infill", "/apply-template", "/embedding")


class UnservedError(HeadraceError):
    """Something of llama-server's that this server does not do."""

    status = 501
    code = "not_supported_error"


class NoSlotError(HeadraceError):
    """All places of the batch are taken (HTTP 503)."""

    status = 503
    code = "unavailable_error"


def refuse(error: BaseException) -> Response:
    """The reply that tells `error`: OpenAI's shape, but the code is the status."""
    status, body = error_body(error)
    told = body["error"]
    kind = told["code"] if isinstance(error, (UnservedError, NoSlotError)) else told["type"]
    if told["code"] == "context_length_exceeded":
        kind = "exceed_context_size_error"
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
    return json_response({"error": {"code": status, "message": told["message"], "type": kind}}, status, headers)
