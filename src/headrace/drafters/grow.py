"""`ModelDrafter`: a drafter with a model grows chains and trees, one call of the model for each depth, all sequences
together.

Chains take the tokens of `Guide.choose`. Trees grow as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4): at
each depth the likeliest nodes of a sequence are expanded, and of all nodes the likeliest are kept. Knows lines and
logits; must not know how a model computes them. The drafters, which are subclasses, choose the tokens before a draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Backend
from headrace.drafters.base import F32, Context, Drafter, Target
from headrace.drafters.context import Computed, Line, LineRows, PrivateContext
from headrace.models import Model
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft


@dataclass(slots=True)
class Growth:
    """A tree that is being grown. Entry i of each list belongs to node i of `tree`.

    `values` are logarithms of the chance that all of a node's path is right, by the drafter's own logits. `lines` hold
    the paths of nodes that are expanded, `features` the model's features of the row before a node.
    """

    tree: Draft = field(default_factory=lambda: Draft([]))
    depths: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lines: list[Line | None] = field(default_factory=list)
    features: list[F32 | None] = field(default_factory=list)

    def add(self, token_id: int, parent: int, value: float, features: F32 | None) -> None:
        self.tree.token_ids.append(token_id)
        self.tree.parents.append(parent)
        self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))
        self.values.append(value)
        self.lines.append(None)
        self.features.append(features)

    def likeliest(self, nodes: Sequence[int], num: int) -> list[int]:
        """Return the `num` nodes of greatest value, in order; of equal ones the first."""
        return sorted(sorted(nodes, key=lambda node: (-self.values[node], node))[:num])

    def pruned(self, num_nodes: int) -> Draft:
        """Return the tree of the likeliest nodes. The value of a node is at most its parent's, which comes first."""
        return self.tree.subset(self.likeliest(range(len(self.values)), num_nodes))


def best_first(shares: F32) -> F32:
    """Return the shares of ranked tokens in descending order: under noise the rank predicts more than the share."""
    return -np.sort(-shares, axis=1)


