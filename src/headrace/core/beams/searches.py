"""`Searches`: the open beam searches, each a set of sequences that run, wait and end together.

A beam is a `Sequence` like any other, with its own table; a fork takes references to its parent's blocks, and the block
that two would write is copied by the first that writes (`BlockTables.grow`). A beam that has computed its tokens waits
for the others of its search; when all candidates are there, `BeamSearch` chooses, beams are forked and dropped, and all
go on. So the result does not depend on which of them ran in which step. After a preemption the first beam waits in the
queue for all; once it has computed the common tokens again, the others fork from it.

Does not decide which sequence runs. Called by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.core.beams.rules import BeamSearch, Top
from headrace.core.kinds import Kind
from headrace.core.requests import LENGTH, finish_after
from headrace.core.sequence import NEVER, Sequence, Status
from headrace.core.tables import BlockTables
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.step import Beam, BeamResult, StepResult

Row = tuple[Sequence, int, bool, int]
"""The result of a step for one sequence: the tokens computed, whether one was sampled after them, and which (or -1)."""


class Search:
    """One search. `live` are its beams in `BeamSearch`'s order: the prompt alone until the first choice. `tops` holds
    the candidates of the beams that have computed all their tokens, by sequence id. `pending` beams were preempted and
    hold no blocks, until `live[0]` has computed the first `num_common` tokens that they share with it."""

    def __init__(self, root: Sequence, params: BeamSearchParams) -> None:
        self.rules = BeamSearch(params, root.stop_ids, root.max_len - root.num_prompt)
        self.width = params.beam_width
        self.live = [root]
        self.tops: dict[int, Top] = {}
        self.pending: list[Sequence] = []
        self.num_common = 0
        # The most blocks held at once, and the most that would have been held without sharing.
        self.num_blocks = self.num_blocks_unshared = 0

    def claim(self, kind: Kind) -> int:
        """Return the blocks that the beams hold at their longest, when they share only the prompt's whole blocks."""
        root = self.live[0]
        return kind.claim(self.width, root.num_prompt, root.max_len)

    def reserve(self, kind: Kind) -> int:
        """Return the number of blocks that the beams after `live[0]` need for their known tokens; before the first
        choice, the number that the first fork will need."""
        pool = kind.pool
        if len(self.live) > 1:
            shared = self.num_common // pool.block_size
            return sum(min(pool.blocks_for(len(seq.tokens)) - shared, kind.most) for seq in self.pending)
        known = min(pool.blocks_for(len(self.live[0].tokens)), kind.most)
        return min(self.width - 1, self.claim(kind) - known)

    def retire(self) -> Sequence:
        """Note that all beams have lost their blocks. Returns the beam that waits in the queue for all."""
        first = self.live[0]
        self.tops.clear()
        self.pending = self.live[1:]
        self.num_common = min((_num_common(first.tokens, seq.tokens) for seq in self.pending), default=0)
        # The next token overwrites a state, and takes blocks out of a window.
        first.stop_at = self.num_common if self.pending else NEVER
        return first

    @property
    def num_absent(self) -> int:
        """The number of beams that may still join those that run."""
        return self.width - len(self.live) + len(self.pending)

    def blocks(self) -> tuple[int, int]:
        """Return the number of blocks that the beams hold, and the number that they would hold without sharing."""
        tables = [seq.block_table for seq in self.live]
        return len(set().union(*tables) - {-1}), sum(map(len, tables))


