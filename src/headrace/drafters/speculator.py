"""`Speculator`: the runner's only interface to speculation, called before the model runs and after it.

`begin_step` returns a record, which the runner fills in; `end_step` reads it, and adds drafts to the step's result. It
owns the drafter, the `Pace` and the distributions that rejection sampling needs, and checks every draft: its token ids,
its shape as a tree, its size. Knows sequences by id and tokens; must not know the scheduler or requests. Called by
`runner.runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.drafters.base import Context, Drafter
from headrace.drafters.pace import Pace
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft, ScheduledBatch, StepResult

logger = logging.getLogger(__name__)

F32 = NDArray[np.float32]

LEAST_KNOWN = 4
"""Known tokens with which a guess about them is compared, at least."""
MOST_SEEN = 16
"""Last tokens of a sequence that are looked back at; what came before is no news."""


class Outcome(NamedTuple):
    """The outcome of a draft's verification; see `Drafter.verified`."""

    seq_id: int
    draft: Draft
    best: list[int]
    accepted: list[int]


class Observation(NamedTuple):
    """The target's features of a sequence; see `Drafter.observe`."""

    seq_id: int
    start: int
    token_ids: list[int]
    features: F32


@dataclass(slots=True)
class StepRecord:
    """The runner's record of a step for the speculator.

    `draft_probs` has the chunks whose drafts are verified by rejection sampling, with the distributions [n, V] from
    which the tokens were drawn (None: chosen without chance). `needs_features`: whether `observations` are needed.
    """

    draft_probs: dict[int, F32 | None] = field(default_factory=dict)
    needs_features: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)


