"""`Searches`: the beam searches that the engine has, each a set of sequences that come and go together.

A beam is a `Sequence` like any other, with a table of its own; a fork takes references to its parent's blocks, and the
block that two would write is copied by whoever writes first (`BlockTables.grow`). A beam that has computed its tokens
waits for the others of its search; when the last one has told its candidates, `BeamSearch` chooses, beams are forked
and dropped, and all go on. So nothing depends on which of them ran in which step. Preempted, the first beam goes to the
queue for all; once it has computed again what all have in common, the others fork from it.

Decides nothing about who runs; called by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.beams import BeamSearch, Top
from headrace.core.finish import LENGTH, finish_after, stop_ids
from headrace.core.sequence import Sequence, Status
from headrace.core.tables import BlockTables
from headrace.protocol.beam import BeamSearchParams, check_combination
from headrace.protocol.errors import RequestError
from headrace.protocol.step import Beam, BeamResult, EngineInfo, Request, StepResult


class Search:
    """One search. `live` are its beams in `BeamSearch`'s order: the prompt alone until the first choice. `tops` holds
    the candidates of those that have computed all they know, by sequence id. `pending` beams were preempted and hold
    nothing, until `live[0]` has computed the first `num_common` tokens that they share with it."""

    def __init__(self, root: Sequence, params: BeamSearchParams) -> None:
        self.rules = BeamSearch(params, root.stop_ids, root.max_len - root.num_prompt)
        self.width = params.beam_width
        self.live = [root]
        self.tops: dict[int, Top] = {}
        self.pending: list[Sequence] = []
        self.num_common = 0
        # The most that it held at once, and would have held unshared.
        self.num_blocks = self.num_blocks_unshared = 0

    def claim(self, block_size: int) -> int:
        """Blocks that the beams hold at their longest, when they share nothing but the prompt's whole blocks."""
        root = self.live[0]
        return claim_of(self.width, root.num_prompt, root.max_len, block_size)

    def reserve(self, block_size: int) -> int:
        """Blocks beside those of `live[0]` that the others need for the tokens they know; of a search that has not
        begun, those that the first fork will need."""
        if len(self.live) > 1:
            shared = self.num_common // block_size
            return sum(-(-len(seq.tokens) // block_size) - shared for seq in self.pending)
        known = -(-len(self.live[0].tokens) // block_size)
        return min(self.width - 1, self.claim(block_size) - known)

    def retire(self) -> Sequence:
        """All beams have lost their blocks. Returns the one that waits for all."""
        first = self.live[0]
        self.tops.clear()
        self.pending = self.live[1:]
        self.num_common = min((_num_common(first.tokens, seq.tokens) for seq in self.pending), default=0)
        return first

    def blocks(self) -> tuple[int, int]:
        """Blocks that the beams hold, and as many as they would hold if each had its own."""
        tables = [seq.block_table for seq in self.live]
        return len(set().union(*tables)), sum(map(len, tables))


class Searches:
    """The searches that have not ended, by request id. `running` is the scheduler's list, changed in place; `number`
    gives the next sequence id."""

    def __init__(
        self,
        tables: BlockTables,
        running: list[Sequence],
        eos_token_ids: frozenset[int],
        number: Callable[[], int],
    ) -> None:
        self.tables = tables
        self.eos_token_ids = eos_token_ids
        self.block_size = tables.pool.block_size
        self.running = running
        self.number = number
        self.open: dict[str, Search] = {}

    def begin(self, request: Request, root: Sequence, max_num_seqs: int) -> None:
        """Make `root` the first beam of the search that `request` asks for. Raises `RequestError`, changing nothing, if
        its beams could not run together."""
        params = request.beam
        if params is None:
            return
        if request.resume_token_ids:
            raise RequestError("resume_token_ids", len(request.resume_token_ids), "none for a beam search")
        search = Search(root, params)
        check_room(params, max_num_seqs, search.claim(self.block_size), self.tables.pool.num_blocks)
        root.search = search
        root.params = params.step_params(request.params, len(root.stop_ids))
        self.open[request.request_id] = search

    # -- what the scheduler has to count in ----------------------------------------------------------------------

    def num_absent(self) -> int:
        """Beams that running searches do not have just now, and for which there must be room to run."""
        return sum(search.width - len(search.live) + len(search.pending) for search in self._running())

    def num_reserved(self) -> int:
        """Blocks that running searches need for beams that are to start again."""
        return sum(search.reserve(self.block_size) for search in self._running() if search.pending)

    def num_requests(self) -> int:
        """Running sequences, the beams of a search counted as one."""
        return len(self.running) - sum(len(search.live) - len(search.pending) - 1 for search in self._running())

    def blocks(self) -> tuple[int, int]:
        """Blocks that the beams hold, and would hold unshared."""
        each = [search.blocks() for search in self._running()]
        return sum(held for held, _ in each), sum(unshared for _, unshared in each)

    def _running(self) -> list[Search]:
        return [search for search in self.open.values() if search.live[0].status is Status.RUNNING] if self.open else []

    # -- the end of a step ---------------------------------------------------------------------------------------

    def take_in(
        self, rows: list[tuple[Sequence, int, bool, int]], result: StepResult, failed: set[int]
    ) -> dict[str, Search]:
        """Note what the step gave for beams; -> the searches that it touched."""
        touched: dict[str, Search] = {}
        for index, (seq, length, sampled, _) in enumerate(rows):
            if seq.search is None or index in failed:
                continue
            seq.num_computed += length
            if seq.num_computed >= seq.publish_at:
                self.tables.publish(seq)
            if sampled:
                seq.search.tops[seq.seq_id] = result.logprobs[index].top
            touched[seq.request_id] = seq.search
        return touched

    def advance(self, search: Search) -> BeamResult | None:
        """Go on as far as can be after a step: start beams again, choose, fork and drop. What was found, at the end."""
        first = search.live[0]
        if search.pending and first.num_computed >= search.num_common:
            for seq in search.pending:
                self._enter(first, seq, search.num_common)
            search.pending = []
        held, unshared = search.blocks()
        search.num_blocks = max(search.num_blocks, held)
        search.num_blocks_unshared = max(search.num_blocks_unshared, unshared)
        if len(search.tops) < len(search.live):
            return None
        tops = [search.tops[seq.seq_id] for seq in search.live]
        search.tops.clear()
        children = search.rules.advance(tops, [seq.tokens for seq in search.live], first.num_prompt)
        if search.rules.finished:
            return self._result(search)
        kept: set[int] = set()
        live: list[Sequence] = []
        for child in children:
            seq = search.live[child.parent]
            if child.parent in kept:
                parent, seq = seq, seq.fork(self.number())
                self._enter(parent, seq, parent.num_computed)
            kept.add(child.parent)
            live.append(seq)
        for index, seq in enumerate(search.live):
            if index not in kept:
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
        for ended in search.rules.answers():
            # One that did not stop has come to its greatest length.
            finish = finish_after(ended.token_ids[-1], len(ended.token_ids), True, params, self.eos_token_ids)
            beams.append(
                Beam(
                    token_ids=ended.token_ids,
                    score=ended.score,
                    cumulative_logprob=ended.total,
                    finish=finish or LENGTH,
                )
            )
        return BeamResult(beams=beams, num_blocks=search.num_blocks, num_blocks_unshared=search.num_blocks_unshared)


def claim_of(width: int, num_prompt: int, max_len: int, block_size: int) -> int:
    """Blocks of `width` beams of at most `max_len` tokens that share the prompt's whole blocks. A beam's last token is
    never computed."""
    shared = num_prompt // block_size
    return shared + width * (-(-(max_len - 1) // block_size) - shared)


def check_room(params: BeamSearchParams, max_num_seqs: int, claim: int, num_blocks: int) -> None:
    """Raise `RequestError` if the beams could never run together."""
    if params.beam_width > max_num_seqs:
        raise RequestError("beam_width", params.beam_width, f"at most {max_num_seqs} (--max-num-seqs)")
    if claim > num_blocks:
        bound = f"such that the beams' {claim} blocks fit the cache's {num_blocks}: narrower, or with less max_tokens"
        raise RequestError("beam_width", params.beam_width, bound)


def verify_search(request: Request, params: BeamSearchParams, info: EngineInfo) -> None:
    """What `engine.core.verify` checks of a search, by the numbers of the engine. Raises `RequestError`."""
    check_combination(request.params)
    if request.pooling:
        raise RequestError("pooling", request.pooling, "left out of a beam search")
    num_kept = params.num_kept(len(stop_ids(request.params, info.eos_token_ids)))
    if num_kept > info.vocab_size:
        raise RequestError(
            "beam_width", params.beam_width, f"less: the model has {info.vocab_size} tokens to choose from"
        )
    num_prompt = len(request.prompt_token_ids)
    max_len = min(num_prompt + (request.params.max_tokens or info.max_model_len), info.max_model_len)
    max_len = min(max_len, info.num_blocks * info.block_size + 1)
    claim = claim_of(params.beam_width, num_prompt, max_len, info.block_size)
    check_room(params, min(info.max_num_seqs, info.max_num_batched_tokens), claim, info.num_blocks)


def _num_common(left: list[int], right: list[int]) -> int:
    """Tokens that two lists begin with alike, and at most so many that either has one left to compute."""
    most = min(len(left), len(right)) - 1
    return next((i for i in range(most) if left[i] != right[i]), most)
