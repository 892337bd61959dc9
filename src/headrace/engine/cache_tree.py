"""The prefix cache as a tree, for people: which prefixes are cached, and how often requests began with them.

`read` runs in the engine's process, between two steps, and visits a bounded number of blocks: those in use, then those
used last. A block's parent is always among the blocks visited before it, so that only leaves are left out. Runs of
blocks with one child each are one node. Costs nothing while it is not called. Called by `engine.orders`.
"""

from __future__ import annotations

from array import array
from itertools import chain, islice

import msgspec

from headrace.core.prefix import PrefixCache
from headrace.core.scheduler import Scheduler

NUM_SHOWN = 24
"""The first token ids of a node, which are sent."""


class ReadCache(msgspec.Struct, frozen=True, tag="read_cache"):
    """Order: return a `CacheTree` of at most `max_blocks` blocks."""

    max_blocks: int


class CacheNode(msgspec.Struct, frozen=True, array_like=True):
    """A run of cached blocks. `parent`: the node before it, -1 at a root. `hits`: the requests that shared its last
    block or a part of that when they were admitted; the last of them came at `last_use`, in microseconds of the
    engine's clock, 0 if none did. `is_held`: a running request holds it. `token_ids`: the first ones."""

    id: int
    parent: int
    num_tokens: int
    hits: int
    last_use: int
    is_held: bool
    token_ids: list[int]


class CacheTree(msgspec.Struct, frozen=True):
    """`nodes` come after their parents. `num_blocks` are visited of `num_cached`."""

    nodes: list[CacheNode]
    num_blocks: int
    num_cached: int


def read(scheduler: Scheduler, order: ReadCache) -> CacheTree:
    """Return the tree of the blocks in use, then of those used last."""
    cache, pool = scheduler.cache, scheduler.pool
    in_use = chain.from_iterable(seq.block_table[: seq.num_published] for seq in scheduler.running)
    visits = islice(chain(in_use, reversed(pool.evictable)), 4 * order.max_blocks)
    # A prefix that running requests share is visited several times.
    blocks = list(islice(dict.fromkeys(block for block in visits if block in cache.entries), order.max_blocks))
    hits, last_use = _sums(cache, blocks)
    children: dict[bytes, int] = {}
    for block in blocks:
        parent = cache.entries[block].parent
        children[parent] = children.get(parent, 0) + 1
    nodes: list[list[int]] = []
    ends: dict[bytes, int] = {}
    for block in blocks:
        key, parent, _ = cache.entries[block]
        node = ends.get(parent, -1)
        is_same = node >= 0 and children[parent] == 1 and hits[nodes[node][-1]] == hits[block]
        if not is_same:
            node = len(nodes)
            nodes.append([])
        nodes[node].append(block)
        ends[key] = node
    return CacheTree(
        [
            CacheNode(
                index,
                ends.get(cache.entries[run[0]].parent, -1),
                len(run) * pool.block_size,
                hits[run[0]],
                last_use[run[0]],
                pool.refs[run[0]] > 0,
                _first_tokens(cache, run),
            )
            for index, run in enumerate(nodes)
        ],
        len(blocks),
        len(cache),
    )


def _sums(cache: PrefixCache, blocks: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return, for each block, the hits of it and all blocks after it, and the time of the last."""
    hits, last_use = dict.fromkeys(blocks, 0), dict.fromkeys(blocks, 0)
    for block in reversed(blocks):
        num, when = cache.hits.get(block, (0, 0))
        hits[block] += num
        last_use[block] = max(last_use[block], when)
        parent = cache.blocks.get(cache.entries[block].parent, -1)
        if parent in hits:
            hits[parent] += hits[block]
            last_use[parent] = max(last_use[parent], last_use[block])
    return hits, last_use


def _first_tokens(cache: PrefixCache, run: list[int]) -> list[int]:
    token_ids = array("q")
    for block in run:
        token_ids.frombytes(cache.entries[block].content)
        if len(token_ids) >= NUM_SHOWN:
            break
    return token_ids[:NUM_SHOWN].tolist()
