"""How a drafter with logits grows chains and trees, one call of its model for each depth, all sequences together.

Chains take the token that the target's sampler would (`Guide.choose`), or one drawn for rejection sampling. Trees are
EAGLE-2's (Li et al. 2024, arXiv 2406.16858, section 4): at each depth the likeliest nodes of a sequence are expanded,
and of all that were seen the likeliest are kept. Knows lines and logits; called by the drafters beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.drafters.base import F32, Context, Draft, Guide
from headrace.drafters.context import Computed, Job, Line, PrivateContext


@dataclass(slots=True, eq=False)
class Node:
    """A guess: `value` is the logarithm of the chance that all of its path is right, by the drafter's own belief."""

    token_id: int
    parent: int
    depth: int
    value: float
    line: Line | None = None
    features: F32 | None = None


def best_first(shares: F32) -> F32:
    """Shares of ranked tokens, the greatest given to the first: under noise the rank says more than the share."""
    return -np.sort(-shares, axis=1)


def path_of(nodes: Sequence[Node], at: int) -> list[int]:
    """Token ids from the root to node `at`."""
    found = []
    while at >= 0:
        found.append(nodes[at].token_id)
        at = nodes[at].parent
    return found[::-1]


def pruned(nodes: Sequence[Node], most: int) -> Draft:
    """The `most` nodes of greatest value. A node is never worth more than its parent, which comes first."""
    best = sorted(range(len(nodes)), key=lambda i: (-nodes[i].value, i))[:most]
    best.sort()
    place = {-1: -1} | {old: new for new, old in enumerate(best)}
    return Draft([nodes[i].token_id for i in best], [place[nodes[i].parent] for i in best])


