"""Warnings about a measurement of a server that may mislead: a client that lags, a warm cache, short answers, drift.
Each function returns a warning, or nothing. Knows timelines, not HTTP. Called by `bench.serve`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from headrace.cli.bench.data import Sample
from headrace.cli.bench.stats import Timeline, percentile

LATE_S = 0.02
"""Seconds after its time from which on a request counts as late."""
MOST_SHARE = 0.05
"""Share of requests (or of tokens) from which on there is a warning."""
TEMPLATE_TOKENS = 64
"""Tokens that a chat template may put before every prompt."""
MOST_DRIFT = 1.5
LEAST_HALF = 10
"""Requests of half a run, below which its median says little."""


def warnings_of(
    timelines: Sequence[Timeline], samples: Sequence[Sample], *, has_rate: bool, is_token_ids: bool
) -> list[str]:
    """Return the warnings of a run.

    Args:
        timelines: of all requests.
        samples: as they were sent, in the same order.
        has_rate: requests had times at which they were due, so that lateness and drift mean something.
        is_token_ids: no template stands before the prompts.
    """
    pairs = [(t, s) for t, s in zip(timelines, samples, strict=True) if not t.error]
    good = [timeline for timeline, _ in pairs]
    texts = [client_queueing(good), drift(good)] if has_rate else []
    texts += [warm_cache(pairs, 0 if is_token_ids else TEMPLATE_TOKENS), short_answers(pairs)]
    return [text for text in texts if text]


def client_queueing(timelines: Sequence[Timeline]) -> str:
    """Requests that were sent later than they were due: the server had less load than was configured."""
    late = [timeline.late for timeline in timelines if timeline.late > LATE_S]
    if len(late) <= MOST_SHARE * len(timelines):
        return ""
    return (
        f"client queueing: {len(late)} of {len(timelines)} requests were sent after their time, p50 "
        f"{1000 * percentile(late, 50):,.0f} ms late: the server had less load than the rate says; raise "
        "--max-concurrency, or send from more processes"
    )


def warm_cache(pairs: Sequence[tuple[Timeline, Sample]], template_tokens: int) -> str:
    """Prompt tokens that came from the server's prefix cache, beyond the prefixes that prompts share with earlier
    prompts.

    In texts a token is one character at least."""
    excess = total = num = 0
    before = list[Sequence[Any]]()
    for timeline, sample in sorted(pairs, key=lambda pair: pair[0].sent):
        allowed = max((_common(sample.prompt, other) for other in before), default=0) + template_tokens
        before.append(sample.prompt)
        total += timeline.num_prompt_tokens
        excess += max(0, timeline.num_cached_tokens - allowed)
        num += timeline.num_cached_tokens > allowed
    if excess <= MOST_SHARE * total:
        return ""
    return (
        f"warm cache: {excess:,} prompt tokens of {num} requests were cached before the run, though no prompt before "
        "them shares these: another run sent the same; change --seed or reset the cache"
    )


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def short_answers(pairs: Sequence[tuple[Timeline, Sample]]) -> str:
    """Answers shorter than requested: runs of other models or seeds then do other work."""
    short = [(t.num_output_tokens, s.output_len) for t, s in pairs if t.num_output_tokens < s.output_len]
    if len(short) <= MOST_SHARE * len(pairs):
        return ""
    came, requested = (statistics.fmean(column) for column in zip(*short, strict=True))
    return (
        f"unequal lengths: {len(short)} of {len(pairs)} answers are shorter than requested, {came:,.0f} tokens of "
        f"{requested:,.0f} in the mean; --ignore-eos gives each its full length"
    )


def drift(timelines: Sequence[Timeline]) -> str:
    """Medians of the requests sent in the first half of the run that are far from the medians of the second."""
    ordered = sorted(timelines, key=lambda timeline: timeline.sent)
    halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    if len(halves[0]) < LEAST_HALF:
        return ""
    for name in ("ttft", "tpot"):
        first, second = (percentile([v for t in half if (v := getattr(t, name)) is not None], 50) for half in halves)
        if min(first, second) > 0 and max(first, second) > MOST_DRIFT * min(first, second):
            return (
                f"drift: the median {name.upper()} of the first half is {1000 * first:,.1f} ms, of the second "
                f"{1000 * second:,.1f} ms: requests pile up, or the server or the machine changed; run longer, or at a "
                "lower rate"
            )
    return ""
