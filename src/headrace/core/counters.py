"""`Counters`: what the scheduler has done since its start, in numbers that only grow, and the `Stats` made of them.

Holds no rules. Called by the scheduler and the drafts.
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

    def count_start(self, num_prompt: int, num_hits: int, is_query: bool) -> None:
        """Count a started request, and unless it may not use the prefix cache, its lookup there."""
        self.num_prompt_tokens += num_prompt
        if is_query:
            self.prefix_cache_queries += num_prompt
            self.prefix_cache_hits += num_hits

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Count one draft, and how many of its tokens were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        per_pos = self.num_accepted_per_pos
        per_pos += [0] * (num_accepted - len(per_pos))
        for place in range(num_accepted):
            per_pos[place] += 1

    def stats(self, pool: BlockPool, num_running: int, num_waiting: int, beam_blocks: tuple[int, int]) -> Stats:
        """Return the counters and the present gauges. `beam_blocks`: the blocks that searches hold, and would hold
        without sharing."""
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
