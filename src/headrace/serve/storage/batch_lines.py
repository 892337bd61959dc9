"""Reads, checks and answers the lines of a batch in OpenAI's format.

Each input line is a request, `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`, and gets one output
line. The output depends on the line alone: a request without a seed gets one from a digest of its text, so a batch that
is interrupted and continued gives the same output. Knows no files and no HTTP; the caller passes a function for each
url. Called by /v1/batches and `run-batch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import msgspec

from headrace.protocol.errors import EngineDeadError, HeadraceError, QueueFullError, RequestError
from headrace.serve.errors import STATUSES, Error, ErrorBody, error_body
from headrace.serve.gates.limits import MAX_BODY_BYTES, parse_json
from headrace.text.inputs import SEED_LIMIT

MAX_CUSTOM_ID = 512
# Sampled answers take a seed; embeddings have no use for one.
SEEDED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Seconds before a line is tried again after the queue was full.
RETRY_S = 0.2
# Tries of a line that fails for an unexpected reason, such as a panic in native code.
MAX_TRIES = 3
UNFORESEEN = ErrorBody(
    message=f"internal error, {MAX_TRIES} times; the server's log has more",
    type=STATUSES[500].kind,
    param=None,
    code="internal_error",
)
# Faults at so many places of the code are logged with their tracebacks, each once.
MAX_LOGGED_PLACES = 100

logger = logging.getLogger("headrace.server")

Route = Callable[[dict[str, Any]], Awaitable[Any]]


class Line(NamedTuple):
    """A request of a batch. `number` counts the input lines from 1; `digest` is of id, url and body."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    digest: bytes


def read_line(raw: bytes, number: int, urls: Iterable[str]) -> Line:
    """Parse an input line and check all that needs no model. Raises `RequestError`."""
    if len(raw) > MAX_BODY_BYTES:
        raise RequestError("line", len(raw), f"at most {MAX_BODY_BYTES} bytes long")
    line = parse_json(raw)
    custom_id, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise RequestError("custom_id", custom_id, f"a string of 1 to {MAX_CUSTOM_ID} characters")
    if line.get("method") != "POST":
        raise RequestError("method", line.get("method"), "POST")
    if not isinstance(url, str) or url not in tuple(urls):
        raise RequestError("url", url, "one of " + ", ".join(urls))
    if not isinstance(body, dict):
        raise RequestError("body", body, "an object")
    digest = hashlib.blake2b(msgspec.json.encode([custom_id, url, body], order="sorted"), digest_size=16).digest()
    return Line(number, custom_id, url, body, digest)


def refusal(number: int, custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """Return the output of a line that has no answer: it was invalid, or its batch ended before its turn."""
    return {
        "id": f"batch_req_{number}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
        "line": number,
    }


def custom_id_of(output: bytes) -> str:
    """Return the custom id of an output that this module made, from the text before its response, which may be long."""
    text = output.partition(b',"response":')[0] + b"}"
    return str(msgspec.json.decode(text)["custom_id"])


def has_failed(output: Mapping[str, Any]) -> bool:
    """Return whether an output is an error."""
    response = output.get("response")
    return not isinstance(response, dict) or response.get("status_code") != 200


class Answerer:
    """Answers the lines of a batch.

    Args:
        routes: by url, a function that takes a body, returns the whole reply, which msgspec can encode at once, and
            raises `HeadraceError`s.
        priority: the priority of requests without one; None if the engine has no priorities.
    """

    def __init__(self, routes: Mapping[str, Route], priority: int | None = None) -> None:
        self.routes = routes
        self.priority = priority
        self._logged_places: set[tuple[str, str, int | None]] = set()

    async def answer(
        self, line: Line, permit: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
    ) -> dict[str, Any]:
        """Return the output of a line. Waits while the engine's queue is full. A line that fails for an unexpected
        reason, of whatever kind, is tried `MAX_TRIES` times; then this line alone has failed.

        Each try holds a `permit`. Raises `EngineDeadError`; the line then has no answer and may be tried again."""
        num_tries = 0
        while True:
            try:
                async with permit():
                    body = self._prepared(line)
                    status, reply = 200, await self.routes[line.url](body)
            except QueueFullError:
                await asyncio.sleep(RETRY_S)
                continue
            except EngineDeadError:
                raise
            except HeadraceError as error:
                status, body_of_error = error_body(error)
                reply = Error(error=body_of_error)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # pyo3 raises a panic as a BaseException
                self._log(error)
                num_tries += 1
                if num_tries < MAX_TRIES:
                    await asyncio.sleep(RETRY_S)
                    continue
                status, reply = 500, Error(error=UNFORESEEN)
            request_id = line.digest.hex()
            response = {"status_code": status, "request_id": request_id, "body": reply}
            return {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": response, "error": None}

    def _log(self, error: BaseException) -> None:
        """Log an error once for each kind and place, so that many lines which fail alike do not fill the log."""
        last = next(reversed(traceback.extract_tb(error.__traceback__)), None)
        place = (type(error).__name__, last.filename if last else "", last.lineno if last else None)
        if place not in self._logged_places and len(self._logged_places) < MAX_LOGGED_PLACES:
            self._logged_places.add(place)
            logger.error("a line of a batch failed unexpectedly", exc_info=error)

    def _prepared(self, line: Line) -> dict[str, Any]:
        """Return the line's body with its seed, request id and priority filled in. Raises `RequestError`."""
        body = dict(line.body)
        if body.get("stream"):
            raise RequestError("stream", True, "false or left out: the answers of a batch come whole")
        if line.url in SEEDED:
            if body.get("seed") is None:
                body["seed"] = int.from_bytes(line.digest[:8], "little") % SEED_LIMIT
            if body.get("request_id") is None:
                body["request_id"] = line.digest.hex()
        if body.get("priority") is None and self.priority is not None:
            body["priority"] = self.priority
        return body


async def answers(
    lines: Iterable[Line], answer: Callable[[Line], Awaitable[dict[str, Any]]], concurrency: int
) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield outputs in order of completion, with at most `concurrency` lines running: each list holds all that ended
    since the last one, so the caller can bring them to the disk at once while further lines run.

    Leaving the iteration early cancels the running lines. Raises the errors of `answer`.
    """
    running: set[asyncio.Task[dict[str, Any]]] = set()
    remaining = iter(lines)

    def fill() -> None:
        while len(running) < concurrency and (line := next(remaining, None)) is not None:
            running.add(asyncio.ensure_future(answer(line)))

    try:
        fill()
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running -= done
            fill()
            outputs = [task.result() for task in done if task.exception() is None]
            if outputs:
                yield outputs
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
