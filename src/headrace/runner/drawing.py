"""How the tokens of a step are drawn from its logits: `Rounds` has one round for each depth of the drafts, and decides
which draft tokens the target accepts; `NativeSelect` is the sampler's `Select` by an operator of the backend.

Coupled: at every node the target's own sample, with its own keyed noise, decides; a draft token is accepted if and only
if it is that sample, so ids and log-probabilities are those without speculation, to the bit. Rejection: the sample is
distributed as the target's, and is a draft token as often as possible (`sampling.rejection`). A chunk without a draft
is drawn from once.

It joins backend and sampler, which must not import each other. Knows logits and parameters; must not know the program
or the drafter. `Rounds` is called by the runner, `NativeSelect` made by `engine.library.load`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.backends.choosing import Chooser
from headrace.backends.step import Draw, Logits
from headrace.grammar.matchers import GrammarError, Mask, Matchers
from headrace.protocol.step import Draft, ScheduledBatch, StepResult
from headrace.runner.faults import NOT_FINITE
from headrace.sampling import rejection
from headrace.sampling.filters import F32, ONE, Candidates, Cut, base_of, select
from headrace.sampling.sampler import Drawn, Row, Sampler

MAX_HEAD = 1024
"""A heap of more is slower than a partition of the whole row."""


class NativeSelect:
    """`Select` for rows of as many logits as `chooser` takes."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def __call__(self, rows: list[F32], greatest: list[float], cuts: list[Cut]) -> list[Candidates]:
        width = self._chooser.width
        native = [i for i, cut in enumerate(cuts) if not MAX_HEAD < cut.top_k < width]
        chosen = self._chooser(
            [rows[i] for i in native],
            [cuts[i].top_k for i in native],
            [(greatest[i], cuts[i].temperature, cuts[i].floor, cuts[i].top_p) for i in native],
            [cuts[i].key for i in native],
        )
        candidates = {}
        for i, (token_ids, scaled, total) in zip(native, chosen, strict=True):
            # The bar of kernels.h, and a little more for rounding.
            bar = math.log(total * 2.0**-ONE) - 3.0 + 1e-6 if total else -math.inf
            candidates[i] = Candidates(token_ids, scaled, base_of(greatest[i], cuts[i].temperature), bar)
        return [candidates[i] if i in candidates else select(rows[i], greatest[i], cuts[i]) for i in range(len(rows))]


@dataclass(slots=True)
class Verification:
    """A chunk that samples, and its draft (of no tokens: a chunk without one).

    `rows[n]` is the row of the logits after node n, -1 for the last known token. `is_coupled`: not verified by
    rejection sampling, which needs `draft_probs` [n, V], the distribution of each token's draw (None: chosen without
    chance). `accepted` are the accepted nodes and `token_ids` the drawn tokens: one more than nodes when drawing has
    ended. `best[n]` is the likeliest token after node n.
    """

    chunk_id: int
    draft: Draft
    rows: dict[int, int]
    is_coupled: bool = True
    draft_probs: F32 | None = None
    is_open: bool = False
    accepted: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    state: float | None = None

    @property
    def node(self) -> int:
        """The last accepted one."""
        return self.accepted[-1] if self.accepted else -1

    def children(self) -> list[int]:
        """The nodes after the last accepted one, in their order."""
        return self.draft.children(self.node)

    def take(self, sample: Drawn) -> bool:
        """Append the token drawn after the last node. Return whether it is a draft token, which is then accepted."""
        self.token_ids.append(sample.token_id)
        self.state = sample.state
        for child in self.children():
            if self.draft.token_ids[child] == sample.token_id:
                self.accepted.append(child)
                return True
        return False


def rejects(row: Row) -> bool:
    """Whether rejection sampling makes a difference to such a row. A sampler with a state is coupled."""
    return not row.params.greedy and not row.params.steers


def draw_rejecting(sampler: Sampler, logits: F32, row: Row, verification: Verification) -> Drawn | ValueError:
    """Draw from `logits` [1, V] after the last node by rejection sampling; errors as of `Sampler.sample_rows`."""
    (pool,) = sampler.shares(logits, [row])
    if isinstance(pool, ValueError):
        return pool
    children, probs = verification.children(), verification.draft_probs
    token_ids = [verification.draft.token_ids[child] for child in children]
    chances = [None if probs is None else probs[child] for child in children]
    token_id = rejection.draw(*pool, token_ids, chances, row.params.seed or 0, row.position)
    return sampler.with_logprob(logits[0], row, Drawn(token_id, state=row.state))


