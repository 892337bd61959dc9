"""What a line of the log may hold: no control characters that a client sent, and no words of a client's (S-22).

The traceback of a fault shows our own lines; the message of the exception may quote the request, so its length is
told instead, except at the levels debug and trace. Called by `server.http`.
"""

from __future__ import annotations

import logging
import re
import traceback
from types import TracebackType

NAMES = ("headrace", "uvicorn", "asyncio")
"""The loggers that are set up; whatever else is imported stays as it is."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def escaped(text: str) -> str:
    """`text` in one line, with nothing in it that a terminal obeys."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


class Lines(logging.Formatter):
    """One line for each message; of exceptions the places and kinds, and with `is_open` their messages too."""

    def __init__(self, is_open: bool = False) -> None:
        super().__init__("%(levelname)-8s %(asctime)s %(name)s: %(message)s", "%m-%d %H:%M:%S")
        self._is_open = is_open

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: ExcInfo) -> str:
        lines: list[str] = []
        error, seen = ei[1], set[int]()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            places = traceback.format_tb(error.__traceback__)
            made = [escaped(line) for place in places for line in place.rstrip("\n").split("\n")]
            lines = [*made, f"{type(error).__name__}: {self._told(error)}", *lines]
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n".join(lines)

    def _told(self, error: BaseException) -> str:
        text = str(error)
        return escaped(text) if self._is_open else f"({len(text)} characters; --uvicorn-log-level debug shows them)"


def set_up(level: str) -> None:
    """Log to stderr, at uvicorn's name of a level."""
    stream = logging.StreamHandler()
    stream.setFormatter(Lines(is_open=level in ("debug", "trace")))
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [stream]
        logger.setLevel(level.upper() if level != "trace" else "DEBUG")
        logger.propagate = False
    # Its connections and requests are of no use to anybody here.
    logging.getLogger("asyncio").setLevel("WARNING")
