"""`Speculator`: what the runner holds of speculation: a drafter, how far it is worth asking, and what it said last.

Asks the drafter after a step, checks what it says (ids of the vocabulary, trees that are trees, no more than was asked
for), keeps the chances of what was drawn, and tells drafter and pace what became of it. Where nobody is worth a guess
it tells for how many steps that holds: what asking costs is bounded by a share of all time. Knows sequences by id and
tokens; must not know the scheduler or requests. Called by `runner.runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.drafters.base import Context, Draft, Drafter
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import DraftTokens, ScheduledBatch, StepResult

logger = logging.getLogger(__name__)

F32 = NDArray[np.float32]


class Plan(Protocol):
    """How far to draft (`pace.Pace`, or `Steady`)."""

    def plan(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """For (sequence id, most) how deep to draft, 0 for not at all."""
        ...

    def nodes(self, depth: int) -> int:
        """How many tokens a tree of some depth is to have at most."""
        ...

    def verified(self, seq_id: int, num_drafted: int, num_accepted: int) -> None: ...

    def stepped(self, num_rows: int, num_seqs: int, seconds: float, num_steps: int) -> None: ...

    def drafted(self, num_seqs: int, depth: int, seconds: float, is_behind: bool, num_empty: int) -> None: ...

    def asked(self, num_seqs: int, seconds: float) -> None: ...

    def rest(self, num_seqs: int) -> int:
        """For how many steps of so many sequences there is nothing to ask."""
        ...

    def drop(self, seq_id: int) -> None: ...


class Steady:
    """`Plan` that always drafts as far as it may."""

    def plan(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        return [most for _, most in wanted]

    def nodes(self, depth: int) -> int:
        return 2**31

    def verified(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        return None

    def stepped(self, num_rows: int, num_seqs: int, seconds: float, num_steps: int) -> None:
        return None

    def drafted(self, num_seqs: int, depth: int, seconds: float, is_behind: bool, num_empty: int) -> None:
        return None

    def asked(self, num_seqs: int, seconds: float) -> None:
        return None

    def rest(self, num_seqs: int) -> int:
        return 0

    def drop(self, seq_id: int) -> None:
        return None


class Speculator:
    """Speculation with one drafter for all sequences.

    Args:
        drafter: guesses.
        plan: says how far.
        vocab_size: of the target; no guess is beyond it.
        num_drafts, num_nodes: the deepest guess, and the most tokens of a tree.
        max_model_len: no sequence is longer.
        eos_token_ids: what ends a sequence, after which nothing is worth guessing.
        rejects: guesses are verified by rejection sampling, so what they were drawn from is kept.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        drafter: Drafter,
        plan: Plan,
        *,
        vocab_size: int,
        num_drafts: int,
        num_nodes: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        rejects: bool,
        clock: Callable[[], float],
    ) -> None:
        self.drafter = drafter
        self.plan = plan
        self.num_drafts = num_drafts
        self.num_nodes = num_nodes
        self.rejects = rejects
        self.clock = clock
        self.num_refused = 0
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos = frozenset(eos_token_ids)
        # What was said last of each sequence, until it is verified.
        self._said: dict[int, Draft] = {}
        # How long each sequence was when the drafter saw it last; what it catches up with is not drafting's price.
        self._lengths: dict[int, int] = {}
        self._catch_up = num_drafts + 1
        # Of the step: when it began, what of its time is the drafter's, and its number.
        self._start = self._aside = 0.0
        self._step_id = 0

    @property
    def watches(self) -> bool:
        """Whether the drafter wants to be shown what the target computes, when it may be asked afterwards."""
        return self.drafter.feature_layers is not None

    def begin(self) -> None:
        """A step begins whose price is of interest."""
        self._start, self._aside = self.clock(), 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile is the price of speculation, not of the step."""
        start = self.clock()
        yield
        self._aside += self.clock() - start

    def end(self, step_id: int, num_rows: int, num_seqs: int) -> None:
        """The step has ended, which had so many rows and sequences."""
        seconds = self.clock() - self._start - self._aside
        self.plan.stepped(num_rows, num_seqs, seconds, max(1, step_id - self._step_id))
        self._step_id = step_id

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        """See `Drafter.observe`."""
        self.drafter.observe(seq_id, start, token_ids, features)

    def chances(self, seq_id: int, draft: DraftTokens) -> tuple[bool, F32 | None]:
        """Whether `draft`, which is to be verified, is what was said last of the sequence (or its beginning), and what
        its tokens were drawn from, if by chance."""
        said = self._said.get(seq_id)
        num = len(draft.token_ids)
        if said is None or said.token_ids[:num] != draft.token_ids:
            return said is not None and said.probs is None, None
        return True, said.probs

    def verified(self, seq_id: int, draft: DraftTokens, best: list[int], nodes: list[int]) -> None:
        """`best[i]` is the target's likeliest token after node i; `nodes` were kept."""
        self.plan.verified(seq_id, draft.depth, len(nodes))
        self.drafter.verified(seq_id, Draft(draft.token_ids, draft.parents or None), best, nodes)

    def drop(self, seq_ids: Sequence[int]) -> None:
        """These sequences are no more."""
        for seq_id in seq_ids:
            self._said.pop(seq_id, None)
            self._lengths.pop(seq_id, None)
            self.plan.drop(seq_id)
            self.drafter.drop(seq_id)

    def propose(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Guesses of what follows a step, for those sequences for which it is worth it, put into `result`; or for how
        many steps nobody need ask."""
        start = self.clock()
        open_ended: list[int] = []
        wanted: list[tuple[int, int]] = []
        for i, token_id in enumerate(result.token_ids):
            params, history = batch.params[i], batch.histories.get(i)
            if token_id < 0 or history is None or not params.speculation:
                continue
            more = _new_tokens(result, i)
            room = self._room(
                params, len(history) + len(more), len(history) + len(more) - batch.num_prompts[i], more[-1]
            )
            self._said.pop(batch.seq_ids[i], None)
            if room > 0:
                open_ended.append(i)
                wanted.append((batch.seq_ids[i], min(self.num_drafts, room)))
        depths = self.plan.plan(wanted) if wanted else []
        asked: list[int] = []
        contexts: list[Context] = []
        for i, depth in zip(open_ended, depths, strict=True):
            if depth > 0:
                num_nodes = max(depth, min(self.plan.nodes(depth), self.num_nodes))
                tokens = [*batch.histories[i], *_new_tokens(result, i)]
                asked.append(i)
                contexts.append(
                    Context(
                        batch.seq_ids[i], tokens, batch.num_prompts[i], batch.params[i], depth, num_nodes,
                        result.states.get(i),
                    )
                )  # fmt: skip
        begin = self.clock()
        if wanted:
            self.plan.asked(len(wanted), begin - start + self._aside)
        if not asked:
            result.rest = self.plan.rest(len(wanted)) if wanted else 0
            return
        is_behind = any(len(each.tokens) > self._lengths.get(each.seq_id, 0) + self._catch_up for each in contexts)
        drafts = self.drafter.propose(contexts)
        for i, context, draft in zip(asked, contexts, drafts, strict=True):
            self._lengths[context.seq_id] = len(context.tokens)
            reason = self._why_unsound(context, draft)
            if reason:
                self.num_refused += 1
                logger.error("a draft was refused: %s", reason)
            elif draft.token_ids:
                self._said[context.seq_id] = draft
                result.drafts[i] = DraftTokens(list(draft.token_ids), list(draft.parents or []))
        depth = max(context.num_drafts for context in contexts)
        num_empty = sum(not draft.token_ids for draft in drafts)
        self.plan.drafted(len(asked), depth, self.clock() - begin, is_behind, num_empty)

    def _room(self, params: SamplingParams, num_tokens: int, num_generated: int, last: int) -> int:
        """How many guesses could be kept: none for a sequence that is at its end."""
        if num_generated >= params.min_tokens and (
            (not params.ignore_eos and last in self._eos) or last in (params.stop_token_ids or ())
        ):
            return 0
        # The last token needs no guess: it is sampled after the one before.
        most = params.max_tokens or self._max_model_len
        return min(self._max_model_len - num_tokens, most - num_generated) - 1

    def _why_unsound(self, context: Context, draft: Draft) -> str:
        """Why a draft can not be verified, or "". A fault of the drafter, not of the sequence."""
        num = len(draft.token_ids)
        if not num:
            return ""
        if not 0 <= min(draft.token_ids) <= max(draft.token_ids) < self._vocab_size:
            return f"token ids reach from {min(draft.token_ids)} to {max(draft.token_ids)}, of {self._vocab_size}"
        parents = draft.parents if draft.parents is not None else list(range(-1, num - 1))
        if len(parents) != num or any(not -1 <= parent < node for node, parent in enumerate(parents)):
            return f"parents {parents} make no tree of {num} nodes"
        if len(set(zip(parents, draft.token_ids, strict=True))) < num:
            return "two children of a node are the same token"
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        if max(depths) > context.num_drafts or num > context.num_nodes:
            return f"{num} guesses, {max(depths)} deep; {context.num_nodes} and {context.num_drafts} were asked for"
        if draft.probs is not None and draft.probs.shape != (num, self._vocab_size):
            return f"chances of shape {draft.probs.shape} for {num} tokens of {self._vocab_size}"
        return ""

    def close(self) -> None:
        """Give back memory. May be called twice."""
        self.drafter.close()


def _new_tokens(result: StepResult, i: int) -> list[int]:
    """What a step added to the sequence of chunk i."""
    return [result.token_ids[i], *result.further.get(i, ()), *result.forced.get(i, ())]
