"""`EngineClient`: the server's view of an engine that lives elsewhere. Owns every open request until its end.

It admits requests (by the engine's own rules and within bounds), hands what comes back to one `RequestStream` per
caller, and, when the engine process dies, tells a new one every open request again with the tokens delivered so far:
callers see a pause. Knows token ids, not text. `server.generation` and `server.http` call it, on one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.config import EngineConfig, ServerConfig
from headrace.core.engine import EngineCore, verify
from headrace.errors import ContextLengthError, EngineDeadError, HeadraceError, QueueFullError, RequestError
from headrace.sampling.params import SamplingParams
from headrace.server import transport
from headrace.server.inputs import max_context, new_request_id
from headrace.server.links import InprocLink, Link, ProcessLink
from headrace.server.outputs import Delta, deltas_of
from headrace.types import EngineInfo, Request, Stats, StepOutput

logger = logging.getLogger("headrace.engine")

# Deaths further apart than this are separate accidents; closer ones count towards max_restarts.
RESTART_WINDOW_S = 600.0
RATE_WINDOW_S = 30.0


class Observer(Protocol):
    """Who wants to measure. Called on the event loop, so it must be quick."""

    def on_step(self, output: StepOutput) -> None: ...

    def on_first_token(self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float) -> None: ...

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """Tokens of one request, `seconds` after its last ones (None for its first)."""
        ...


class RequestStream:
    """What comes back for one call: deltas of `num_requests` requests, each named by its index.

    An async iterator of lists of (index, delta). Deltas that wait for a slow reader are merged, so the stream holds
    at most what was generated, and the engine never waits for it (R-14). Leaving it early, by `close` or by leaving
    its `async with`, aborts what still runs.
    """

    def __init__(self, requests: Sequence[Request], abort: Callable[[str], None]) -> None:
        self.requests = list(requests)
        self._abort = abort
        self._open = set(range(len(requests)))
        self._pending: dict[int, Delta] = {}
        self._wake = asyncio.Event()
        self._error: HeadraceError | None = None

    def push(self, index: int, delta: Delta) -> None:
        if index not in self._open:
            return
        if delta.finish is not None:
            self._open.discard(index)
        if index in self._pending:
            self._pending[index].merge(delta)
        else:
            self._pending[index] = delta
        self._wake.set()

    def fail(self, error: HeadraceError) -> None:
        """End with an error, raised after what has come in already was read."""
        self._error = self._error or error
        self._wake.set()

    def abort(self, index: int) -> None:
        """End one of the requests; nothing more is heard of it."""
        if index in self._open:
            self._open.discard(index)
            self._abort(self.requests[index].request_id)
            self._wake.set()

    def close(self) -> None:
        """Abort whatever is still open. May be called at any time, and twice."""
        for index in tuple(self._open):
            self.abort(index)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, {}
        return list(pending.items())

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class _Open:
    """One open request: where its deltas go, and what a new engine must be told."""

    __slots__ = (
        "arrival_time",
        "delivered",
        "index",
        "last_time",
        "num_cached",
        "num_prompt_logprobs",
        "num_prompt_logprobs_seen",
        "request",
        "started",
        "state",
        "stream",
    )

    def __init__(self, request: Request, stream: RequestStream, index: int, arrival_time: float) -> None:
        self.request = request
        self.stream = stream
        self.index = index
        self.started = False
        self.num_cached = 0
        self.arrival_time = arrival_time
        self.last_time: float | None = None
        self.delivered = list(request.resume_token_ids)
        self.state = request.resume_state
        self.num_prompt_logprobs = 0
        self.num_prompt_logprobs_seen = 0

    def accept(self, delta: Delta) -> None:
        """Note what is delivered. A restarted engine tells prompt logprobs from the start: drop the known ones."""
        self.delivered += delta.token_ids
        if delta.prompt_logprobs:
            seen = self.num_prompt_logprobs_seen
            self.num_prompt_logprobs_seen += len(delta.prompt_logprobs)
            delta.prompt_logprobs = delta.prompt_logprobs[max(0, self.num_prompt_logprobs - seen) :]
            self.num_prompt_logprobs += len(delta.prompt_logprobs)
        if self.started:
            delta.num_cached_tokens = None
            delta.start_time = None
        elif delta.num_cached_tokens is not None:
            self.started = True
            self.num_cached = delta.num_cached_tokens

    def resumed(self) -> Request:
        """The request to tell a new engine."""
        self.num_prompt_logprobs_seen = 0
        known = {name: getattr(self.request, name) for name in self.request.__struct_fields__}
        return Request(**(known | {"resume_token_ids": list(self.delivered), "resume_state": self.state}))


class EngineClient:
    """One engine behind a `Link`.

    Args:
        link: starts the engine and carries messages.
        max_num_queued_reqs, max_num_queued_tokens: bounds on requests that the engine has not started.
        max_restarts: deaths within `RESTART_WINDOW_S` that are repaired; after that `EngineDeadError`.
    """

    def __init__(
        self,
        link: Link,
        *,
        max_num_queued_reqs: int = 1024,
        max_num_queued_tokens: int = 2**20,
        max_restarts: int = 0,
    ) -> None:
        self._link = link
        self._max_reqs = max_num_queued_reqs
        self._max_tokens = max_num_queued_tokens
        self._max_restarts = max_restarts
        self._open: dict[str, _Open] = {}
        self._info: EngineInfo | None = None
        self._starts: collections.deque[tuple[float, int]] = collections.deque()
        self._deaths: list[float] = []
        self._past = Stats()
        self._dead: HeadraceError | None = None
        self._alive = False
        self._proven = False
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._last_frame_time = 0.0
        self.observer: Observer | None = None
        self.stats = Stats()
        self.num_restarts = 0
        self.is_proven_once = False
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.dead = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Start the engine and see one real token from it.

        Raises what the engine could not load for (`CheckpointError`, `ModelNotFoundError`, `HeadraceError`).
        """
        try:
            await self._launch()
            async with self.submit([self._probe()]) as stream:
                async for _ in stream:
                    pass
            # What the probe cost is nobody's traffic.
            self._past = Stats(**{name: -getattr(self.stats, name) for name in COUNTERS})
            self.is_proven_once = True
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop the engine. Open streams end with `EngineDeadError`."""
        self._closing = True
        self._alive = False
        self._fail_all(EngineDeadError("the server is shutting down"))
        if self._supervisor is not None:
            self._supervisor.cancel()
        await self._link.close()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def is_started(self) -> bool:
        """The engine was ready once, so that `info` is known."""
        return self._info is not None

    @property
    def is_alive(self) -> bool:
        """The engine runs and has made a token since it (re)started."""
        return self._alive and self._proven

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def stalled_for(self) -> float:
        """Seconds since the engine was last heard of, if it owes something; else 0. Its step counter's standstill."""
        return time.monotonic() - self._last_frame_time if self._open and self._alive else 0.0

    async def _launch(self) -> None:
        self._proven = False
        self._info = await self._link.start(self._on_message, self._on_lost)
        self.stats = Stats(num_blocks=self._info.num_blocks)
        self._alive = True
        self._last_frame_time = time.monotonic()

    def _probe(self) -> Request:
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True, detokenize=False)
        return Request(request_id=PROBE + new_request_id(), prompt_token_ids=[0], params=params)

    # -- requests

    def submit(self, requests: Sequence[Request], arrival_time: float | None = None) -> RequestStream:
        """Accept all of `requests` or none. `arrival_time` is when the call came in, if not now.

        Raises `RequestError` (can not be served as it stands), `QueueFullError` (not now) or `EngineDeadError`.
        """
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        for request in requests:
            if len(request.prompt_token_ids) >= max_context(self.info):
                bound = f"at most {max_context(self.info) - 1} tokens long"
                raise ContextLengthError("prompt", len(request.prompt_token_ids), bound)
            verify(request, self.info)
            if request.params.logits_processors and not self._link.in_process:
                bound = "left out, unless the engine runs in the caller's own process"
                raise RequestError("logits_processors", "functions", bound)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._admit(len(requests), num_tokens)
        stream = RequestStream(requests, self.abort)
        arrival = time.monotonic() if arrival_time is None else arrival_time
        for index, request in enumerate(requests):
            self._open[request.request_id] = _Open(request, stream, index, arrival)
            if self._alive:
                self._link.post(transport.Add(request))
        self.num_waiting += len(requests)
        self.num_waiting_tokens += num_tokens
        return stream

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks. Unknown and ended ids are fine: ends race with aborts."""
        if self._forget(request_id) and self._alive:
            self._link.post(transport.Abort(request_id))

    def reset_prefix_cache(self) -> None:
        if self._alive:
            self._link.post(transport.ResetPrefixCache())

    def _admit(self, num_requests: int, num_tokens: int) -> None:
        if num_requests > self._max_reqs:
            raise RequestError("n", num_requests, f"at most {self._max_reqs} answers in one call (n times prompts)")
        over_reqs = self.num_waiting + num_requests - self._max_reqs
        over_tokens = self.num_waiting_tokens + num_tokens - self._max_tokens
        # A call above the token bound by itself is let into an empty queue: it could never be served otherwise.
        if over_reqs <= 0 and (over_tokens <= 0 or self.num_waiting == 0):
            return
        raise QueueFullError(
            f"{self.num_waiting} requests with {self.num_waiting_tokens} tokens wait already; the bounds are "
            f"{self._max_reqs} and {self._max_tokens}",
            retry_after=self._retry_after(),
        )

    def _retry_after(self) -> int:
        """Seconds that the queue takes at the rate of the last half minute, 1 to 60."""
        now = time.monotonic()
        while self._starts and self._starts[0][0] < now - RATE_WINDOW_S:
            self._starts.popleft()
        if not self._starts:
            return 10
        span = max(now - self._starts[0][0], 1.0)
        wait_reqs = self.num_waiting * span / len(self._starts)
        wait_tokens = self.num_waiting_tokens * span / sum(num_tokens for _, num_tokens in self._starts)
        return min(60, max(1, math.ceil(max(wait_reqs, wait_tokens))))

    def _forget(self, request_id: str) -> _Open | None:
        entry = self._open.pop(request_id, None)
        if entry is not None and not entry.started:
            self._leave_queue(entry)
        return entry

    def _leave_queue(self, entry: _Open) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= len(entry.request.prompt_token_ids)

    # -- what comes back

    def _on_message(self, message: transport.FromEngine) -> None:
        self._last_frame_time = time.monotonic()
        match message:
            case transport.Output(output):
                self._on_output(output)
            case transport.Rejected(request_id, field, value, bound, code):
                entry = self._forget(request_id)
                if entry is not None:
                    entry.stream.fail(RequestError(field, value, bound, code))
                    entry.stream.close()
            case _:
                raise transport.TransportError(f"unexpected {type(message).__name__} from a running engine")

    def _on_output(self, output: StepOutput) -> None:
        if output.stats is not None:
            self.stats = output.stats
        for request_id, delta in deltas_of(output):
            entry = self._open.get(request_id)
            if entry is None:
                continue
            was_waiting = not entry.started
            entry.state = output.states.get(request_id, entry.state)
            entry.accept(delta)
            if was_waiting and entry.started:
                self._leave_queue(entry)
                self._starts.append((output.end_time, len(entry.request.prompt_token_ids)))
            num_tokens = len(delta.token_ids)
            if delta.beams is not None:
                num_tokens = sum(len(beam.token_ids) for beam in delta.beams.beams)
            self._proven = self._proven or num_tokens > 0
            if num_tokens:
                self._observe_tokens(entry, delta, num_tokens)
            if delta.finish is not None:
                self._forget(request_id)
            entry.stream.push(entry.index, delta)
        if self.observer is not None:
            self.observer.on_step(output)

    def _observe_tokens(self, entry: _Open, delta: Delta, num_tokens: int) -> None:
        last, entry.last_time = entry.last_time, delta.time
        if self.observer is None or entry.request.request_id.startswith(PROBE):
            return
        if last is None:
            num_prompt = len(entry.request.prompt_token_ids)
            self.observer.on_first_token(num_prompt, entry.num_cached, delta.time - entry.arrival_time)
        self.observer.on_tokens(num_tokens, None if last is None else delta.time - last)

    # -- death

    def _on_lost(self, reason: str) -> None:
        """The link's peer is gone without having been asked to go."""
        if self._closing:
            return
        self._alive = False
        # Its counts stay counted; what it held is held no more.
        self._past, self.stats = self.total, Stats()
        logger.error("the engine died with %d open requests: %s", len(self._open), reason)
        self._supervisor = asyncio.get_running_loop().create_task(self._restart(reason))

    async def _restart(self, reason: str) -> None:
        while True:
            now = time.monotonic()
            self._deaths = [death for death in self._deaths if death > now - RESTART_WINDOW_S] + [now]
            if len(self._deaths) > self._max_restarts:
                self._give_up(f"the engine died ({reason}) and was restarted {len(self._deaths) - 1} times")
                return
            try:
                await self._launch()
            except (HeadraceError, OSError) as error:
                reason = str(error)
                logger.error("the engine did not start again: %s", reason)
                continue
            break
        self.num_restarts += 1
        resumed = [entry.resumed() for entry in self._open.values()]
        logger.warning("the engine was restarted; %d requests go on", len(resumed))
        for request in resumed:
            self._link.post(transport.Add(request))
        # One real token before it is called alive again, whoever gets it first.
        self.submit([self._probe()])

    def _give_up(self, message: str) -> None:
        self._dead = EngineDeadError(message)
        logger.critical("%s; giving up", message)
        self._fail_all(self._dead)
        self.dead.set()

    def _fail_all(self, error: HeadraceError) -> None:
        for request_id in list(self._open):
            entry = self._forget(request_id)
            if entry is not None:
                entry.stream.fail(error)

    # -- counters that survive a restart

    @property
    def total(self) -> Stats:
        """`stats` with counters summed over all lives of the engine. Gauges are those of the present one."""
        return self._sum(self._past, self.stats)

    @staticmethod
    def _sum(past: Stats, now: Stats) -> Stats:
        summed = {name: getattr(past, name) + getattr(now, name) for name in COUNTERS}
        gauges = {name: getattr(now, name) for name in now.__struct_fields__ if name not in COUNTERS}
        return Stats(**(gauges | summed))


PROBE = "probe-"
COUNTERS = (
    "num_steps",
    "num_preemptions",
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_recomputed_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_batched_tokens",
)


class ProcessClient(EngineClient):
    """The engine in a child process, restarted when it dies (`headrace serve`)."""

    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        super().__init__(
            ProcessLink(config),
            max_num_queued_reqs=server.max_num_queued_reqs,
            max_num_queued_tokens=server.max_num_queued_tokens,
            max_restarts=server.max_restarts,
        )


class InprocClient(EngineClient):
    """The engine on a thread of this process (the library and tests). A dead one stays dead."""

    def __init__(self, build: Callable[[], EngineCore], **bounds: int) -> None:
        super().__init__(InprocLink(build), **bounds)
