"""`Sink`: where lines of the log go, so that nobody waits for the log and nothing ends by it (R-28).

A thread writes them to stderr. What a full disk, a broken pipe or a reader that stands still keeps from being written
is dropped, counted, and told of in the first line that can be written again. Set up by `engine.logs`; knows no server.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading

MAX_LINES = 2000
"""As many wait for a reader that is slow."""
LAST_LINES_S = 1.0
"""How long the end of the process waits for the last of them."""


class Sink(logging.Handler):
    """A handler for file descriptor 2.

    Attributes:
        num_dropped: lines that were not written.
    """

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self.num_dropped = 0
        self._descriptor = descriptor
        self._num_told = 0
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write_on, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._drop()

    def close(self) -> None:
        """Write what waits, for at most `LAST_LINES_S`. May be called twice; what comes later is dropped."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=LAST_LINES_S)
            except queue.Full:
                pass  # its reader stands still, and these lines are lost with the process
            else:
                self._thread.join(LAST_LINES_S)
        super().close()

    def _drop(self) -> None:
        # Also called by the thread that writes; the lock is the handler's own, and can be taken twice.
        self.acquire()
        self.num_dropped += 1
        self.release()

    def _write_on(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                if self.num_dropped > self._num_told:
                    told = self.num_dropped
                    self._write(self._lost(told - self._num_told))
                    self._num_told = told
                self._write(line)
            except OSError:
                self._drop()

    def _write(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _lost(self, number: int) -> str:
        text = "%d lines of the log could not be written"
        record = logging.LogRecord("headrace.log", logging.WARNING, __file__, 0, text, (number,), None)
        return self.format(record) + "\n"


def num_dropped() -> int:
    """Lines that all sinks of this process dropped."""
    return sum(each.num_dropped for each in logging.getLogger("headrace").handlers if isinstance(each, Sink))
