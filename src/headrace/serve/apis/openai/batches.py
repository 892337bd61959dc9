"""OpenAI's /v1/batches: files of requests, answered in the background by the engine that serves all other requests.

Batches run one at a time, oldest first, with several lines at once. No new line starts while other requests wait:
interactive requests go first. An answer is written to the output file before it is counted, so with a storage folder
the next server continues a batch that this one did not finish. A batch waits while the disk is full or fails. This
module knows files and lines, and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette

from headrace.engine.tenants import Tenant, acting_as
from headrace.protocol.errors import EngineDeadError, HeadraceError, RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.files import PAGE, Files, NotFoundError, page
from headrace.serve.apis.openai.reply import Page
from headrace.serve.call.parsing import Body, WarningLines, convert
from headrace.serve.call.schema import check_metadata
from headrace.serve.storage.batch_lines import Answerer, Line, answers, has_failed, read_line, refusal
from headrace.serve.storage.store import StorageError, Store, StoreFullError

logger = logging.getLogger("headrace.server")

MAX_LINES = 50_000
MAX_OPEN = 64
MAX_LISTED_ERRORS = 100
LOOK_AGAIN_S = 0.02
DISK_AGAIN_S = 5.0
HOUR_S = 3600
ENDED = ("failed", "completed", "expired", "cancelled")
NONE_AT_FIRST = (
    "errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
"""The fields of a batch that are None before its work comes there."""
DEFAULT_PAGE = 20


class BatchRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchError(msgspec.Struct, kw_only=True):
    """`line` counts the lines of the input from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch as the API describes it. Times in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    warnings: WarningLines = UNSET


class BatchList(Page, kw_only=True):
    data: list[BatchObject]