class ModelDrafter(Drafter):
    """A drafter with a model over a private context of `window` positions, and of a draft's positions in addition.

    Args:
        backend: the model's.
        feeds: the model reads its own features of the row before, which its program keeps (`feature_layers`).
        token_ids: the target's id of each of the model's tokens; None if they are the same.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        spec: SpeculativeConfig,
        target: Target,
        window: int,
        feeds: bool = False,
        feature_layers: Sequence[int] = (),
        token_ids: NDArray[np.int64] | None = None,
    ) -> None:
        # Children of a node, and nodes of a sequence that are expanded at each depth.
        self._width = spec.tree_width if spec.num_nodes > spec.num_drafts else 1
        self._guide, self._feeds = target.guide, feeds
        most_lines = target.max_num_seqs * self._width
        window += spec.num_drafts
        self.private = PrivateContext(model, backend, target, window, most_lines, feature_layers, token_ids)

    @abstractmethod
    def job(self, context: Context, keep: set[int]) -> LineRows | None:
        """Return the tokens to compute before a draft, which the sequence's line lacks. None if nothing can be drafted.
        The lines of the sequences `keep` must stay."""
        ...

    def reads(self, token_id: int) -> bool:
        """Return whether the model can read a token of the target's vocabulary."""
        return True

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        keep = {context.seq_id for context in contexts}
        jobs = {i: self.job(context, keep) for i, context in enumerate(contexts) if context.num_drafts > 0}
        ready = {i: job for i, job in jobs.items() if job is not None}
        drafts = [Draft([]) for _ in contexts]
        if not ready:
            return drafts
        first = self.private.extend(list(ready.values()), self._feeds)
        places = [i for i, finite in zip(ready, first.finite, strict=True) if finite]
        if len(places) < len(ready):
            first = first.subset([row for row, finite in enumerate(first.finite) if finite])
        trees = not self._guide.rejects and any(contexts[i].num_nodes > contexts[i].num_drafts for i in places)
        grow = self._trees if trees else self._chains
        lines = [ready[i].line for i in places]
        lengths = [len(line.tokens) for line in lines]
        grown = grow([contexts[i] for i in places], lines, first) if places else []
        for i, line, length, draft in zip(places, lines, lengths, grown, strict=True):
            self.private.rewind(line, length)
            drafts[i] = draft
        return drafts

    def drop(self, seq_id: int) -> None:
        self.private.drop(seq_id)

    def close(self) -> None:
        self.private.close()

    def _chains(self, contexts: list[Context], lines: list[Line], step: Computed) -> list[Draft]:
        chains: list[list[int]] = [[] for _ in contexts]
        alive = list(range(len(contexts)))
        keep = {context.seq_id for context in contexts}
        while alive:
            token_ids = self._guide.choose(step.logits, [contexts[i] for i in alive], [chains[i] for i in alive])
            for i, token_id in zip(alive, token_ids, strict=True):
                chains[i].append(token_id)
            rows = [
                row
                for row, i in enumerate(alive)
                if len(chains[i]) < contexts[i].num_drafts
                and self.reads(chains[i][-1])
                and self.private.reserve(lines[i], 1, keep)
            ]
            if not rows:
                break
            jobs = [LineRows(lines[alive[row]], [chains[alive[row]][-1]], step.features_of(row)) for row in rows]
            step = self.private.extend(jobs, self._feeds)
            alive = [alive[row] for row in rows]
            if not all(step.finite):
                sound = [row for row, finite in enumerate(step.finite) if finite]
                step, alive = step.subset(sound), [alive[row] for row in sound]
        return [Draft(chain) for chain in chains]

    def _trees(self, contexts: list[Context], lines: list[Line], step: Computed) -> list[Draft]:
        growths = [Growth() for _ in contexts]
        parents = [(i, -1) for i in range(len(contexts))]  # sequence and node of each row of `step`
        forks: list[Line] = []
        max_depth = max(context.num_drafts for context in contexts)
        for depth in range(1, max_depth + 1):
            rows = [row for row, (i, _) in enumerate(parents) if depth <= contexts[i].num_drafts and step.finite[row]]
            if not rows:
                break
            self._rank(contexts, growths, [parents[row] for row in rows], rows, step)
            if depth == max_depth:
                break
            parents, jobs = self._expand(contexts, lines, growths, depth, forks)
            if not jobs:
                break
            step = self.private.extend(jobs, self._feeds)
        for line in forks:
            self.private.empty(line)
        return [growth.pruned(context.num_nodes) for growth, context in zip(growths, contexts, strict=True)]

    def _rank(
        self,
        contexts: list[Context],
        growths: list[Growth],
        parents: list[tuple[int, int]],
        rows: list[int],
        step: Computed,
    ) -> None:
        """Add the best children of `parents`, whose logits are `rows` of `step`."""
        tails = [[growths[i].tree.token_ids[node] for node in growths[i].tree.path(parent)] for i, parent in parents]
        token_ids, shares = self._guide.rank(step.logits[rows], [contexts[i] for i, _ in parents], tails, self._width)
        shares = best_first(shares)
        for (i, parent), row, ids, logs in zip(parents, rows, token_ids.tolist(), shares.tolist(), strict=True):
            base = growths[i].values[parent] if parent >= 0 else 0.0
            # The child's row reads the features of its parent's row.
            features = step.features_of(row)
            for token_id, share in zip(ids, logs, strict=True):
                if share > -np.inf:
                    growths[i].add(token_id, parent, base + min(share, 0.0), features)

    def _expand(
        self, contexts: list[Context], lines: list[Line], growths: list[Growth], depth: int, forks: list[Line]
    ) -> tuple[list[tuple[int, int]], list[LineRows]]:
        """Return the nodes of this depth to expand, and their jobs, for which room is reserved."""
        keep = {context.seq_id for context in contexts}
        parents: list[tuple[int, int]] = []
        jobs: list[LineRows] = []
        for i, growth in enumerate(growths):
            if contexts[i].num_drafts <= depth or not growth.values:
                continue
            # A node that would be pruned has no child that would not be.
            values = sorted(growth.values, reverse=True)[: contexts[i].num_nodes]
            front = [n for n, d in enumerate(growth.depths) if d == depth and growth.values[n] >= values[-1]]
            nodes = growth.likeliest(front, self._width)
            heirs: dict[int, int] = {}  # the child of each parent that continues the parent's line
            for node in nodes:
                heirs.setdefault(growth.tree.parents[node], node)
            for node in nodes:
                parent = growth.tree.parents[node]
                source = lines[i] if parent < 0 else growth.lines[parent]
                if source is not None and heirs[parent] != node:
                    fork = growth.lines[node] = self.private.fork(source)
                    if fork is not None:
                        forks.append(fork)
            for node in nodes:
                parent = growth.tree.parents[node]
                if heirs[parent] == node:
                    growth.lines[node] = lines[i] if parent < 0 else growth.lines[parent]
                line = growth.lines[node]
                if line is not None and self.private.reserve(line, 1, keep):
                    parents.append((i, node))
                    jobs.append(LineRows(line, [growth.tree.token_ids[node]], growth.features[node]))
        return parents, jobs