class Speculator:
    """Speculation with one drafter for all sequences.

    Args:
        drafter: makes the drafts.
        pace: decides how deep they are; None: as deep as allowed.
        vocab_size: of the target; no draft token is beyond it.
        num_drafts, num_nodes: the deepest draft, and the most tokens of a tree.
        max_model_len: no sequence is longer.
        eos_token_ids: tokens that end a sequence, after which nothing is drafted.
        take_probs: returns and forgets the distributions [n, V] of a sequence's last draft (None: chosen without
            chance); drafts are then verified by rejection sampling. None: they are coupled.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        drafter: Drafter,
        pace: Pace | None,
        *,
        vocab_size: int,
        num_drafts: int,
        num_nodes: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        take_probs: Callable[[int], F32 | None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.drafter = drafter
        self.pace = pace
        self.num_drafts = num_drafts
        self.num_nodes = num_nodes
        self.clock = clock
        self.num_refused = 0
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos = frozenset(eos_token_ids)
        self._take_probs = take_probs
        # Under rejection sampling: the last draft of each sequence, until it is verified.
        self._proposals: dict[int, tuple[list[int], F32 | None]] = {}
        # Length of each sequence at its last draft: after more new tokens than a step gives, drafters have to catch up.
        self._lengths: dict[int, int] = {}
        self._start = self._looking = 0.0

    def begin_step(self, batch: ScheduledBatch) -> StepRecord:
        """Begin a step, before the model runs `batch`. Returns the record that the runner fills in."""
        record = StepRecord(needs_features=batch.asks and self.drafter.feature_layers is not None)
        for i, draft in batch.drafts.items():
            token_ids, probs = self._proposals.get(batch.seq_ids[i], ([], None))
            # The scheduler may have cut it. Drafts from other sources are coupled, which is always sound.
            if self._take_probs is not None and token_ids[: len(draft.token_ids)] == draft.token_ids:
                record.draft_probs[i] = probs
        self._start = self._now()
        return record

    def end_step(self, batch: ScheduledBatch, result: StepResult, record: StepRecord) -> None:
        """End a step, after the model has run `batch`: set drafts in `result`, or for how many steps to `rest`."""
        start = self._now()
        num_draft_rows = sum(len(draft.token_ids) for draft in batch.drafts.values())
        if self.pace is not None:
            num_rows = len(batch.token_ids) + num_draft_rows
            self.pace.stepped(batch.step_id, len(batch), num_rows, num_draft_rows, start - self._start)
        for outcome in record.outcomes:
            if self.pace is not None:
                self.pace.verified(outcome.seq_id, outcome.draft.depth, len(outcome.accepted))
            self.drafter.verified(*outcome)
        for seq_id in batch.ended:
            self._proposals.pop(seq_id, None)
            self._lengths.pop(seq_id, None)
            if self.pace is not None:
                self.pace.drop(seq_id)
            self.drafter.drop(seq_id)
        for observation in record.observations:
            self.drafter.observe(*observation)
        if not batch.asks:
            return
        contexts = self._contexts(batch, result)
        if contexts:
            begin = self._now()
            is_behind = self._propose(contexts, result)
            if self.pace is not None:
                depth = max(context.num_drafts for context in contexts.values())
                self.pace.drafted(len(contexts), depth, self._now() - begin, is_behind)
        elif self.pace is not None:
            result.rest = self.pace.rest(self._now() - start - self._looking)

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self.drafter.close()

    def _now(self) -> float:
        return self.clock() if self.pace is not None else 0.0

    def _contexts(self, batch: ScheduledBatch, result: StepResult) -> dict[int, Context]:
        """Return the contexts of the chunks to draft for, by chunk, each as deep as the pace decides."""
        pace, self._looking = self.pace, 0.0
        depths = pace.current(batch.seq_ids) if pace is not None else None
        chunk_ids = [i for i in batch.histories if result.token_ids[i] >= 0 and batch.params[i].speculation]
        is_due = pace is not None and depths is None
        if pace is not None and is_due and pace.looks_back:
            self._look_back(batch, result, [i for i in chunk_ids if batch.seq_ids[i] not in pace.depths])
            if pace.stays_asleep(len(batch)):
                return {}
        limits: dict[int, int] = {}
        for i in chunk_ids:
            if depths is None or batch.seq_ids[i] in depths:
                further = _further(result, i)
                num_tokens = len(batch.histories[i]) + len(further)
                most = self._most_accepted(batch.params[i], num_tokens, batch.num_prompts[i], further[-1])
                if most > 0:
                    limits[i] = min(self.num_drafts, most)
        if pace is not None and is_due:
            depths = pace.plan([(batch.seq_ids[i], most) for i, most in limits.items()], batch.seq_ids)
        contexts: dict[int, Context] = {}
        for i, most in limits.items():
            depth = most if depths is None else min(most, depths.get(batch.seq_ids[i], 0))
            if depth > 0:
                num_nodes = self.num_nodes if pace is None else min(self.num_nodes, pace.nodes(depth))
                tokens = [*batch.histories[i], *_further(result, i)]
                contexts[i] = self._context(batch, i, tokens, depth, max(depth, num_nodes), result.read(i).state)
        return contexts

    def _context(
        self, batch: ScheduledBatch, i: int, tokens: list[int], depth: int, num_nodes: int, state: float | None = None
    ) -> Context:
        return Context(batch.seq_ids[i], tokens, batch.num_prompts[i], batch.params[i], depth, num_nodes, state)

    def _look_back(self, batch: ScheduledBatch, result: StepResult, chunk_ids: list[int]) -> None:
        """Have guesses made about text that is known by now, which costs no row, as long as the pace has time for it.
        Sequences with the most text that was not looked at come first."""
        pace, unseen = self.pace, dict[int, int]()
        for i in chunk_ids:
            seen = max(batch.num_prompts[i], self._lengths.get(batch.seq_ids[i], 0))
            num_unseen = len(batch.histories[i]) + 1 - seen
            if num_unseen >= LEAST_KNOWN:
                unseen[i] = num_unseen
        for i in sorted(unseen, key=unseen.__getitem__, reverse=True):
            if pace is None or not pace.may_look:
                return
            start, seq_id, num_unseen = self._now(), batch.seq_ids[i], min(unseen[i], MOST_SEEN)
            tokens = [*batch.histories[i], *_further(result, i)]
            place = len(tokens) - num_unseen
            num_learnt = 0 if seq_id in self._lengths else place
            while place + LEAST_KNOWN <= len(tokens):
                context = self._context(batch, i, tokens[:place], self.num_drafts, self.num_drafts)
                [draft] = self.drafter.propose([context])
                path = draft.paths()[0] if draft.token_ids else []
                guess = [draft.token_ids[node] for node in path[: len(tokens) - place]]
                num_right = next((k for k, token in enumerate(guess) if token != tokens[place + k]), len(guess))
                pace.foretold(seq_id, len(guess), num_right)
                self._lengths[seq_id] = place
                # A wrong guess ends it: the next look begins elsewhere.
                place = place + 1 + num_right if num_right else len(tokens)
            seconds = self._now() - start
            self._looking += seconds
            pace.looked(num_learnt, seconds)

    def _most_accepted(self, params: SamplingParams, num_tokens: int, num_prompt: int, last: int) -> int:
        """Return how many draft tokens could be accepted after `num_tokens`; 0 for a sequence that ends here."""
        num_generated = num_tokens - num_prompt
        if num_generated >= params.min_tokens and (
            (not params.ignore_eos and last in self._eos) or last in (params.stop_token_ids or ())
        ):
            return 0
        # The last token needs no draft: it is sampled after the one before.
        most = params.max_tokens or self._max_model_len
        return min(self._max_model_len - num_tokens, most - num_generated) - 1

    def _propose(self, contexts: dict[int, Context], result: StepResult) -> bool:
        """Draft for `contexts` (by chunk). Return whether the drafter had more to catch up with than a step gives."""
        is_behind = False
        drafts = self.drafter.propose(list(contexts.values()))
        for (i, context), draft in zip(contexts.items(), drafts, strict=True):
            seq_id, num_tokens = context.seq_id, len(context.tokens)
            is_behind |= num_tokens > self._lengths.get(seq_id, 0) + self.num_drafts + 1
            self._lengths[seq_id] = num_tokens
            if self.pace is not None:
                self.pace.answered(seq_id, bool(draft.token_ids))
            probs = self._take_probs(seq_id) if self._take_probs is not None else None
            reason = self._why_unsound(context, draft, probs)
            if reason:
                self.num_refused += 1
                logger.error("a draft was refused: %s", reason)
            elif draft.token_ids:
                result.row(i).draft = draft
                if self._take_probs is not None:
                    self._proposals[seq_id] = draft.token_ids, probs
        return is_behind

    def _why_unsound(self, context: Context, draft: Draft, probs: F32 | None) -> str:
        """Return why a draft cannot be verified, or "". That is a fault of the drafter, not of the sequence."""
        num = len(draft.token_ids)
        if not num:
            return ""
        if not 0 <= min(draft.token_ids) <= max(draft.token_ids) < self._vocab_size:
            return f"token ids reach from {min(draft.token_ids)} to {max(draft.token_ids)}, of {self._vocab_size}"
        if flaw := draft.flaw():
            return flaw
        if draft.depth > context.num_drafts or num > context.num_nodes:
            return f"{num} tokens, {draft.depth} deep; at most {context.num_nodes} and {context.num_drafts} fit"
        if probs is not None and probs.shape != (num, self._vocab_size):
            return f"probabilities of shape {probs.shape} for {num} tokens of {self._vocab_size}"
        return ""


def _further(result: StepResult, i: int) -> list[int]:
    """Return the tokens that a step adds to chunk i's sequence, of which one was sampled."""
    row = result.read(i)
    return [result.token_ids[i], *row.further, *row.forced]
