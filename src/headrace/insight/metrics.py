"""Prometheus metrics under vLLM's names, with the prefix `headrace:`.

Gauges and the engine's counters are read from the client's state at each scrape and stored nowhere else, so they cannot
drift (I-21, R-22). The engine client and `TextClient`, whose observer this is, update histograms and per-request
counters. Knows no HTTP; `serve.app` serves the text of `render`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.engine import context, logs
from headrace.engine.client import EngineClient
from headrace.protocol.step import Stats, StepOutput
from headrace.text.outputs import RequestState

LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
FACTS = ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype", "backend", "device")
"""Fields of `EngineInfo` that are labels of the metric of the engine's sizes."""
TOKENS = tuple(2**exponent for exponent in range(18))
SOURCES = ("local_compute", "local_cache_hit")
REASONS = ("stop", "length", "abort", "error")


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


class ServerMetrics:
    """All metrics of one server, in its own registry."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._values = (model_name, "0")
        self._num_batched: dict[int, int] = {}
        self._counted = Totals()
        self.num_helper_faults: Callable[[], Mapping[str, int]] = dict
        """Returns how often each kind of process other than the engine failed."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
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

    def render(self) -> bytes:
        """Return the exposition text of one scrape."""
        return generate_latest(self.registry)

    # -- the observer of `EngineClient` and `TextClient`

    def on_step(self, output: StepOutput, replica: int = 0) -> None:
        stats, before = output.stats, self._num_batched.get(replica, 0)
        if stats is not None and stats.num_batched_tokens != before:
            self._iteration.observe(stats.num_batched_tokens - before)
            self._num_batched[replica] = stats.num_batched_tokens
            self._counted.num_busy += stats.num_running

    def on_end(self, request_ids: Collection[str], replica: int = 0) -> None:
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
        self._counted.num_cached_tokens += num_cached_tokens

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
        self._counted.prompt_seconds += times.prefill_time or 0.0
        self._counted.decode_seconds += times.decode_time or 0.0
        num_tokens = len(state.request.prompt_token_ids) + len(state.token_ids)
        self._counted.most_tokens = max(self._counted.most_tokens, num_tokens)
        if times.finished_time is not None:
            self._whole.observe(times.finished_time - times.arrival_time)
            self._prompts.observe(len(state.request.prompt_token_ids))
            self._answers.observe(len(state.token_ids))
            self._computed.observe(len(state.request.prompt_token_ids) - state.num_cached_tokens)
            if state.request.params.max_tokens is not None:
                self._max_tokens.observe(state.request.params.max_tokens)
            if times.decode_time is not None and len(state.token_ids) > 1:
                self._per_token.observe(times.decode_time / (len(state.token_ids) - 1))

    def totals(self) -> Totals:
        """Return the counters of this model, and its present state."""
        client, now, total = self._client, self._client.stats, self._client.total
        return msgspec.structs.replace(
            self._counted,
            num_steps=max(0, total.num_steps),
            num_running=now.num_running,
            num_waiting=now.num_waiting if client.is_alive else client.num_unfinished,
            num_prompt_tokens=max(0, total.num_prompt_tokens),
            num_generated_tokens=max(0, total.num_generated_tokens),
            num_drafts=total.num_drafts,
            num_draft_tokens=total.num_draft_tokens,
            num_accepted_tokens=total.num_accepted_tokens,
        )

    # -- prometheus_client's collector

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that are read from the client now."""
        client, now, total = self._client, self._client.stats, self._client.total
        # While there is no engine, all open requests wait.
        waiting = now.num_waiting if client.is_alive else client.num_unfinished
        gauges = {
            "num_requests_running": ("Requests in the running batch.", now.num_running),
            "num_requests_waiting": ("Requests that wait for room.", waiting),
            "kv_cache_usage_perc": ("Share of KV blocks that requests hold, 0 to 1.", now.kv_cache_usage),
            "beam_search_blocks": ("KV blocks that beam searches hold.", now.num_beam_blocks),
            "beam_search_blocks_unshared": (
                "KV blocks that they would hold if no beam shared.",
                now.num_beam_blocks_unshared,
            ),
            "engine_up": ("1 while the engine runs and makes tokens.", float(client.is_alive)),
        }
        if client.is_fleet:
            yield from self._of_replicas()
        for name, (doc, value) in gauges.items():
            yield self._family(GaugeMetricFamily, name, doc, {(): value})
        doc = "Blocks of each kind of cache (slots, of states), by what they are used for."
        yield self._family(GaugeMetricFamily, "cache_blocks", doc, blocks_by_use(now), ("kind", "use"))
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", total.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found there.", total.prefix_cache_hits),
            "num_preemptions": ("Requests sent back to the queue.", total.num_preemptions),
            "prompt_tokens_recomputed": ("Tokens computed again after a preemption.", total.num_recomputed_tokens),
            "num_steps": ("Steps of the engine.", total.num_steps),
            "spec_decode_num_drafts": ("Drafts that were verified.", total.num_drafts),
            "spec_decode_num_draft_tokens": ("Tokens of these drafts.", total.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Those of them that were kept.", total.num_accepted_tokens),
            "engine_restarts": ("Times the engine was restarted.", client.num_restarts),
            "requests_expired": ("Calls that ended by their deadline.", client.num_expired + context.num_late()),
            "log_lines_dropped": ("Lines of the log that could not be written.", logs.num_dropped()),
            "schedule_recordings_ended": (
                "Recordings of the schedule that ended before their engine.",
                total.num_recordings_ended,
            ),
            "requests_quarantined": ("Requests that were given up for killing the engine.", client.num_quarantined),
        }
        for name, (doc, value) in counters.items():
            # The start's own probe is subtracted, which must not give a negative count.
            yield self._family(CounterMetricFamily, name, doc, {(): max(0, value)})
        doc = "Processes beside the engine that failed, and in whose place another was started."
        helpers: dict[tuple[str, ...], float] = {(name,): num for name, num in self.num_helper_faults().items()}
        yield self._family(CounterMetricFamily, "helper_restarts", doc, helpers, ("helper",))
        accepted = enumerate(total.num_accepted_per_pos)
        counts: dict[tuple[str, ...], float] = {(str(position),): count for position, count in accepted}
        doc = "Draft tokens that were kept, by how many came before them in the draft."
        yield self._family(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", doc, counts, ("position",))
        if client.is_started:
            facts = {name: str(getattr(client.info, name)) for name in FACTS}
            facts["num_gpu_blocks"] = str(client.info.num_blocks)
            doc = "The engine's sizes."
            yield self._family(GaugeMetricFamily, "cache_config_info", doc, {tuple(facts.values()): 1}, tuple(facts))

    def _of_replicas(self) -> Iterable[Metric]:
        """Yield the metrics of each replica of a fleet."""
        replicas = self._client.replicas
        numbers = [str(each.index) for each in replicas]
        gauges: dict[str, tuple[str, list[float]]] = {
            "replica_up": ("1 while the replica runs and makes tokens.", [float(each.is_alive) for each in replicas]),
            "replica_requests": ("Open requests of the replica.", [len(each.entries) for each in replicas]),
            "replica_kv_cache_usage_perc": (
                "Share of its KV blocks that requests hold, 0 to 1.",
                [each.stats.kv_cache_usage for each in replicas],
            ),
            "replica_start_time_seconds": (
                "When its engine was ready, in seconds since 1970.",
                [time.time() - time.monotonic() + each.start_time if each.is_up else 0.0 for each in replicas],
            ),
        }
        counters = {
            "replica_restarts": ("Times the replica was restarted.", [each.num_restarts for each in replicas]),
            "replica_generation_tokens": (
                "Tokens that it generated.",
                [max(0, each.total.num_generated_tokens) for each in replicas],
            ),
            "replica_prefix_cache_hits": (
                "Prompt tokens found in its prefix cache.",
                [each.total.prefix_cache_hits for each in replicas],
            ),
            "replica_prefix_cache_queries": (
                "Prompt tokens looked up there.",
                [max(0, each.total.prefix_cache_queries) for each in replicas],
            ),
            "replica_requests_moved_away": (
                "Requests that went on in another replica.",
                [each.num_moved_away for each in replicas],
            ),
            "replica_requests_moved_here": (
                "Requests that came from another replica.",
                [each.num_moved_here for each in replicas],
            ),
        }
        for name, (doc, values) in gauges.items():
            yield self._family(GaugeMetricFamily, name, doc, _numbered(numbers, values), ("replica",))
        for name, (doc, counts) in counters.items():
            yield self._family(CounterMetricFamily, name, doc, _numbered(numbers, counts), ("replica",))
        info: dict[tuple[str, ...], float] = {
            (number, each.fingerprint): 1.0 for number, each in zip(numbers, replicas, strict=True)
        }
        doc = "What the replica computes, as a digest; empty while it starts."
        yield self._family(GaugeMetricFamily, "replica_info", doc, info, ("replica", "fingerprint"))

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        doc: str,
        numbers: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        """Return a metric with its numbers by the values of `labels`, which come after the labels of all metrics."""
        family = kind(f"headrace:{name}", doc, labels=(*LABELS, *labels))
        for values, number in numbers.items():
            family.add_metric((*self._values, *values), number)
        return family

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"headrace:{name}", doc, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._values)

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(f"headrace:{name}", doc, LABELS, registry=self.registry).labels(*self._values)

    def _counters(self, name: str, doc: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        """Return a counter for each value of a further label."""
        counter = Counter(f"headrace:{name}", doc, (*LABELS, label), registry=self.registry)
        return {value: counter.labels(*self._values, value) for value in values}


def _numbered(numbers: Sequence[str], values: Sequence[float]) -> dict[tuple[str, ...], float]:
    return {(number,): value for number, value in zip(numbers, values, strict=True)}


class _Together:
    """The metrics of several models as one collector: each metric once, with the samples of all."""

    def __init__(self, metrics: Sequence[ServerMetrics]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for each in self._metrics:
            for family in each.registry.collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        return families.values()


def render(metrics: Sequence[ServerMetrics]) -> bytes:
    """Return the exposition text of one scrape of all models."""
    return metrics[0].render() if len(metrics) == 1 else generate_latest(_Together(metrics))


def blocks_by_use(stats: Stats) -> dict[tuple[str, ...], float]:
    """Return the number of blocks of each kind that are held, cached (and held by none), and free."""
    kinds = [(stats.num_blocks, stats.num_blocks_held, stats.num_blocks_cached), *stats.more_blocks]
    return {
        (str(kind), use): float(number)
        for kind, (num, num_held, num_cached) in enumerate(kinds)
        for use, number in (("held", num_held), ("cached", num_cached), ("free", num - num_held - num_cached))
    }
