"""`Runner`: the executor that runs a model. A `ScheduledBatch` goes in, a `StepResult` comes out.

It holds the model's program (with the KV cache) and the sampler. It decides nothing: the batch says which tokens to
compute and where their keys and values go. A fault of one chunk ends that chunk alone. Speculation takes part at two
points, before the model runs and after it. Knows no tensors: the program is the backend's. Called by `engine.core`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.backends.base import DrawingProgram, Program
from headrace.backends.pooling import Span, pool
from headrace.backends.step import Chunks
from headrace.drafters.speculator import Observation, Outcome, Speculator, StepRecord
from headrace.grammar.matchers import Matchers
from headrace.protocol.adapters import AdapterStore
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft, RowResult, ScheduledBatch, StepResult, TokenLogprob
from headrace.runner.drawing import Rounds, Verification
from headrace.runner.faults import NOT_FINITE, StepFaults
from headrace.runner.overlap import Overlap, StartedStep, copy_blocks
from headrace.runner.pictures import PictureSource, picture_rows, places_of, whole_rows
from headrace.runner.pieces import Piece, make_pieces, make_portions, states_of
from headrace.sampling.sampler import Sampler

MAX_LOGITS = 2**24
"""Logits of prompt rows in memory at once (64 MiB of float32)."""

NO_DRAFT = Draft([])


class Runner:
    """Computes steps of one model over one KV cache."""

    def __init__(
        self,
        program: Program,
        sampler: Sampler,
        matchers: Matchers | None = None,
        speculator: Speculator | None = None,
        adapters: AdapterStore | None = None,
        pictures: PictureSource | None = None,
    ) -> None:
        """`matchers`: None for an engine that takes no constraints (it has no tokenizer). `speculator`: None for one
        without speculation. `adapters`, `pictures`: None for an engine without them."""
        self.program = program
        self.sampler = sampler
        self.matchers = matchers
        self.speculator = speculator
        self.adapters, self.pictures = adapters, pictures
        self.block_size = program.block_size
        self._rounds = Rounds(sampler, matchers)
        self._faults = StepFaults()
        self._overlap: Overlap | None = None
        # To draw again, the last row is computed again, which a state does not allow.
        if speculator is None and isinstance(program, DrawingProgram) and not program.kinds[-1].is_state:
            self._overlap = Overlap(program, sampler, self._rounds, self._why_unsound)

    @property
    def runs_ahead(self) -> Callable[[SamplingParams], bool] | None:
        """Whether the token after one with such parameters can be computed before that token is known on the host; None
        where no step can start while another runs."""
        return None if self._overlap is None else self._overlap.runs_ahead

    def run(self, batch: ScheduledBatch) -> StepResult:
        return self.finish(self.start(batch))

    def start(self, batch: ScheduledBatch) -> StepResult | StartedStep:
        """Start one step. Where the host takes part, or where there is no device, the whole step is computed here, and
        `finish` hands over the result. Raises only for faults that no single chunk owns (a broken device)."""
        self._begin_masks(batch)
        overlap = self._overlap
        if overlap is None:
            return self._run_now(batch)
        step = overlap.start(batch)
        if step is None:
            return overlap.note(batch, self._run_now(overlap.known(batch)))
        if self._faults.is_open:
            self._faults.settle(StepResult(step_id=batch.step_id, token_ids=[]), len(batch))
        return step

    def finish(self, ticket: StepResult | StartedStep) -> StepResult:
        if isinstance(ticket, StepResult) or self._overlap is None:
            return ticket  # type: ignore[return-value]
        return self._overlap.finish(ticket)

    def _run_now(self, batch: ScheduledBatch) -> StepResult:
        """Run one step: copies, forward, logits of the rows that need them, tokens."""
        result = StepResult(step_id=batch.step_id, token_ids=[-1] * len(batch))
        # A step without speculation costs nothing for it.
        speculator = self.speculator if batch.asks or batch.drafts or batch.ended else None
        record = speculator.begin_step(batch) if speculator is not None else None
        if batch.copies or batch.more_copies:
            copy_blocks(self.program, batch)
        groups = self._sound_groups(batch, result)
        program = self.program
        for pieces in make_portions(groups, program.max_rows, program.max_logits, program.model.both_ways):
            # A chunk that failed in an earlier portion is not computed further.
            if result.rows:
                pieces = [piece for piece in pieces if not result.read(piece.chunk_id).error]
            self._compute_what_fits(batch, pieces, result, record)
        if self._faults.is_open:
            self._faults.settle(result, len(batch))
        for i, row in result.rows.items():
            if row.error:
                result.token_ids[i] = -1
                result.rows[i] = RowResult(error=row.error, is_deferred=row.is_deferred)
        if speculator is not None and record is not None:
            speculator.end_step(batch, result, record)
        return result

    def close(self) -> None:
        """Free the memory of the cache. May be called twice."""
        if self.matchers is not None:
            self.matchers.close()
        if self.speculator is not None:
            self.speculator.close()
        self.program.close()
        if self.pictures is not None:
            self.pictures.close()

    def idle(self) -> None:
        """Prepare for the next request while there is nothing to do."""
        if self.matchers is not None:
            self.matchers.warm()

    def _begin_masks(self, batch: ScheduledBatch) -> None:
        """Start to compute the masks of this step, in parallel with the forward pass."""
        requests = []
        for i, params in enumerate(batch.params):
            if params.structured_outputs is not None:
                tokens = batch.histories[i][batch.num_prompts[i] :] if batch.samples[i] else None
                requests.append((batch.seq_ids[i], params.structured_outputs, tokens))
        if requests and self.matchers is not None:
            self.matchers.begin(requests)

    def _sound_groups(self, batch: ScheduledBatch, result: StepResult) -> list[list[Piece]]:
        """Return the pieces of each chunk that can be computed. The others get an error each."""
        groups = []
        row = 0
        for i, length in enumerate(batch.lens):
            token_ids = batch.token_ids[row : row + length]
            row += length
            reason = self._why_unsound(batch, i, token_ids)
            if reason:
                result.row(i).error = f"invalid_chunk: {reason}"
            else:
                groups.append(make_pieces(batch, i, token_ids, self.block_size))
        return groups

    def _why_unsound(self, batch: ScheduledBatch, chunk_id: int, token_ids: list[int]) -> str:
        """Return why a chunk cannot be computed, or ""."""
        program, table = self.program, batch.block_tables[chunk_id]
        start, length = batch.starts[chunk_id], batch.lens[chunk_id]
        if chunk_id in batch.drafts:
            draft = batch.drafts[chunk_id]
            token_ids = token_ids + draft.token_ids
            length += len(draft.paths()[0])
            table = table + [block for tail in draft.tails for block in tail]
        if length < 1 or start < 0:
            return f"positions {start} ... {start + length - 1} are no positions"
        if not 0 <= min(token_ids) <= max(token_ids) < program.vocab_size:
            return (
                f"token ids reach from {min(token_ids)} to {max(token_ids)}, "
                f"the model has 0 to {program.vocab_size - 1}"
            )
        tables = [batch.block_tables[chunk_id], *[more[chunk_id] for more in batch.more_tables]]
        if (shortest := min(map(len, tables))) * program.block_size < start + length:
            return f"{shortest} blocks of {program.block_size} do not hold {start + length} positions"
        tables[0] = table
        for kind, seen, size in zip(program.kinds, tables, program.pool_sizes, strict=False):
            # Blocks behind the window of the first row are not read.
            seen = seen[max(0, start + 1 - kind.window) // program.block_size :] if kind.window else seen
            if not 0 <= min(seen) <= max(seen) < size:
                return f"block ids reach from {min(seen)} to {max(seen)}, the cache has 0 to {size - 1}"
        if (adapter := batch.adapters.get(chunk_id)) and (self.adapters is None or self.adapters.slot(adapter) < 0):
            return f"its adapter {adapter[:12]} is not loaded"
        if batch.state_reads and not (-1 if start == 0 else 0) <= batch.state_reads[chunk_id] < program.pool_sizes[-1]:
            return f"the state before position {start} is in slot {batch.state_reads[chunk_id]}, no slot of the cache"
        return ""

    def _compute_what_fits(
        self, batch: ScheduledBatch, pieces: list[Piece], result: StepResult, record: StepRecord | None
    ) -> None:
        """Compute the pieces, in halves where that fails. A piece that fails alone, for lack of memory (R-25) or for
        another reason, ends its chunk. A piece that is computed again, together with others, writes the same bits
        again.
        """
        if not pieces:
            return
        try:
            self._compute(batch, pieces, result, record)
            return
        except BaseException as error:
            alone = len(pieces) == 1 and not pieces[0].nodes
            reason = self._faults.reason(error, batch.lens[pieces[0].chunk_id] if alone else 0)
            if not reason:
                raise
            if alone:
                result.row(pieces[0].chunk_id).error = reason
                return
        # A later part of a chunk has advanced the state that it reads.
        lost = {piece.chunk_id for piece in pieces if batch.state_reads and piece.start > batch.starts[piece.chunk_id]}
        for i in lost:
            result.row(i).error = reason
        pieces = [piece for piece in pieces if piece.chunk_id not in lost]
        if lost:
            self._compute_what_fits(batch, pieces, result, record)
            return
        # Not in the except clause, whose traceback holds the tensors of the failed attempt.
        chunk_ids = list(dict.fromkeys(piece.chunk_id for piece in pieces))
        if len(chunk_ids) == 1:
            # Without its draft it may fit.
            known = [piece.without_draft() for piece in pieces if piece.last]
            self._compute_what_fits(batch, known, result, record)
            return
        first = set(chunk_ids[: len(chunk_ids) // 2])
        self._compute_what_fits(batch, [piece for piece in pieces if piece.chunk_id in first], result, record)
        self._compute_what_fits(batch, [piece for piece in pieces if piece.chunk_id not in first], result, record)

    def _compute(
        self, batch: ScheduledBatch, pieces: list[Piece], result: StepResult, record: StepRecord | None
    ) -> None:
        verifications: list[Verification] = []
        rows: list[int] = []
        draft_rows: list[tuple[Verification, int, int]] = []
        scored: list[tuple[Piece, int]] = []
        pooled: list[tuple[Piece, int]] = []
        copies: list[tuple[int, int]] = []
        later, observed = list[int](), list[int]()
        row = 0
        for piece in pieces:
            i, size = piece.chunk_id, len(piece.token_ids)
            if batch.params[i].prompt_logprobs is not None:
                scored.append((piece, row))
                later += range(row, row + num_scored(batch, piece))
            if i in batch.pooling:
                pooled.append((piece, row))
                later += [row + size - 1] * piece.last if batch.pooling[i][0] == "last" else range(row, row + size)
            if record is not None and record.needs_features and batch.params[i].speculation:
                observed += range(row, row + size)
            if piece.copies:
                copies += [(row + place, slot) for place, slot in piece.copies]
            row += size
            if piece.last and batch.samples[i]:
                verification = Verification(i, batch.drafts[i] if piece.nodes else NO_DRAFT, {-1: len(rows)})
                if record is not None and piece.nodes and i in record.draft_probs:
                    verification.is_coupled, verification.draft_probs = False, record.draft_probs[i]
                verifications.append(verification)
                rows.append(row - 1 - len(piece.nodes))
            for place, node in enumerate(piece.nodes, row - len(piece.nodes)):
                draft_rows.append((verifications[-1], node, place))
        # Behind the rows that are sampled from in any case, which then lie side by side.
        for verification, node, place in draft_rows:
            verification.rows[node] = len(rows)
            rows.append(place)
        logits_rows = rows if len(rows) <= self.program.max_logits else []
        chunks = Chunks(
            [piece.start for piece in pieces],
            [piece.token_ids for piece in pieces],
            [piece.table for piece in pieces],
            copies,
            [[tables[piece.chunk_id] for piece in pieces] for tables in batch.more_tables],
            *states_of(batch, pieces),
            later if logits_rows else later + rows,
            observed,
            self._slots(batch, pieces),
            None if self.pictures is None else places_of(batch, pieces, self.pictures),
            whole_rows(pieces) if batch.pictures else (),
        )
        further = [] if self.pictures is None else [picture_rows(batch, pieces, self.pictures)]
        finite, logits = self.program.forward(chunks, logits_rows, *further)
        for piece, sound in zip(pieces, finite, strict=True):
            # The logits decide for a piece with a draft: its row that is not finite may follow a rejected token.
            if not sound and not piece.nodes:
                result.row(piece.chunk_id).error = NOT_FINITE
        if logits_rows:
            # Before the next call, which overwrites the logits.
            self._rounds.draw(batch, verifications, logits, result)
        prompt_logprobs = [
            (piece.chunk_id, self._prompt_logprobs(batch, piece, row, result))
            for piece, row in scored
            if not result.read(piece.chunk_id).error
        ]
        vectors = [(piece.chunk_id, self._pool(batch, piece, row, result)) for piece, row in pooled]
        if rows and not logits_rows:
            self._draw_in_turns(batch, verifications, rows, result)
        observations: list[Observation] = []
        if record is not None and record.needs_features:
            observations = self._observations(batch, pieces, verifications, result)
        # Last, when memory cannot run out any more: pieces that are computed again must not count twice.
        for i, entries in prompt_logprobs:
            if entries:
                result.row(i).prompt_logprobs.extend(entries)
        for i, vector in vectors:
            if vector:
                result.row(i).pooled = vector
        if record is not None:
            record.observations += observations
            record.outcomes += [
                Outcome(batch.seq_ids[each.chunk_id], each.draft, each.best, each.accepted)
                for each in verifications
                if each.best and each.token_ids
            ]

    def _slots(self, batch: ScheduledBatch, pieces: list[Piece]) -> list[int]:
        """Return the slot of each piece's adapter, -1 for none; empty where no piece has one."""
        if not batch.adapters or self.adapters is None:
            return []
        slots = {i: self.adapters.slot(digest) for i, digest in batch.adapters.items()}
        return [slots.get(piece.chunk_id, -1) for piece in pieces]

    def _draw_in_turns(
        self, batch: ScheduledBatch, verifications: list[Verification], rows: list[int], result: StepResult
    ) -> None:
        """Draw where a program gives fewer logits at once than are needed: whole chunks in each turn. A program of an
        engine with speculation has room for one (`engine.library.load`)."""
        most = self.program.max_logits
        start = 0
        while start < len(verifications):
            stop = start
            places: list[int] = []
            while stop < len(verifications) and len(places) + len(verifications[stop].rows) <= most:
                verification = verifications[stop]
                first = len(places)
                places += [rows[row] for row in verification.rows.values()]
                verification.rows = {node: first + k for k, node in enumerate(verification.rows)}
                stop += 1
            if not places:
                num_rows = len(verifications[start].rows)
                raise ValueError(f"{num_rows} rows of logits of one chunk, {most} is all there can be")
            self._rounds.draw(batch, verifications[start:stop], self.program.logits(places), result)
            start = stop

    def _observations(
        self, batch: ScheduledBatch, pieces: list[Piece], verifications: list[Verification], result: StepResult
    ) -> list[Observation]:
        """Return the features of the computed rows, without rejected draft tokens."""
        # By chunk: the first position, the tokens, and their rows.
        observed: dict[int, tuple[int, list[int], list[int]]] = {}
        nodes: dict[tuple[int, int], tuple[int, int]] = {}
        row = 0
        for piece in pieces:
            i = piece.chunk_id
            if batch.params[i].speculation and not result.read(i).error:
                _, token_ids, rows = observed.setdefault(i, (piece.start, [], []))
                token_ids += piece.token_ids[: piece.num_known]
                rows += range(row, row + piece.num_known)
                for place, node in enumerate(piece.nodes, piece.num_known):
                    nodes[i, node] = piece.token_ids[place], row + place
            row += len(piece.token_ids)
        for verification in verifications:
            if verification.chunk_id in observed:
                _, token_ids, rows = observed[verification.chunk_id]
                for node in verification.accepted:
                    token_id, place = nodes[verification.chunk_id, node]
                    token_ids.append(token_id)
                    rows.append(place)
        places = [place for _, _, rows in observed.values() for place in rows]
        if not places:
            return []
        features = self.program.features(places)
        observations: list[Observation] = []
        begin = 0
        for i, (start, token_ids, rows) in observed.items():
            part = features[begin : begin + len(rows)]
            observations.append(Observation(batch.seq_ids[i], start, token_ids, part))
            begin += len(rows)
        return observations

    def _pool(self, batch: ScheduledBatch, piece: Piece, row: int, result: StepResult) -> list[float]:
        """Return the pooled hidden states after a piece that begins at row `row`."""
        i = piece.chunk_id
        kind, before = batch.pooling[i]
        span = Span(row, piece.start, len(piece.token_ids), batch.num_prompts[i])
        numbers = pool(kind, result.read(i).pooled or before, span, self.program)
        if not np.isfinite(numbers).all():
            result.row(i).error = NOT_FINITE
        return [] if result.read(i).error else numbers.tolist()

    def _prompt_logprobs(self, batch: ScheduledBatch, piece: Piece, row: int, result: StepResult) -> list[TokenLogprob]:
        """Return log-probabilities of prompt tokens. Logits are computed for some rows at a time: for a whole prompt
        they are far larger than its text."""
        i = piece.chunk_id
        num_rows = num_scored(batch, piece)
        # The token after each row: the piece's own tokens, then the token that comes after the piece.
        next_token_ids = piece.token_ids[1 : num_rows + 1]
        if len(next_token_ids) < num_rows:
            next_token_ids.append(self._token_after(batch, piece))
        most = max(1, min(MAX_LOGITS // self.program.vocab_size, self.program.max_logits))
        entries: list[TokenLogprob] = []
        for start in range(0, num_rows, most):
            token_ids = next_token_ids[start : start + most]
            logits = self.program.logits(list(range(row + start, row + start + len(token_ids))))
            if not all(logits.finite):
                result.row(i).error = NOT_FINITE
                return []
            entries += self.sampler.prompt_logprobs(logits.fetch(), token_ids, batch.params[i].prompt_logprobs or 0)
        return entries

    def _token_after(self, batch: ScheduledBatch, piece: Piece) -> int:
        """Return the prompt token after `piece`: of the same chunk, or as the batch has it."""
        i = piece.chunk_id
        if piece.last:
            return batch.next_token_ids[i]
        offset = sum(batch.lens[:i]) + piece.start - batch.starts[i] + len(piece.token_ids)
        return batch.token_ids[offset]


def num_scored(batch: ScheduledBatch, piece: Piece) -> int:
    """Return how many rows of a piece have a prompt token after them: the first ones."""
    return max(0, min(len(piece.token_ids), batch.num_prompts[piece.chunk_id] - 1 - piece.start))
