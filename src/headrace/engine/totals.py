"""Counters of an engine, summed over all of its lives. Pure; called by `engine.client`."""

from __future__ import annotations

import itertools
from typing import Any

from headrace.protocol.step import Stats

COUNTERS = (
    "num_steps",
    "num_preemptions",
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_recomputed_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_batched_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_recordings_ended",
)


def summed(past: Stats, now: Stats) -> Stats:
    """`now` with the counters of both. Gauges are those of `now`."""
    made: dict[str, Any] = {name: getattr(past, name) + getattr(now, name) for name in COUNTERS}
    both = itertools.zip_longest(past.num_accepted_per_pos, now.num_accepted_per_pos, fillvalue=0)
    made["num_accepted_per_pos"] = [before + since for before, since in both]
    gauges = {name: getattr(now, name) for name in now.__struct_fields__ if name not in made}
    return Stats(**(gauges | made))


def negated(stats: Stats) -> Stats:
    """What takes the counters of `stats` away when it is summed: the work, and not what has ended for good."""
    return Stats(**{name: -getattr(stats, name) for name in COUNTERS if name != "num_recordings_ended"})
