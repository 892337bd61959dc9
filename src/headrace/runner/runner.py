"""`Runner`: the real executor. A ScheduledBatch goes in, numbers are made and used up here, a StepResult comes out.

It owns the model's program (with the KV cache) and the sampler. It decides nothing: which tokens to compute and where
their keys and values go is written in the batch. A fault that belongs to one chunk ends that chunk alone. Knows no
tensors: the program is the backend's. Called by `engine.core`.
"""

from __future__ import annotations

import numpy as np

from headrace.backends.base import Chunks, Program
from headrace.drafters.speculator import Speculator
from headrace.grammar.matchers import Matchers
from headrace.protocol.step import DraftTokens, ScheduledBatch, StepResult, TokenLogprob
from headrace.runner.faults import NOT_FINITE, Blame
from headrace.runner.pieces import Piece, make_pieces, make_portions, num_rows
from headrace.runner.verification import Rounds, Trial
from headrace.sampling.sampler import Sampler

MAX_LOGITS = 2**24
"""Numbers in the logits of prompt rows that are held at once (64 MiB of float32)."""

NO_DRAFT = DraftTokens([])


class Runner:
    """Computes steps of one model over one KV cache."""

    def __init__(
        self,
        program: Program,
        sampler: Sampler,
        matchers: Matchers | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """`matchers`: None for an engine that takes no constraints (it has no tokenizer). `speculator`: None for one
        that does not guess."""
        self.program = program
        self.sampler = sampler
        self.matchers = matchers
        self.speculator = speculator
        self.block_size = program.block_size
        self._rounds = Rounds(sampler, matchers)
        self._blame = Blame()

    def run(self, batch: ScheduledBatch) -> StepResult:
        """One step: copies, forward, logits of the rows that are asked for, tokens.

        Raises only for faults that no single chunk owns (a broken device).
        """
        result = StepResult(step_id=batch.step_id, token_ids=[-1] * len(batch))
        # While nobody is asked for guesses, nothing is paid for them.
        speculator = self.speculator if batch.asks or batch.drafts else None
        if speculator is not None:
            speculator.begin()
        if batch.copies:
            self.program.copy_blocks(batch.copies)
        self._begin_masks(batch)
        groups = self._sound_groups(batch, result)
        for pieces in make_portions(groups, self.program.max_rows, self.program.max_logits):
            # What an earlier portion found wrong is not computed further.
            if result.errors:
                pieces = [piece for piece in pieces if piece.chunk_id not in result.errors]
            self._compute_what_fits(batch, pieces, result)
        self._blame.settle(result, len(batch))
        for i in result.errors:
            result.token_ids[i] = -1
            result.forced.pop(i, None)
            result.logprobs.pop(i, None)
            result.prompt_logprobs.pop(i, None)
            result.pooled.pop(i, None)
            result.further.pop(i, None)
            result.further_logprobs.pop(i, None)
        if speculator is not None:
            speculator.end(batch.step_id, sum(map(num_rows, groups)), len(groups))
            if batch.asks:
                speculator.propose(batch, result)
        if batch.ended and self.speculator is not None:
            self.speculator.drop(batch.ended)
        return result

    def close(self) -> None:
        """Give the cache's memory back. May be called twice."""
        if self.matchers is not None:
            self.matchers.close()
        if self.speculator is not None:
            self.speculator.close()
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

    def _sound_groups(self, batch: ScheduledBatch, result: StepResult) -> list[list[Piece]]:
        """The pieces of each chunk that can be computed. The others get an error each."""
        groups = []
        row = 0
        for i, length in enumerate(batch.lens):
            own = batch.token_ids[row : row + length]
            row += length
            reason = self._why_unsound(batch, i, own)
            if reason:
                result.errors[i] = f"invalid_chunk: {reason}"
            else:
                groups.append(make_pieces(batch, i, own, self.block_size))
        return groups

    def _why_unsound(self, batch: ScheduledBatch, chunk_id: int, token_ids: list[int]) -> str:
        """Why a chunk can not be computed, or ""."""
        program, table = self.program, batch.block_tables[chunk_id]
        start, length = batch.starts[chunk_id], batch.lens[chunk_id]
        if chunk_id in batch.drafts:
            draft = batch.drafts[chunk_id]
            token_ids = token_ids + draft.token_ids
            length += len(draft.paths[0]) if draft.paths else len(draft.token_ids)
            table = table + [block for tail in draft.tails for block in tail]
        if length < 1 or start < 0:
            return f"positions {start} ... {start + length - 1} are no positions"
        if not 0 <= min(token_ids) <= max(token_ids) < program.vocab_size:
            return (
                f"token ids reach from {min(token_ids)} to {max(token_ids)}, "
                f"the model has 0 to {program.vocab_size - 1}"
            )
        if len(batch.block_tables[chunk_id]) * program.block_size < start + length:
            return f"{len(table)} blocks of {program.block_size} do not hold {start + length} positions"
        if not 0 <= min(table) <= max(table) < program.num_blocks:
            return f"block ids reach from {min(table)} to {max(table)}, the cache has 0 to {program.num_blocks - 1}"
        return ""

    def _compute_what_fits(self, batch: ScheduledBatch, pieces: list[Piece], result: StepResult) -> None:
        """Compute the pieces, in halves where that fails; one that fails alone, for want of memory (R-25) or otherwise,
        ends its chunk. To compute a piece again, in other company, writes the same bits again.
        """
        if not pieces:
            return
        try:
            self._compute(batch, pieces, result)
            return
        except BaseException as error:
            alone = len(pieces) == 1 and not pieces[0].nodes
            reason = self._blame.reason(error, batch.lens[pieces[0].chunk_id] if alone else 0)
            if not reason:
                raise
            if alone:
                result.errors[pieces[0].chunk_id] = reason
                return
        # Not in the except clause, whose traceback holds the tensors of the failed attempt.
        chunk_ids = list(dict.fromkeys(piece.chunk_id for piece in pieces))
        if len(chunk_ids) == 1:
            # Without its guesses it may fit.
            self._compute_what_fits(batch, [piece.without_guesses() for piece in pieces if piece.last], result)
            return
        first = set(chunk_ids[: len(chunk_ids) // 2])
        self._compute_what_fits(batch, [piece for piece in pieces if piece.chunk_id in first], result)
        self._compute_what_fits(batch, [piece for piece in pieces if piece.chunk_id not in first], result)

    def _compute(self, batch: ScheduledBatch, pieces: list[Piece], result: StepResult) -> None:
        trials: list[Trial] = []
        rows: list[int] = []
        guessed: list[tuple[Trial, int, int]] = []
        asked = []
        wanted = []
        copies: list[tuple[int, int]] = []
        row = 0
        for piece in pieces:
            i, size = piece.chunk_id, len(piece.token_ids)
            if batch.params[i].prompt_logprobs is not None:
                asked.append((piece, row))
            if i in batch.pooling:
                wanted.append((piece, row))
            if piece.copies:
                copies += [(row + own, slot) for own, slot in piece.copies]
            row += size
            if piece.last and batch.samples[i]:
                trials.append(Trial(i, batch.drafts[i] if piece.nodes else NO_DRAFT, {-1: len(rows)}))
                rows.append(row - 1 - len(piece.nodes))
            for place, node in enumerate(piece.nodes, row - len(piece.nodes)):
                guessed.append((trials[-1], node, place))
        # Behind those that are drawn from in any case, which then lie side by side.
        for trial, node, place in guessed:
            trial.rows[node] = len(rows)
            rows.append(place)
        first = rows if len(rows) <= self.program.max_logits else []
        chunks = Chunks(
            [piece.start for piece in pieces],
            [piece.token_ids for piece in pieces],
            [piece.table for piece in pieces],
            copies,
        )
        finite, logits = self.program.forward(chunks, first)
        for piece, sound in zip(pieces, finite, strict=True):
            # Of a piece with guesses the logits tell: what is not finite may be after a guess that is rejected.
            if not sound and not piece.nodes:
                result.errors[piece.chunk_id] = NOT_FINITE
        if first:
            # Before the next call, which overwrites the logits.
            self._rounds.draw(batch, trials, logits, result, self.speculator)
        foretold = []
        for piece, row in asked:
            if piece.chunk_id not in result.errors:
                foretold.append((piece.chunk_id, self._foretell(batch, piece, row, result)))
        pooled = [(piece.chunk_id, self._pool(batch, piece, row, result)) for piece, row in wanted]
        if rows and not first:
            self._draw_some_at_a_time(batch, trials, rows, result)
        if batch.asks and self.speculator is not None and self.speculator.watches:
            with self.speculator.aside():
                self._show(batch, pieces, trials, rows, result, self.speculator)
        # Last, when memory can not run out any more: pieces that are computed again must not count twice.
        for i, entries in foretold:
            if entries:
                result.prompt_logprobs.setdefault(i, []).extend(entries)
        result.pooled.update((i, vector) for i, vector in pooled if vector)

    def _draw_some_at_a_time(
        self, batch: ScheduledBatch, trials: list[Trial], rows: list[int], result: StepResult
    ) -> None:
        """Where a program gives fewer logits at once than are wanted: whole trials in each turn. A program of an engine
        that guesses has room for one (`engine.load`)."""
        most = self.program.max_logits
        start = 0
        while start < len(trials):
            stop = start
            places: list[int] = []
            while stop < len(trials) and len(places) + len(trials[stop].rows) <= most:
                trial = trials[stop]
                places += [rows[at] for at in trial.rows.values()]
                first = len(places) - len(trial.rows)
                trial.rows = {node: first + k for k, node in enumerate(trial.rows)}
                stop += 1
            if not places:
                raise ValueError(f"{len(trials[start].rows)} rows of logits of one chunk, {most} is all there can be")
            self._rounds.draw(batch, trials[start:stop], self.program.logits(places), result, self.speculator)
            start = stop

    def _show(
        self,
        batch: ScheduledBatch,
        pieces: list[Piece],
        trials: list[Trial],
        rows: list[int],
        result: StepResult,
        speculator: Speculator,
    ) -> None:
        """Show the drafter what was computed, without the guesses that were rejected."""
        kept = {trial.chunk_id: trial for trial in trials}
        shown: dict[int, tuple[int, list[int], list[int]]] = {}
        row = 0
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for piece in pieces:
            i = piece.chunk_id
            if batch.params[i].speculation and i not in result.errors:
                start, tokens, own = shown.setdefault(i, (piece.start, [], []))
                if piece.num_known:
                    tokens += piece.token_ids[: piece.num_known]
                    own += range(row, row + piece.num_known)
                for at, node in enumerate(piece.nodes, piece.num_known):
                    places[i, node] = row + at, piece.token_ids[at]
            row += len(piece.token_ids)
        for i, trial in kept.items():
            if i in shown:
                for node in trial.nodes:
                    at, token_id = places[i, node]
                    shown[i][1].append(token_id)
                    shown[i][2].append(at)
        wanted = [at for _, _, own in shown.values() for at in own]
        if not wanted:
            return
        features = self.program.features(wanted)
        begin = 0
        for i, (start, tokens, own) in shown.items():
            speculator.observe(batch.seq_ids[i], start, tokens, features[begin : begin + len(own)])
            begin += len(own)

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
