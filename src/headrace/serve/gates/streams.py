"""Sends answers to clients that may hang up or stop reading.

The connection is watched while the engine works, for streams and plain replies alike. If the client hangs up, its
requests end at once (R-04). If it stops reading, the connection is closed after `STALL_S`, and the batch never waits
for it (R-14). A stream that breaks ends with an error event and without `[DONE]` (R-15, I-25). Called by
`serve.routing`; knows no API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from headrace.serve.errors import error_body
from headrace.serve.gates.limits import ClientGoneError, Receive, Scope

logger = logging.getLogger("headrace.server")

# How long a write to a client may block.
STALL_S = 30.0

T = TypeVar("T")


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work` unless the client hangs up first; then cancel it. Raises `ClientGoneError`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client hung up")
    finally:
        for each in (task, watch):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnect(receive: Receive) -> None:
    """Wait until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An ASGI response of server-sent events, or of lines of JSON. `close` is called at the end, also after errors.

    `failure` returns the last event of a broken stream; by default OpenAI's.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        headers: Mapping[str, str],
        media_type: str = "text/event-stream",
        failure: Callable[[BaseException], bytes] | None = None,
    ) -> None:
        super().__init__(media_type=media_type)
        self._events = events
        self._close = close
        self._failure = failure or _error_event
        # The headers of the base class would declare a length.
        self._sent_headers = [
            (b"content-type", f"{media_type}; charset=utf-8".encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode("ascii", "replace")) for name, value in headers.items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Any) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGoneError:
            logger.debug("a client left in the middle of its stream")
        except TimeoutError:
            logger.warning("a client did not read its stream for %g s; it was given up", STALL_S)
        finally:
            self._close()

    async def _send_all(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._sent_headers})
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await self._send(send, event, more=True)
            except TimeoutError:
                raise
            except Exception as error:
                await self._send(send, self._failure(error), more=True)
        await self._send(send, b"", more=False)

    @staticmethod
    async def _send(send: Any, body: bytes, more: bool) -> None:
        async with asyncio.timeout(STALL_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})


def _error_event(error: BaseException) -> bytes:
    return b"data: " + msgspec.json.encode(error_body(error)[1]) + b"\n\n"
