"""`Drafts`: where guesses get their place in a step, and what becomes of their blocks when the step is known.

A chain of guesses writes to the sequence's own blocks, past its end. A tree is written as forks: each path from the
first guess to a leaf has its own blocks from the first one that a guess falls into, so that to keep a path is to swap
blocks. Guesses only take what nobody else wants: no sequence is thrown out for them, and none waits. Knows ints; called
by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.counters import Counters
from headrace.core.sequence import Sequence, Status
from headrace.core.tables import BlockTables
from headrace.protocol.step import DraftTokens, ScheduledBatch, StepResult


class Drafts:
    """`enabled`: whether the executor guesses at all. `ended` are sequences that it may forget.

    An executor that found nobody worth a guess is not asked for some steps (`StepResult.rest`), in which nothing of
    this costs anything.
    """

    def __init__(self, tables: BlockTables, counters: Counters, enabled: bool) -> None:
        self.tables = tables
        self.counters = counters
        self.enabled = enabled
        self.ended: list[int] = []
        # Whether a sequence may have a draft; steps without a question, and of how many sequences they are.
        self._open = False
        self._rest = self._rest_seqs = 0

    def asks(self, num_seqs: int) -> bool:
        """Whether guesses are wanted after a step of so many sequences. Called once a step."""
        if self._rest > 0 and num_seqs >= self._rest_seqs:
            self._rest -= 1
            return False
        self._rest = 0
        return self.enabled

    def reserve(self, running: Iterable[Sequence], budget: int) -> int:
        """Tokens of a step's `budget` that guesses may use: not more than half, the rest is for what is known."""
        if not self._open:
            return 0
        num = sum(len(seq.draft.token_ids) for seq in running if seq.draft is not None)
        self._open = num > 0
        return min(num, budget // 2)

    def place(self, chunks: Iterable[tuple[Sequence, int]], budget: int) -> dict[int, DraftTokens]:
        """Blocks for the guesses of those sequences that compute all they know; by sequence id. Guesses that find no
        room are forgotten."""
        placed: dict[int, DraftTokens] = {}
        for seq, length in chunks:
            draft, seq.draft = seq.draft, None
            if draft is None or seq.num_computed + length < len(seq.tokens):
                continue
            # The last token of a sequence is never computed.
            draft = cut(draft, seq.max_len - 1 - len(seq.tokens), budget)
            draft = self._with_blocks(seq, length, draft)
            if draft.token_ids:
                placed[seq.seq_id] = draft
                budget -= len(draft.token_ids)
        return placed

    def _with_blocks(self, seq: Sequence, length: int, draft: DraftTokens) -> DraftTokens:
        pool, tables = self.tables.pool, self.tables
        trunk = len(draft.paths[0]) if draft.paths else len(draft.token_ids)
        if not tables.grow(seq, length + trunk):
            room = len(seq.block_table) * pool.block_size - seq.num_computed - length
            return DraftTokens(trunk_of(draft)[: max(0, room)])
        if len(draft.paths) < 2:
            return draft
        stop = seq.num_computed + length
        num_whole = stop // pool.block_size
        sizes = [pool.blocks_for(stop + len(path)) - num_whole for path in draft.paths[1:]]
        blocks = pool.allocate(sum(sizes))
        if blocks is None:
            return DraftTokens(trunk_of(draft))
        tails = [[blocks.pop() for _ in range(size)] for size in sizes]
        seq.tails = draft.tails = tails
        if num_whole * pool.block_size < seq.num_computed:
            tables.copies += [(seq.block_table[num_whole], tail[0]) for tail in tails]
        return draft

    def settle(self, batch: ScheduledBatch, flight: list[Sequence], result: StepResult) -> None:
        """Let every sequence keep the blocks of the path that was kept, and no others."""
        for index, draft in batch.drafts.items():
            seq = flight[index]
            if seq.status is not Status.FINISHED:
                if draft.tails:
                    num_whole = (batch.starts[index] + batch.lens[index]) // self.tables.pool.block_size
                    self.tables.adopt(seq, num_whole, result.paths.get(index, 0))
                self.counters.verified(len(draft.token_ids), len(result.further.get(index, ())))

    def keep(self, flight: list[Sequence], batch: ScheduledBatch, result: StepResult, failed: set[int]) -> None:
        """Take back what rejected guesses wrote to, and remember the new guesses of those that go on."""
        if batch.asks:
            self._rest, self._rest_seqs = result.rest, len(flight)
        for index in batch.drafts:
            if flight[index].status is Status.RUNNING:
                self.tables.trim(flight[index])
        for index, draft in result.drafts.items():
            seq = flight[index]
            if index not in failed and seq.status is Status.RUNNING and not seq.is_beam:
                seq.draft = draft
                self._open = True

    def take_ended(self) -> list[int]:
        ended, self.ended = self.ended, []
        return ended


def trunk_of(draft: DraftTokens) -> list[int]:
    """The tokens of path 0."""
    return [draft.token_ids[node] for node in draft.paths[0]] if draft.paths else draft.token_ids


def cut(draft: DraftTokens, max_depth: int, max_nodes: int) -> DraftTokens:
    """The draft without what is deeper than `max_depth`, and with the first `max_nodes` of the rest at most. The paths
    of a tree are written down."""
    if not draft.parents:
        return DraftTokens(draft.token_ids[: max(0, min(max_depth, max_nodes))])
    depths: list[int] = []
    new_ids: dict[int, int] = {-1: -1}
    token_ids: list[int] = []
    parents: list[int] = []
    for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths[node] <= max_depth and len(token_ids) < max_nodes and parent in new_ids:
            new_ids[node] = len(token_ids)
            token_ids.append(token_id)
            parents.append(new_ids[parent])
    paths = paths_of(parents)
    if len(paths) < 2 and parents == list(range(-1, len(parents) - 1)):
        return DraftTokens(token_ids)
    return DraftTokens(token_ids, parents, paths)


def paths_of(parents: list[int]) -> list[list[int]]:
    """Every path from a first node to a leaf, in the order of the leaves' first ancestors: the first path is made of
    first children."""
    inner = set(parents)
    paths = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            paths.append(path[::-1])
    return sorted(paths)
