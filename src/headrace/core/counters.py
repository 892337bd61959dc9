"""`Counters`: what the scheduler has done since its start. Numbers that only grow, and how they are told.

Knows no rules; the scheduler counts, and asks for `Stats` after each step.
"""

from __future__ import annotations

from headrace.core.blocks import BlockPool
from headrace.protocol.step import Stats


class Counters:
    """Each field is the counter of the same name in `Stats`."""

    __slots__ = (
        "num_accepted_per_pos",
        "num_accepted_tokens",
        "num_batched_tokens",
        "num_draft_tokens",
        "num_drafts",
        "num_generated_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "num_steps",
        "prefix_cache_hits",
        "prefix_cache_queries",
    )

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_batched_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_pos: list[int] = []

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Count one draft and what was kept of it."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        per_pos = self.num_accepted_per_pos
        per_pos += [0] * (num_accepted - len(per_pos))
        for place in range(num_accepted):
            per_pos[place] += 1

    def stats(self, pool: BlockPool, num_running: int, num_waiting: int, beam_blocks: tuple[int, int]) -> Stats:
        """The counters, with the gauges of this moment. `beam_blocks`: held by searches, and as if they shared none."""
        return Stats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=pool.num_blocks,
            num_blocks_held=pool.num_held,
            num_blocks_cached=len(pool.evictable),
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_batched_tokens=self.num_batched_tokens,
            num_beam_blocks=beam_blocks[0],
            num_beam_blocks_unshared=beam_blocks[1],
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_per_pos=list(self.num_accepted_per_pos),
        )
