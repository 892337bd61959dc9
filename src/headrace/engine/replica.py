"""`Replica`: the life of one engine behind a `Link`: its start, watchdog, death and restart, and the requests it has.

Passes the engine's messages to its `ReplicaOwner`, which owns the open requests and sends them on after a death.
Knows ids of requests, not their contents. `engine.client.EngineClient` holds one, a fleet several.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from headrace.engine.links import Link
from headrace.engine.open_requests import OpenRequest, RequestStream, Resumption, negated, summed
from headrace.engine.order_calls import Orders
from headrace.engine.records.crash_reports import CrashReports
from headrace.protocol import frames
from headrace.protocol.errors import EngineDeadError, EngineLostError, HeadraceError
from headrace.protocol.step import Abort, Add, EngineInfo, Stats
from headrace.protocol.watchdog import Watchdog

logger = logging.getLogger("headrace.engine")

# Deaths further apart than this are separate accidents; closer ones count towards max_restarts.
RESTART_WINDOW_S = 600.0
SHORTAGE_S = 0.25
"""The pause after a start for which the system had no room; it doubles with each death."""
# Multiple of the first start's time after which another start counts as frozen.
START_PATIENCE = 10


class ReplicaOwner(Protocol):
    """Owns the open requests of its replicas. Called on the event loop."""

    def probe(self, replica: Replica) -> RequestStream:
        """Request one real token of an engine that has just started, ahead of all others."""
        ...

    def on_message(self, replica: Replica, message: frames.FromEngine) -> None:
        """Take in a message of the engine, which is no reply to an order."""
        ...

    def on_end(self, replica: Replica) -> None:
        """Note that the engine has ended, by itself or by `close`."""
        ...

    def convict(self, replica: Replica, reason: str, now: float) -> None:
        """Decide where the requests of a dead engine go, and which of them must fail for its death."""
        ...

    def on_given_up(self, replica: Replica, message: str) -> None:
        """Note that the engine is not restarted any more."""
        ...


class Watching:
    """Whether the engine sends the events of its blocks, also after a restart. `post` sends a message to the engine."""

    def __init__(self, post: Callable[[frames.ToEngine], None]) -> None:
        self._post = post
        self._is_watched = False

    def watch(self, is_watched: bool) -> None:
        """Begin or end the events of blocks in the notes of steps."""
        self._is_watched = is_watched
        self._post(frames.Watch(is_watched))

    def renew(self) -> None:
        """Begin them in an engine that has just started, if the last one sent them."""
        if self._is_watched:
            self._post(frames.Watch(True))


class Replica:
    """One engine behind a `Link`.

    Args:
        link: starts the engine and carries messages.
        holder: owns the requests.
        index: its number among the holder's replicas.
        max_restarts: deaths within `RESTART_WINDOW_S` after which the engine is restarted; after that it is given up.
        watchdog_timeout: seconds without a step after which an engine with open requests is ended; see `Watchdog`.

    `entries` are the open requests that it has, or gets as soon as it is ready. `is_up`: it runs; `is_proven`: it has
    made a token since it (re)started; `is_leaving`: it gets no new requests. `fingerprint` is a digest of
    `engine.fingerprint` in a fleet, "" while the engine starts; `num_moved_away` and `num_moved_here` count requests
    that went on in another replica, or came from one. `start_time` is when the engine was ready, in monotonic seconds.
    """

    def __init__(
        self, link: Link, holder: ReplicaOwner, index: int = 0, max_restarts: int = 0, watchdog_timeout: float = 60.0
    ) -> None:
        self.link = link
        self.index = index
        self.max_restarts = max_restarts
        self.entries: dict[str, OpenRequest] = {}
        self.resumption = Resumption(self.send)
        self.info: EngineInfo | None = None
        self.start_seconds = self.start_time = 0.0
        self.fingerprint = ""
        self.is_leaving = False
        self.num_moved_away = self.num_moved_here = 0
        self.deaths: list[float] = []
        self.is_up = self.is_proven = self.is_proven_once = False
        self.watchdog = Watchdog(watchdog_timeout)
        self.orders = Orders(link.post, lambda: self.is_up)
        self.watching = Watching(link.post)
        self.reports: CrashReports | None = None
        self.stats = Stats()
        self.num_restarts = 0
        self.dead: EngineDeadError | None = None
        self._holder = holder
        self._past = Stats()
        self._is_closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs and has made a token since it (re)started."""
        return self.is_up and self.is_proven

    @property
    def phase(self) -> str:
        """Its phase: loading, ready, leaving, restarting or lost."""
        if self.dead is not None:
            return "lost"
        if not self.is_alive:
            return "restarting" if self.is_proven_once else "loading"
        return "leaving" if self.is_leaving else "ready"

    @property
    def total(self) -> Stats:
        """`stats` with counters summed over all lives of the engine, and the gauges of the present one."""
        return summed(self._past, self.stats)

    async def start(self) -> None:
        """Start the engine, also one that was closed, and wait for one real token from it.

        Raises the error that kept the engine from loading (`CheckpointError`, `ModelNotFoundError`, `HeadraceError`).
        """
        self._is_closing = False
        while not await self._is_launched():
            self.num_restarts += 1
        if self._is_closing:
            self.is_up = False
            raise EngineDeadError("the engine was closed while it started")
        self._watch = self._spawn(self._keep_watch())
        async with self._holder.probe(self) as stream:
            async for _ in stream:
                pass
        # The probe is not traffic of any client.
        self._past = summed(self._past, negated(self.stats))
        self.is_proven_once = True

    async def close(self, at_once: bool = False) -> None:
        """Stop the engine, `at_once` in mid-step."""
        self._is_closing, self.is_up = True, False
        self.orders.fail_all()
        self._note_end()
        for task in filter(None, (self._supervisor, self._watch)):
            task.cancel()
        await self.link.close(at_once)

    async def _is_launched(self) -> bool:
        """Start an engine, and return whether it is there: False after a death that another start may mend. An engine
        that ends with an error would do so again. Raises the error of that, or of one death too many."""
        try:
            await self._launch()
            return True
        except EngineLostError as error:
            reason = str(error)
        self.deaths.append(time.monotonic())
        if self._is_closing or self._is_spent():
            times = f"; it was started {len(self.deaths)} times in vain" if self.deaths[1:] else ""
            raise EngineLostError(reason + times)
        logger.error("%s; another one starts", reason)
        self._report(reason)
        return False

    def _is_spent(self) -> bool:
        """Whether the engine died more often of late than it may."""
        self.deaths = [death for death in self.deaths if death > time.monotonic() - RESTART_WINDOW_S]
        return len(self.deaths) > self.max_restarts

    async def _launch(self) -> None:
        """Start an engine. One that takes much longer than the first did, or stands still, counts as frozen."""
        self.is_proven = False
        began = time.monotonic()
        limit = max(self.watchdog.timeout, START_PATIENCE * self.start_seconds) if self.start_seconds else None
        try:
            async with asyncio.timeout(limit or None) as until:
                watching = asyncio.create_task(self._watch_start(until))
                try:
                    self.info = await self.link.start(self._on_message, self._on_lost)
                finally:
                    watching.cancel()
        except TimeoutError:
            await self.link.kill()
            raise EngineDeadError(f"the engine did not start within {time.monotonic() - began:.0f} s") from None
        self.start_seconds = max(self.start_seconds or time.monotonic() - began, self.link.load_seconds)
        self.stats = Stats(num_blocks=self.info.num_blocks)
        self.is_up, self.start_time = True, time.monotonic()
        self.watching.renew()
        self.watchdog.starts_anew()

    async def _watch_start(self, until: asyncio.Timeout) -> None:
        """End a start, but for the first, in which no processor is used or waited for as long as a watchdog waits."""
        watchdog = Watchdog(self.watchdog.timeout)
        while self.start_seconds and watchdog.timeout and not self.link.in_process:
            if (usage := self.link.usage()) is not None:
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
        self.link.post(Abort(""))

    async def _keep_watch(self) -> None:
        """End an engine that stands still with open requests. An idle engine gets a ping now and then."""
        watchdog = self.watchdog
        while True:
            await asyncio.sleep(watchdog.interval)
            if not self.is_up:
                continue
            # It has no open requests, and sent a message lately.
            is_idle = not self.entries and watchdog.silent < max(1.0, watchdog.timeout / 4)
            if not self.entries and not is_idle:
                self._ping()
            if watchdog.tick(time.monotonic(), self.link.usage()) and not is_idle and not self.link.in_process:
                silent, frozen = watchdog.silent, watchdog.frozen
                reason = f"frozen: no step for {silent:.1f} s, no processor time for {frozen:.1f} s of them"
                logger.error("the engine is %s; its stacks follow, then it is killed", reason)
                self.is_up = False
                await self.link.kill()
                self._on_lost(reason)

    def send(self, entry: OpenRequest) -> None:
        """Send one of the `entries`."""
        request = entry.resumed() if entry.was_sent else entry.request
        entry.is_sent = entry.was_sent = True
        self.link.post(Add(request, entry.times(time.monotonic())))

    def release(self, entry: OpenRequest, is_aborted: bool) -> None:
        """Forget one of the `entries`, which has ended there, or `is_aborted`: then its blocks are freed."""
        del self.entries[entry.request.request_id]
        entry.replica = -1
        self.resumption.saw(entry, ended=True)
        if is_aborted and entry.is_sent and self.is_up:
            self.link.post(Abort(entry.request.request_id))

    def hand_over(self) -> list[OpenRequest]:
        """Give up all `entries` but the probe, so that another replica can go on with them."""
        entries = [entry for entry in self.entries.values() if not entry.is_probe]
        self.resumption.clear()
        for entry in entries:
            request_id = entry.request.request_id
            del self.entries[request_id]
            if entry.is_sent and self.is_up:
                self.link.post(Abort(request_id))
            entry.replica, entry.is_sent = -1, False
        return entries

    def _on_message(self, message: frames.FromEngine) -> None:
        self.watchdog.heard()
        self._heard.set()
        if isinstance(message, frames.Reply):
            self.orders.settle(message.order_id, message.body)
        else:
            self._holder.on_message(self, message)

    # -- death

    def _on_lost(self, reason: str) -> None:
        """Note that the engine has ended by itself, and restart it."""
        if self._is_closing:
            return
        self.is_up = False
        logger.error("the engine died with %d open requests: %s", len(self.entries), reason)
        self._report(reason)
        self.orders.fail_all()
        self._note_end()
        self._supervisor = self._spawn(self._restart(reason))

    def _note_end(self) -> None:
        """Keep an engine's counters in the sums. Its gauges are void."""
        self._past, self.stats = self.total, Stats()
        self._holder.on_end(self)

    def _report(self, reason: str) -> None:
        if self.reports is not None:
            state = (self.info, self.stats, self.total, self.num_restarts)
            self.reports.write(reason, self.link.black_box, list(self.entries.values()), *state)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose failure is logged and ends the replica."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                logger.error("the engine's supervisor failed", exc_info=task.exception())
                self._give_up("the engine's supervisor failed")

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(ended)
        return task

    async def _restart(self, reason: str) -> None:
        now = time.monotonic()
        self.deaths.append(now)
        self._holder.convict(self, reason, now)
        while True:
            if self._is_spent():
                # The cause is for the log, not for clients.
                logger.critical("the last death: %s", reason)
                self._give_up(f"the engine died and was restarted {len(self.deaths) - 1} times")
                return
            try:
                await self._launch()
                break
            except (HeadraceError, OSError) as error:
                reason = str(error)
                self.deaths.append(time.monotonic())
                logger.error("the engine did not start again: %s", reason)
                self._report(reason)
                if isinstance(error, OSError):
                    # Such as no descriptor, memory or process. It may pass, but not between tries without a pause.
                    await asyncio.sleep(SHORTAGE_S * 2 ** len(self.deaths))
        self.num_restarts += 1
        logger.warning("the engine was restarted; %d requests go on", len(self.entries))
        # It counts as alive after one real token. Then all other requests are sent.
        self._holder.probe(self)

    def refuse(self, message: str) -> None:
        """Use the engine no more: it will not do."""
        self._is_closing, self.is_up = True, False
        self._give_up(message)

    def _give_up(self, message: str) -> None:
        self.dead = EngineDeadError(message)
        logger.critical("%s; giving up", message)
        self._holder.on_given_up(self, message)
