"""`Speculator`: what the runner holds of speculation: a drafter, how far it is worth asking, and what it said last.

Asks the drafter after each step, checks what it says (ids of the vocabulary, trees that are trees, no more than was
asked for), keeps the chances of what was drawn, and tells drafter and pace what became of it. Knows sequences by id and
tokens; must not know the scheduler or requests. Called by `runner.runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.drafters.base import Context, Draft, Drafter
from headrace.types import DraftTokens

MAX_REST = 16
"""Steps without a question, where no answer was wanted before."""

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

    def stepped(self, num_rows: int, num_seqs: int, seconds: float) -> None: ...

    def drafted(self, num_seqs: int, depth: int, seconds: float) -> None: ...

    def drop(self, seq_id: int) -> None: ...


class Steady:
    """`Plan` that always drafts as far as it may."""

    def plan(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        return [most for _, most in wanted]

    def nodes(self, depth: int) -> int:
        return 2**31

    def verified(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        return None

    def stepped(self, num_rows: int, num_seqs: int, seconds: float) -> None:
        return None

    def drafted(self, num_seqs: int, depth: int, seconds: float) -> None:
        return None

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
        self._watching = drafter.feature_layers is not None
        # Steps until the plan is asked again, how many there were, and of how many sequences they are.
        self._rest = self._rest_steps = self._rest_seqs = 0

    @property
    def watches(self) -> bool:
        """Whether the drafter wants to be shown what the target computes just now."""
        return self._watching

    def rests(self, num_seqs: int) -> bool:
        """Whether nothing is asked after this step, of so many sequences: nobody was worth it lately, and finding out
        costs time. Called once a step. With fewer sequences it may be worth it again."""
        self._rest -= 1
        return self._rest >= 0 and num_seqs >= self._rest_seqs

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
            self.plan.drop(seq_id)
            self.drafter.drop(seq_id)

    def propose(self, contexts: list[Context]) -> dict[int, DraftTokens]:
        """Guesses for those of `contexts` for which it is worth it, by their index. Their `num_drafts` and `num_nodes`
        are filled in here."""
        open_ended = []
        wanted = []
        for i, context in enumerate(contexts):
            self._said.pop(context.seq_id, None)
            room = self._room(context)
            if room > 0:
                open_ended.append(i)
                wanted.append((context.seq_id, min(self.num_drafts, room)))
        depths = self.plan.plan(wanted) if wanted else []
        asked = []
        for i, depth in zip(open_ended, depths, strict=True):
            if depth > 0:
                contexts[i].num_drafts = depth
                contexts[i].num_nodes = max(depth, min(self.plan.nodes(depth), self.num_nodes))
                asked.append(i)
        if wanted and self.drafter.feature_layers is not None:
            self._watching = bool(asked)
        if not asked:
            self._rest = self._rest_steps = min(MAX_REST, max(1, 2 * self._rest_steps))
            self._rest_seqs = len(contexts)
            return {}
        self._rest_steps = 0
        start = self.clock()
        drafts = self.drafter.propose([contexts[i] for i in asked])
        found: dict[int, DraftTokens] = {}
        for i, draft in zip(asked, drafts, strict=True):
            reason = self._why_unsound(contexts[i], draft)
            if reason:
                self.num_refused += 1
                logger.error("a draft was refused: %s", reason)
            elif draft.token_ids:
                self._said[contexts[i].seq_id] = draft
                found[i] = DraftTokens(list(draft.token_ids), list(draft.parents or []))
        depth = max(contexts[i].num_drafts for i in asked)
        self.plan.drafted(len(asked), depth, self.clock() - start)
        return found

    def _room(self, context: Context) -> int:
        """How many guesses could be kept: none for a sequence that is at its end."""
        params, num = context.params, len(context.tokens)
        num_generated = num - context.num_prompt
        if num_generated >= params.min_tokens and (
            (not params.ignore_eos and context.tokens[-1] in self._eos)
            or context.tokens[-1] in (params.stop_token_ids or ())
        ):
            return 0
        # The last token needs no guess: it is sampled after the one before.
        return min(self._max_model_len - num, (params.max_tokens or self._max_model_len) - num_generated) - 1

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
