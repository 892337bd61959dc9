"""Errors in the shape that Ollama's clients read."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from headrace.protocol.errors import QueueFullError
from headrace.serve.errors import error_body, json_response


def failure(error: BaseException) -> dict[str, Any]:
    """An error in Ollama's shape."""
    return {"error": error_body(error)[1]["error"]["message"]}


def refuse(error: BaseException) -> Response:
    """The reply that tells `error`."""
    status, body = error_body(error)
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
    return json_response({"error": body["error"]["message"]}, status, headers)