class Rounds:
    """Draws the tokens of a step from its logits: one for each chunk that samples, then one more after each accepted
    draft token.

    `matchers`: None for an engine that takes no constraints.
    """

    def __init__(self, sampler: Sampler, matchers: Matchers | None) -> None:
        self.sampler = sampler
        self.matchers = matchers

    def draw(
        self, batch: ScheduledBatch, verifications: list[Verification], logits: Logits, result: StepResult
    ) -> None:
        """Sample from `logits` one token for each chunk, and more where draft tokens are accepted. A row that cannot be
        sampled from fails its own chunk (R-17)."""
        for each in verifications:
            if not logits.finite[each.rows[-1]]:
                row = result.row(each.chunk_id)
                row.error = row.error or NOT_FINITE
        masks = self._masks(batch, [each.chunk_id for each in verifications], result)
        sound = verifications
        if result.rows:
            records = [result.read(each.chunk_id) for each in verifications]
            sound = [v for v, r in zip(verifications, records, strict=True) if not r.error and not r.is_deferred]
        for verification, sample in zip(sound, self._sample(batch, sound, logits, masks), strict=True):
            i = verification.chunk_id
            if isinstance(sample, ValueError):
                result.row(i).error = f"sampling_error: {sample}"
                continue
            result.token_ids[i] = sample.token_id
            if sample.logprob is not None:
                result.row(i).logprob = sample.logprob
            if sample.state is not None:
                result.row(i).state = sample.state
            if verification.draft.token_ids:
                verification.is_open = verification.take(sample)
            if i in masks:
                self._accept(batch, i, sample.token_id, 1, result)
        drafts = [each for each in sound if each.draft.token_ids]
        if drafts:
            self._draw_deeper(batch, drafts, logits, result)

    def _draw_deeper(
        self, batch: ScheduledBatch, verifications: list[Verification], logits: Logits, result: StepResult
    ) -> None:
        """Draw one more token after each accepted one, as deep as that goes."""
        best = logits.best
        while live := [each for each in verifications if self._is_open(each, logits, result)]:
            constrained = [each for each in live if batch.params[each.chunk_id].structured_outputs is not None]
            masks = self._further_masks(batch, constrained, result)
            live = [each for each in live if each.is_open]
            for verification, sample in zip(live, self._sample(batch, live, logits, masks), strict=True):
                i = verification.chunk_id
                # The next step begins at this token, and reports the error.
                if isinstance(sample, ValueError):
                    verification.is_open = False
                    continue
                verification.is_open = verification.take(sample)
                record = result.row(i)
                record.further.append(sample.token_id)
                record.path = verification.draft.path_id(verification.accepted)
                if sample.logprob is not None:
                    record.further_logprobs.append(sample.logprob)
                if sample.state is not None:
                    record.state = sample.state
                if i in masks:
                    self._accept(batch, i, sample.token_id, len(verification.token_ids), result)
        for each in verifications:
            # An accepted token after which nothing was drawn is computed again in the next step.
            each.accepted = each.accepted[: max(0, len(each.token_ids) - 1)]
            each.best = [best[each.rows[node]] for node in range(len(each.draft.token_ids))]

    def _is_open(self, verification: Verification, logits: Logits, result: StepResult) -> bool:
        return (
            verification.is_open
            and logits.finite[verification.rows[verification.node]]
            and not result.read(verification.chunk_id).error
            and not result.read(verification.chunk_id).forced
        )

    def _sample(
        self, batch: ScheduledBatch, verifications: list[Verification], logits: Logits, masks: dict[int, Mask]
    ) -> list[Drawn | ValueError]:
        """Draw a token after the last node of each."""
        if not verifications:
            return []
        places = [each.rows[each.node] for each in verifications]
        rows = [
            self._row(batch, each, logits.best[place], masks.get(each.chunk_id))
            for each, place in zip(verifications, places, strict=True)
        ]
        if logits.on_host:
            samples = self.sampler.sample_rows(logits.fetch(places), rows)
        else:

            def draw(some: list[int], cuts: list[Cut]) -> list[int]:
                draws = [Draw(*cut[:4], *(cut.key or (0, 0)), rows[k].mask) for k, cut in zip(some, cuts, strict=True)]
                return logits.draw([places[k] for k in some], draws)

            samples = self.sampler.sample_fetched(rows, lambda some: logits.fetch([places[k] for k in some]), draw)
        for k, (each, row) in enumerate(zip(verifications, rows, strict=True)):
            if not each.is_coupled and rejects(row) and each.children():
                samples[k] = draw_rejecting(self.sampler, logits.fetch([places[k]]), row, each)
        return samples

    def _further_masks(
        self, batch: ScheduledBatch, verifications: list[Verification], result: StepResult
    ) -> dict[int, Mask]:
        """Masks after accepted draft tokens. A late mask closes its verification; the next step waits for it."""
        masks: dict[int, Mask] = {}
        matchers = self.matchers
        if not verifications or matchers is None:
            return masks
        requests = []
        for verification in verifications:
            i, constraint = verification.chunk_id, batch.params[verification.chunk_id].structured_outputs
            if constraint is not None:
                tokens = batch.histories[i][batch.num_prompts[i] :] + verification.token_ids
                requests.append((batch.seq_ids[i], constraint, tokens))
        matchers.begin(requests)
        late = matchers.wait([seq_id for seq_id, _, _ in requests], others=True)
        for verification, (seq_id, constraint, tokens) in zip(verifications, requests, strict=True):
            try:
                if seq_id in late:
                    verification.is_open = False
                else:
                    masks[verification.chunk_id] = matchers.mask(seq_id, constraint, tokens)
            except GrammarError:
                verification.is_open = False
        return masks

    def _masks(self, batch: ScheduledBatch, chunk_ids: list[int], result: StepResult) -> dict[int, Mask]:
        """The masks of the chunks that have a constraint. Those whose masks are late are deferred to another step."""
        constrained = [
            i for i in chunk_ids if batch.params[i].structured_outputs is not None and not result.read(i).error
        ]
        masks: dict[int, Mask] = {}
        if not constrained:
            return masks
        if self.matchers is None:
            for i in constrained:
                result.row(i).error = "structured_output_error: the engine has no tokenizer"
            return masks
        late = self.matchers.wait([batch.seq_ids[i] for i in constrained], others=len(batch) > len(constrained))
        for i in constrained:
            constraint = batch.params[i].structured_outputs
            if batch.seq_ids[i] in late:
                result.row(i).is_deferred = True
            elif constraint is not None:
                try:
                    tokens = batch.histories[i][batch.num_prompts[i] :]
                    masks[i] = self.matchers.mask(batch.seq_ids[i], constraint, tokens)
                except GrammarError as error:
                    result.row(i).error = f"structured_output_error: {error}"
        return masks

    def _accept(self, batch: ScheduledBatch, i: int, token_id: int, num: int, result: StepResult) -> None:
        """Advance the matcher by the `num`-th token of chunk i in this step."""
        num_generated = batch.starts[i] + batch.lens[i] + num - batch.num_prompts[i]
        try:
            forced = self.matchers.accept(batch.seq_ids[i], token_id, batch.params[i], num_generated)  # type: ignore[union-attr]
        except GrammarError as error:
            result.row(i).error = f"structured_output_error: {error}"
            return
        if forced:
            result.row(i).forced = forced

    def _row(self, batch: ScheduledBatch, verification: Verification, best: int, mask: Mask | None) -> Row:
        i, token_ids = verification.chunk_id, verification.token_ids
        # Where drafts are wanted the tokens of every sequence are in the batch; few samplers look at them.
        history = batch.histories.get(i, []) if not batch.asks or batch.params[i].needs_history else []
        return Row(
            params=batch.params[i],
            position=batch.starts[i] + batch.lens[i] + len(token_ids),
            num_prompt=batch.num_prompts[i],
            history=history + token_ids if history and token_ids else history,
            best=best,
            state=verification.state if token_ids else batch.states.get(i),
            mask=mask,
        )
