"""A fleet by a modelled clock: each replica is the engine's own scheduler and blocks, and a step takes the time of a
formula. No host time enters, so a run gives the same figures everywhere. Called by `headrace simulate`.

A request waits in front of the router until a replica has room. A replica computes one step at a time; requests that
come in between join the next one. Everything outside the engine (network, text, Python) takes no time here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import msgspec

from headrace.core.options import SchedulerOptions
from headrace.core.prefix import root_key
from headrace.core.reports import KeyReports
from headrace.core.requests import verify_fit
from headrace.core.scheduler import Scheduler
from headrace.fleet.dispatch import Dispatcher, has_room
from headrace.fleet.index import prefix_keys
from headrace.fleet.router import Route, Router
from headrace.fleet.traces import Call
from headrace.protocol.errors import RequestError
from headrace.protocol.kinds import CacheKind
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, ScheduledBatch, StepResult

StepTime = Callable[[Sequence[int], Sequence[int], int], float]
"""Seconds of a step, of where its chunks start, how long they are, and its rows of logits."""
TOKEN = 7
SECRET = b"simulation"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a replica's scheduler. `num_blocks` are of kind 0 of the cache's `kinds`, `more_blocks` of the
    others: blocks of windows, slots of states."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32768
    enable_prefix_caching: bool = True
    kinds: tuple[CacheKind, ...] = (CacheKind(),)
    more_blocks: tuple[int, ...] = ()


class Life(msgspec.Struct):
    """A request's times in seconds of the trace, its tokens, its replica, and prompt tokens that the cache had."""

    arrival: float
    num_prompt: int
    num_new: int
    replica: int = -1
    first: float = math.inf
    end: float = math.inf
    num_cached: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """0 for a single token, which breaks no goal."""
        return (self.end - self.first) / (self.num_new - 1) if self.num_new > 1 else 0.0

    @property
    def e2el(self) -> float:
        return self.end - self.arrival

    def keeps(self, goals: dict[str, float]) -> bool:
        """Whether the times are within goals in milliseconds by ttft, tpot, e2el."""
        return all(1e3 * getattr(self, name) <= goal for name, goal in goals.items())


class SimulatedRun(msgspec.Struct):
    """The outcome of a simulation. `num_refused`: requests that no replica can hold. `has_failed`: it ended early,
    since more requests than allowed broke their goals."""

    lives: list[Life]
    num_refused: int
    num_steps: int
    num_preemptions: int
    duration: float
    has_failed: bool = False


class _Replica:
    def __init__(self, sizes: Sizes) -> None:
        self.scheduler = Scheduler(
            SchedulerOptions(
                num_blocks=sizes.num_blocks,
                block_size=sizes.block_size,
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=sizes.max_num_batched_tokens,
                max_model_len=sizes.max_model_len,
                enable_prefix_caching=sizes.enable_prefix_caching,
                kinds=sizes.kinds,
                more_blocks=sizes.more_blocks,
            )
        )
        self.reports = KeyReports(self.scheduler.cache, SECRET, 1)
        self.batch: ScheduledBatch | None = None
        self.start = 0.0
        self.num_prompt_tokens = 0


