"""The lists of the inspector: requests in a line each, the misses of the prefix cache, and its tree with texts.

All lists are bounded. Called by `serve.inspection` and `insight.replay_worker`. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import msgspec

from headrace.core.prefix import Miss
from headrace.engine.cache_tree import CacheTree
from headrace.engine.open_requests import PROBE
from headrace.insight.explain import Text, verdict_of
from headrace.insight.lives import Life, Lives

MAX_REQUESTS = 1000
MAX_MISSES = 200
MAX_BLOCKS = 4096
"""Blocks of the cache that are visited for its tree."""
MAX_NODES = 2000
MAX_CHARS = 40


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `phase` is for an open request, `reason` for one that has ended; the other is empty. `arrived` is in
    monotonic seconds, the clock of steps and states; `ttft` and `latency` in seconds, the latter so far if it is open.
    `num_generated_tokens` counts the tokens drawn in the known steps."""

    id: str
    seq_id: int
    replica: int
    phase: str
    reason: str
    arrived: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    ttft: float | None
    latency: float
    num_preemptions: int
    num_guessed: int
    num_kept: int


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The open requests and the last ended ones, newest first, at most `MAX_REQUESTS`."""

    requests: list[Summary]


class CacheMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A lookup that had not the whole prompt. `time` is in monotonic seconds; for the others see `CacheVerdict`."""

    id: str
    time: float
    reason: str
    at: int
    num_cached_tokens: int
    num_prompt_tokens: int
    sentence: str
    prompt: str | None
    cached: str | None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens that every cached prefix after `parent` (None: a root) goes on with. `hits` are the requests that
    shared its last block or a part of that, the last of them `last_use` seconds ago, None if there was none. `text` is
    the beginning of the run, None without a tokenizer."""

    id: int
    parent: int | None
    num_tokens: int
    hits: int
    last_use: float | None
    is_held: bool
    text: str | None


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The tree of the `num_blocks_shown` blocks used last, of `num_blocks_cached`, and the latest misses."""

    nodes: list[Node]
    misses: list[CacheMiss]
    num_blocks_shown: int
    num_blocks_cached: int


def summary_of(life: Life, lives: Lives, now: float, is_open: bool) -> Summary:
    """Return the line of a request at `now`, in monotonic seconds."""
    arrived = life.arrival.times[0]
    return Summary(
        id=life.request_id,
        seq_id=life.arrival.seq_id,
        replica=life.replica,
        phase=lives.phase_of(life) if is_open else "",
        reason=life.reason,
        arrived=arrived,
        num_prompt_tokens=life.arrival.num_prompt,
        num_cached_tokens=life.num_cached,
        num_generated_tokens=lives.num_generated(life),
        ttft=life.first_token - arrived if life.first_token else None,
        latency=now - arrived if is_open else life.latency,
        num_preemptions=len(life.preemptions),
        num_guessed=life.num_guessed,
        num_kept=life.num_kept,
    )


def requests_of(lives: Lives, now: float) -> Requests:
    """Return the open requests, and the ones that ended last."""
    rows = [(life, True) for life in lives.open()]
    rows += [(life, False) for life in islice(reversed(lives.ended.values()), MAX_REQUESTS)]
    rows = [row for row in rows if not row[0].request_id.startswith(PROBE)]
    rows.sort(key=lambda row: -row[0].arrival.times[0])
    return Requests(requests=[summary_of(life, lives, now, is_open) for life, is_open in rows[:MAX_REQUESTS]])


def misses_of(lives: Lives, name_of: Callable[[Life | None], str], text_of: Text | None) -> list[CacheMiss]:
    """Return the latest lookups that ended before the prompt did, the newest first."""
    recent = [*lives.open(), *islice(reversed(lives.ended.values()), MAX_REQUESTS)]
    places = [
        (miss.time, life, index)
        for life in recent
        for index, miss in enumerate(life.misses)
        if miss.admission.miss != Miss.NONE and not life.request_id.startswith(PROBE)
    ]
    places.sort(key=lambda place: -place[0])
    misses = []
    for when, life, index in places[:MAX_MISSES]:
        verdict = verdict_of(life, index, lives, name_of, text_of)
        misses.append(
            CacheMiss(
                id=life.request_id,
                time=when,
                reason=verdict.reason,
                at=verdict.at_token,
                num_cached_tokens=verdict.num_cached_tokens,
                num_prompt_tokens=verdict.num_prompt_tokens,
                sentence=verdict.sentence,
                prompt=verdict.prompt,
                cached=verdict.cached,
            )
        )
    return misses


def cache_of(tree: CacheTree, misses: list[CacheMiss], text_of: Text | None, now: float) -> Cache:
    """Return the first `MAX_NODES` of a tree with their texts, at `now` in monotonic seconds. Parents come before their
    children."""
    nodes = [
        Node(
            id=node.id,
            parent=None if node.parent < 0 else node.parent,
            num_tokens=node.num_tokens,
            hits=node.hits,
            last_use=now - node.last_use / 1e6 if node.last_use else None,
            is_held=node.is_held,
            text=None if text_of is None else text_of(node.token_ids)[:MAX_CHARS],
        )
        for node in tree.nodes[:MAX_NODES]
    ]
    num_shown = tree.num_blocks
    return Cache(nodes=nodes, misses=misses, num_blocks_shown=num_shown, num_blocks_cached=tree.num_cached)