class Searches:
    """The searches that have not ended, by request id. `running` is the scheduler's list, changed in place; `next_id`
    returns a fresh sequence id."""

    def __init__(
        self,
        tables: BlockTables,
        running: list[Sequence],
        eos_token_ids: frozenset[int],
        next_id: Callable[[], int],
    ) -> None:
        self.tables = tables
        self.eos_token_ids = eos_token_ids
        self.running = running
        self.next_id = next_id
        self.open: dict[str, Search] = {}

    def begin(self, params: BeamSearchParams, root: Sequence) -> None:
        """Make `root` the first beam of a search."""
        root.is_beam = True
        root.params = params.step_params(root.params, len(root.stop_ids))
        self.open[root.request_id] = Search(root, params)

    def get(self, seq: Sequence) -> Search | None:
        """Return the open search of a beam, None for any other sequence."""
        return self.open.get(seq.request_id) if seq.is_beam else None

    def members(self, seq: Sequence) -> list[Sequence]:
        """Return the sequences that run, wait and end together with `seq`: the beams of its search, or itself."""
        search = self.get(seq)
        return [seq] if search is None else search.live

    # -- what the scheduler counts -------------------------------------------------------------------------------

    def claims(self, seqs: Iterable[Sequence], kind: Kind) -> int:
        """Return the blocks that `seqs` hold together at their longest; a search counts once for all its beams."""
        searches: dict[str, Search] = {}
        num_blocks = 0
        for seq in seqs:
            search = self.get(seq)
            if search is None:
                num_blocks += kind.worst_case(seq)
            else:
                searches[seq.request_id] = search
        return num_blocks + sum(search.claim(kind) for search in searches.values())

    def fit(self, seqs: Iterable[Sequence]) -> bool:
        """Whether `seqs` fit the pools of all kinds together at their longest."""
        return all(self.claims(seqs, kind) <= kind.pool.num_blocks for kind in self.tables.all_kinds)

    def num_absent(self) -> int:
        """Return the number of beams that running searches may still add to the running sequences."""
        return sum(search.num_absent for search in self.at_work())

    def with_reserve(self, promised: list[int], search: Search) -> list[int]:
        """Return `promised` with the blocks of each kind that the beams of `search` need in addition to the first."""
        return [num + search.reserve(kind) for num, kind in zip(promised, self.tables.all_kinds, strict=True)]

    def promise(self, promised: list[int]) -> None:
        """Add to `promised` the blocks that running searches need for their pending beams."""
        for search in self.at_work():
            if search.pending:
                promised[:] = self.with_reserve(promised, search)

    def num_requests(self) -> int:
        """Return the number of running requests: the beams of a search count as one."""
        return len(self.running) - sum(len(search.live) - len(search.pending) - 1 for search in self.at_work())

    def blocks(self) -> tuple[int, int]:
        """Return the number of blocks that all beams hold, and the number that they would hold without sharing."""
        counts = [search.blocks() for search in self.at_work()]
        return sum(num_blocks for num_blocks, _ in counts), sum(unshared for _, unshared in counts)

    def at_work(self) -> list[Search]:
        return [search for search in self.open.values() if search.live[0].status is Status.RUNNING]

    # -- the end of a step ---------------------------------------------------------------------------------------

    def take_in(self, rows: list[Row], result: StepResult, failed: set[int]) -> dict[str, Search]:
        """Apply the result of a step to the beams in it. Returns their searches by request id."""
        searches: dict[str, Search] = {}
        for index, (seq, length, sampled, _) in enumerate(rows):
            if not seq.is_beam or index in failed:
                continue
            search = searches[seq.request_id] = self.open[seq.request_id]
            seq.num_computed += length
            if seq.num_computed >= seq.publish_at:
                self.tables.publish(seq)
            if sampled:
                search.tops[seq.seq_id] = result.rows[index].logprob.top  # type: ignore[union-attr]
        return searches

    def advance(self, search: Search) -> BeamResult | None:
        """Move a search on after a step: start pending beams, and when all candidates are there choose, fork and drop
        beams. Returns the answers at the end of the search, None before."""
        first = search.live[0]
        if search.pending and first.num_computed >= search.num_common:
            for seq in search.pending:
                self._enter(first, seq, search.num_common)
            search.pending, first.stop_at = [], NEVER
        num_blocks, unshared = search.blocks()
        search.num_blocks = max(search.num_blocks, num_blocks)
        search.num_blocks_unshared = max(search.num_blocks_unshared, unshared)
        if len(search.tops) < len(search.live):
            return None
        tops = [search.tops[seq.seq_id] for seq in search.live]
        search.tops.clear()
        children = search.rules.advance(tops, [seq.tokens for seq in search.live], first.num_prompt)
        if search.rules.finished:
            return self._result(search)
        parents: set[int] = set()
        live: list[Sequence] = []
        for child in children:
            seq = search.live[child.parent]
            if child.parent in parents:
                parent, seq = seq, seq.fork(self.next_id())
                self._enter(parent, seq, parent.num_computed)
            parents.add(child.parent)
            live.append(seq)
        for index, seq in enumerate(search.live):
            if index not in parents:
                self.running.remove(seq)
                self.tables.release(seq)
                seq.move(Status.FINISHED)
        # Last, since a fork copies the tokens that its parent had before.
        for seq, child in zip(live, children, strict=True):
            seq.tokens.append(child.token_id)
        search.live = live
        return None

    def _enter(self, parent: Sequence, seq: Sequence, num: int) -> None:
        seq.rank, seq.num_overtaken = parent.rank, parent.num_overtaken
        self.tables.fork(parent, seq, num)
        seq.move(Status.RUNNING)
        self.running.append(seq)

    def _result(self, search: Search) -> BeamResult:
        params = search.live[0].params
        beams = []
        for answer in search.rules.answers():
            # An answer without a stop token has reached its greatest length.
            finish = finish_after(answer.token_ids[-1], len(answer.token_ids), True, params, self.eos_token_ids)
            beams.append(
                Beam(
                    token_ids=answer.token_ids,
                    score=answer.score,
                    cumulative_logprob=answer.total,
                    finish=finish or LENGTH,
                )
            )
        return BeamResult(beams=beams, num_blocks=search.num_blocks, num_blocks_unshared=search.num_blocks_unshared)


def _num_common(left: list[int], right: list[int]) -> int:
    """Return the length of the common beginning of two token lists, less than the length of either, so that each has
    one token left to compute."""
    most = min(len(left), len(right)) - 1
    return next((i for i in range(most) if left[i] != right[i]), most)