class Simulation:
    """Replicas of some `sizes` behind a router of a `policy`, whose steps take `step_time`. `is_early`: a request goes
    to a replica when it comes, as in fleets without a queue in front."""

    def __init__(
        self, num_replicas: int, policy: str, sizes: Sizes, step_time: StepTime, is_early: bool = False
    ) -> None:
        self.router = Router(policy, num_replicas, sizes.block_size)
        self._sizes = sizes
        # One engine has no queue in front of it either.
        self._is_early = is_early or num_replicas == 1
        self._queue: Dispatcher[str] = Dispatcher(self.router, "fcfs")
        self._requests: dict[str, Request] = {}
        self._routes: dict[str, Route] = {}
        self._all = range(num_replicas)
        self._root = root_key(SECRET, "", "", b"")
        self.replicas = [_Replica(sizes) for _ in range(num_replicas)]
        self._time = step_time
        self._ends: list[tuple[float, int]] = []
        self._lives: dict[str, Life] = {}
        self._done: list[Life] = []
        self._num_steps = 0

    def run(
        self, calls: Sequence[Call], goals: dict[str, float] | None = None, most_failures: float = math.inf,
        on_step: Callable[[int], None] = lambda num_done: None,
    ) -> SimulatedRun:  # fmt: skip
        """Play the calls. It ends early once more than `most_failures` of them broke the `goals`.

        `on_step` is called now and then with the number of requests that ended."""
        ends, num_refused, num_failures = self._ends, 0, 0
        at, now, checked = 0, 0.0, 0
        while at < len(calls) or ends:
            while at < len(calls) and (not ends or calls[at].time <= ends[0][0]):
                moment = calls[at].time
                # Requests that come at one time are in one step.
                while at < len(calls) and calls[at].time == moment:
                    call, at = calls[at], at + 1
                    if not self._arrive(call, at):
                        num_refused += 1
                        num_failures += 1
                self._dispatch(moment)
            if not ends:
                continue
            now, index = heapq.heappop(ends)
            self._finish(index, now)
            if len(self._done) >= checked + 64 or not ends:
                if goals:
                    num_failures += sum(not life.keeps(goals) for life in self._done[checked:])
                checked = len(self._done)
                on_step(checked)
            if num_failures > most_failures:
                break
        num_preemptions = sum(replica.scheduler.counters.num_preemptions for replica in self.replicas)
        failed = num_failures > most_failures
        return SimulatedRun(self._done, num_refused, self._num_steps, num_preemptions, now, failed)

    def _arrive(self, call: Call, number: int) -> bool:
        """Queue a call; False if no replica can hold it."""
        request = Request(
            request_id=str(number),
            prompt_token_ids=call.token_ids(number),
            params=SamplingParams(seed=1, max_tokens=call.num_new, ignore_eos=True),
        )
        sizes, scheduler = self._sizes, self.replicas[0].scheduler
        try:
            verify_fit(request, scheduler.max_model_len, scheduler.max_num_seqs, sizes.num_blocks, sizes.block_size)
        except RequestError:
            return False
        keys: list[bytes] = []
        if self.router.policy == "prefix" and sizes.enable_prefix_caching:
            keys = prefix_keys(request.prompt_token_ids, sizes.block_size, SECRET, self._root)
        self._lives[request.request_id] = Life(call.time, call.num_prompt, call.num_new)
        self._requests[request.request_id] = request
        self._queue.add(request.request_id, request, keys)
        return True

    def _dispatch(self, now: float) -> None:
        """Send requests from the queue to replicas that have room, and let idle ones begin a step."""
        idle = dict[int, None]()
        for request_id, route in self._queue.dispatch(self._is_free, lambda item: self._all):
            replica = self.replicas[route.index]
            replica.scheduler.add(self._requests.pop(request_id))
            self._routes[request_id] = route
            self._lives[request_id].replica = route.index
            if replica.batch is None:
                idle[route.index] = None
        for index in idle:
            self._start(index, now)

    def _is_free(self, index: int) -> bool:
        if self._is_early:
            return True
        return has_room(self.router.loads[index], self._sizes.max_num_seqs, self._sizes.max_num_batched_tokens)

    def _start(self, index: int, now: float) -> None:
        replica = self.replicas[index]
        batch = replica.batch = replica.scheduler.schedule()
        replica.start = now
        seconds = self._time(batch.starts, batch.lens, sum(batch.samples)) if batch.lens else 0.0
        heapq.heappush(self._ends, (now + seconds, index))
        self._num_steps += 1

    def _finish(self, index: int, now: float) -> None:
        replica, router = self.replicas[index], self.router
        batch = replica.batch
        if batch is None:
            return
        tokens = [TOKEN if samples else -1 for samples in batch.samples]
        output = replica.scheduler.commit(batch, StepResult(step_id=batch.step_id, token_ids=tokens))
        num_before, replica.num_prompt_tokens = (
            replica.num_prompt_tokens,
            replica.scheduler.counters.num_prompt_tokens,
        )
        router.measure(index, replica.num_prompt_tokens - num_before, now - replica.start)
        lives = self._lives
        for request_id, num_cached in output.started.items():
            lives[request_id].num_cached = num_cached
        if router.loads[index].has_prompts:
            for request_id in output.request_ids:
                router.computed(self._routes[request_id])
        for request_id in output.request_ids:
            life = lives[request_id]
            if life.first == math.inf:
                life.first = now
        for request_id in output.finished:
            life = lives.pop(request_id)
            life.end = now
            self._done.append(life)
            router.ended(self._routes.pop(request_id))
        report = replica.reports.take()
        if report is not None and router.policy == "prefix":
            router.index.update(index, report)
        replica.batch = None
        if replica.scheduler.has_work():
            self._start(index, now)
        if len(self._queue):
            self._dispatch(now)


def smallest_fleet(runs: Callable[[int], SimulatedRun], most: int) -> tuple[int, SimulatedRun] | None:
    """Return the least number of replicas, up to `most`, whose run does not fail, and that run; None if all fail.

    `runs` plays the trace on so many replicas. More replicas are taken to be no worse."""
    good: tuple[int, SimulatedRun] | None = None
    low, num = 0, 1
    while good is None:
        run = runs(num)
        if not run.has_failed:
            good = num, run
        elif num == most:
            return None
        else:
            low, num = num, min(2 * num, most)
    while good[0] - low > 1:
        middle = (low + good[0]) // 2
        run = runs(middle)
        if run.has_failed:
            low = middle
        else:
            good = middle, run
    return good


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` percent of sorted `values` do not exceed, as numpy interpolates it; NaN of none."""
    if not values:
        return math.nan
    place = (len(values) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
