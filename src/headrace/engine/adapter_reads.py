"""`AdapterReads`: adapters that are read on threads while the engine computes.

A file of hundreds of megabytes takes seconds to read, to hash and to convert, and no stream waits for that: between two
steps the engine only puts what was read into a slot. Knows no files. Called by `engine.child`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from headrace.engine.core import EngineCore
from headrace.protocol import frames
from headrace.protocol.adapters import AdapterRead, LoadAdapter

logger = logging.getLogger("headrace.engine")

POLL_S = 0.005
"""How late an engine without work may notice that a file was read, or that a message came meanwhile."""


class AdapterReads:
    """The reads of one engine. `send` sends the replies to the orders."""

    def __init__(self, core: EngineCore, send: Callable[[frames.FromEngine], None]) -> None:
        self._core, self._send = core, send
        self._num_open = 0
        self._ended: queue.SimpleQueue[tuple[str, AdapterRead]] = queue.SimpleQueue()

    def begin(self, order_id: str, order: LoadAdapter) -> None:
        """Begin to read an adapter, for an order that is replied to when it is in its slot."""
        self._num_open += 1
        # It may read on when the engine ends.
        threading.Thread(target=self._read, args=(order_id, order.path), name="adapter", daemon=True).start()

    def settle(self) -> None:
        """Put the adapters that were read into their slots, and send the replies. Called between two steps."""
        while self._num_open and not self._ended.empty():
            order_id, read = self._ended.get()
            self._num_open -= 1
            self._send(frames.Reply(order_id, msgspec.msgpack.encode(self._core.change_adapters(read))))

    def wait(
        self, receive: Callable[[bool], list[frames.ToEngine] | None], may_block: bool
    ) -> list[frames.ToEngine] | None:
        """Return the next messages by `receive`, that of `drive`; with `may_block`, when there are some. Settles what
        was read meanwhile."""
        while self._num_open and may_block:
            if (messages := receive(False)) != []:
                return messages
            time.sleep(POLL_S)
            self.settle()
        return receive(may_block)

    def _read(self, order_id: str, path: str) -> None:
        try:
            read = self._core.read_adapter(path)
        except Exception as error:  # the order must have a reply, and the engine goes on
            logger.error("an adapter could not be read", exc_info=error)
            read = AdapterRead(refused=("lora_path", path, f"an adapter that can be read ({type(error).__name__})"))
        self._ended.put((order_id, read))
