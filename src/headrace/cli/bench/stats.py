"""The results of a benchmark: the timeline of each request, and the figures and the table made from them.

Names of the JSON fields and lines of the table are vLLM's. All times are seconds in and milliseconds out. Pure
arithmetic: knows neither HTTP nor the engine; called by `bench.serve` and `bench.offline`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.protocol.errors import RequestError

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
MEMORY = {
    "Weights in memory": "weight_bytes",
    "KV cache as allocated": "kv_cache_bytes",
    "Resident memory": "resident_bytes",
    "Peak resident memory": "peak_resident_bytes",
    "Peak GPU memory": "peak_device_bytes",
}
"""Rows of the table, in MB, and the figures in bytes."""


class Timeline(msgspec.Struct, kw_only=True):
    """One request as its client saw it. `sent` and the members of `token_times` are readings of one clock.

    `sent` is when the request left, after any waiting for a free slot in the client, which is `queue_time`; `late` is
    all that lies between when it was due and when it left. `num_cached_tokens` is the server's count. The entries of
    `token_times` are arrivals of text: one for each token, or one for several that came together.
    """

    sent: float
    queue_time: float = 0.0
    late: float = 0.0
    token_times: list[float] = []
    done: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        return (self.token_times[0] if self.token_times else self.done) - self.sent

    @property
    def e2el(self) -> float:
        return self.done - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token, which has no such time."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` percent lie, by linear interpolation; 0.0 for no values."""
    return float(np.percentile(values, share)) if values else 0.0


def _number(text: str) -> float:
    """Parse a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def is_within_goals(timeline: Timeline, goals: dict[str, float]) -> bool:
    """Return whether one request met every goal (milliseconds). A request of one token has no TPOT to break."""
    times = ((getattr(timeline, name), limit) for name, limit in goals.items())
    return all(seconds is None or seconds * 1000 <= limit for seconds, limit in times)


def samples(timelines: Sequence[Timeline], name: str) -> list[float]:
    """Return all values of one metric in milliseconds."""
    if name == "itl":
        return [gap * 1000 for timeline in timelines for gap in timeline.itls]
    values = [getattr(timeline, name) for timeline in timelines]
    return [value * 1000 for value in values if value is not None]


def peaks(timelines: Sequence[Timeline]) -> tuple[float, int]:
    """Return the most tokens that arrived in one second, and the most requests that were open at once."""
    if not timelines:
        return 0.0, 0
    start = min(timeline.sent for timeline in timelines)
    per_second: defaultdict[int, float] = defaultdict(float)
    edges: list[tuple[float, int]] = []
    for timeline in timelines:
        edges += [(timeline.sent, 1), (timeline.done, -1)]
        # Tokens that came together count at their common arrival.
        weight = timeline.num_output_tokens / max(1, len(timeline.token_times))
        for moment in timeline.token_times:
            per_second[int(moment - start)] += weight
    num_open = most = 0
    for _, change in sorted(edges):
        num_open += change
        most = max(most, num_open)
    return max(per_second.values(), default=0.0), most


def figures(
    timelines: Sequence[Timeline],
    duration: float,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    percentiles: Sequence[float] = (99.0,),
    goals: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Return the figures of one run as vLLM's JSON fields.

    Args:
        timelines: all requests, failed ones included.
        duration: seconds from the first request to the last answer.
        metrics: which of ttft, tpot, itl, e2el.
        percentiles: which ones, 0 to 100.
        goals: milliseconds, by ttft, tpot, e2el.
    """
    good = [timeline for timeline in timelines if not timeline.error]
    total_input = sum(timeline.num_prompt_tokens for timeline in good)
    total_output = sum(timeline.num_output_tokens for timeline in good)
    peak_rate, peak_open = peaks(good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(timelines) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(is_within_goals(t, goals) for t in good) / duration if goals else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_rate,
        "max_concurrent_requests": peak_open,
    }
    for name in metrics:
        values = samples(good, name)
        result[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        result[f"median_{name}_ms"] = percentile(values, 50)
        result[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        for share in percentiles:
            result[f"p{share:g}_{name}_ms"] = percentile(values, share)
    return result


def check_metrics(text: str) -> list[str]:
    """'ttft,tpot' -> ['ttft', 'tpot']. Raises `RequestError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TITLES:
            raise RequestError("percentile_metrics", name, "of " + ", ".join(TITLES))
    return names


def check_percentiles(text: str) -> list[float]:
    """'50,99' -> [50.0, 99.0]. Raises `RequestError`."""
    shares: list[float] = []
    for part in text.split(","):
        share = _number(part)
        if not 0 <= share <= 100:
            raise RequestError("metric_percentiles", part, "numbers from 0 to 100, with commas between")
        shares.append(share)
    return shares


def table(
    result: dict[str, Any],
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    percentiles: Sequence[float] = (99.0,),
    title: str = "Serving Benchmark Result",
    width: int = 50,
) -> str:
    """Return vLLM's table of the figures, `width` characters wide."""
    lines = [f" {title} ".center(width, "=")]

    def row(label: str, value: object) -> None:
        if value is not None:
            text = f"{value:.2f}" if isinstance(value, float) else str(value)
            lines.append(f"{label + ':':<40} {text:<{width - 41}}".rstrip())

    request_rate = result.get("request_rate")
    row("Successful requests", result["completed"])
    row("Failed requests", result["failed"])
    if "avg_latency" in result:
        row("Mean batch latency (ms)", result["avg_latency"] * 1000)
        row("Median batch latency (ms)", result["percentiles"]["50"] * 1000)
    row("Maximum request concurrency", result.get("max_concurrency"))
    row("Request rate configured (RPS)", None if request_rate == "inf" else request_rate)
    row("Benchmark duration (s)", result["duration"])
    row("Total input tokens", result["total_input_tokens"])
    row("Total generated tokens", result["total_output_tokens"])
    row("Request throughput (req/s)", result["request_throughput"])
    row("Request goodput (req/s)", result["request_goodput"])
    row("Output token throughput (tok/s)", result["output_throughput"])
    row("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    row("Peak concurrent requests", result["max_concurrent_requests"])
    row("Total token throughput (tok/s)", result["total_token_throughput"])
    row("Mean wait in this client (ms)", result.get("mean_client_queue_time_ms") or None)
    for label, name in MEMORY.items():
        row(f"{label} (MB)", result[name] / 1e6 if result.get(name) else None)
    for name in metrics:
        short, long = TITLES[name]
        lines.append(long.center(width, "-"))
        row(f"Mean {short} (ms)", result[f"mean_{name}_ms"])
        row(f"Median {short} (ms)", result[f"median_{name}_ms"])
        for share in percentiles:
            row(f"P{share:g} {short} (ms)", result[f"p{share:g}_{name}_ms"])
    lines.append("=" * width)
    return "\n".join(lines)
