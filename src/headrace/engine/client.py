"""`EngineClient`: the server's side of an engine in another process. Owns every open request until its end.

It admits requests, passes their output to one `RequestStream` for each caller, and, when the engine process dies,
submits every open request to a new one with the tokens delivered so far. `engine.replica` has the engine's life. Knows
token ids, not text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec

from headrace.core.requests import verify_size
from headrace.engine import tenants
from headrace.engine.admission import Admission
from headrace.engine.core import EngineCore, verify
from headrace.engine.links import ENGINE_COMMAND, InprocLink, Link, ProcessLink, engine_level
from headrace.engine.open_requests import PROBE, OpenRequest, PoisonedRequestError, RequestStream
from headrace.engine.order_calls import Orders
from headrace.engine.records.crash_reports import CrashReports
from headrace.engine.replica import Replica
from headrace.protocol import frames
from headrace.protocol.adapters import AdapterReply, LoadAdapter, LoadedAdapter, UnloadAdapter, read_reply
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import DeadlineError, EngineDeadError, HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Finish, Request, ResetPrefixCache, Stats, StepOutput
from headrace.text.inputs import new_request_id
from headrace.text.outputs import Delta, deltas_of

logger = logging.getLogger("headrace.engine")


RANKS_GRACE_S = 2.0
"""By which the watchdog of an engine of several ranks is later than their own."""


class Observer(Protocol):
    """Takes measurements of an engine; `insight.metrics` has one. Called on the event loop, so it must be quick."""

    def on_step(self, output: StepOutput, replica: int = 0) -> None:
        """Note a step of one of the engines."""
        ...

    def on_end(self, request_ids: Collection[str], replica: int = 0) -> None:
        """Note that the engine has ended. These requests go on in the next one, whose steps count from the first."""
        ...

    def on_first_token(self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float) -> None: ...

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """Note tokens of one request, `seconds` after the tokens before them (None for its first)."""
        ...


class EngineClient:
    """One engine behind a `Link`.

    Args:
        link: starts the engine and carries messages.
        max_num_queued_reqs, max_num_queued_tokens: bounds on requests that the engine has not started.
        max_restarts, watchdog_timeout: see `Replica`; an engine that is given up ends all with an `EngineDeadError`.
            Deaths caused by a request do not count, as long as others are served in between.
    """

    is_fleet = False
    """Whether its replicas may come and go."""

    def __init__(
        self,
        link: Link,
        *,
        max_num_queued_reqs: int = 1024,
        max_num_queued_tokens: int = 2**20,
        max_restarts: int = 0,
        watchdog_timeout: float = 60.0,
    ) -> None:
        self._set_up([link], max_num_queued_reqs, max_num_queued_tokens, max_restarts, watchdog_timeout)

    def _set_up(
        self, links: Sequence[Link], max_reqs: int, max_tokens: int, max_restarts: int, watchdog_timeout: float
    ) -> None:
        self._life = max_restarts, watchdog_timeout
        self.replicas = [Replica(link, self, at, *self._life) for at, link in enumerate(links)]
        self.is_watched = False
        self._open: dict[str, OpenRequest] = {}
        self._num_guilty = 0
        self._dead: HeadraceError | None = None
        self._closing = False
        self.admission = Admission(max_reqs, max_tokens)
        self.observer: Observer | None = None
        self.num_expired = self.num_quarantined = 0
        self.is_draining = False
        self.dead = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Start the engine, also one that was closed, and wait for one real token from it.

        Raises the error that kept the engine from loading (`CheckpointError`, `ModelNotFoundError`, `HeadraceError`).
        """
        self._closing = False
        try:
            await asyncio.gather(*(replica.start() for replica in self.replicas))
        except BaseException:
            await self.close()
            raise

    async def close(self, at_once: bool = False) -> None:
        """Stop the engine, `at_once` in mid-step. Open streams end with `EngineDeadError`."""
        self._closing = True
        for replica in self.replicas:
            replica.is_up = False
        self.fail_all(EngineDeadError("the server is shutting down"))
        await asyncio.gather(*(replica.close(at_once) for replica in self.replicas))

    @property
    def info(self) -> EngineInfo:
        info = self.replicas[0].info
        if info is None:
            raise EngineDeadError("the engine has not started")
        return info

    @property
    def is_started(self) -> bool:
        """Whether the engine was ready once, so that `info` is known."""
        return self.replicas[0].info is not None

    @property
    def is_proven_once(self) -> bool:
        return any(replica.is_proven_once for replica in self.replicas)

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs and has made a token since it (re)started."""
        return any(replica.is_alive for replica in self.replicas)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and not started again."""
        return self._closing

    @property
    def is_stalled(self) -> bool:
        """Whether no engine that runs makes progress."""
        return all(replica.watchdog.is_stalled for replica in self.replicas if replica.is_alive)

    def replica(self, index: int) -> Replica:
        """Return a replica by its number. Raises `KeyError`."""
        for replica in self.replicas:
            if replica.index == index:
                return replica
        raise KeyError(index)

    @property
    def pids(self) -> list[int]:
        """The ids of the engine's running processes; empty if it runs in this one."""
        return [replica.link.pid for replica in self.replicas if replica.link.pid is not None]

    @property
    def orders(self) -> Orders:
        return self.replicas[0].orders

    def watch(self, is_watched: bool) -> None:
        """Begin or end the events of blocks in the notes of steps, of the first engine."""
        self.is_watched = is_watched
        for replica in self.replicas[:1]:
            replica.watching.watch(is_watched)

    @property
    def num_restarts(self) -> int:
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """The number of requests that the engine has not begun."""
        return self.admission.num_waiting

    async def answers(self, seconds: float = 1.0) -> bool:
        """Return whether the engine sends a message within `seconds`, or computes."""
        return any(await asyncio.gather(*(replica.answers(seconds) for replica in self.replicas)))

    async def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        """Have all engines read the adapter at `path`. Raises `RequestError`, `EngineDeadError`."""
        loaded: LoadedAdapter | None = None
        for replica in self.replicas:
            adapter = read_reply(await replica.orders.give(LoadAdapter(path), AdapterReply))
            if adapter is None or (loaded is not None and adapter.digest != loaded.digest):
                raise RequestError("lora_path", path, "the same files for all engines")
            loaded = adapter
        if loaded is None:
            raise EngineDeadError("there is no engine")
        for replica in self.replicas:
            replica.link.adapters[name] = path
        return loaded

    async def unload_adapter(self, name: str, digest: str) -> None:
        """Have all engines forget an adapter that no request uses. Raises `RequestError`, `EngineDeadError`."""
        for replica in self.replicas:
            read_reply(await replica.orders.give(UnloadAdapter(digest), AdapterReply))
            replica.link.adapters.pop(name, None)

    def probe(self, replica: Replica) -> RequestStream:
        """Request one real token, of an encoder a vector, ahead of the queue. A probe that the last engine has not
        answered is sent again."""
        for entry in [entry for entry in replica.entries.values() if entry.is_probe]:
            replica.send(entry)
            return entry.stream
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True, detokenize=False)
        request = Request(request_id=PROBE + new_request_id(), prompt_token_ids=[0], params=params)
        if not self.info.generates:
            request = msgspec.structs.replace(request, pooling="cls")
        stream = RequestStream([request], self.abort)
        entry = self._enter(request, stream, 0, time.monotonic(), 0, "")
        self._assign(entry, replica)
        if replica.is_up:
            replica.send(entry)
        return stream

    # -- requests

    def check_room(self, num: int) -> None:
        """Raise the errors that `submit` would raise now for `num` requests, however short, before they are
        tokenised."""
        self._check_open()
        self.admission.check_room(num, tenants.current().name, time.monotonic())

    def verify(self, requests: Sequence[Request]) -> None:
        """Raise `RequestError` unless the engine can serve each of `requests`. A worker thread may call this."""
        verify_size(requests, self.info.vocab_size)
        for request in {r.group or r.request_id: r for r in requests}.values():  # a group differs in its seeds only
            verify(request, self.info)
            if request.params.logits_processors and not all(each.link.in_process for each in self.replicas):
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
        now); at `deadline` (both monotonic seconds) the stream ends with a `DeadlineError`, whatever state its requests
        are in.

        Raises the errors of `check_room`, or `DeadlineError` (too late).
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
            self._place(entry)
        if deadline is not None:
            stream.arm(asyncio.get_running_loop().call_later(deadline - now, self._expire, stream))
        return stream

    def _enter(self, request: Request, stream: RequestStream, index: int, arrival: float, *more: Any) -> OpenRequest:
        entry = OpenRequest(request, stream, index, arrival, *more)
        self._open[request.request_id] = entry
        self.admission.enter(entry.work, entry.name)
        return entry

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
        self._forget(request_id, is_aborted=True)

    def reset_prefix_cache(self) -> None:
        for replica in self.replicas:
            if replica.is_up:
                replica.link.post(ResetPrefixCache())

    def _forget(self, request_id: str, is_aborted: bool = False) -> OpenRequest | None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            if not entry.started:
                self.admission.leave(entry.work, entry.name)
            if entry.replica >= 0:
                self.replica(entry.replica).release(entry, is_aborted)
        return entry

    # -- messages of the engine

    def on_message(self, replica: Replica, message: frames.FromEngine) -> None:
        """See `ReplicaOwner`."""
        match message:
            case frames.Output(output):
                self._on_output(replica, output)
            case frames.Rejected(request_id, field, value, bound, code):
                entry = self._forget(request_id) if request_id in replica.entries else None
                if entry is not None:
                    refusal = RequestError(field, value, bound, code)
                    fault = HeadraceError(f"the engine could not take in the request: {value}")
                    entry.stream.fail(fault if code == HeadraceError.code else refusal)
            case _:
                raise frames.TransportError(f"unexpected {type(message).__name__} from a running engine")

    def _on_output(self, replica: Replica, output: StepOutput) -> None:
        if output.stats is not None:
            replica.stats = output.stats
        for request_id, delta in deltas_of(output):
            entry = replica.entries.get(request_id)
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
                self._on_finish(entry, delta.finish)
            elif num_tokens or (began and entry.shows_no_tokens and len(entry.deaths) < 2):
                replica.resumption.saw(entry, ended=False)
            entry.stream.push(entry.index, delta)
            if (num_tokens or delta.pooled) and not replica.is_proven:
                # The engine works: send it the requests that waited for that.
                replica.is_proven = True
                self._on_proven(replica)
        if self.observer is not None:
            self.observer.on_step(output, replica.index)

    def _on_finish(self, entry: OpenRequest, finish: Finish) -> None:
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

    # -- where requests go

    def _place(self, entry: OpenRequest) -> None:
        """Send a new request, or keep it for the next engine."""
        replica = self.replicas[0]
        self._assign(entry, replica)
        if replica.is_alive:
            replica.resumption.add(entry)

    def _on_proven(self, replica: Replica) -> None:
        """Send a new engine the requests that waited for it."""
        entries = [entry for entry in replica.entries.values() if not entry.is_sent]
        replica.resumption.begin(entries, self.info.max_num_seqs)

    @staticmethod
    def _assign(entry: OpenRequest, replica: Replica) -> None:
        entry.replica = replica.index
        replica.entries[entry.request.request_id] = entry

    # -- death

    def on_end(self, replica: Replica) -> None:
        """See `ReplicaOwner`."""
        if self.observer is not None:
            self.observer.on_end(self._open, replica.index)

    def convict(self, replica: Replica, reason: str, now: float) -> None:
        """Find the request that caused a death, and fail it after enough deaths."""
        entries = [entry for entry in replica.entries.values() if not entry.is_probe]
        most, was_killed = self.info.max_num_seqs, replica.link.was_killed
        culprit = replica.resumption.judge(entries, most, was_killed, now)
        if culprit is None:
            return
        logger.error("request %s is given up: %s, over and over", culprit.stream.call_id, reason)
        for each in self.replicas:
            if self._num_guilty < max(1, each.max_restarts):
                each.deaths = [death for death in each.deaths if death not in culprit.deaths]
        self._num_guilty += 1
        self.num_quarantined += 1
        self._forget(culprit.request.request_id)
        culprit.stream.fail(PoisonedRequestError(f"the engine died {len(culprit.deaths)} times over this request"))

    def on_given_up(self, replica: Replica, message: str) -> None:
        """End all requests: there is no engine any more."""
        self._dead = EngineDeadError(message)
        self.fail_all(self._dead)
        self.dead.set()

    def fail_all(self, error: HeadraceError) -> None:
        """End every open stream with an error."""
        for replica in self.replicas:
            replica.orders.fail_all()
        for request_id, entry in list(self._open.items()):
            entry.stream.fail(error)
            self._forget(request_id)

    # -- gauges, and counters that survive a restart

    @property
    def stats(self) -> Stats:
        """Return the gauges and counters of the present engine."""
        return self.replicas[0].stats

    @property
    def total(self) -> Stats:
        """`stats` with counters summed over all lives of the engine, and the gauges of the present one."""
        return self.replicas[0].total