class Batches:
    """The batches in `store`, whose files are in `files`.

    Args:
        concurrency: lines that are open at once.
        num_others: requests that wait in the engine's queue, this module's own included.
    """

    def __init__(
        self, store: Store, files: Files, answerer: Answerer, concurrency: int, num_others: Callable[[], int]
    ) -> None:
        self.store, self.files, self.answerer = store, files, answerer
        self.concurrency = concurrency
        self._num_others = num_others
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._running: tuple[str, asyncio.Task[None]] | None = None

    def start(self) -> None:
        """Begin to work, also on the batches of an earlier server."""
        self._worker = asyncio.ensure_future(self._work())
        self._wake.set()

    async def close(self) -> None:
        """Stop. What is not done stays as it is, for the next start."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    def create(self, body: dict[str, Any]) -> BatchObject:
        """Answer a file of requests in the background.

        Raises `RequestError`, `NotFoundError`, `StoreFullError`.
        """
        request = convert(BatchRequest, body)
        if request.endpoint not in self.answerer.routes:
            raise RequestError("endpoint", request.endpoint, "one of " + ", ".join(self.answerer.routes))
        window = re.fullmatch(r"(\d{1,3})h", request.completion_window)
        if window is None or not int(window[1]):
            raise RequestError("completion_window", request.completion_window, "24h, or other hours from 1h to 999h")
        check_metadata(request.metadata)
        self.files.get(request.input_file_id)
        unfinished = [batch_id for batch_id in self.store if self._card(batch_id)["status"] not in ENDED]
        if len(unfinished) >= MAX_OPEN:
            raise StoreFullError(f"batches: {len(unfinished)} are not done yet; the bound is {MAX_OPEN}")
        now = int(time.time())
        batch_id = self.store.new_id()
        fields: dict[str, Any] = dict.fromkeys(NONE_AT_FIRST) | {
            "id": batch_id,
            "endpoint": request.endpoint,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + HOUR_S * int(window[1]),
            "request_counts": RequestCounts(total=0, completed=0, failed=0),
            "metadata": request.metadata or None,
        }
        batch = BatchObject(**fields)
        while len(self.store) >= self.store.max_items and (old := self._oldest_ended()):
            self.store.delete(old)
        self.store.put(batch_id, msgspec.to_builtins(batch))
        self._wake.set()
        batch.warnings = request.warnings.reply()
        return batch

    def get(self, batch_id: str) -> BatchObject:
        """One batch.

        Raises `NotFoundError`.
        """
        if batch_id not in self.store:
            raise NotFoundError("batch", batch_id)
        return msgspec.convert(self._card(batch_id), BatchObject)

    def listed(self, query: Mapping[str, str]) -> BatchList:
        """The batches."""
        return page(BatchList, [self.get(batch_id) for batch_id in self.store], query, DEFAULT_PAGE)

    def cancel(self, batch_id: str) -> BatchObject:
        """End a batch early.

        What was answered stays. Raises `NotFoundError`, `RequestError` if it has ended.
        """
        batch = self.get(batch_id)
        if batch.status in ENDED:
            raise RequestError("batch_id", batch.status, "that of a batch which has not ended")
        if batch.status != "cancelling":
            self._note(batch_id, "cancelling")
        if self._running is not None and self._running[0] == batch_id:
            self._running[1].cancel()
        self._wake.set()
        return self.get(batch_id)

    # -- the work

    async def _work(self) -> None:
        stuck: set[str] = set()
        while True:
            self._wake.clear()
            waiting = [batch_id for batch_id in self.store if self._card(batch_id)["status"] not in ENDED]
            if not waiting:
                await self._wake.wait()
                continue
            batch_id = next((batch_id for batch_id in waiting if batch_id not in stuck), "")
            if not batch_id:
                # The disk may be well again.
                await asyncio.sleep(DISK_AGAIN_S)
                stuck.clear()
                continue
            # The lines count for the tenant who sent the batch, as single requests would.
            with acting_as(Tenant(self.store.owner(batch_id))):
                task = asyncio.ensure_future(self._do(batch_id))
            self._running = batch_id, task
            try:
                await asyncio.wait({task})
            finally:
                self._running = None
                task.cancel()
                [error] = await asyncio.gather(task, return_exceptions=True)
            if isinstance(error, EngineDeadError):
                return  # the server ends; the next one goes on with this batch
            try:
                if isinstance(error, StorageError):
                    raise error
                if isinstance(error, Exception):
                    logger.error("batch %s failed", batch_id, exc_info=error)
                    is_ours = isinstance(error, HeadraceError)
                    message = str(error) if is_ours else "internal error; the server's log has more"
                    self._fail(batch_id, [_error("batch_failed", message)])
                elif self._card(batch_id)["status"] == "cancelling":
                    self._end(batch_id, "cancelled")
            except (StorageError, StoreFullError) as waits:
                logger.warning("batch %s waits: %s", batch_id, waits)
                stuck.add(batch_id)

    async def _do(self, batch_id: str) -> None:
        card = self._card(batch_id)
        if card["status"] == "cancelling":
            return
        try:
            raw = await asyncio.to_thread(self.files.content, card["input_file_id"])
        except NotFoundError as error:
            self._fail(batch_id, [_error("invalid_input", str(error))])
            return
        numbers, errors = await asyncio.to_thread(check_all, raw, card["endpoint"])
        if errors:
            self._fail(batch_id, errors)
            return
        done = self._open_files(batch_id, len(numbers))
        lines = lines_of(raw, card["endpoint"], {number for name, number in numbers.items() if name not in done})
        seconds = card["expires_at"] - time.time()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                async with contextlib.aclosing(
                    answers(lines, self.answerer.answer, self.concurrency, self._quiet)
                ) as outputs:
                    async for _, output in outputs:
                        self._keep(batch_id, output)
        except TimeoutError:
            self._mark_expired(batch_id, numbers)
            self._end(batch_id, "expired")
            return
        self._note(batch_id, "finalizing")
        self._end(batch_id, "completed")

    async def _quiet(self) -> None:
        """Wait until no request waits in the queue of the engine."""
        while self._num_others():
            await asyncio.sleep(LOOK_AGAIN_S)

    def _open_files(self, batch_id: str, total: int) -> set[str]:
        """Create the output files, or open those of an earlier server. Return the ids of the answered lines."""
        card = self._card(batch_id)
        done: set[str] = set()
        counts = {"total": total, "completed": 0, "failed": 0}
        for name, kind, counted in (("_output", "output", "completed"), ("_errors", "errors", "failed")):
            file_id = card.get(name)
            if file_id is None or file_id not in self.files.store:
                file = self.files.create(f"{batch_id}_{kind}.jsonl", "batch_output", b"", hidden=True)
                card[name] = file.id
                try:
                    self.store.set_metadata(batch_id, card)
                except HeadraceError:
                    self.files.store.discard(file.id)
                    raise
                continue
            written = self.files.store.body(file_id)
            whole = written[: written.rfind(b"\n") + 1]
            if len(whole) < len(written):
                self.files.store.put(file_id, self.files.store.metadata(file_id) or {}, whole)
            ids = [msgspec.json.decode(line)["custom_id"] for line in whole.splitlines()]
            done.update(ids)
            counts[counted] = len(ids)
        card |= {"status": "in_progress", "in_progress_at": int(time.time()), "request_counts": counts}
        self.store.set_metadata(batch_id, card)
        return done

    def _keep(self, batch_id: str, output: dict[str, Any]) -> None:
        card = self._card(batch_id)
        failed = has_failed(output)
        self.files.store.append(card["_errors" if failed else "_output"], msgspec.json.encode(output) + b"\n")
        card["request_counts"]["failed" if failed else "completed"] += 1
        self.store.set_metadata(batch_id, card)

    def _mark_expired(self, batch_id: str, numbers: Mapping[str, int]) -> None:
        card = self._card(batch_id)
        bodies = [self.files.store.body(card[name]) for name in ("_output", "_errors")]
        done = {msgspec.json.decode(line)["custom_id"] for body in bodies for line in body.splitlines()}
        for custom_id, number in numbers.items():
            if custom_id not in done:
                message = "the batch expired before this line was answered"
                self._keep(batch_id, refusal(number, custom_id, "batch_expired", message))

    def _end(self, batch_id: str, status: str) -> None:
        """Show the files that have something in them, and drop those that have not."""
        card = self._card(batch_id)
        for name, field in (("_output", "output_file_id"), ("_errors", "error_file_id")):
            file_id = card.pop(name, None)
            if file_id is None or file_id not in self.files.store:
                continue
            if self.files.store.body_size(file_id):
                self.files.reveal(file_id)
                card[field] = file_id
            else:
                self.files.store.delete(file_id)
        card |= {"status": status, f"{status}_at": int(time.time())}
        self.store.set_metadata(batch_id, card)

    def _fail(self, batch_id: str, errors: list[BatchError]) -> None:
        listed = msgspec.to_builtins(BatchErrors(data=errors))
        self.store.set_metadata(batch_id, self._card(batch_id) | {"errors": listed})
        self._end(batch_id, "failed")

    def _note(self, batch_id: str, status: str) -> None:
        self.store.set_metadata(batch_id, self._card(batch_id) | {"status": status, f"{status}_at": int(time.time())})

    def _card(self, batch_id: str) -> dict[str, Any]:
        return self.store.metadata(batch_id) or {}

    def _oldest_ended(self) -> str | None:
        return next((batch_id for batch_id in self.store if self._card(batch_id)["status"] in ENDED), None)


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> BatchError:
    return BatchError(code=code, message=message, param=param, line=line)


def check_all(raw: bytes, endpoint: str) -> tuple[dict[str, int], list[BatchError]]:
    """Return the line numbers of a batch's requests by custom id, and the errors of its lines: a batch with a bad line
    is not answered at all."""
    numbers: dict[str, int] = {}
    errors: list[BatchError] = []
    for number, text in _texts(raw):
        try:
            custom_id = read_line(text, number, (endpoint,)).custom_id
            if custom_id in numbers:
                raise RequestError("custom_id", custom_id, f"used once; line {numbers[custom_id]} has it too")
            if len(numbers) >= MAX_LINES:
                raise RequestError("line", number, f"among at most {MAX_LINES} requests of one batch")
        except RequestError as error:
            errors.append(_error(error.code, str(error), error.field, number))
            if len(errors) >= MAX_LISTED_ERRORS:
                break
            continue
        numbers[custom_id] = number
    if not numbers and not errors:
        errors.append(_error("empty_file", "the file has no lines"))
    return numbers, errors


def lines_of(raw: bytes, endpoint: str, numbers: Container[int]) -> Iterator[Line]:
    """Yield the lines with these numbers, read when their turn comes: all at once take many times the file's size."""
    return (read_line(text, number, (endpoint,)) for number, text in _texts(raw) if number in numbers)


def _texts(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    with io.BytesIO(raw) as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def add_routes(app: Starlette, batches: Batches) -> None:
    """/v1/batches."""
    routing.post(app, "/v1/batches", batches.create, takes=BatchRequest, gives=BatchObject)
    routing.get(app, "/v1/batches", batches.listed, gives=BatchList, query=PAGE)
    routing.get(app, "/v1/batches/{batch_id}", batches.get, gives=BatchObject)
    routing.post(app, "/v1/batches/{batch_id}/cancel", batches.cancel, gives=BatchObject)
