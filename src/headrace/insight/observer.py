"""`Observer`: all that a step's output and the end of an answer leave behind in the server's process.

It stands on every token's way back, so it only counts (`Counts`, which `insight.metrics` renders) and keeps the notes
of the engine's journal as they came, in a log of `MAX_UNREAD` entries with the ends of engines and of answers among
them. Somebody who reads, as `insight.explainer` does for explanations and live pages, gets the entries in their order;
when the log is full its oldest entry is handed over. Knows no HTTP and does not look into a note. Made by
`insight.explainer` and called by `EngineClient` and `TextClient`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from headrace.engine import context, tenants
from headrace.engine.generation import FinishObserver
from headrace.protocol.step import EngineInfo, StepOutput
from headrace.text.outputs import RequestState

LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
TOKENS = tuple(2**exponent for exponent in range(18))
SOURCES = ("local_compute", "local_cache_hit")
REASONS = ("stop", "length", "abort", "error")
MAX_UNREAD = 256
"""Entries of the log. A note has some numbers for each sequence of a step."""


class Totals(msgspec.Struct):
    """The counters of one model since the start, and its present state. `num_busy` counts the running requests of each
    step, and `most_tokens` the tokens of the longest request that has ended, prompt and answer."""

    num_steps: int = 0
    num_busy: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    most_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


class Counts:
    """The histograms and counters of one model, in `registry`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._values = (model_name, "0")
        self._num_batched: dict[int, int] = {}
        self.totals = Totals()
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", GAP_SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to end.", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to the first step.", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to last.", SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Decode time over tokens after the first.", GAP_SECONDS
        )
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token.", SECONDS)
        self._lag = self._histogram(
            "event_loop_lag_seconds", "How much later than due the server's event loop ran a timer.", SECONDS
        )
        self._iteration = self._histogram("iteration_tokens_total", "Tokens computed in a step.", TOKENS)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS)
        self._answers = self._histogram("request_generation_tokens", "Generated tokens of a finished request.", TOKENS)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a finished request.", TOKENS)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a finished request that no cache had.", TOKENS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Those of them found in the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._sources = self._counters("prompt_tokens_by_source", "Where prompt tokens came from.", "source", SOURCES)
        self._finished = self._counters("request_success", "Ended requests.", "finished_reason", REASONS)

    def on_step(self, output: StepOutput, replica: int) -> None:
        stats, before = output.stats, self._num_batched.get(replica, 0)
        if stats is not None and stats.num_batched_tokens != before:
            self._iteration.observe(stats.num_batched_tokens - before)
            self._num_batched[replica] = stats.num_batched_tokens
            self.totals.num_busy += stats.num_running

    def on_end(self, replica: int) -> None:
        # The next engine counts from zero again.
        self._num_batched[replica] = 0

    def on_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def on_first_token(self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float) -> None:
        self._first.observe(seconds)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        self._sources["local_compute"].inc(num_prompt_tokens - num_cached_tokens)
        self._sources["local_cache_hit"].inc(num_cached_tokens)
        self.totals.num_cached_tokens += num_cached_tokens

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        self._generation_tokens.inc(num_tokens)
        if seconds is not None:
            self._gap.observe(seconds / num_tokens)

    def on_finish(self, state: RequestState, reason: str) -> None:
        self._finished[reason].inc()
        times = state.metrics
        for histogram, seconds in (
            (self._queue, times.time_in_queue),
            (self._prefill, times.prefill_time),
            (self._decode, times.decode_time),
        ):
            if seconds is not None:
                histogram.observe(max(0.0, seconds))
        if times.first_scheduled_time is not None and times.last_token_time is not None:
            self._inference.observe(times.last_token_time - times.first_scheduled_time)
        self.totals.prompt_seconds += times.prefill_time or 0.0
        self.totals.decode_seconds += times.decode_time or 0.0
        num_tokens = len(state.request.prompt_token_ids) + len(state.token_ids)
        self.totals.most_tokens = max(self.totals.most_tokens, num_tokens)
        if times.finished_time is not None:
            self._whole.observe(times.finished_time - times.arrival_time)
            self._prompts.observe(len(state.request.prompt_token_ids))
            self._answers.observe(len(state.token_ids))
            self._computed.observe(len(state.request.prompt_token_ids) - state.num_cached_tokens)
            if state.request.params.max_tokens is not None:
                self._max_tokens.observe(state.request.params.max_tokens)
            if times.decode_time is not None and len(state.token_ids) > 1:
                self._per_token.observe(times.decode_time / (len(state.token_ids) - 1))

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"headrace:{name}", doc, LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self._values)

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(f"headrace:{name}", doc, LABELS, registry=self._registry).labels(*self._values)

    def _counters(self, name: str, doc: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        """Return a counter for each value of a further label."""
        counter = Counter(f"headrace:{name}", doc, (*LABELS, label), registry=self._registry)
        return {value: counter.labels(*self._values, value) for value in values}


class StepNote(NamedTuple):
    """A step of a replica: a `core.journal.Note` as msgpack. `info` has the numbers of an engine that sends its first
    step."""

    replica: int
    note: bytes
    info: EngineInfo | None


class EngineEnd(NamedTuple):
    """The end of a replica's engine. These requests go on in the next one."""

    replica: int
    request_ids: frozenset[str]


class Delivery(NamedTuple):
    """The last token of an answer has reached its caller at `time`, in monotonic seconds. `holder` is the name of the
    caller's key."""

    request_id: str
    time: float
    reason: str
    holder: str
    call_id: str


Entry = StepNote | EngineEnd | Delivery


class Observer:
    """The observer of one model's client and of its answers.

    Args:
        counts: counts steps, tokens and answers.
        after: is called at the end of an answer.
        read: takes the entries of the log, each once and in order.
        info: returns the engine's numbers once it sends steps.

    While it `is_followed`, every entry is handed over at once.
    """

    def __init__(
        self,
        counts: Counts,
        after: FinishObserver,
        read: Callable[[Entry], None],
        info: Callable[[], EngineInfo],
    ) -> None:
        self.is_followed = False
        self.on_first_token, self.on_tokens = counts.on_first_token, counts.on_tokens
        self._counts = counts
        self._after = after
        self._read = read
        self._info = info
        self._unread: deque[Entry] = deque()
        self._sending: set[int] = set()

    def on_step(self, output: StepOutput, replica: int = 0) -> None:
        if output.note:
            info = None
            if replica not in self._sending:
                self._sending.add(replica)
                info = self._info()
            self._keep(StepNote(replica, output.note, info))
        self._counts.on_step(output, replica)

    def on_end(self, request_ids: Collection[str], replica: int = 0) -> None:
        self._sending.discard(replica)
        self._keep(EngineEnd(replica, frozenset(request_ids)))
        self._counts.on_end(replica)

    def on_finish(self, state: RequestState, reason: str) -> None:
        """Note that the last token of an answer has reached its caller, whose call is the current one."""
        holder, call_id = tenants.current().name, context.current().call_id
        self._keep(Delivery(state.request.request_id, time.monotonic(), reason, holder, call_id))
        self._after.on_finish(state, reason)

    def _keep(self, entry: Entry) -> None:
        unread = self._unread
        unread.append(entry)
        if self.is_followed:
            self.hand_over()
        elif len(unread) > MAX_UNREAD:
            self._read(unread.popleft())

    def hand_over(self) -> None:
        """Let all entries be read that were not yet."""
        while self._unread:
            self._read(self._unread.popleft())
