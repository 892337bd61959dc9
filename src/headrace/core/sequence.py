"""`Sequence`: the state of one live request, or of one beam of a search. Mutable, and used inside the core alone.

There is no prefill phase and no decode phase: of the known `tokens`, the first `num_computed` are computed, and the
scheduler closes the gap. Holds no policy and knows neither queue, blocks nor searches; the scheduler changes it.
"""

from __future__ import annotations

import sys
from dataclasses import InitVar, dataclass, field
from enum import IntEnum

from headrace.protocol.errors import InvariantError
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import fit_wholes, named, wholes_of
from headrace.protocol.step import Draft, Pooling, Request, Stats

NEVER = sys.maxsize


class Status(IntEnum):
    """The life of a sequence. A preempted one is waiting again; a finished one may still be in the step in flight."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


_LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.RUNNING, Status.WAITING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.FINISHED),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, or one beam of a search, between its arrival and its end.

    `seq_id` is fresh and grows with arrival. `tokens` are prompt + resumed + generated; `num_known` of them came
    with the request. `tables[k]` holds the blocks of kind k (`core.kinds`) for positions 0 ... num_computed - 1 (and
    those scheduled); -1 stands for a block behind the kind's window. `states` are slots of the state kind, by the
    number of tokens that the state has seen: the slot that the next step reads, and the slots that steps in flight
    write. When the sequence began to run, the whole blocks of its first `num_matched` tokens were cached. No chunk goes
    beyond `stop_at`. `keys[i]` is the prefix cache's key of all tokens before block i, so `keys[0]` is the root; it is
    extended when needed and never changes. Blocks are published when `num_computed` reaches `publish_at`. `high_water`
    is the largest `num_computed` that a preemption discarded, or that a state went back from. `rank` is the priority in
    use: smaller is sooner, and minus infinity once the sequence was overtaken too often. `needs_history`: the sampler
    reads all tokens; `state` is the sampler's state after the last of them. `is_beam`: a beam of the search with this
    `request_id`; `arrival` is the `seq_id` of the first beam of that search, or the sequence's own. `special`: the
    batch has further columns for it. `runs_ahead`: its next token may be computed before it is known on the host; steps
    in flight compute `num_ahead` tokens after the first `num_computed`. `draft` holds draft tokens for the next step,
    `tails` the blocks of a tree of them in the step in flight. No step may end inside one of `wholes`, (first, stop).
    """

    request: Request
    seq_id: int
    max_len: int
    stop_ids: frozenset[int]
    root: InitVar[bytes]
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    needs_history: bool = field(init=False)
    special: bool = field(init=False)
    state: float | None = field(init=False)
    pooling: Pooling = field(init=False)
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    num_known: int = field(init=False)
    keys: list[bytes] = field(init=False)
    arrival: int = field(init=False)
    is_beam: bool = False
    family: bytes = b""
    rank: float = 0
    status: Status = Status.WAITING
    started: bool = False
    num_computed: int = 0
    num_ahead: int = 0
    runs_ahead: bool = False
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    states: dict[int, int] = field(default_factory=dict)
    num_matched: int = 0
    stop_at: int = NEVER
    draft: Draft | None = None
    tails: list[list[int]] = field(default_factory=list)
    wholes: list[tuple[int, int]] = field(init=False)
    num_published: int = 0
    publish_at: int = NEVER
    high_water: int = 0
    num_preemptions: int = 0
    num_forced: int = 0
    num_recomputed: int = 0
    num_overtaken: int = 0
    pooled: list[float] = field(default_factory=list)

    def __post_init__(self, root: bytes) -> None:
        request = self.request
        self.request_id = request.request_id
        self.params = request.params
        self.needs_history = request.params.needs_history
        self.state = request.resume_state
        self.pooling = request.pooling
        self.tokens = [*request.prompt_token_ids, *request.resume_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_known = len(self.tokens)
        self.keys = [root]
        self.arrival = self.seq_id
        self.special = self.needs_history or self.state is not None or self.pooling != "" or request.adapter != ""
        self.special = self.special or bool(request.pictures)
        self.wholes = wholes_of(request.pictures) if request.pictures else []

    @property
    def block_table(self) -> list[int]:
        """The table of kind 0."""
        return self.tables[0]

    @block_table.setter
    def block_table(self, table: list[int]) -> None:
        self.tables[0] = table

    @property
    def named(self) -> list[int]:
        """The tokens as the prefix cache knows them."""
        return named(self.tokens, self.request.pictures)

    @property
    def order(self) -> tuple[float, int]:
        """The key that sorts the queue; the largest of the running ones is the first victim of a preemption."""
        return self.rank, self.arrival

    @property
    def gap(self) -> int:
        """The tokens that the next step may compute. While a step is in flight, these are the known tokens after it, or
        the token that it draws, unless the sequence ends with that token for its length."""
        gap = len(self.tokens) - self.num_computed - self.num_ahead
        if not self.num_ahead:
            return gap
        return (gap or int(len(self.tokens) + 1 < self.max_len)) if self.runs_ahead else 0

    def fit(self, start: int, length: int, most: int) -> int:
        """Return how many tokens from `start` on a step computes instead of `length`, at most `most`, so that it ends
        inside no picture that is seen whole; 0 where it has no room for one."""
        return fit_wholes(self.wholes, start, length, most) if self.wholes else length

    @property
    def may_share(self) -> bool:
        """Whether the sequence may start on blocks computed for others. The first row
        or the mean as a vector, and `prompt_logprobs`, need every row of the prompt computed, once."""
        if self.pooling not in ("", "last"):
            return False
        return self.params.prompt_logprobs is None or self.high_water >= self.num_prompt - 1

    def count(self, length: int, counters: Stats) -> None:
        """Count, among the next `length` tokens, those in the prompt and those computed before a preemption.

        A prompt's last token counts with the one before it, since steps of one token are not counted here."""
        start = self.num_computed + self.num_ahead
        num_again = max(0, min(self.high_water, start + length) - start)
        self.num_recomputed += num_again
        counters.num_recomputed_tokens += num_again
        num_prompt = self.num_prompt if start + length + 1 >= self.num_prompt else start + length
        counters.num_prompt_tokens += max(0, num_prompt - max(start, self.high_water))

    def set_back(self, length: int) -> None:
        """Note that the last `length` computed tokens are computed again: the last was not sampled from, and a state
        cannot go back to the one before it."""
        self.high_water = max(self.high_water, self.num_computed + length - 1)
        self.num_forced += 1

    def fork(self, seq_id: int) -> Sequence:
        """Return another beam of the same search with the same tokens, waiting and without blocks."""
        seq = Sequence(self.request, seq_id, self.max_len, self.stop_ids, self.keys[0])
        for name in ("arrival", "is_beam", "params", "high_water", "num_preemptions", "num_forced", "started"):
            setattr(seq, name, getattr(self, name))
        seq.tokens, seq.keys = list(self.tokens), list(self.keys)
        return seq

    def move(self, status: Status) -> None:
        """Change the status. Raises `InvariantError` (I-10) for a transition that is not legal."""
        if (self.status, status) not in _LEGAL:
            raise InvariantError("I-10", f"{self.request_id}: {self.status.name} -> {status.name}")
        self.status = status
