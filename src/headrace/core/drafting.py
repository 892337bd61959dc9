"""`Drafts`: places drafts in a step, and settles their blocks when the result of the step is known.

A chain is written to the sequence's own blocks, past its end. A tree is written as forks: each path to a leaf has its
own blocks from the first one that holds a draft token, so that to keep a path is to swap blocks. Drafts only use spare
budget and blocks: no sequence is preempted for them, and none waits. Knows ints; must not know how drafts are made.
Called by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.sequence import Sequence, Status
from headrace.core.tables import BlockTables
from headrace.protocol.step import Draft, ScheduledBatch, Stats, StepResult


class Drafts:
    """`enabled`: whether the executor makes drafts at all; else nothing here is called. `ended` are sequences that it
    may forget.

    The executor may rest (`StepResult.rest`): the steps until then request no drafts, and cost nothing for them.
    """

    def __init__(self, tables: BlockTables, counters: Stats, enabled: bool) -> None:
        self.tables = tables
        self.counters = counters
        self.enabled = enabled
        self.ended: list[int] = []
        # Whether a sequence may have a draft; steps to rest, and the least sequences of such a step.
        self._open = False
        self._rest = self._rest_seqs = 0

    def request(self, num_seqs: int) -> tuple[list[int], bool]:
        """Return the sequences that ended since the last step, and whether a step of `num_seqs` sequences requests
        drafts. Called once a step."""
        ended, self.ended = self.ended, []
        if self._rest > 0 and num_seqs >= self._rest_seqs:
            self._rest -= 1
            return ended, False
        self._rest = 0
        return ended, True

    def reserve(self, running: Iterable[Sequence], budget: int) -> int:
        """Tokens of a step's `budget` for drafts: at most half, the rest is for known tokens."""
        if not self._open:
            return 0
        num = sum(len(seq.draft.token_ids) for seq in running if seq.draft is not None)
        self._open = num > 0
        return min(num, budget // 2)

    def place(self, chunks: Iterable[tuple[Sequence, int]], budget: int) -> dict[int, Draft]:
        """Return the drafts, with blocks, of the sequences that compute all their known tokens, by sequence id. A draft
        without room is dropped."""
        placed: dict[int, Draft] = {}
        for seq, length in chunks:
            draft, seq.draft = seq.draft, None
            if draft is None or seq.num_computed + length < len(seq.tokens):
                continue
            # The last token of a sequence is never computed.
            draft = draft.cut(seq.max_len - 1 - len(seq.tokens), budget)
            if not self.tables.is_plain:
                # A tree's paths would each need a state and windows.
                draft = draft.subset(draft.paths()[0][: max(0, self.tables.max_chunk - length)])
            draft = self._with_blocks(seq, length, draft)
            if draft.token_ids:
                placed[seq.seq_id] = draft
                budget -= len(draft.token_ids)
        return placed

    def _with_blocks(self, seq: Sequence, length: int, draft: Draft) -> Draft:
        pool, tables = self.tables.pool, self.tables
        paths = draft.paths()
        trunk = [draft.token_ids[node] for node in paths[0]]
        if not tables.grow(seq, length + len(trunk), len(trunk)):
            if tables.state is not None:
                return Draft([])
            room = len(seq.block_table) * pool.block_size - seq.num_computed - length
            return Draft(trunk[: max(0, room)])
        if len(paths) == 1:
            return draft
        stop = seq.num_computed + length
        num_whole = stop // pool.block_size
        sizes = [pool.blocks_for(stop + len(path)) - num_whole for path in paths[1:]]
        blocks = pool.allocate(sum(sizes))
        if blocks is None:
            return Draft(trunk)
        tails = [[blocks.pop() for _ in range(size)] for size in sizes]
        seq.tails = draft.tails = tails
        if num_whole * pool.block_size < seq.num_computed:
            tables.copies[0] += [(seq.block_table[num_whole], tail[0]) for tail in tails]
        return draft

    def settle(self, batch: ScheduledBatch, flight: list[Sequence], result: StepResult) -> None:
        """Let every sequence keep the blocks of the path that was accepted, and no others."""
        for index, draft in batch.drafts.items():
            seq = flight[index]
            if seq.status is not Status.FINISHED:
                if draft.tails:
                    num_whole = (batch.starts[index] + batch.lens[index]) // self.tables.pool.block_size
                    self.tables.adopt(seq, num_whole, result.read(index).path)
                self._count(len(draft.token_ids), len(result.read(index).further))

    def _count(self, num_drafted: int, num_accepted: int) -> None:
        """Count one draft, and how many of its tokens were accepted."""
        counters = self.counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_drafted
        counters.num_accepted_tokens += num_accepted
        per_pos = counters.num_accepted_per_pos
        per_pos += [0] * (num_accepted - len(per_pos))
        for place in range(num_accepted):
            per_pos[place] += 1

    def keep(self, flight: list[Sequence], batch: ScheduledBatch, result: StepResult, failed: set[int]) -> None:
        """Release the blocks of rejected draft tokens, and keep the new drafts of the sequences that go on."""
        if batch.asks:
            self._rest, self._rest_seqs = result.rest, len(flight)
        for index in batch.drafts:
            if flight[index].status is Status.RUNNING:
                self.tables.trim(flight[index])
        for index, row in result.rows.items():
            seq = flight[index]
            if row.draft is not None and index not in failed and seq.status is Status.RUNNING and not seq.is_beam:
                seq.draft = row.draft
                self._open = True
