"""Verification: which guesses the target would have said itself, one round of draws for each token of depth.

Coupled: at every node the target's own sample, with its own keyed noise, decides; a guess is kept if and only if it is
that token, so ids and log-probabilities are those without guesses, to the bit. Rejection: the sample is distributed as
the target's, and is a guess as often as may be (`sampling.rejection`). Knows logits and parameters; called by the
runner, which has drawn the first token already when it is coupled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.sampling import rejection
from headrace.sampling.sampler import Drawn, Row, Sampler
from headrace.types import DraftTokens

F32 = NDArray[np.float32]


@dataclass(slots=True)
class Trial:
    """A chunk whose guesses are verified. `rows[n]`: where the logits after node n lie, -1 for the last known token.
    `coupled`: not by rejection sampling, for which `chances` are what each guess was drawn from, if by chance. `nodes`
    were kept so far, and `token_ids` were drawn: one more, while it is open, unless it has just begun."""

    chunk_id: int
    draft: DraftTokens
    rows: dict[int, int]
    coupled: bool = True
    chances: F32 | None = None
    is_open: bool = False
    nodes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    state: float | None = None

    @property
    def node(self) -> int:
        """The last that was kept."""
        return self.nodes[-1] if self.nodes else -1

    def children(self) -> list[int]:
        """The guesses after the last that was kept, in their order."""
        node = self.node
        if self.draft.parents:
            return [i for i, parent in enumerate(self.draft.parents) if parent == node]
        return [node + 1] if node + 1 < len(self.draft.token_ids) else []

    def take(self, drawn: Drawn) -> bool:
        """Note what was drawn after the last node; -> whether that was a guess, which is kept then."""
        self.token_ids.append(drawn.token_id)
        self.state = drawn.state
        for child in self.children():
            if self.draft.token_ids[child] == drawn.token_id:
                self.nodes.append(child)
                return True
        return False

    def path(self) -> int:
        """A path of the tree that holds all nodes that were kept."""
        num = len(self.nodes)
        return next((i for i, path in enumerate(self.draft.paths) if path[:num] == self.nodes), 0)


def rejects(row: Row) -> bool:
    """Whether rejection sampling makes a difference to such a row. A sampler with a state of its own is coupled."""
    return not row.params.greedy and not row.params.steers


def draw_rejecting(sampler: Sampler, logits: F32, rows: list[Row], trials: list[Trial]) -> list[Drawn | ValueError]:
    """As `Sampler.sample_rows`, for the rows of `trials` after their last nodes, by rejection sampling."""
    found: list[Drawn | ValueError] = []
    for x, row, trial, pool in zip(logits, rows, trials, sampler.shares(logits, rows), strict=True):
        if isinstance(pool, ValueError):
            found.append(pool)
            continue
        children = trial.children()
        guesses = [trial.draft.token_ids[child] for child in children]
        chances = [None if trial.chances is None else trial.chances[child] for child in children]
        token_id = rejection.draw(*pool, guesses, chances, row.params.seed or 0, row.position)
        found.append(sampler.told(x, row, Drawn(token_id, state=row.state)))
    return found
