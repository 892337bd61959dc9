"""`BlockPool`: the state of every KV block. Owns reference counts, the free stack, the eviction order and the pins.

A block is free, or held (by block tables and pins), or evictable: without a reference but still cached under a key,
until its room is needed. Knows ints only: no tokens, no keys, no requests. Called by the scheduler and by the prefix
cache, whose `on_evict` is called when a cached block is evicted.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from headrace.protocol.errors import InvariantError

TAKEN, DROPPED, PINNED, CACHED, EVICTED, FORGOTTEN = range(6)
"""The kinds of block events: a holder takes or drops a reference, or leaves its reference to the step in flight (holder
0); a block is cached under a key, or evicted; all blocks are forgotten by the cache."""

BlockEvent = tuple[int, Iterable[int], list[int]]
"""A kind of event, the holders, and the blocks: block i belongs to holder i, or to the only one."""

LAID_OUT = 1024
"""Blocks whose entries a pool makes at once."""


def _nothing(_: int) -> None:
    return None


class BlockPool:
    """`num_blocks` blocks of `block_size` slots. Block ids are 0 ... num_blocks - 1; none is special.

    `refs` and `cached` end at the highest block that was ever needed, rounded up: a pool of millions of blocks, of
    which the simulation of a fleet has many, takes memory for those in use alone. The `num_fresh` blocks behind them
    are free too. They are used after the free ones that were used before, and before any block is evicted.
    `is_busy`: a step is in flight. `users` are the sequences for which the pool is called: one for
    all blocks, or one for each. While the pool is watched, `log` has the events since it was emptied last.
    `fail_at` makes the allocation with that number fail (the first is 1), as if memory had run out: for tests;
    `has_failed` then stays set until it is cleared.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs: list[int] = []
        self.cached: list[bool] = []
        self.free: list[int] = []
        self.num_fresh = num_blocks
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.pins: list[int] = []
        self.is_busy = False
        self.users: Iterable[int] = (0,)
        self.log: list[BlockEvent] | None = None
        self.on_evict: Callable[[int], None] = _nothing
        self.num_allocations = 0
        self.fail_at = 0
        self.has_failed = False
        self.lay_out(1)

    def lay_out(self, num: int) -> None:
        """Make entries for `num` fresh blocks at least, which become free below all others: the lowest id is used
        first."""
        first = len(self.refs)
        num = min(self.num_fresh, max(num, LAID_OUT))
        self.num_fresh -= num
        self.refs += [0] * num
        self.cached += [False] * num
        self.free[:0] = range(first + num - 1, first - 1, -1)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return."""
        return len(self.free) + len(self.evictable) + self.num_fresh

    @property
    def num_held(self) -> int:
        """Blocks held by tables and pins."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_slots: int) -> int:
        """Return the number of blocks that hold `num_slots` positions. Admission and allocation use the same (I-19)."""
        return -(-num_slots // self.block_size)

    def allocate(self, num: int) -> list[int] | None:
        """Return `num` blocks, each with one reference; or None, with nothing changed (I-6).

        Cached blocks are evicted, least recently used first, once no free ones are left.
        """
        self.num_allocations += 1
        free = self.free
        if self.num_allocations == self.fail_at:
            self.has_failed = True
            return None
        if num > len(free) + len(self.evictable) + self.num_fresh:
            return None
        if num > len(free) and self.num_fresh:
            self.lay_out(num - len(free))
        while len(free) < num:
            block, _ = self.evictable.popitem(last=False)
            self.cached[block] = False
            self.note(EVICTED, (block,))
            self.on_evict(block)
            free.append(block)
        blocks = [free.pop() for _ in range(num)]
        for block in blocks:
            self.refs[block] = 1
        self.note(TAKEN, blocks)
        return blocks

    def note(self, kind: int, blocks: Iterable[int]) -> None:
        """Log an event if the pool is watched."""
        if self.log is not None:
            self.log.append((kind, self.users, list(blocks)))

    def take(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block, held or evictable.

        Raises `InvariantError` (I-3) for a free block.
        """
        refs = self.refs
        for block in blocks:
            if refs[block] == 0:
                if block not in self.evictable:
                    raise InvariantError("I-3", f"block {block} is free and was taken")
                del self.evictable[block]
            refs[block] += 1
        self.note(TAKEN, blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, the last of the table first, so that leaves are evicted before parents.

        Raises `InvariantError` (I-2) for a block without a reference.
        """
        refs = self.refs
        for block in reversed(blocks):
            if refs[block] <= 0:
                raise InvariantError("I-2", f"block {block} was released and not held")
            refs[block] -= 1
            if not refs[block]:
                if self.cached[block]:
                    self.evictable[block] = None
                else:
                    self.free.append(block)
        self.note(DROPPED, blocks)

    def pin(self, block: int) -> None:
        """Turn one reference to `block` into a pin: it stays until the step in flight is retired (I-7)."""
        self.pins.append(block)
        self.note(PINNED, (block,))

    def unpin(self, num: int = sys.maxsize) -> None:
        """Release the first `num` pins: the step that they belong to is retired."""
        pins, self.pins = self.pins[:num], self.pins[num:]
        self.users = (0,)
        self.release(pins)

    def give_up(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; a step in flight may still use them, so that they stay pinned under it."""
        if self.is_busy:
            self.pins += blocks
            self.note(PINNED, blocks)
        else:
            self.release(blocks)

    def mark_cached(self, block: int) -> None:
        """Make `block`, which is held, evictable instead of free when its last reference is released."""
        self.cached[block] = True
        self.note(CACHED, (block,))

    def forget(self, block: int) -> None:
        """Uncache one block, whose prefix is not known any more."""
        self.cached[block] = False
        if block in self.evictable:
            del self.evictable[block]
            self.free.append(block)

    def forget_cached(self) -> None:
        """Uncache all blocks: evictable ones are free now, held ones when they are released."""
        self.free.extend(self.evictable)
        self.evictable.clear()
        self.cached = [False] * len(self.cached)
        self.note(FORGOTTEN, ())

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the counts with all block tables. Raises `InvariantError` I-1, I-2 or I-3."""
        counts = Counter(block for table in tables for block in table)
        counts.update(self.pins)
        num_held = sum(count > 0 for count in self.refs)
        num_free = len(self.free) + self.num_fresh
        if num_free + len(self.evictable) + num_held != self.num_blocks:
            raise InvariantError(
                "I-1", f"{num_free} free + {len(self.evictable)} cached + {num_held} held != {self.num_blocks}"
            )
        for block, count in enumerate(self.refs):
            if count != counts[block]:
                raise InvariantError("I-2", f"block {block} counts {count} references and has {counts[block]}")
        free = set(self.free)
        if len(free) != len(self.free):
            raise InvariantError("I-3", "a block is twice in the free list")
        for block, count in enumerate(self.refs):
            idle = self.evictable if self.cached[block] else free
            if (block in idle) != (count == 0) or (block in free and block in self.evictable):
                raise InvariantError("I-3", f"block {block} with {count} references is in the wrong list")
