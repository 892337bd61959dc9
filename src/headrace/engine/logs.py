"""The log: the contents of its lines, and a handler that neither delays nor ends the process (S-22, R-28).

A line holds no control characters that a client sent, and no text of a request: the traceback of a fault shows lines
of the server's code, and of the exception's message, which may quote a request, only the length, except at the levels
debug and trace. A line has the id of its call (`context`). A thread writes the lines to stderr. Lines that a full disk,
a broken pipe or a stopped reader keeps from being written are dropped and counted, and the next line that is written
gives their number. Called by `serve.app` and `engine.child`.

A message may have `extra={"fields": {...}}`, which JSON shows next to it, and `extra={"rows": {...}}`, which text shows
below it: as a table on a terminal, and elsewhere as one line for each row.
"""

from __future__ import annotations

import atexit
import codecs
import copy
import datetime
import json
import logging
import os
import queue
import re
import threading
import traceback
from types import TracebackType

from headrace import env
from headrace.engine import context

NAMES = ("headrace", "uvicorn", "asyncio", "opentelemetry", "py.warnings")
"""The loggers that are set up; other loggers stay as they are."""
MAX_LINES = 2000
"""Lines that wait for a slow reader, at most."""
LAST_LINES_S = 1.0
"""Seconds, at most, that the end of the process waits for the last lines."""
# Python reads a codec's file when it is first used, and then there may be no descriptor left.
for _name in ("ascii", "idna", "latin-1"):
    codecs.lookup(_name)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def escaped(text: str) -> str:
    """Return `text` in one line, without characters that a terminal obeys."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


class LineFormatter(logging.Formatter):
    """Formats a message as one line, with the id of its call if it has one. Of exceptions it shows the places and
    kinds, and with `shows_messages` their messages too. `on_terminal`: rows are shown as a table, and a line begins
    with the sequence that erases a progress bar."""

    def __init__(self, shows_messages: bool = False, on_terminal: bool = False) -> None:
        super().__init__("%(levelname)-8s %(asctime)s %(name)s: %(message)s", "%m-%d %H:%M:%S")
        self._shows_messages = shows_messages
        self._on_terminal = on_terminal

    def format(self, record: logging.LogRecord) -> str:
        rows: dict[str, str] = getattr(record, "rows", {})
        first = super().format(record)
        if self._on_terminal:
            width = max(map(len, rows), default=0)
            table = (f"         {escaped(name):{width}}  {escaped(value)}" for name, value in rows.items())
            return "\n".join(("\r\x1b[K" + first, *table))
        lines = [first]
        for name, value in rows.items():
            row = copy.copy(record)
            row.msg, row.args = f"{name}: {value}", None
            lines.append(super().format(row))
        return "\n".join(lines)

    def formatMessage(self, record: logging.LogRecord) -> str:
        call_id = context.current().call_id
        return escaped(super().formatMessage(record)) + (f" [{call_id}]" if call_id else "")

    def formatException(self, ei: ExcInfo) -> str:
        lines: list[str] = []
        error, seen = ei[1], set[int]()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            places = traceback.format_tb(error.__traceback__)
            stack = [escaped(line) for place in places for line in place.rstrip("\n").split("\n")]
            lines = [*stack, f"{type(error).__name__}: {self._message_of(error)}", *lines]
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n".join(lines)

    def _message_of(self, error: BaseException) -> str:
        text = str(error)
        if self._shows_messages:
            return escaped(text)
        return f"({len(text)} characters; --uvicorn-log-level debug shows them)"


class JsonFormatter(LineFormatter):
    """Formats a message as one JSON object in a line: time (UTC), level, logger, message; request_id if the line is
    about a call; exception, a list of lines, if there was one; the message's own fields. All that is not ASCII is
    escaped."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        call_id = context.current().call_id
        if call_id:
            fields["request_id"] = call_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info).split("\n")
        elif record.exc_text:
            fields["exception"] = record.exc_text.split("\n")
        fields |= {name: value for name, value in getattr(record, "fields", {}).items() if name not in fields}
        return json.dumps(fields).replace("\x7f", "\\u007f")


def record_of(line: str) -> logging.LogRecord | None:
    """Return the record of a line that `JsonFormatter` made in another process; None for any other text."""
    try:
        fields = json.loads(line)
        level = fields.pop("level").upper()
        return logging.makeLogRecord(
            {
                "created": datetime.datetime.fromisoformat(fields.pop("time")).timestamp(),
                "levelname": level,
                "levelno": logging.getLevelNamesMapping()[level],
                "name": fields.pop("logger"),
                "msg": str(fields.pop("message")),
                "exc_text": "\n".join(fields.pop("exception", ())),
                "fields": fields,
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


class Sink(logging.Handler):
    """A handler that writes lines to a file descriptor, on its own thread.

    Attributes:
        num_dropped: lines that were not written.
    """

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self.num_dropped = 0
        self._descriptor = descriptor
        self._num_reported = 0
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._drop()

    def close(self) -> None:
        """Write the lines that wait, for at most `LAST_LINES_S`. May be called twice; later lines are dropped."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=LAST_LINES_S)
            except queue.Full:
                pass  # its reader has stopped, and these lines are lost with the process
            else:
                self._thread.join(LAST_LINES_S)
        super().close()

    def _drop(self) -> None:
        # Also called by the thread that writes; the lock is the handler's, and can be taken twice.
        self.acquire()
        self.num_dropped += 1
        self.release()

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                if self.num_dropped > self._num_reported:
                    num_dropped = self.num_dropped
                    self._write(self._report(num_dropped - self._num_reported))
                    self._num_reported = num_dropped
                self._write(line)
            except OSError:
                self._drop()

    def _write(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _report(self, num_lines: int) -> str:
        text = "%d lines of the log could not be written"
        record = logging.LogRecord("headrace.log", logging.WARNING, __file__, 0, text, (num_lines,), None)
        return self.format(record) + "\n"


def num_dropped() -> int:
    """Return the number of lines that all sinks of this process dropped."""
    return sum(handler.num_dropped for handler in logging.getLogger("headrace").handlers if isinstance(handler, Sink))


FORMATTERS: dict[str, type[LineFormatter]] = {"text": LineFormatter, "json": JsonFormatter}


def set_up(level: str, form: str = "text") -> None:
    """Log to stderr, at uvicorn's name of a level, by one of `FORMATTERS`."""
    sink = Sink()
    is_verbose = level in ("debug", "trace")
    sink.setFormatter(FORMATTERS[form](is_verbose, env.is_terminal(2)))
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [sink]
        logger.setLevel(level.upper() if level != "trace" else "DEBUG")
        logger.propagate = False
    logging.captureWarnings(form == "json")
    # asyncio's messages below this level are about its own connections; and the server itself logs what uvicorn would.
    for name in ("asyncio",) if is_verbose else ("asyncio", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger(name).level))
