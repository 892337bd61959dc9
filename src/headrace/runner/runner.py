"""`Runner`: the real executor. A ScheduledBatch goes in, numbers are made and used up here, a StepResult comes out.

It owns the model's program (with the KV cache) and the sampler. It decides nothing: which tokens to compute and where
their keys and values go is written in the batch. A fault that belongs to one chunk ends that chunk alone. Knows no
tensors: the program is the backend's. Called by `core.engine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.backends.base import Chunks, Logits, Program
from headrace.grammar.matchers import GrammarError, Mask, Matchers
from headrace.sampling.sampler import Row, Sampler
from headrace.types import ScheduledBatch, StepResult, TokenLogprob

MAX_LOGITS = 2**24
"""Numbers in the logits of prompt rows that are held at once (64 MiB of float32)."""

NOT_FINITE = "numerical_error: the model's logits are not finite"


@dataclass(slots=True)
class Piece:
    """Rows of chunk `chunk_id` that are computed together, from position `start` on. `last`: they end it."""

    chunk_id: int
    start: int
    token_ids: list[int]
    last: bool


class Runner:
    """Computes steps of one model over one KV cache."""

    def __init__(self, program: Program, sampler: Sampler, matchers: Matchers | None = None) -> None:
        """`matchers`: None for an engine that takes no constraints (it has no tokenizer)."""
        self.program = program
        self.sampler = sampler
        self.matchers = matchers
        self.block_size = program.block_size

    def run(self, batch: ScheduledBatch) -> StepResult:
        """One step: copies, forward, logits of the rows that are asked for, tokens.

        Raises only for faults that no single chunk owns (a broken device).
        """
        result = StepResult(step_id=batch.step_id, token_ids=[-1] * len(batch))
        if batch.copies:
            self.program.copy_blocks(batch.copies)
        self._begin_masks(batch)
        for pieces in self._portions(self._sound_pieces(batch, result)):
            # What an earlier portion found wrong is not computed further.
            if result.errors:
                pieces = [piece for piece in pieces if piece.chunk_id not in result.errors]
            self._compute_what_fits(batch, pieces, result)
        for i in result.errors:
            result.token_ids[i] = -1
            result.forced.pop(i, None)
            result.logprobs.pop(i, None)
            result.prompt_logprobs.pop(i, None)
            result.pooled.pop(i, None)
        return result

    def close(self) -> None:
        """Give the cache's memory back. May be called twice."""
        if self.matchers is not None:
            self.matchers.close()
        self.program.close()

    def idle(self) -> None:
        """Nothing is to be done just now: a good moment to prepare for what the next request may bring."""
        if self.matchers is not None:
            self.matchers.warm()

    def _begin_masks(self, batch: ScheduledBatch) -> None:
        """Let the masks of this step be made while the forward pass runs."""
        wanted = []
        for i, params in enumerate(batch.params):
            if params.structured_outputs is not None:
                tokens = batch.histories[i][batch.num_prompts[i] :] if batch.samples[i] else None
                wanted.append((batch.seq_ids[i], params.structured_outputs, tokens))
        if wanted and self.matchers is not None:
            self.matchers.begin(wanted)

    def _sound_pieces(self, batch: ScheduledBatch, result: StepResult) -> list[Piece]:
        """The chunks that can be computed, whole. The others get an error each."""
        pieces = []
        row = 0
        for i, length in enumerate(batch.lens):
            own = batch.token_ids[row : row + length]
            row += length
            reason = self._why_unsound(batch, i, own)
            if reason:
                result.errors[i] = f"invalid_chunk: {reason}"
            else:
                pieces.append(Piece(i, batch.starts[i], own, True))
        return pieces

    def _why_unsound(self, batch: ScheduledBatch, chunk_id: int, token_ids: list[int]) -> str:
        """Why a chunk can not be computed, or ""."""
        program, table = self.program, batch.block_tables[chunk_id]
        start, length = batch.starts[chunk_id], batch.lens[chunk_id]
        if length < 1 or start < 0:
            return f"positions {start} ... {start + length - 1} are no positions"
        if not 0 <= min(token_ids) <= max(token_ids) < program.vocab_size:
            return (
                f"token ids reach from {min(token_ids)} to {max(token_ids)}, "
                f"the model has 0 to {program.vocab_size - 1}"
            )
        if len(table) * program.block_size < start + length:
            return f"{len(table)} blocks of {program.block_size} do not hold {start + length} positions"
        if not 0 <= min(table) <= max(table) < program.num_blocks:
            return f"block ids reach from {min(table)} to {max(table)}, the cache has 0 to {program.num_blocks - 1}"
        return ""

    def _portions(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Cut the step where the program can not take more rows at once; how it is cut changes no bits."""
        most = self.program.max_rows
        if sum(len(piece.token_ids) for piece in pieces) <= most:
            return [pieces] if pieces else []
        portions: list[list[Piece]] = [[]]
        room = most
        for piece in pieces:
            start, left = piece.start, piece.token_ids
            while left:
                if not room:
                    portions.append([])
                    room = most
                taken, left = left[:room], left[room:]
                portions[-1].append(Piece(piece.chunk_id, start, taken, not left))
                start += len(taken)
                room -= len(taken)
        return portions

    def _compute_what_fits(self, batch: ScheduledBatch, pieces: list[Piece], result: StepResult) -> None:
        """Compute the pieces, in halves where memory runs out; one that does not fit alone fails (R-25).

        To compute a piece again, in other company, writes the same bits again.
        """
        if not pieces:
            return
        try:
            self._compute(batch, pieces, result)
            return
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            if len(pieces) == 1:
                result.errors[pieces[0].chunk_id] = f"out_of_memory: {error}"
                return
        # Not in the except clause, whose traceback holds the tensors of the failed attempt.
        half = len(pieces) // 2
        self._compute_what_fits(batch, pieces[:half], result)
        self._compute_what_fits(batch, pieces[half:], result)

    def _compute(self, batch: ScheduledBatch, pieces: list[Piece], result: StepResult) -> None:
        chunks = Chunks(
            [piece.start for piece in pieces],
            [piece.token_ids for piece in pieces],
            [batch.block_tables[piece.chunk_id] for piece in pieces],
        )
        samples: list[int] = []
        rows: list[int] = []
        asked = []
        wanted = []
        row = 0
        for piece in pieces:
            size = len(piece.token_ids)
            if batch.params[piece.chunk_id].prompt_logprobs is not None:
                asked.append((piece, row))
            if piece.chunk_id in batch.pooling:
                wanted.append((piece, row))
            row += size
            if piece.last and batch.samples[piece.chunk_id]:
                samples.append(piece.chunk_id)
                rows.append(row - 1)
        first = rows if len(rows) <= self.program.max_logits else []
        finite, logits = self.program.forward(chunks, first)
        for piece, sound in zip(pieces, finite, strict=True):
            if not sound:
                result.errors[piece.chunk_id] = NOT_FINITE
        if first:
            # Before the next call, which overwrites the logits.
            self._draw(batch, samples, logits, result)
        foretold = []
        for piece, row in asked:
            if piece.chunk_id not in result.errors:
                foretold.append((piece.chunk_id, self._foretell(batch, piece, row, result)))
        pooled = [(piece.chunk_id, self._pool(batch, piece, row, result)) for piece, row in wanted]
        if rows and not first:
            most = self.program.max_logits
            for i in range(0, len(rows), most):
                self._draw(batch, samples[i : i + most], self.program.logits(rows[i : i + most]), result)
        # Last, when memory can not run out any more: pieces that are computed again must not count twice.
        for i, entries in foretold:
            if entries:
                result.prompt_logprobs.setdefault(i, []).extend(entries)
        result.pooled.update((i, vector) for i, vector in pooled if vector)

    def _pool(self, batch: ScheduledBatch, piece: Piece, row: int, result: StepResult) -> list[float]:
        """What becomes of the hidden states of a piece that begins at row `row`: those of the last row, or all rows
        added to what was before, one by one, so that the sum is the same however the prompt was cut."""
        i = piece.chunk_id
        kind, before = batch.pooling[i]
        if kind == "last":
            if not piece.last:
                return []
            total = self.program.hidden_states([row + len(piece.token_ids) - 1])[0].astype(np.float64)
        else:
            total = np.array(result.pooled.get(i) or before or 0.0, np.float64)
            most = self.program.max_logits
            for start in range(0, len(piece.token_ids), most):
                stop = min(start + most, len(piece.token_ids))
                for hidden in self.program.hidden_states(list(range(row + start, row + stop))):
                    total = total + hidden
        if not np.isfinite(total).all():
            result.errors[i] = NOT_FINITE
        return [] if i in result.errors else total.tolist()

    def _foretell(self, batch: ScheduledBatch, piece: Piece, row: int, result: StepResult) -> list[TokenLogprob]:
        """Log-probabilities of prompt tokens, some rows at a time: a prompt's logits are far larger than its text."""
        i = piece.chunk_id
        num_rows = max(0, min(len(piece.token_ids), batch.num_prompts[i] - 1 - piece.start))
        # Of the row after each one: the piece's own tokens, then the token that comes after the piece.
        next_token_ids = piece.token_ids[1 : num_rows + 1]
        if len(next_token_ids) < num_rows:
            next_token_ids.append(self._token_after(batch, piece))
        most = max(1, min(MAX_LOGITS // self.program.vocab_size, self.program.max_logits))
        found: list[TokenLogprob] = []
        for start in range(0, num_rows, most):
            foretold = next_token_ids[start : start + most]
            logits = self.program.logits(list(range(row + start, row + start + len(foretold))))
            if not all(logits.finite):
                result.errors[i] = NOT_FINITE
                return []
            found += self.sampler.prompt_logprobs(logits.rows, foretold, batch.params[i].prompt_logprobs or 0)
        return found

    def _token_after(self, batch: ScheduledBatch, piece: Piece) -> int:
        """The prompt token after `piece`: of the same chunk, or the one that the scheduler told."""
        i = piece.chunk_id
        if piece.last:
            return batch.next_token_ids[i]
        offset = sum(batch.lens[:i]) + piece.start - batch.starts[i] + len(piece.token_ids)
        return batch.token_ids[offset]

    def _draw(self, batch: ScheduledBatch, chunk_ids: list[int], logits: Logits, result: StepResult) -> None:
        """Sample from `logits`, one row for each chunk. What is wrong with a row fails its own chunk (R-17)."""
        for at, i in enumerate(chunk_ids):
            if not logits.finite[at]:
                result.errors.setdefault(i, NOT_FINITE)
        masks = self._masks(batch, chunk_ids, result)
        sound = [at for at, i in enumerate(chunk_ids) if i not in result.errors and i not in result.deferred]
        if not sound:
            return
        rows = [self._row(batch, chunk_ids[at], logits.best[at], masks.get(chunk_ids[at])) for at in sound]
        numbers = logits.rows if len(sound) == len(chunk_ids) else logits.rows[sound]
        for at, drawn in zip(sound, self.sampler.sample_rows(numbers, rows), strict=True):
            i = chunk_ids[at]
            if isinstance(drawn, ValueError):
                result.errors[i] = f"sampling_error: {drawn}"
                continue
            result.token_ids[i] = drawn.token_id
            if drawn.logprob is not None:
                result.logprobs[i] = drawn.logprob
            if drawn.state is not None:
                result.states[i] = drawn.state
            if i in masks:
                self._accept(batch, i, drawn.token_id, result)

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

    def _accept(self, batch: ScheduledBatch, i: int, token_id: int, result: StepResult) -> None:
        num_generated = batch.starts[i] + batch.lens[i] + 1 - batch.num_prompts[i]
        try:
            forced = self.matchers.accept(batch.seq_ids[i], token_id, batch.params[i], num_generated)  # type: ignore[union-attr]
        except GrammarError as error:
            result.errors[i] = f"structured_output_error: {error}"
            return
        if forced:
            result.forced[i] = forced

    def _row(self, batch: ScheduledBatch, i: int, best: int, mask: Mask | None) -> Row:
        return Row(
            params=batch.params[i],
            position=batch.starts[i] + batch.lens[i],
            num_prompt=batch.num_prompts[i],
            history=batch.histories.get(i, []),
            best=best,
            state=batch.states.get(i),
            mask=mask,
        )


def _is_out_of_memory(error: Exception) -> bool:
    """Python's and numpy's kind, a GPU's kind, and the words by which torch tells it of a CPU."""
    kind = type(error).__name__
    return isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)
