"""`Sequence`: what the core knows of one live request. Mutable, and seen by the core alone.

There is no prefill phase and no decode phase: a sequence knows `tokens` and has computed the first `num_computed`
of them; the gap between the two is what the scheduler closes. Holds no policy: the scheduler decides, this remembers.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import TYPE_CHECKING

from headrace.protocol.errors import InvariantError
from headrace.protocol.step import DraftTokens, Request

if TYPE_CHECKING:
    from headrace.core.searches import Search

NEVER = sys.maxsize


class Status(IntEnum):
    """Where a sequence is. A preempted one is waiting again; a finished one may still be in the step in flight."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


_LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.RUNNING, Status.WAITING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.FINISHED),
}


class Sequence:
    """One request on its way.

    `seq_id` is fresh and grows with arrival. `tokens` are prompt + resumed + generated; `num_known` of them came
    with the request. `block_table` holds the blocks of positions 0 ... num_computed - 1 (and those scheduled).
    `keys[i]` is the prefix cache's key of all tokens before block i, so `keys[0]` is the root; it is extended when
    needed and never changes. Blocks are published when `num_computed` reaches `publish_at`. `high_water` is the
    largest `num_computed` that a preemption threw away. `rank` is the priority in use: smaller is sooner, and minus
    infinity once the sequence was overtaken too often. `needs_history` says that its sampler wants to see all tokens;
    `state` is what the sampler knows beyond them, after the last one. `arrival` is the `seq_id` of the first beam of
    its `search`, if it is a beam, else its own. `special` ones have a column of the batch beside those of all. `draft`
    are guesses to be verified with the next step, `tails` the blocks of a tree of them in the step in flight.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "draft",
        "family",
        "high_water",
        "keys",
        "max_len",
        "needs_history",
        "num_computed",
        "num_forced",
        "num_known",
        "num_overtaken",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_recomputed",
        "params",
        "pooled",
        "pooling",
        "publish_at",
        "rank",
        "request",
        "request_id",
        "search",
        "seq_id",
        "special",
        "started",
        "state",
        "status",
        "stop_ids",
        "tails",
        "tokens",
    )

    def __init__(self, request: Request, seq_id: int, max_len: int, stop_ids: frozenset[int], root: bytes) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.needs_history = request.params.needs_history
        self.state = request.resume_state
        self.seq_id = seq_id
        self.arrival = seq_id
        self.search: Search | None = None
        self.tokens = [*request.prompt_token_ids, *request.resume_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_known = len(self.tokens)
        self.max_len = max_len
        self.stop_ids = stop_ids
        self.keys = [root]
        self.family = b""
        self.rank: float = 0
        self.status = Status.WAITING
        self.started = False
        self.num_computed = 0
        self.block_table: list[int] = []
        self.draft: DraftTokens | None = None
        self.tails: list[list[int]] = []
        self.num_published = 0
        self.publish_at = NEVER
        self.high_water = 0
        self.num_preemptions = 0
        self.num_forced = 0
        self.num_recomputed = 0
        self.num_overtaken = 0
        self.pooling = request.pooling
        self.pooled: list[float] = []
        self.special = self.needs_history or self.state is not None or self.pooling != ""

    @property
    def order(self) -> tuple[float, int]:
        """Place in the queue; the largest is the first victim of a preemption."""
        return self.rank, self.arrival

    @property
    def members(self) -> list[Sequence]:
        """The sequences that come and go together with this one: the beams of its search, or itself."""
        return [self] if self.search is None else self.search.live

    @property
    def may_share(self) -> bool:
        """Whether it may start on blocks computed for others. Log-probabilities of the prompt need every one of its
        rows computed, once."""
        if self.pooling == "mean":
            return False
        return self.params.prompt_logprobs is None or self.high_water >= self.num_prompt - 1

    def fork(self, seq_id: int) -> Sequence:
        """Another beam of the same search with the same tokens, waiting and without blocks."""
        seq = Sequence(self.request, seq_id, self.max_len, self.stop_ids, self.keys[0])
        for name in ("arrival", "params", "high_water", "num_preemptions", "num_forced", "started"):
            setattr(seq, name, getattr(self, name))
        seq.search, seq.tokens, seq.keys = self.search, list(self.tokens), list(self.keys)
        return seq

    def move(self, status: Status) -> None:
        """Change the status. Raises `InvariantError` (I-10) for a transition that is not legal."""
        if (self.status, status) not in _LEGAL:
            raise InvariantError("I-10", f"{self.request_id}: {self.status.name} -> {status.name}")
        self.status = status
