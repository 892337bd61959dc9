"""What a line of the log may hold: no control characters that a client sent, and no words of a client's (S-22).

The traceback of a fault shows our own lines; the message of the exception may quote the request, so its length is
told instead, except at the levels debug and trace. A line says which call it is about (`calls`). Called by
`serve.app`.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import traceback
from types import TracebackType

from headrace.engine import context
from headrace.engine.sink import Sink

NAMES = ("headrace", "uvicorn", "asyncio", "opentelemetry", "py.warnings")
"""The loggers that are set up; whatever else is imported stays as it is."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def escaped(text: str) -> str:
    """`text` in one line, with nothing in it that a terminal obeys."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


class Lines(logging.Formatter):
    """One line for each message, with the id of the call that it is about if there is one; of exceptions the places
    and kinds, and with `is_open` their messages too."""

    def __init__(self, is_open: bool = False) -> None:
        super().__init__("%(levelname)-8s %(asctime)s %(name)s: %(message)s", "%m-%d %H:%M:%S")
        self._is_open = is_open

    def formatMessage(self, record: logging.LogRecord) -> str:
        call_id = context.current().call_id
        return escaped(super().formatMessage(record)) + (f" [{call_id}]" if call_id else "")

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


class Objects(Lines):
    """One JSON object a line: time (UTC), level, logger, message; request_id if the line is about a call; exception, a
    list of lines, if there was one. All that is not ASCII is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        made: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        call_id = context.current().call_id
        if call_id:
            made["request_id"] = call_id
        if record.exc_info:
            made["exception"] = self.formatException(record.exc_info).split("\n")
        elif record.exc_text:
            made["exception"] = record.exc_text.split("\n")
        return json.dumps(made).replace("\x7f", "\\u007f")


def record_of(line: str) -> logging.LogRecord | None:
    """What `Objects` made `line` of, in another process; None if it is some other text."""
    try:
        found = json.loads(line)
        return logging.makeLogRecord(
            {
                "created": datetime.datetime.fromisoformat(found["time"]).timestamp(),
                "levelname": found["level"].upper(),
                "levelno": logging.getLevelNamesMapping()[found["level"].upper()],
                "name": found["logger"],
                "msg": str(found["message"]),
                "exc_text": "\n".join(found.get("exception", ())),
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


FORMS: dict[str, type[Lines]] = {"text": Lines, "json": Objects}


def set_up(level: str, form: str = "text") -> None:
    """Log to stderr, at uvicorn's name of a level, in one of `FORMS`."""
    # Nobody waits for the log, and nothing ends by it.
    stream = Sink()
    stream.setFormatter(FORMS[form](is_open=level in ("debug", "trace")))
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [stream]
        logger.setLevel(level.upper() if level != "trace" else "DEBUG")
        logger.propagate = False
    logging.captureWarnings(form == "json")
    # Its connections and requests are of no use to anybody here.
    logging.getLogger("asyncio").setLevel("WARNING")
