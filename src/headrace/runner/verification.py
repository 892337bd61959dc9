"""Verification: which guesses the target would have said itself, one round of draws for each token of depth.

Coupled: at every node the target's own sample, with its own keyed noise, decides; a guess is kept if and only if it is
that token, so ids and log-probabilities are those without guesses, to the bit. Rejection: the sample is distributed as
the target's, and is a guess as often as may be (`sampling.rejection`). Knows logits and parameters; must not know the
program. Called by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Logits
from headrace.drafters.speculator import Speculator
from headrace.grammar.matchers import GrammarError, Mask, Matchers
from headrace.protocol.step import DraftTokens, ScheduledBatch, StepResult
from headrace.runner.faults import NOT_FINITE
from headrace.sampling import rejection
from headrace.sampling.sampler import Drawn, Row, Sampler

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


class Rounds:
    """Draws the tokens of a step from its logits: one for each trial, then one more after each guess that was kept.

    `matchers`: None for an engine that takes no constraints.
    """

    def __init__(self, sampler: Sampler, matchers: Matchers | None) -> None:
        self.sampler = sampler
        self.matchers = matchers

    def draw(
        self,
        batch: ScheduledBatch,
        trials: list[Trial],
        logits: Logits,
        result: StepResult,
        speculator: Speculator | None = None,
    ) -> None:
        """Sample from `logits`: one token for each trial, and more where guesses are kept. What is wrong with a row
        fails its own chunk (R-17)."""
        for trial in trials:
            if not logits.finite[trial.rows[-1]]:
                result.errors.setdefault(trial.chunk_id, NOT_FINITE)
        masks = self._masks(batch, [trial.chunk_id for trial in trials], result)
        live = [
            trial for trial in trials if trial.chunk_id not in result.errors and trial.chunk_id not in result.deferred
        ]
        tried = [trial for trial in live if trial.draft.token_ids]
        if tried and speculator is not None:
            for trial in tried:
                known, trial.chances = speculator.chances(batch.seq_ids[trial.chunk_id], trial.draft)
                trial.coupled = not (known and speculator.rejects)
        for trial, drawn in zip(live, self._sample(batch, live, logits, masks), strict=True):
            i = trial.chunk_id
            if isinstance(drawn, ValueError):
                result.errors[i] = f"sampling_error: {drawn}"
                trial.is_open = False
                continue
            result.token_ids[i] = drawn.token_id
            if drawn.logprob is not None:
                result.logprobs[i] = drawn.logprob
            if drawn.state is not None:
                result.states[i] = drawn.state
            if trial.draft.token_ids:
                trial.is_open = trial.take(drawn)
            if i in masks:
                self._accept(batch, i, drawn.token_id, 1, result)
        if tried:
            self._go_on(batch, tried, logits, result, speculator)

    def _go_on(
        self,
        batch: ScheduledBatch,
        trials: list[Trial],
        logits: Logits,
        result: StepResult,
        speculator: Speculator | None,
    ) -> None:
        """One more token after each guess that was kept, as deep as they are."""
        best = logits.best
        while live := [trial for trial in trials if self._is_open(trial, logits, result)]:
            bound = [trial for trial in live if batch.params[trial.chunk_id].structured_outputs is not None]
            masks = self._further_masks(batch, bound, result)
            live = [trial for trial in live if trial.is_open]
            for trial, drawn in zip(live, self._sample(batch, live, logits, masks), strict=True):
                i = trial.chunk_id
                # What is wrong here is told by the next step, which begins at this token.
                if isinstance(drawn, ValueError):
                    trial.is_open = False
                    continue
                trial.is_open = trial.take(drawn)
                result.further.setdefault(i, []).append(drawn.token_id)
                result.paths[i] = trial.path()
                if drawn.logprob is not None:
                    result.further_logprobs.setdefault(i, []).append(drawn.logprob)
                if drawn.state is not None:
                    result.states[i] = drawn.state
                if i in masks:
                    self._accept(batch, i, drawn.token_id, len(trial.token_ids), result)
        for trial in trials:
            # A guess whose own token was not drawn after: it was computed, and will be again.
            trial.nodes = trial.nodes[: len(trial.token_ids) - 1]
            if speculator is not None and trial.token_ids:
                likeliest = [best[trial.rows[node]] for node in range(len(trial.draft.token_ids))]
                speculator.verified(batch.seq_ids[trial.chunk_id], trial.draft, likeliest, trial.nodes)

    def _is_open(self, trial: Trial, logits: Logits, result: StepResult) -> bool:
        return (
            trial.is_open
            and logits.finite[trial.rows[trial.node]]
            and trial.chunk_id not in result.errors
            and trial.chunk_id not in result.forced
        )

    def _sample(
        self, batch: ScheduledBatch, trials: list[Trial], logits: Logits, masks: dict[int, Mask]
    ) -> list[Drawn | ValueError]:
        """What is drawn after the last node of each trial."""
        if not trials:
            return []
        places = [trial.rows[trial.node] for trial in trials]
        rows = [
            self._row(batch, trial, logits.best[at], masks.get(trial.chunk_id))
            for trial, at in zip(trials, places, strict=True)
        ]
        num = len(places)
        numbers = logits.rows[:num] if places == list(range(num)) else logits.rows[places]
        drawn = self.sampler.sample_rows(numbers, rows)
        for k, (trial, row) in enumerate(zip(trials, rows, strict=True)):
            if not trial.coupled and rejects(row) and trial.children():
                drawn[k : k + 1] = draw_rejecting(self.sampler, numbers[k : k + 1], [row], [trial])
        return drawn

    def _further_masks(self, batch: ScheduledBatch, trials: list[Trial], result: StepResult) -> dict[int, Mask]:
        """Masks after guesses that were kept. Those that are late end their trials, whose next step waits for them."""
        masks: dict[int, Mask] = {}
        matchers = self.matchers
        if not trials or matchers is None:
            return masks
        wanted = []
        for trial in trials:
            i, constraint = trial.chunk_id, batch.params[trial.chunk_id].structured_outputs
            if constraint is not None:
                tokens = batch.histories[i][batch.num_prompts[i] :] + trial.token_ids
                wanted.append((batch.seq_ids[i], constraint, tokens))
        matchers.begin(wanted)
        late = matchers.wait([seq_id for seq_id, _, _ in wanted], others=True)
        for trial, (seq_id, constraint, tokens) in zip(trials, wanted, strict=True):
            try:
                if seq_id in late:
                    trial.is_open = False
                else:
                    masks[trial.chunk_id] = matchers.mask(seq_id, constraint, tokens)
            except GrammarError:
                trial.is_open = False
        return masks

    def _masks(self, batch: ScheduledBatch, chunk_ids: list[int], result: StepResult) -> dict[int, Mask]:
        """The masks of the chunks that have a constraint. Those whose masks are late are deferred to another step."""
        bound = [i for i in chunk_ids if batch.params[i].structured_outputs is not None and i not in result.errors]
        masks: dict[int, Mask] = {}
        if not bound:
            return masks
        if self.matchers is None:
            result.errors.update(dict.fromkeys(bound, "structured_output_error: the engine has no tokenizer"))
            return masks
        late = self.matchers.wait([batch.seq_ids[i] for i in bound], others=len(batch) > len(bound))
        for i in bound:
            constraint = batch.params[i].structured_outputs
            if batch.seq_ids[i] in late:
                result.deferred.add(i)
            elif constraint is not None:
                try:
                    tokens = batch.histories[i][batch.num_prompts[i] :]
                    masks[i] = self.matchers.mask(batch.seq_ids[i], constraint, tokens)
                except GrammarError as error:
                    result.errors[i] = f"structured_output_error: {error}"
        return masks

    def _accept(self, batch: ScheduledBatch, i: int, token_id: int, num: int, result: StepResult) -> None:
        """Tell the matcher of the `num`-th token of chunk i in this step."""
        num_generated = batch.starts[i] + batch.lens[i] + num - batch.num_prompts[i]
        try:
            forced = self.matchers.accept(batch.seq_ids[i], token_id, batch.params[i], num_generated)  # type: ignore[union-attr]
        except GrammarError as error:
            result.errors[i] = f"structured_output_error: {error}"
            return
        if forced:
            result.forced[i] = forced

    def _row(self, batch: ScheduledBatch, trial: Trial, best: int, mask: Mask | None) -> Row:
        i, known = trial.chunk_id, trial.token_ids
        # Where guesses are asked for every sequence's tokens are at hand; few samplers look at them.
        history = batch.histories.get(i, []) if not batch.asks or batch.params[i].needs_history else []
        return Row(
            params=batch.params[i],
            position=batch.starts[i] + batch.lens[i] + len(known),
            num_prompt=batch.num_prompts[i],
            history=history + known if history and known else history,
            best=best,
            state=trial.state if known else batch.states.get(i),
            mask=mask,
        )
