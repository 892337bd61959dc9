"""`EngineClient`: the server's side of an engine in another process. Owns every open request until its end.

It admits requests, passes their output to one `RequestStream` for each caller, and, when the engine process dies,
submits every open request to a new one with the tokens delivered so far. Knows token ids, not text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from headrace.engine import tenants
from headrace.engine.admission import Admission
from headrace.engine.core import EngineCore, verify
from headrace.engine.crash_reports import CrashReports
from headrace.engine.links import ENGINE_COMMAND, InprocLink, Link, ProcessLink, engine_level
from headrace.engine.observer import Observer
from headrace.engine.order_calls import Orders
from headrace.engine.request_stream import RequestStream
from headrace.engine.resumption import PROBE, OpenRequest, PoisonedRequestError, Resumption, negated, summed
from headrace.engine.watching import Watching
from headrace.protocol import frames
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import DeadlineError, EngineDeadError, HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Abort, Add, EngineInfo, Finish, Request, ResetPrefixCache, Stats, StepOutput
from headrace.protocol.watchdog import Watchdog
from headrace.text.inputs import new_request_id
from headrace.text.outputs import Delta, deltas_of

logger = logging.getLogger("headrace.engine")

# Deaths further apart than this are separate accidents; closer ones count towards max_restarts.
RESTART_WINDOW_S = 600.0
# Multiple of the first start's time after which another start counts as frozen.
START_PATIENCE = 10


class EngineClient:
    """One engine behind a `Link`.

    Args:
        link: starts the engine and carries messages.
        max_num_queued_reqs, max_num_queued_tokens: bounds on requests that the engine has not started.
        max_restarts: deaths within `RESTART_WINDOW_S` after which the engine is restarted; after that
            `EngineDeadError`. Deaths caused by a request do not count, as long as others are served in between.
        watchdog_timeout: seconds without a step after which an engine with open requests is ended; see `Watchdog`.
    """

    def __init__(
        self,
        link: Link,
        *,
        max_num_queued_reqs: int = 1024,
        max_num_queued_tokens: int = 2**20,
        max_restarts: int = 0,
        watchdog_timeout: float = 60.0,
    ) -> None:
        self._link = link
        self._max_restarts = max_restarts
        self._open: dict[str, OpenRequest] = {}
        self._resumption = Resumption(self._send)
        self._info: EngineInfo | None = None
        self._num_guilty = 0
        self._start_seconds = 0.0
        self._deaths: list[float] = []
        self._past = Stats()
        self._dead: HeadraceError | None = None
        self._alive = False
        self._proven = False
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.admission = Admission(max_num_queued_reqs, max_num_queued_tokens)
        self.watchdog = Watchdog(watchdog_timeout)
        self.orders = Orders(link.post)
        self.watching = Watching(link.post)
        self.observer: Observer | None = None
        self.reports: CrashReports | None = None
        self.stats = Stats()
        self.num_restarts = self.num_expired = self.num_quarantined = 0
        self.is_proven_once = False
        self.is_draining = False
        self.dead = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Start the engine, also one that was closed, and wait for one real token from it.

        Raises what kept the engine from loading (`CheckpointError`, `ModelNotFoundError`, `HeadraceError`).
        """
        self._closing = False
        try:
            await self._launch()
            self._watch = self._spawn(self._keep_watch())
            async with self._probe() as stream:
                async for _ in stream:
                    pass
            # The probe is not traffic of any client.
            self._past = summed(self._past, negated(self.stats))
            self.is_proven_once = True
        except BaseException:
            await self.close()
            raise

    async def close(self, at_once: bool = False) -> None:
        """Stop the engine, `at_once` in mid-step. Open streams end with `EngineDeadError`."""
        self._closing, self._alive = True, False
        self.fail_all(EngineDeadError("the server is shutting down"))
        self._note_end()
        for task in filter(None, (self._supervisor, self._watch)):
            task.cancel()
        await self._link.close(at_once)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def is_started(self) -> bool:
        """Whether the engine was ready once, so that `info` is known."""
        return self._info is not None

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs and has made a token since it (re)started."""
        return self._alive and self._proven

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, if it has one of its own and runs."""
        return self._link.pid

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """The number of requests that the engine has not begun."""
        return self.admission.num_waiting

    async def _launch(self) -> None:
        """Start an engine. One that takes much longer than the first did, or stands still, counts as frozen."""
        self._proven = False
        began = time.monotonic()
        limit = max(self.watchdog.timeout, START_PATIENCE * self._start_seconds) if self._start_seconds else None
        try:
            async with asyncio.timeout(limit or None) as until:
                watching = asyncio.create_task(self._watch_start(until))
                try:
                    self._info = await self._link.start(self._on_message, self._on_lost)
                finally:
                    watching.cancel()
        except TimeoutError:
            await self._link.kill()
            raise EngineDeadError(f"the engine did not start within {time.monotonic() - began:.0f} s") from None
        self._start_seconds = self._start_seconds or time.monotonic() - began
        self.stats = Stats(num_blocks=self._info.num_blocks)
        self._alive = True
        self.watching.renew()
        self.watchdog.starts_anew()

    async def _watch_start(self, until: asyncio.Timeout) -> None:
        """End a start, but for the first, in which no processor is used or waited for as long as a watchdog waits."""
        watchdog = Watchdog(self.watchdog.timeout)
        while self._start_seconds and watchdog.timeout and not self._link.in_process:
            if (usage := self._link.usage()) is not None:
                watchdog.tick(time.monotonic(), usage)
            if watchdog.frozen >= watchdog.timeout:
                until.reschedule(asyncio.get_running_loop().time())
                return
            await asyncio.sleep(watchdog.interval)

    async def answers(self, seconds: float = 1.0) -> bool:
        """Return whether the engine sends a message within `seconds`, or computes."""
        if not self.is_alive:
            return False
        self._heard.clear()
        self._ping()
        try:
            async with asyncio.timeout(seconds):
                await self._heard.wait()
            return True
        except TimeoutError:
            return self.is_alive and self.watchdog.frozen < seconds

    def _ping(self) -> None:
        """Make an idle engine send its gauges, as it does after any message."""
        self._link.post(Abort(""))

    def _probe(self) -> RequestStream:
        """Request one real token, ahead of the queue. A probe that the last engine has not answered is sent again."""
        for entry in [entry for entry in self._open.values() if entry.is_probe]:
            self._send(entry)
            return entry.stream
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True, detokenize=False)
        request = Request(request_id=PROBE + new_request_id(), prompt_token_ids=[0], params=params)
        stream = RequestStream([request], self.abort)
        entry = self._enter(request, stream, 0, time.monotonic(), 0, "")
        if self._alive:
            self._send(entry)
        return stream

    async def _keep_watch(self) -> None:
        """End an engine that stands still with open requests. An idle engine gets a ping now and then."""
        watchdog = self.watchdog
        while True:
            await asyncio.sleep(watchdog.interval)
            if not self._alive:
                continue
            # It has no open requests, and sent a message lately.
            is_idle = not self._open and watchdog.silent < max(1.0, watchdog.timeout / 4)
            if not self._open and not is_idle:
                self._ping()
            if watchdog.tick(time.monotonic(), self._link.usage()) and not is_idle and not self._link.in_process:
                silent, frozen = watchdog.silent, watchdog.frozen
                reason = f"frozen: no step for {silent:.1f} s, no processor time for {frozen:.1f} s of them"
                logger.error("the engine is %s; its stacks follow, then it is killed", reason)
                self._alive = False
                await self._link.kill()
                self._on_lost(reason)

    # -- requests

    def check_room(self, num: int) -> None:
        """Raise what `submit` would raise now for `num` requests, however short, before they are tokenised."""
        self._check_open()
        self.admission.check_room(num, tenants.current().name, time.monotonic())

    def verify(self, requests: Sequence[Request]) -> None:
        """Raise `RequestError` unless the engine can serve each of `requests`. A worker thread may call this."""
        for request in {r.group or r.request_id: r for r in requests}.values():  # a group differs in its seeds only
            verify(request, self.info)
            if request.params.logits_processors and not self._link.in_process:
                bound = "left out, unless the engine runs in the caller's own process"
                raise RequestError("logits_processors", "functions", bound)

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._closing or self.is_draining:
            raise EngineDeadError("the server is shutting down")

    def submit(
        self, requests: Sequence[Request], arrival_time: float | None = None, deadline: float | None = None
    ) -> RequestStream:
        """Accept all of `requests`, which `verify` has passed, or none. `arrival_time` is when the call came in (None:
        now); at `deadline` (both monotonic seconds) the stream ends with a `DeadlineError`, wherever its requests are
        then.

        Raises what `check_room` does, or `DeadlineError` (too late).
        """
        self._check_open()
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            self.num_expired += 1
            raise DeadlineError("the request's time was over before it could be queued", started=False)
        name = tenants.current().name
        works = [self.admission.work_of(request) for request in requests]
        self.admission.admit(works, name, now)
        stream = RequestStream(requests, self.abort)
        arrival = now if arrival_time is None else arrival_time
        for index, (request, work) in enumerate(zip(requests, works, strict=True)):
            if self.info.scheduling_policy == "fair":
                request = msgspec.structs.replace(request, tenant=name, work=work)
            entry = self._enter(request, stream, index, arrival, work, name, now)
            # Requests that are not sent now are sent to the next engine.
            if self.is_alive:
                self._resumption.add(entry)
        if deadline is not None:
            stream.arm(asyncio.get_running_loop().call_later(deadline - now, self._expire, stream))
        return stream

    def _enter(self, request: Request, stream: RequestStream, index: int, arrival: float, *more: Any) -> OpenRequest:
        entry = OpenRequest(request, stream, index, arrival, *more)
        self._open[request.request_id] = entry
        self.admission.enter(entry.work, entry.name)
        return entry

    def _send(self, entry: OpenRequest) -> None:
        entry.is_sent = True
        request = entry.resumed() if entry.deaths else entry.request
        self._link.post(Add(request, entry.times(time.monotonic())))

    def _expire(self, stream: RequestStream) -> None:
        """End a call at its deadline (R-13), with an error and never as if its answer were complete."""
        entries = [self._open[r.request_id] for r in stream.requests if r.request_id in self._open]
        if not entries:
            return
        self.num_expired += 1
        started = any(entry.started for entry in entries)
        where = "while it was computed" if started else "in the queue"
        stream.fail(DeadlineError(f"the request's time was over {where}", started))

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks. Unknown and ended ids are fine: ends race with aborts."""
        entry = self._forget(request_id)
        if entry is not None and entry.is_sent and self._alive:
            self._link.post(Abort(request_id))

    def reset_prefix_cache(self) -> None:
        if self._alive:
            self._link.post(ResetPrefixCache())

    def _forget(self, request_id: str) -> OpenRequest | None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            if not entry.started:
                self.admission.leave(entry.work, entry.name)
            self._resumption.saw(entry, ended=True)
        return entry

    # -- what comes back

    def _on_message(self, message: frames.FromEngine) -> None:
        self.watchdog.heard()
        self._heard.set()
        match message:
            case frames.Output(output):
                self._on_output(output)
            case frames.Reply(order_id, body):
                self.orders.settle(order_id, body)
            case frames.Rejected(request_id, field, value, bound, code):
                entry = self._forget(request_id)
                if entry is not None:
                    refusal = RequestError(field, value, bound, code)
                    fault = HeadraceError(f"the engine could not take in the request: {value}")
                    entry.stream.fail(fault if code == HeadraceError.code else refusal)
            case _:
                raise frames.TransportError(f"unexpected {type(message).__name__} from a running engine")

    def _on_output(self, output: StepOutput) -> None:
        if output.stats is not None:
            self.stats = output.stats
        for request_id, delta in deltas_of(output):
            entry = self._open.get(request_id)
            if entry is None:
                continue
            was_waiting, began = not entry.started, delta.num_cached_tokens is not None
            entry.state = output.states.get(request_id, entry.state)
            entry.accept(delta)
            if was_waiting and entry.started:
                self.admission.leave(entry.work, entry.name, output.end_time)
            num_tokens = sum(len(each.token_ids) for each in (delta.beams.beams if delta.beams else [delta]))
            if num_tokens:
                self._observe_tokens(entry, delta, num_tokens)
            if delta.finish is not None:
                self._on_end(entry, delta.finish)
            elif num_tokens or (began and entry.shows_no_tokens and len(entry.deaths) < 2):
                self._resumption.saw(entry, ended=False)
            entry.stream.push(entry.index, delta)
            if num_tokens and not self._proven:
                # The engine works: send it the requests that waited for that.
                self._proven = True
                self._resumption.begin(
                    [entry for entry in self._open.values() if not entry.is_sent], self.info.max_num_seqs
                )
        if self.observer is not None:
            self.observer.on_step(output)

    def _on_end(self, entry: OpenRequest, finish: Finish) -> None:
        self._forget(entry.request.request_id)
        if not entry.is_probe and finish.reason in ("stop", "length"):
            self.admission.ended(len(entry.delivered))
            self._num_guilty = 0

    def _observe_tokens(self, entry: OpenRequest, delta: Delta, num_tokens: int) -> None:
        last, entry.last_time = entry.last_time, delta.time
        if self.observer is None or entry.is_probe:
            return
        if last is None:
            num_prompt = len(entry.request.prompt_token_ids)
            self.observer.on_first_token(num_prompt, entry.num_cached, delta.time - entry.arrival_time)
        self.observer.on_tokens(num_tokens, None if last is None else delta.time - last)

    # -- death

    def _on_lost(self, reason: str) -> None:
        """Note that the engine has ended by itself, and restart it."""
        if self._closing:
            return
        self._alive = False
        logger.error("the engine died with %d open requests: %s", len(self._open), reason)
        self._report(reason)
        self.orders.fail_all()
        self._note_end()
        self._supervisor = self._spawn(self._restart(reason))

    def _note_end(self) -> None:
        """Keep an engine's counters in the sums. Its gauges are void, and the open requests go on in the next one."""
        self._past, self.stats = self.total, Stats()
        if self.observer is not None:
            self.observer.on_end(self._open)

    def _report(self, reason: str) -> None:
        if self.reports is not None:
            state = (self._info, self.stats, self.total, self.num_restarts)
            self.reports.write(reason, self._link.black_box, list(self._open.values()), *state)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose failure is logged and ends the client."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                logger.error("the engine's supervisor failed", exc_info=task.exception())
                self._give_up("the engine's supervisor failed")

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(ended)
        return task

    async def _restart(self, reason: str) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        self._convict(reason, now)
        while True:
            self._deaths = [death for death in self._deaths if death > now - RESTART_WINDOW_S]
            if len(self._deaths) > self._max_restarts:
                # The cause is for the log, not for clients.
                logger.critical("the last death: %s", reason)
                self._give_up(f"the engine died and was restarted {len(self._deaths) - 1} times")
                return
            try:
                await self._launch()
                break
            except (HeadraceError, OSError) as error:
                reason, now = str(error), time.monotonic()
                self._deaths.append(now)
                logger.error("the engine did not start again: %s", reason)
                self._report(reason)
        self.num_restarts += 1
        logger.warning("the engine was restarted; %d requests go on", len(self._open))
        # It counts as alive after one real token. Then all other requests are sent.
        self._probe()

    def _convict(self, reason: str, now: float) -> None:
        """Find the request that caused a death, and fail it after enough deaths."""
        entries = [entry for entry in self._open.values() if not entry.is_probe]
        culprit = self._resumption.judge(entries, self.info.max_num_seqs, self._link.was_killed, now)
        if culprit is None:
            return
        logger.error("request %s is given up: %s, over and over", culprit.stream.call_id, reason)
        if self._num_guilty < max(1, self._max_restarts):
            self._deaths = [death for death in self._deaths if death not in culprit.deaths]
        self._num_guilty += 1
        self.num_quarantined += 1
        self._forget(culprit.request.request_id)
        culprit.stream.fail(PoisonedRequestError(f"the engine died {len(culprit.deaths)} times over this request"))

    def _give_up(self, message: str) -> None:
        self._dead = EngineDeadError(message)
        logger.critical("%s; giving up", message)
        self.fail_all(self._dead)
        self.dead.set()

    def fail_all(self, error: HeadraceError) -> None:
        """End every open stream with an error."""
        self.orders.fail_all()
        for request_id, entry in list(self._open.items()):
            entry.stream.fail(error)
            self._forget(request_id)

    # -- counters that survive a restart

    @property
    def total(self) -> Stats:
        """`stats` with counters summed over all lives of the engine, and the gauges of the present one."""
        return summed(self._past, self.stats)


class ProcessClient(EngineClient):
    """The engine in a child process, restarted when it dies (`headrace serve`)."""

    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        super().__init__(
            ProcessLink(config, ENGINE_COMMAND, server.log_format == "json", engine_level(server.uvicorn_log_level)),
            max_num_queued_reqs=server.max_num_queued_reqs,
            max_num_queued_tokens=server.max_num_queued_tokens,
            max_restarts=server.max_restarts,
            watchdog_timeout=server.watchdog_timeout,
        )
        if server.crash_report_dir:
            self.reports = CrashReports(server.crash_report_dir, config, server)


class InprocClient(EngineClient):
    """The engine on a thread of this process (the library and tests). A dead one stays dead."""

    def __init__(self, build: Callable[[], EngineCore], **bounds: float) -> None:
        super().__init__(InprocLink(build), **bounds)  # type: ignore[arg-type]
