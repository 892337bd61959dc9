"""Prometheus metrics under vLLM's names, with the prefix `headrace:`.

Gauges and the engine's counters are read from the client's state at each scrape and stored nowhere else, so they cannot
drift (I-21, R-22). Histograms and per-request counters are `observer.Counts`. Knows no HTTP; `serve.app` serves the
text of `render`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.engine import context, logs
from headrace.engine.client import EngineClient
from headrace.insight.observer import LABELS, Counts, Totals
from headrace.protocol.step import Stats

FACTS = ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype", "backend", "device")
"""Fields of `EngineInfo` that are labels of the metric of the engine's sizes."""


class ServerMetrics:
    """All metrics of one server, in its own registry."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._values = (model_name, "0")
        self.num_helper_faults: Callable[[], Mapping[str, int]] = dict
        """Returns how often each kind of process other than the engine failed."""
        self.num_unfilled: Callable[[int], int] = lambda block_size: 0
        """Returns how many slots of the blocks that requests hold have no token yet."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.counts = Counts(self.registry, model_name)

    def render(self) -> bytes:
        """Return the exposition text of one scrape."""
        return generate_latest(self.registry)

    def totals(self) -> Totals:
        """Return the counters of this model, and its present state."""
        client, now, total = self._client, self._client.stats, self._client.total
        return msgspec.structs.replace(
            self.counts.totals,
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
            "kv_cache_waste_perc": ("Share of the slots of held KV blocks without a token, 0 to 1.", self.waste()),
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

    def waste(self) -> float:
        """Return the share of the slots of held blocks that have no token; 0 if none is held."""
        client = self._client
        num_slots = client.stats.num_blocks_held * client.info.block_size if client.is_started else 0
        return min(1.0, self.num_unfilled(client.info.block_size) / num_slots) if num_slots else 0.0

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
