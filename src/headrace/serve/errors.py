"""Turns exceptions into replies, in the shape of the API that was called: an `Api` is one such shape.

All replies to exceptions are made here, and other texts of errors that leave the server pass `without_paths`: paths of
the server's files are for the log and for administrators alone (S-22). An unexpected exception is logged with its
traceback, and the client gets an internal error without a path or a name. Every status that the server sends is a row
of `STATUSES`. Knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from headrace.engine import context, tenants
from headrace.protocol.errors import ContextLengthError, HeadraceError, RequestError

logger = logging.getLogger("headrace.server")

ENDINGS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end a task or the process; none of them becomes a reply."""


_PART = r"""[^\s/'",;:()]+"""
PATH = re.compile(rf"(?<![\w:/.~-])~?/(?!(?:v1|api|health|inspect|fleet)/)(?:{_PART}(?: {_PART}){{0,2}}/)+({_PART})?")
"""An absolute path of two parts or more, which is neither a URL nor one of the server's routes; its last part. Folders
may have two blanks in their names."""


class HttpStatus(NamedTuple):
    """One HTTP status. `kind` is the `type` of its errors; `why` describes it in the OpenAPI document."""

    kind: str
    why: str


STATUSES = {
    400: HttpStatus(
        "invalid_request_error",
        "A field is missing, of the wrong type or out of its range, or the prompt does not fit.",
    ),
    401: HttpStatus("authentication_error", "The API key is missing or wrong."),
    403: HttpStatus("permission_error", "The API key opens other routes, or the web page may not call the server."),
    404: HttpStatus("not_found_error", "There is no such model or object."),
    405: HttpStatus("invalid_request_error", "The route does not take this method."),
    408: HttpStatus(
        "timeout_error", "The deadline passed before the engine began with the call, or the body was too slow."
    ),
    409: HttpStatus("invalid_request_error", "The engines can not be updated, or an update failed or is running."),
    413: HttpStatus("invalid_request_error", "The body is too large."),
    414: HttpStatus("invalid_request_error", "The address is too long."),
    415: HttpStatus("invalid_request_error", "The body is compressed, or a web page's is not JSON."),
    421: HttpStatus("invalid_request_error", "The server does not go by the name that it was called by."),
    429: HttpStatus("rate_limit_error", "Too many requests wait, or the key's minute is used up; see Retry-After."),
    431: HttpStatus("invalid_request_error", "The headers are too large."),
    500: HttpStatus("server_error", "The engine failed this request."),
    501: HttpStatus("server_error", "Not done by this server."),
    503: HttpStatus(
        "server_error",
        "The engine, or a process beside it, is loading, ending or gone; too many connections or bytes come at a time; "
        "or the disk for stored files fails.",
    ),
    504: HttpStatus("timeout_error", "The deadline passed while the engine computed."),
    507: HttpStatus("server_error", "The disk for the file is full."),
}


class CallError(HeadraceError):
    """A call that the server refuses: the HTTP status, the code and the message of its error, and the reply's further
    headers."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.code, self.headers = status, code, headers or {}
        super().__init__(message)


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of an error. The last two fields, which llama-server has too, hold the tokens of the prompt and of the
    context where the prompt is longer than the context."""

    message: str
    type: str
    param: str | None
    code: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class Error(msgspec.Struct, kw_only=True):
    """OpenAI's reply to a call that failed."""

    error: ErrorBody


def event(body: object, name: str = "") -> bytes:
    """Return one server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


class Api(NamedTuple):
    """The shape of an API's errors.

    `shape` returns the struct, an `error_type`, for an HTTP status and OpenAI's body; `encode` writes it as the end of
    a broken stream. `prefixes` begin the API's paths; all other paths are OpenAI's. `overflow` words a prompt or answer
    that does not fit the context. `heartbeat` is sent in a stream that is silent, if there is one.
    """

    error_type: type[msgspec.Struct]
    shape: Callable[[int, ErrorBody], msgspec.Struct]
    encode: Callable[[msgspec.Struct], bytes] = event
    prefixes: tuple[str, ...] = ()
    overflow: Callable[[ContextLengthError], str] = str
    heartbeat: bytes = b": heartbeat\n\n"


OPENAI = Api(Error, lambda status, body: Error(error=body))


def api_of(apis: Sequence[Api], path: str) -> Api:
    """Return the API that a path belongs to."""
    return next((api for api in apis if path.startswith(api.prefixes)), OPENAI)


def without_paths(text: str) -> str:
    """Return a text with the last part of each path in place of the path; for administrators, the text itself."""
    return text if tenants.current().is_admin else PATH.sub(lambda match: match[1] or "...", text)


class HiddenPaths:
    """Logs errors whose paths their callers do not see: of each holder one a minute, since a path may be the caller's
    own, and any call may name one. The next line has the number of those that were left out."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._num_left_out: Counter[str] = Counter()

    def log(self, message: str) -> None:
        holder, now = tenants.current().name, time.monotonic()
        if now - self._last.get(holder, -math.inf) < tenants.MINUTE_S:
            self._num_left_out[holder] += 1
            return
        self._last[holder] = now
        others = self._num_left_out.pop(holder, 0)
        more = f" (and {others} more since the last such line)" if others else ""
        logger.warning("an error whose paths the caller does not see%s: %s", more, message)


hidden_paths = HiddenPaths()


def text_of(error: HeadraceError) -> str:
    """Return the message of an error for the caller, without the paths of files. The value of a `RequestError` is the
    caller's, and stays; so does the text of a `CallError`, which no file decides."""
    message = str(error)
    if isinstance(error, CallError):
        return message
    if isinstance(error, RequestError):
        text = message.replace(error.bound, without_paths(error.bound))
    else:
        text = without_paths(message)
    if text != message:
        hidden_paths.log(message)
    return text


def error_body(error: BaseException, api: Api = OPENAI) -> tuple[int, ErrorBody]:
    """Return status and body for any exception."""
    if isinstance(error, HeadraceError):
        status, code, message = error.status, error.code, text_of(error)
        if isinstance(error, ContextLengthError):
            message = api.overflow(error)
    else:
        logger.error("a request failed unexpectedly", exc_info=error)
        status, code, message = 500, "internal_error", "internal error; the server's log has more"
        call_id = context.current().call_id
        message += f" of the request {call_id}" if call_id else ""
    kind = STATUSES[status].kind if status in STATUSES else STATUSES[400 if status < 500 else 500].kind
    param = error.field if isinstance(error, RequestError) else None
    body = ErrorBody(message=message, type=kind, param=param, code=code)
    if isinstance(error, ContextLengthError):
        body.n_prompt_tokens, body.n_ctx = error.num_prompt, error.max_model_len
    return status, body


def error_response(error: BaseException, api: Api = OPENAI) -> Response:
    """Return the reply for `error`."""
    status, body = error_body(error, api)
    seconds = error.retry_after if isinstance(error, HeadraceError) else None
    headers = None if seconds is None else {"retry-after": str(seconds)}
    response = json_response(api.shape(status, body), status, headers)
    if isinstance(error, CallError):
        response.headers.update(error.headers)
    return response


def error_event(error: BaseException, api: Api = OPENAI) -> bytes:
    """Return the end of a stream that `error` broke."""
    return api.encode(api.shape(*error_body(error, api)))


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply with `body` as JSON. msgspec never writes NaN or Infinity, so any parser can read it (R-16)."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), media_type="application/json")