class Grower:
    """Grows drafts over one private context.

    Args:
        width: children of a node, and nodes of a sequence that are expanded at each depth.
        feeds: the model looks at its own features of the row before.
    """

    def __init__(self, private: PrivateContext, guide: Guide, width: int, feeds: bool) -> None:
        self._private, self._guide, self._width, self._feeds = private, guide, width, feeds

    def grow(self, contexts: Sequence[Context], lines: Sequence[Line], first: Computed) -> list[Draft]:
        """Drafts for sequences whose lines hold all their tokens; `first` foretells the token after each.

        The lines are as before when this returns.
        """
        sound = [i for i, right in enumerate(first.finite) if right and contexts[i].num_drafts > 0]
        drafts = [Draft([]) for _ in contexts]
        if not sound:
            return drafts
        own = [contexts[i] for i in sound]
        lengths = [len(lines[i].tokens) for i in sound]
        if len(sound) < len(contexts):
            kept = None if first.features is None else first.features[sound]
            first = Computed(first.logits[sound], kept, [True] * len(sound))
        trees = not self._guide.rejects and any(c.num_nodes > c.num_drafts for c in own)
        made = (self._trees if trees else self._chains)(own, [lines[i] for i in sound], first)
        for i, length, draft in zip(sound, lengths, made, strict=True):
            self._private.rewind(lines[i], length)
            drafts[i] = draft
        return drafts

    def _chains(self, contexts: list[Context], lines: list[Line], step: Computed) -> list[Draft]:
        tails: list[list[int]] = [[] for _ in contexts]
        chances: list[list[F32]] = [[] for _ in contexts]
        alive = list(range(len(contexts)))
        keep = {context.seq_id for context in contexts}
        while alive:
            own, seen = [contexts[i] for i in alive], [tails[i] for i in alive]
            if self._guide.rejects:
                chosen, shares = self._guide.draw(step.logits, own, seen)
                for i, row in zip(alive, shares, strict=True):
                    chances[i].append(row)
            else:
                chosen = self._guide.choose(step.logits, own, seen)
            for i, token_id in zip(alive, chosen, strict=True):
                tails[i].append(token_id)
            places = [
                at
                for at, i in enumerate(alive)
                if len(tails[i]) < contexts[i].num_drafts and self._private.reserve(lines[i], 1, keep)
            ]
            if not places:
                break
            jobs = [self._job(lines[alive[at]], tails[alive[at]][-1], step, at) for at in places]
            step = self._private.extend(jobs, self._feeds)
            alive = [alive[at] for at in places]
            if not all(step.finite):
                right = [at for at, finite in enumerate(step.finite) if finite]
                kept = None if step.features is None else step.features[right]
                step = Computed(step.logits[right], kept, [True] * len(right))
                alive = [alive[at] for at in right]
        return [Draft(tail, probs=np.stack(rows) if rows else None) for tail, rows in zip(tails, chances, strict=True)]

    def _job(self, line: Line, token_id: int, step: Computed, at: int) -> Job:
        return Job(line, [token_id], step.features[at : at + 1] if step.features is not None else None)

    def _trees(self, contexts: list[Context], lines: list[Line], step: Computed) -> list[Draft]:
        nodes: list[list[Node]] = [[] for _ in contexts]
        parents = [(i, -1) for i in range(len(contexts))]  # sequence and node of each row of `step`
        forks: list[Line] = []
        for depth in range(1, max(context.num_drafts for context in contexts) + 1):
            wanted = [at for at, (i, _) in enumerate(parents) if depth <= contexts[i].num_drafts and step.finite[at]]
            if not wanted:
                break
            self._rank(contexts, nodes, [parents[at] for at in wanted], wanted, step, depth)
            if depth == max(context.num_drafts for context in contexts):
                break
            parents, jobs = self._expand(contexts, lines, nodes, depth, step, forks)
            if not jobs:
                break
            step = self._private.extend(jobs, self._feeds)
        for line in forks:
            self._private.empty(line)
        return [pruned(own, context.num_nodes) for own, context in zip(nodes, contexts, strict=True)]

    def _rank(
        self,
        contexts: list[Context],
        nodes: list[list[Node]],
        parents: list[tuple[int, int]],
        rows: list[int],
        step: Computed,
        depth: int,
    ) -> None:
        """The best children of `parents`, whose logits are `rows` of `step`."""
        tails = [path_of(nodes[i], at) for i, at in parents]
        token_ids, shares = self._guide.rank(step.logits[rows], [contexts[i] for i, _ in parents], tails, self._width)
        shares = best_first(shares)
        for (i, parent), row, ids, found in zip(parents, rows, token_ids.tolist(), shares.tolist(), strict=True):
            base = nodes[i][parent].value if parent >= 0 else 0.0
            features = None if step.features is None else step.features[row : row + 1]
            for token_id, share in zip(ids, found, strict=True):
                if share > -np.inf:
                    # What the parent's row gave is what the child's row looks at.
                    nodes[i].append(Node(token_id, parent, depth, base + min(share, 0.0), features=features))

    def _expand(
        self,
        contexts: list[Context],
        lines: list[Line],
        nodes: list[list[Node]],
        depth: int,
        step: Computed,
        forks: list[Line],
    ) -> tuple[list[tuple[int, int]], list[Job]]:
        """Room and jobs for the nodes of this depth that are worth going on from."""
        keep = {context.seq_id for context in contexts}
        parents: list[tuple[int, int]] = []
        jobs: list[Job] = []
        for i, own in enumerate(nodes):
            if contexts[i].num_drafts <= depth:
                continue
            front = [at for at, node in enumerate(own) if node.depth == depth]
            # Of nodes that would not be kept no child would be.
            least = sorted((node.value for node in own), reverse=True)[: contexts[i].num_nodes][-1] if own else 0.0
            front = [at for at in front if own[at].value >= least]
            best = sorted(sorted(front, key=lambda at: (-own[at].value, at))[: self._width])
            first: dict[int, int] = {}  # of each parent the child that goes on in the parent's line
            for at in best:
                first.setdefault(own[at].parent, at)
            for at in best:
                node = own[at]
                source = lines[i] if node.parent < 0 else own[node.parent].line
                if source is not None and first[node.parent] != at:
                    node.line = self._private.fork(source)
                    if node.line is not None:
                        forks.append(node.line)
            for at in best:
                node = own[at]
                if first[node.parent] == at:
                    node.line = lines[i] if node.parent < 0 else own[node.parent].line
                if node.line is not None and self._private.reserve(node.line, 1, keep):
                    parents.append((i, at))
                    jobs.append(Job(node.line, [node.token_id], node.features))
        return parents, jobs
