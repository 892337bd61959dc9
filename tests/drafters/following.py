"""A target without a model, and a runner's role around one drafter: drafts are checked, verified and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.drafters.base import Context, Drafter
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft

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
    if flaw := draft.flaw():
        return flaw
    if size > (context.num_nodes if draft.parents else context.num_drafts):
        return f"{size} nodes"
    if any(not isinstance(token, int) or not 0 <= token < vocab_size for token in draft.token_ids):
        return "a token out of the vocabulary"
    if draft.depth > context.num_drafts:
        return f"depth {draft.depth} of {context.num_drafts}"
    return ""


def verify(draft: Draft, tokens: list[int], say: Say) -> tuple[list[int], list[int], list[int]]:
    """-> the accepted nodes, the new tokens, and what the target says after each node."""
    paths = [[draft.token_ids[each] for each in draft.path(node)] for node in range(len(draft.token_ids))]
    best = [say(tokens + path) for path in paths]
    accepted: list[int] = []
    node, new = -1, [say(tokens)]
    while True:
        children = [child for child in draft.children(node) if draft.token_ids[child] == new[-1]]
        if not children:
            return accepted, new, best
        node = children[0]
        accepted.append(node)
        new.append(best[node])


def follow(
    drafter: Drafter, say: Say, prompt: list[int], num_tokens: int, num_drafts: int = 4, num_nodes: int | None = None,
    seq_id: int = 1,
) -> Told:  # fmt: skip
    """Generate by speculation. The tokens are what `say` alone would have given, whatever was guessed."""
    output = Told([])
    tokens = list(prompt)
    while len(output.tokens) < num_tokens:
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
        output.num_steps += 1
        output.num_drafted += len(draft.token_ids)
        output.accepted.append(len(accepted))
        tokens += new
        output.tokens += new
    drafter.drop(seq_id)
    output.tokens = output.tokens[:num_tokens]
    return output
