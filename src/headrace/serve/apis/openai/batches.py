"""OpenAI's /v1/batches: files of requests, answered in the background by the engine that serves all other requests.

The batches of one holder run one at a time, oldest first; batches of several holders run at the same time and share the
open lines (`serve.storage.fair_semaphore`). No new line starts while other requests wait: interactive requests go
first. Answers are on the disk, in the output files, before they are counted; all that ended meanwhile are written at
once. With a storage folder the next server continues a batch that this one did not finish, behind the lines that are
counted. A batch waits while the disk is full or fails, and while its holder's share of the storage is full. Knows files
and lines, and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

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
from headrace.serve.errors import text_of
from headrace.serve.storage.batch_lines import Answerer, Line, answers, custom_id_of, has_failed, read_line, refusal
from headrace.serve.storage.fair_semaphore import FairSemaphore
from headrace.serve.storage.space import StorageError
from headrace.serve.storage.store import Store, StoreFullError
from headrace.serve.storage.writers import Writers

logger = logging.getLogger("headrace.server")

MAX_LINES = 50_000
MAX_OPEN = 64
MAX_LISTED_ERRORS = 100
DISK_AGAIN_S = 5.0
HOUR_S = 3600
ENDED = ("failed", "completed", "expired", "cancelled")
NONE_AT_FIRST = (
    "errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
"""The fields of a batch that are None until its work reaches them."""
DEFAULT_PAGE = 20
OUTPUTS = {"_output": ("output", "completed"), "_errors": ("errors", "failed")}
"""The fields of a card that hold the ids of the output files: the ends of their names, and the counts of their lines.
`_sizes` has the bytes of each that are counted; bytes behind them are remains of a crash."""

T = TypeVar("T")


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
    """An error of a line. `line` counts the lines of the input from 1."""

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


class StoredBatch(BatchObject, kw_only=True):
    """A batch as it is stored. `sizes`: bytes of its output files that are whole."""

    sizes: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = msgspec.field(name="_sizes", default_factory=dict)


class BatchList(Page, kw_only=True):
    data: list[BatchObject]


class Batches:
    """The batches in `store`, whose files are in `files`.

    Args:
        concurrency: lines that are open at once.
        num_others: requests that wait in the engine's queue, this module's own included.
    """

    def __init__(
        self,
        store: Store,
        files: Files,
        writers: Writers,
        answerer: Answerer,
        concurrency: int,
        num_others: Callable[[], int],
    ) -> None:
        self.store, self.files, self.writers, self.answerer = store, files, writers, answerer
        self.concurrency = concurrency
        self.is_held_back: Callable[[], bool] = lambda: False
        """Returns whether no line may begin now."""
        self._permits = FairSemaphore(concurrency, num_others, lambda: self.is_held_back())
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        # By holder: the batch that runs, the task that oversees it, and the task that answers its lines.
        self._running: dict[str, tuple[str, asyncio.Task[None], asyncio.Task[None]]] = {}
        self._given_up: set[str] = set()

    def start(self) -> None:
        """Begin to work, also on the batches of an earlier server."""
        self._worker = asyncio.ensure_future(self._work())
        self._wake.set()

    async def close(self) -> None:
        """Stop. The unanswered lines are left for the next start."""
        tasks = [] if self._worker is None else [self._worker]
        for _, overseer, work in self._running.values():
            tasks += [overseer, work]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def create(self, body: dict[str, Any]) -> BatchObject:
        """Note a batch, to be answered after `wake`. Raises `RequestError`, `NotFoundError`, `StoreFullError`,
        `StorageError`."""
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
        while self.store.num_items >= self.store.max_items and (old := self._oldest_ended()):
            self.store.delete(old)
        self.store.put(batch_id, msgspec.to_builtins(batch))
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

    async def cancel(self, batch_id: str) -> BatchObject:
        """End a batch early.

        The answers so far stay. Raises `NotFoundError`, `RequestError` if it has ended.
        """

        def begin(card: dict[str, Any]) -> None:
            if card["status"] in ENDED:
                raise RequestError("batch_id", card["status"], "that of a batch which has not ended")
            if card["status"] != "cancelling":
                card |= {"status": "cancelling", "cancelling_at": int(time.time())}

        self.get(batch_id)
        with acting_as(Tenant(self.store.owner(batch_id))):
            await self.writers.run(self._change, batch_id, begin)
        for running_id, _, work in self._running.values():
            if running_id == batch_id:
                work.cancel()
        self.wake()
        return self.get(batch_id)

    def wake(self) -> None:
        """Look for batches to run."""
        self._wake.set()

    # -- the work

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            for batch_id in self.store:
                owner = self.store.owner(batch_id)
                if owner in self._running or batch_id in self._given_up or self._card(batch_id)["status"] in ENDED:
                    continue
                # The lines count for the tenant who sent the batch, as single requests would.
                with acting_as(Tenant(owner)):
                    work = asyncio.ensure_future(self._do(batch_id))
                    overseer = asyncio.ensure_future(self._oversee(batch_id, owner, work))
                self._running[owner] = batch_id, overseer, work
            await self._wake.wait()

    async def _oversee(self, batch_id: str, owner: str, work: asyncio.Task[None]) -> None:
        """Wait for a batch's work, and note how it ended."""
        try:
            await asyncio.wait({work})
            error = asyncio.CancelledError() if work.cancelled() else work.exception()
            if isinstance(error, EngineDeadError):
                return  # the server ends; the next one goes on with this batch
            if isinstance(error, asyncio.CancelledError):
                if self._card(batch_id).get("status") == "cancelling":
                    await self._stored(batch_id, self._end, batch_id, "cancelled")
            elif error is not None:
                logger.error("batch %s failed", batch_id, exc_info=error)
                internal = "internal error; the server's log has more"
                message = text_of(error) if isinstance(error, HeadraceError) else internal
                await self._stored(batch_id, self._fail, batch_id, [_error("batch_failed", message)])
        except Exception:
            logger.exception("batch %s can not be ended; the next start tries it again", batch_id)
            self._given_up.add(batch_id)
        del self._running[owner]
        self.wake()

    async def _do(self, batch_id: str) -> None:
        card = self._card(batch_id)
        if card["status"] == "cancelling":
            raise asyncio.CancelledError
        try:
            raw = await self._stored(batch_id, self.files.content, card["input_file_id"])
        except NotFoundError as error:
            await self._stored(batch_id, self._fail, batch_id, [_error("invalid_input", text_of(error))])
            return
        numbers, errors = await asyncio.to_thread(check_all, raw, card["endpoint"])
        if errors:
            await self._stored(batch_id, self._fail, batch_id, errors)
            return
        done = await self._stored(batch_id, self._open_files, batch_id, len(numbers))
        lines = lines_of(raw, card["endpoint"], {number for name, number in numbers.items() if name not in done})

        def answer(line: Line) -> Awaitable[dict[str, Any]]:
            return self.answerer.answer(line, self._permits.permit)

        seconds = card["expires_at"] - time.time()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                async with contextlib.aclosing(answers(lines, answer, self.concurrency)) as groups:
                    async for outputs in groups:
                        await self._stored(batch_id, self._keep, batch_id, outputs)
        except TimeoutError:
            await self._stored(batch_id, self._mark_expired, batch_id, numbers)
            await self._stored(batch_id, self._end, batch_id, "expired")
            return
        await self._stored(batch_id, self._note, batch_id, "finalizing")
        await self._stored(batch_id, self._end, batch_id, "completed")

    async def _stored(self, batch_id: str, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`. It is called again while the disk fails, or the share of the holder is full, so it
        must change nothing twice."""
        waits = False
        while True:
            try:
                result = await self.writers.run(function, *args)
            except (StorageError, StoreFullError) as error:
                if not waits:
                    logger.warning("batch %s waits: %s", batch_id, error)
                waits = True
                await asyncio.sleep(DISK_AGAIN_S)
                continue
            if waits:
                logger.info("batch %s goes on", batch_id)
            return result

    def _open_files(self, batch_id: str, total: int) -> set[str]:
        """Create the output files, or open the files of an earlier server. Return the ids of the answered lines."""
        card = self._card(batch_id)
        sizes = card.setdefault("_sizes", {})
        done: set[str] = set()
        counts = {"total": total}
        for name, (kind, counted) in OUTPUTS.items():
            file_id = card.get(name)
            if file_id is None or file_id not in self.files.store:
                file = self.files.create(f"{batch_id}_{kind}.jsonl", "batch_output", b"", hidden=True)
                card[name] = file.id
                sizes[name] = 0
                try:
                    self._update(batch_id, {name: file.id, "_sizes": sizes})
                except HeadraceError:
                    self.files.store.discard(file.id)
                    raise
            # An earlier version of headrace kept no sizes.
            sizes.setdefault(name, self.files.store.body(card[name]).rfind(b"\n") + 1)
            self.files.store.write(card[name], b"", sizes[name])
            ids = [custom_id_of(line) for line in self._lines(card, name)]
            done.update(ids)
            counts[counted] = len(ids)
        changes = {"status": "in_progress", "in_progress_at": int(time.time())}
        changes |= {"_sizes": sizes, "request_counts": counts}
        self._update(batch_id, changes)
        return done

    def _lines(self, card: Mapping[str, Any], name: str) -> list[bytes]:
        """Return the lines of an output file that are counted."""
        return self.files.store.body(card[name])[: card["_sizes"][name]].splitlines()

    def _keep(self, batch_id: str, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Write outputs, and then count them. A crash in between leaves bytes behind the size in the card."""
        card = self._card(batch_id)
        for name, (_, counted) in OUTPUTS.items():
            lines = [msgspec.json.encode(each) for each in outputs if has_failed(each) == (name == "_errors")]
            if lines:
                data = b"\n".join(lines) + b"\n"
                self.files.store.write(card[name], data, card["_sizes"][name])
                card["_sizes"][name] += len(data)
                card["request_counts"][counted] += len(lines)
        self._update(batch_id, {"_sizes": card["_sizes"], "request_counts": card["request_counts"]})

    def _mark_expired(self, batch_id: str, numbers: Mapping[str, int]) -> None:
        card = self._card(batch_id)
        done = {custom_id_of(line) for name in OUTPUTS for line in self._lines(card, name)}
        message = "the batch expired before this line was answered"
        left = [
            refusal(number, custom_id, "batch_expired", message)
            for custom_id, number in numbers.items()
            if custom_id not in done
        ]
        self._keep(batch_id, left)

    def _end(self, batch_id: str, status: str) -> None:
        """Show the files that have lines, and delete the empty ones."""
        card = self._card(batch_id)
        sizes = card.get("_sizes", {})
        file_ids = {}
        for name, field in (("_output", "output_file_id"), ("_errors", "error_file_id")):
            file_id = card.get(name)
            if file_id is None or file_id not in self.files.store:
                continue
            size = sizes.get(name, self.files.store.body_size(file_id))
            if size:
                self.files.store.write(file_id, b"", size)
                self.files.reveal(file_id)
                file_ids[field] = file_id
            else:
                self.files.store.delete(file_id)

        def end(card: dict[str, Any]) -> None:
            for name in (*OUTPUTS, "_sizes"):
                card.pop(name, None)
            card |= file_ids | {"status": status, f"{status}_at": int(time.time())}

        self._change(batch_id, end)

    def _fail(self, batch_id: str, errors: list[BatchError]) -> None:
        self._update(batch_id, {"errors": msgspec.to_builtins(BatchErrors(data=errors))})
        self._end(batch_id, "failed")

    def _note(self, batch_id: str, status: str) -> None:
        self._update(batch_id, {"status": status, f"{status}_at": int(time.time())})

    def _update(self, batch_id: str, changes: Mapping[str, Any]) -> None:
        """Replace fields of a card. A batch that a caller has cancelled stays so until it has ended."""

        def update(card: dict[str, Any]) -> None:
            is_cancelling = card["status"] == "cancelling"
            card |= {name: value for name, value in changes.items() if not (is_cancelling and name == "status")}

        self._change(batch_id, update)

    def _change(self, batch_id: str, change: Callable[[dict[str, Any]], None]) -> None:
        card = self._card(batch_id)
        change(card)
        self.store.set_metadata(batch_id, card)

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
            errors.append(_error(error.code, text_of(error), error.field, number))
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
    """Yield the lines that are not blank, with their numbers."""
    with io.BytesIO(raw) as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def add_routes(app: Starlette, batches: Batches) -> None:
    """/v1/batches."""

    async def create(body: dict[str, Any]) -> BatchObject:
        """Answer a file of requests in the background."""
        batch = await batches.writers.run(batches.create, body)
        batches.wake()
        return batch

    routing.post(app, "/v1/batches", create, takes=BatchRequest, gives=BatchObject)
    routing.get(app, "/v1/batches", batches.listed, gives=BatchList, query=PAGE)
    routing.get(app, "/v1/batches/{batch_id}", batches.get, gives=BatchObject)
    routing.post(app, "/v1/batches/{batch_id}/cancel", batches.cancel, gives=BatchObject)
