"""`RequestStream`: the deltas of one call, merged for a slow reader.

Knows token ids and deltas, no engine and no text. `engine.client` fills it, on one event loop; the callers of
`EngineClient.submit` read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.engine import context
from headrace.protocol.errors import HeadraceError
from headrace.protocol.step import Request
from headrace.text.outputs import Delta


class RequestStream:
    """The deltas of one call's requests, each named by its index.

    An async iterator of lists of (index, delta). Deltas that wait for a slow reader are merged, so the stream never
    holds more than was generated, and the engine never waits for it (R-14). Leaving it early, by `close` or by leaving
    its `async with`, aborts the requests that still run.
    """

    def __init__(self, requests: Sequence[Request], abort: Callable[[str], None]) -> None:
        self.requests = list(requests)
        # The id in the reply, or else the first request's.
        self.call_id = context.current().call_id or (requests[0].request_id if requests else "")
        self.fingerprint = ""
        """The fingerprint (`engine.fingerprint`) of the engines in a fleet that may compute the answers; "": any
        engine."""
        self._abort = abort
        self._open = set(range(len(requests)))
        self._pending: dict[int, Delta] = {}
        self._wake = asyncio.Event()
        self._error: HeadraceError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, timer: asyncio.TimerHandle) -> None:
        """Keep a timer, which is cancelled when all requests have ended."""
        self._timer = timer

    def push(self, index: int, delta: Delta) -> None:
        if index not in self._open:
            return
        if delta.finish is not None:
            self._end(index)
        if index in self._pending:
            self._pending[index].merge(delta)
        else:
            self._pending[index] = delta
        self._wake.set()

    def fail(self, error: HeadraceError) -> None:
        """Close with an error, raised after the pending deltas were read."""
        self._error = self._error or error
        self._wake.set()
        self.close()

    def abort(self, index: int) -> None:
        """End one of the requests; no more deltas of it come."""
        if index in self._open:
            self._end(index)
            self._abort(self.requests[index].request_id)
            self._wake.set()

    def close(self) -> None:
        """Abort the requests that are still open. May be called at any time, and twice."""
        for index in tuple(self._open):
            self.abort(index)

    def _end(self, index: int) -> None:
        self._open.discard(index)
        if self._timer is not None and not self._open:
            self._timer.cancel()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self.take()

    def take(self) -> list[tuple[int, Delta]]:
        """Return the deltas that wait, which may be none."""
        pending, self._pending = self._pending, {}
        return list(pending.items())

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