def watchdog_timeout(config: EngineConfig, server: ServerConfig) -> float:
    """Return the seconds without a step or processor time after which an engine is ended: the first of several ranks
    soon after the others would have ended for lack of it. Raises `RequestError` for settings that ranks do not have."""
    field, world = config.ranks
    if world == 1:
        return server.watchdog_timeout
    if server.slot_save_path is not None:
        bound = f"left out with {field} {world}: each rank has its part of a block"
        raise RequestError("slot_save_path", server.slot_save_path, bound)
    return min(server.watchdog_timeout or float("inf"), config.distributed_timeout + RANKS_GRACE_S)


class ProcessClient(EngineClient):
    """The engine in a child process, restarted when it dies (`headrace serve`)."""

    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        super().__init__(
            ProcessLink(config, ENGINE_COMMAND, server.log_format == "json", engine_level(server.uvicorn_log_level)),
            max_num_queued_reqs=server.max_num_queued_reqs,
            max_num_queued_tokens=server.max_num_queued_tokens,
            max_restarts=server.max_restarts,
            watchdog_timeout=watchdog_timeout(config, server),
        )
        if server.crash_report_dir:
            self.replicas[0].reports = CrashReports(server.crash_report_dir, config, server)


class InprocClient(EngineClient):
    """The engine on a thread of this process (the library and tests). A dead one stays dead."""

    def __init__(self, build: Callable[[], EngineCore], **bounds: float) -> None:
        super().__init__(InprocLink(build), **bounds)  # type: ignore[arg-type]
