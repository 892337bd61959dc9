"""`Overlap`: steps whose tokens the device draws, so that a step can start before the tokens of the last one are known.

A chunk that follows an undrawn token gets it on the device, out of the last step's draws. Where the host draws another
token after all, because the two best were too close for the device to tell, the chunk that followed is deferred. Rows
of logits that the host draws from are brought to it behind the step. Steps with drafts, pooling, pictures or
log-probabilities of prompts are computed by the runner when they start. Knows no tensors. Called by the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.backends.base import DrawingProgram, DrawnRows, Program
from headrace.backends.places import table_of
from headrace.backends.step import Chunks, Draw, HostLogits
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import end_of
from headrace.protocol.step import UNDRAWN, Draft, ScheduledBatch, StepResult
from headrace.runner.drawing import Rounds, Verification
from headrace.runner.faults import NOT_FINITE
from headrace.sampling.sampler import Row, Sampler

logger = logging.getLogger("headrace.engine")


@dataclass(slots=True)
class StartedStep:
    """A step that was started. `result` is None until it is known.

    `places[i]` is the row of the logits that chunk i samples from, and `on_host` are the chunks whose tokens the host
    draws. `carried[i]` is the chunk of the step `before` whose token, known on the device alone, chunk i begins with.
    """

    batch: ScheduledBatch
    result: StepResult | None = None
    places: dict[int, int] = field(default_factory=dict)
    on_host: list[int] = field(default_factory=list)
    before: StartedStep | None = None
    carried: dict[int, int] = field(default_factory=dict)
    ticket: Any = None
    drawn_rows: DrawnRows | None = None


class Overlap:
    """The steps of a program that draws."""

    def __init__(
        self,
        program: DrawingProgram,
        sampler: Sampler,
        rounds: Rounds,
        why_unsound: Callable[[ScheduledBatch, int, list[int]], str],
    ) -> None:
        """`why_unsound` returns the reason why a chunk of such tokens cannot be computed, or ""."""
        self._program = program
        self._why_unsound = why_unsound
        self._sampler = sampler
        self._rounds = rounds
        self._last: StartedStep | None = None
        self._has_places = table_of(program.model) is not None

    def runs_ahead(self, params: SamplingParams) -> bool:
        """Whether the device draws every token with these parameters, and nothing else is reported."""
        if params.structured_outputs is not None or params.prompt_logprobs is not None or params.needs_history:
            return False
        return self._sampler.cut_of(Row(params, position=0, num_prompt=0)) is not None

    def start(self, batch: ScheduledBatch) -> StartedStep | None:
        """Start a step, or return None if it is none that the program takes."""
        if not self._is_plain(batch):
            return None
        draws = {i: self._draw(batch, i) for i, samples in enumerate(batch.samples) if samples}
        step = StartedStep(batch, before=self._last, places={i: place for place, i in enumerate(draws)})
        step.on_host = [i for i, draw in draws.items() if draw is None]
        chunks = self._chunks(step)
        if chunks is None:
            return None
        begins = [0]
        for length in batch.lens:
            begins.append(begins[-1] + length)
        before = self._last.places if self._last is not None else {}
        carried = {begins[i]: before[source] for i, source in step.carried.items()}
        try:
            copy_blocks(self._program, batch)
            step.ticket = self._program.start(chunks, [begins[i + 1] - 1 for i in draws], list(draws.values()), carried)
        except Exception as error:
            logger.error("a step could not be started beside another; it is computed alone", exc_info=error)
            return None
        self._last = step
        return step

    def finish(self, step: StartedStep) -> StepResult:
        """Wait for a step and return its result. May be called again."""
        if step.result is not None:
            return step.result
        batch, rows = step.batch, self._wait(step)
        result = StepResult(step_id=batch.step_id, token_ids=[-1] * len(batch))
        for i, source in step.carried.items():
            if self._token_before(step, source) != self._guess_before(step, source):
                result.row(i).is_deferred = True
        undecided = []
        for i, sound in enumerate(rows.sound):
            place = step.places.get(i)
            if i in result.rows:
                continue
            if not sound or (place is not None and not rows.finite[place]):
                result.row(i).error = NOT_FINITE
            elif place is not None and i not in step.on_host:
                if rows.is_sure[place]:
                    result.token_ids[i] = rows.token_ids[place]
                else:
                    undecided.append(i)
        self._draw_fetched(step, rows, result)
        if undecided:
            self._draw_again(step, undecided, result)
        step.result, step.before = result, None
        return result

    def known(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return `batch` with all its token ids, once the step before has ended. A chunk after no token keeps
        `UNDRAWN`; its result counts for nothing."""
        last = self._last
        if last is not None:
            self.finish(last)
        if last is None or last.result is None or UNDRAWN not in batch.token_ids:
            return batch
        token_ids, at = list(batch.token_ids), 0
        tokens = dict(zip(last.batch.seq_ids, last.result.token_ids, strict=True))
        for seq_id, length in zip(batch.seq_ids, batch.lens, strict=True):
            if token_ids[at] == UNDRAWN:
                token_ids[at] = tokens.get(seq_id, UNDRAWN)
            at += length
        return msgspec.structs.replace(batch, token_ids=token_ids)

    def note(self, batch: ScheduledBatch, result: StepResult) -> StartedStep:
        """Note a step that was computed when it started."""
        self._last = StartedStep(batch, result)
        return self._last

    def _is_plain(self, batch: ScheduledBatch) -> bool:
        """Whether the step is one call of the program, which returns tokens and their reported numbers alone."""
        fits = 0 < len(batch.token_ids) <= self._program.max_rows and len(batch) <= self._program.max_logits
        if not fits or batch.drafts or batch.asks or batch.pooling:
            return False
        # Rows behind a picture may turn by other positions than those in the cache.
        if any(self._has_places or batch.starts[i] < end_of(pictures) for i, pictures in batch.pictures.items()):
            return False
        return all(params.prompt_logprobs is None for params in batch.params)

    def _draw(self, batch: ScheduledBatch, i: int) -> Draw | None:
        """Return how the device draws the token of chunk i; None if the host does."""
        params = batch.params[i]
        if params.structured_outputs is not None or i in batch.histories or i in batch.states:
            return None
        cut = self._sampler.cut_of(Row(params, batch.starts[i] + batch.lens[i], batch.num_prompts[i]))
        return None if cut is None else Draw(*cut[:4], *(cut.key or (0, 0)))

    def _chunks(self, step: StartedStep) -> Chunks | None:
        """Return the chunks of a step, with an arbitrary token in the place of each one that only the device knows, or
        None if a chunk cannot be computed. Fills `step.carried`."""
        batch, before = step.batch, step.before
        known = self.known(batch) if before is None or before.result is not None else batch
        sources = {} if before is None else {seq_id: i for i, seq_id in enumerate(before.batch.seq_ids)}
        pieces, at = [], 0
        for i, (seq_id, length) in enumerate(zip(batch.seq_ids, batch.lens, strict=True)):
            token_ids = known.token_ids[at : at + length]
            at += length
            if token_ids == [UNDRAWN] and before is not None and sources.get(seq_id) in before.places:
                step.carried[i], token_ids = sources[seq_id], [0]
            if self._why_unsound(batch, i, token_ids):
                return None
            pieces.append(token_ids)
        return Chunks(batch.starts, pieces, batch.block_tables, more_tables=batch.more_tables)

    def _wait(self, step: StartedStep) -> DrawnRows:
        if step.drawn_rows is None:
            step.drawn_rows = self._program.finish(step.ticket)
        return step.drawn_rows

    def _token_before(self, step: StartedStep, source: int) -> int:
        """Return the token that chunk `source` of the step before got in the end, -1 for none."""
        return self.finish(step.before).token_ids[source] if step.before is not None else UNDRAWN

    def _guess_before(self, step: StartedStep, source: int) -> int:
        """Return the token that the device drew for chunk `source` of the step before."""
        before = step.before
        return self._wait(before).token_ids[before.places[source]] if before is not None else UNDRAWN

    def _draw_fetched(self, step: StartedStep, rows: DrawnRows, result: StepResult) -> None:
        """Draw the tokens of the chunks whose logits were brought to the host."""
        chunk_ids = step.on_host
        if not chunk_ids:
            return
        places = [step.places[i] for i in chunk_ids]
        finite, best = [rows.finite[place] for place in places], [rows.token_ids[place] for place in places]
        waiting = [Verification(i, Draft([]), {-1: row}) for row, i in enumerate(chunk_ids)]
        self._rounds.draw(step.batch, waiting, HostLogits(rows.logits, finite, best), result)

    def _draw_again(self, step: StartedStep, chunk_ids: list[int], result: StepResult) -> None:
        """Draw the tokens of chunks for which the device could not tell. Their logits may be overwritten, so their last
        rows are computed again, to the same bits."""
        batch = step.batch
        if self._last is not None and self._last.result is None:
            self._wait(self._last)
        rows = []
        for i in chunk_ids:
            token_id = batch.token_ids[sum(batch.lens[: i + 1]) - 1]
            rows.append([self._token_before(step, step.carried[i]) if i in step.carried else token_id])
        starts = [batch.starts[i] + batch.lens[i] - 1 for i in chunk_ids]
        tables = [[each[i] for i in chunk_ids] for each in (batch.block_tables, *batch.more_tables)]
        chunks = Chunks(starts, rows, tables[0], more_tables=tables[1:])
        _, logits = self._program.forward(chunks, list(range(len(rows))))
        again = [Verification(i, Draft([]), {-1: place}) for place, i in enumerate(chunk_ids)]
        self._rounds.draw(batch, again, logits, result)


def copy_blocks(program: Program, batch: ScheduledBatch) -> None:
    """Copy the blocks of a step, of each kind its own. A batch without tables of the other kinds means all of them."""
    num_kinds = sum(not kind.is_state for kind in program.kinds)
    all_copies = [batch.copies, *batch.more_copies] if batch.more_tables else [batch.copies] * num_kinds
    for kind, copies in enumerate(all_copies):
        if copies:
            program.copy_blocks(copies, kind)
