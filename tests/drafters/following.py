"""A target without a model, and a runner's role around one drafter: drafts are checked, verified and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.drafters.base import Context, Draft, Drafter
from headrace.protocol.params import SamplingParams

VOCAB = 50
Say = Callable[[list[int]], int]
"""The token that the target says after some tokens."""


@dataclass
class Told:
    """What a run gave."""

    tokens: list[int]
    num_steps: int = 0
    num_drafted: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def mean_length(self) -> float:
        """Tokens for each step."""
        return sum(1 + number for number in self.accepted) / max(1, len(self.accepted))


def fault(draft: Draft, context: Context, vocab_size: int = VOCAB) -> str:
    """What is wrong with a draft, or ""."""
    size = len(draft.token_ids)
    parents = draft.parents if draft.parents is not None else list(range(-1, size - 1))
    if len(parents) != size:
        return f"{len(parents)} parents of {size} tokens"
    if size > (context.num_nodes if draft.parents is not None else context.num_drafts):
        return f"{size} nodes"
    if any(not isinstance(token, int) or not 0 <= token < vocab_size for token in draft.token_ids):
        return "a token out of the vocabulary"
    depths: list[int] = []
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            return f"node {i} follows {parent}"
        depths.append(1 if parent < 0 else depths[parent] + 1)
    if max(depths, default=0) > context.num_drafts:
        return f"depth {max(depths)} of {context.num_drafts}"
    if len({*zip(parents, draft.token_ids, strict=True)}) < size:
        return "two equal children"
    return ""


def verify(draft: Draft, tokens: list[int], say: Say) -> tuple[list[int], list[int], list[int]]:
    """-> the accepted nodes, the new tokens, and what the target says after each node."""
    size = len(draft.token_ids)
    parents = draft.parents if draft.parents is not None else list(range(-1, size - 1))
    paths: list[list[int]] = []
    for token, parent in zip(draft.token_ids, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else tokens), token])
    best = [say(path) for path in paths]
    accepted: list[int] = []
    node, new = -1, [say(tokens)]
    while True:
        found = [i for i in range(size) if parents[i] == node and draft.token_ids[i] == new[-1]]
        if not found:
            return accepted, new, best
        node = found[0]
        accepted.append(node)
        new.append(best[node])


def follow(
    drafter: Drafter, say: Say, prompt: list[int], num_tokens: int, num_drafts: int = 4, num_nodes: int | None = None,
    seq_id: int = 1,
) -> Told:  # fmt: skip
    """Generate by speculation. The tokens are what `say` alone would have given, whatever was guessed."""
    told = Told([])
    tokens = list(prompt)
    while len(told.tokens) < num_tokens:
        context = Context(
            seq_id=seq_id,
            tokens=tokens,
            num_prompt=len(prompt),
            params=SamplingParams(),
            num_drafts=num_drafts,
            num_nodes=num_nodes or num_drafts,
        )
        [draft] = drafter.propose([context])
        wrong = fault(draft, context)
        if wrong:
            raise ValueError(wrong)
        accepted, new, best = verify(draft, tokens, say)
        if draft.token_ids:
            drafter.verified(seq_id, draft, best, accepted)
        told.num_steps += 1
        told.num_drafted += len(draft.token_ids)
        told.accepted.append(len(accepted))
        tokens += new
        told.tokens += new
    drafter.drop(seq_id)
    told.tokens = told.tokens[:num_tokens]
    return told
