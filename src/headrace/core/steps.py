"""A step of the scheduler: the batch of its sequences, its time in flight, and the output of its result.

`make_batch` turns the chosen sequences into the columns of a `ScheduledBatch`. `Flight` has the steps that are
scheduled and not yet committed: one, or two while a device computes the first of them. All blocks that a step in flight
may read or write stay held until it is retired (I-7), also blocks of sequences that end meanwhile and blocks that a
sequence gives up. `output_of` turns a result into the `StepOutput` of its requests.

Knows sequences and blocks; must not know how a step is chosen. Called by the scheduler alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.core.beams.searches import Row, Searches
from headrace.core.blocks import BlockPool
from headrace.core.sequence import Sequence
from headrace.protocol.errors import HeadraceError, InvariantError
from headrace.protocol.step import UNDRAWN, Draft, Pooling, RowResult, ScheduledBatch, Stats, StepOutput, StepResult


def make_batch(
    step_id: int,
    ready: list[Sequence],
    chunks: list[tuple[Sequence, int]],
    copies: list[list[tuple[int, int]]],
    drafts: dict[int, Draft],
    ended: list[int],
    asks: bool = False,
    has_state: bool = False,
) -> tuple[list[Sequence], ScheduledBatch]:
    """Return the sequences of a step, in its order, and its batch: one token of each of `ready`, then the `chunks`.

    `copies` has a list for each kind of blocks; `drafts` is keyed by sequence id. With `asks` the batch has the tokens
    of every sequence that may get draft tokens.
    """
    flight = ready
    starts = [s.num_computed + s.num_ahead for s in ready]
    lens = [1] * len(ready)
    samples = [True] * len(ready)
    token_ids = [s.tokens[-1] if start < len(s.tokens) else UNDRAWN for s, start in zip(ready, starts, strict=True)]
    nexts: dict[int, int] = {}
    if chunks:
        flight = ready + [s for s, _ in chunks]
        for seq, length in chunks:
            start = seq.num_computed + seq.num_ahead
            stop = start + length
            if seq.params.prompt_logprobs is not None and stop < seq.num_prompt:
                nexts[len(starts)] = seq.tokens[stop]
            starts.append(start)
            lens.append(length)
            samples.append(stop == len(seq.tokens))
            token_ids += seq.tokens[start:stop]
    # Few sequences need the further columns, and this loop runs over all of them in every step.
    special = [(i, s) for i, s in enumerate(flight) if s.special]
    for i, seq in special:
        samples[i] = samples[i] and not seq.pooling
    if asks:
        histories = {
            i: s.tokens
            for i, s in enumerate(flight)
            if samples[i] and (s.needs_history or (s.params.speculation and not s.is_beam))
        }
    else:
        histories = {i: s.tokens for i, s in special if s.needs_history and samples[i]}
    batch = ScheduledBatch(
        step_id=step_id,
        seq_ids=[s.seq_id for s in flight],
        starts=starts,
        lens=lens,
        token_ids=token_ids,
        block_tables=[s.tables[0] for s in flight],
        samples=samples,
        params=[s.params for s in flight],
        num_prompts=[s.num_prompt for s in flight],
        copies=copies[0],
        next_token_ids=nexts,
        histories=histories,
        states={i: s.state for i, s in special if s.state is not None and samples[i]},
        pooling={i: pooling_of(s) for i, s in special if s.pooling and pools_rows(s, lens[i])},
        adapters={i: s.request.adapter for i, s in special if s.request.adapter},
        pictures={i: s.request.pictures for i, s in special if s.request.pictures},
        drafts={i: drafts[s.seq_id] for i, s in enumerate(flight) if s.seq_id in drafts} if drafts else {},
        ended=ended,
        asks=asks,
    )
    if len(copies) > 1:
        batch.more_tables = [[seq.tables[kind] for seq in flight] for kind in range(1, len(copies))]
        batch.more_copies = copies[1:]
    if has_state:
        add_states(batch, flight)
    return flight, batch


def add_states(batch: ScheduledBatch, flight: list[Sequence]) -> None:
    """Add the columns of the state kind: one slot to read, and one to write after the last token and each guess.

    Raises `InvariantError` where a sequence lacks the state that it goes on from: it would begin again."""
    row = -1
    for i, seq in enumerate(flight):
        start, length = batch.starts[i], batch.lens[i]
        if start and start not in seq.states:
            raise InvariantError("I-22", f"{seq.request_id} has no state after {start} tokens")
        batch.state_reads.append(seq.states[start] if start else -1)
        num_guesses = len(batch.drafts[i].token_ids) if i in batch.drafts else 0
        row += length
        batch.state_writes += [(row + k, seq.states[start + length + k]) for k in range(num_guesses + 1)]
        row += num_guesses


def pools_rows(seq: Sequence, length: int) -> bool:
    """Whether the hidden states of the next `length` tokens of `seq` are pooled."""
    return seq.pooling != "last" or seq.num_computed + length == len(seq.tokens)


def pooling_of(seq: Sequence) -> tuple[Pooling, list[float]]:
    """Return the kind of pooling, and the numbers pooled before; none for a sequence that begins again."""
    return seq.pooling, seq.pooled if seq.num_computed else []


@dataclass(slots=True)
class Step:
    """A step in flight, and its sequences in the order of its batch.

    Of each pool, `num_older_pins` pins belong to the step before. `zombies` have ended since; this step is the last
    that uses their blocks. Rows in `void` began at a token that was not drawn: their result counts for nothing.
    `has_dropped`: some rows are void, or their sequences have ended.
    """

    batch: ScheduledBatch
    seqs: list[Sequence]
    num_older_pins: list[int]
    zombies: list[Sequence] = field(default_factory=list)
    void: set[int] = field(default_factory=set)
    has_dropped: bool = False


class Flight:
    """The steps in flight, the oldest first. `Sequence.num_ahead` counts the tokens that they compute."""

    def __init__(self, pools: list[BlockPool]) -> None:
        self.pools = pools
        self.steps: list[Step] = []

    def __bool__(self) -> bool:
        return bool(self.steps)

    def has_room(self, are_equal: bool) -> bool:
        """Whether a step may be scheduled while one is in flight: if at least half of its sequences can go on, since
        the others then get a token in every second step; where holders' shares are equal, also all prompts."""
        if len(self.steps) != 1:
            return False
        stays, samples = [not seq.runs_ahead for seq in self.steps[0].seqs], self.steps[0].batch.samples
        # A chunk that samples nothing has more of its prompt to come.
        return 2 * sum(stays) <= len(stays) and not (are_equal and any(map(int.__gt__, stays, samples)))

    def begin(self, batch: ScheduledBatch, seqs: list[Sequence], num_older_pins: list[int]) -> None:
        """Add a step. The pins beyond `num_older_pins` are its own."""
        self.steps.append(Step(batch, seqs, num_older_pins))
        for pool in self.pools:
            pool.is_busy = True
        for seq, length in zip(seqs, batch.lens, strict=True):
            seq.num_ahead += length

    def oldest(self, batch: ScheduledBatch, result: StepResult) -> Step:
        """Return the oldest step. Raises `HeadraceError` if `batch` is not its batch or `result` not its result."""
        step = self.steps[0] if self.steps else None
        is_whole = result.step_id == batch.step_id and len(result.token_ids) == len(batch)
        if step is None or step.batch is not batch or not is_whole:
            raise HeadraceError(f"commit() was given the batch {batch.step_id} and the result {result.step_id}")
        return step

    def retire(self) -> Step:
        """Remove the oldest step, and release its pins. The caller releases its zombies."""
        step = self.steps.pop(0)
        for kind, pool in enumerate(self.pools):
            pool.is_busy = bool(self.steps)
            pool.unpin(self.steps[0].num_older_pins[kind] if self.steps else len(pool.pins))
        for index, (seq, length) in enumerate(zip(step.seqs, step.batch.lens, strict=True)):
            if index not in step.void:
                seq.num_ahead -= length
        return step

    def hold(self, seq: Sequence) -> bool:
        """Keep the blocks of a sequence that has ended until the last step that uses them is retired. False if no step
        does."""
        users = [step for step in self.steps if seq in step.seqs]
        for step in users:
            step.has_dropped = True
        if users:
            users[-1].zombies.append(seq)
        return bool(users)

    def make_void(self, seq: Sequence) -> None:
        """Let the rows of `seq` in all steps in flight count for nothing: they followed a token that was not drawn."""
        for step in self.steps:
            if seq in step.seqs:
                step.void.add(step.seqs.index(seq))
                step.has_dropped = True
                seq.num_ahead = 0

    def zombies(self) -> list[Sequence]:
        return [seq for step in self.steps for seq in step.zombies]

    def stops(self) -> dict[int, int]:
        """Return the number of positions that each sequence, by id, has once all steps in flight are computed."""
        stops: dict[int, int] = {}
        for step in self.steps:
            batch = step.batch
            trunks = {i: len(draft.paths()[0]) for i, draft in batch.drafts.items()}
            for i, seq in enumerate(step.seqs):
                if i not in step.void:
                    stops[seq.seq_id] = batch.starts[i] + batch.lens[i] + trunks.get(i, 0)
        return stops


def computed_rows(rows: Iterable[Row], deferred: set[int], has_state: bool) -> list[Row]:
    """Return the rows of a step without the last token of each chunk in `deferred`, from which nothing is sampled. A
    state cannot go back by one token, so in a model with states no token of such a chunk counts."""
    return [
        (seq, 0 if has_state else length - 1, False, token) if index in deferred else (seq, length, sampled, token)
        for index, (seq, length, sampled, token) in enumerate(rows)
    ]


def output_of(
    batch: ScheduledBatch,
    flight: list[Sequence],
    result: StepResult,
    seqs: list[Sequence],
    added: list[list[int]],
    failed: set[int],
) -> StepOutput:
    """Return the output of a step in which each of `seqs` got the tokens `added`; chunks in `failed` count for
    nothing."""
    output = StepOutput(step_id=batch.step_id, request_ids=[seq.request_id for seq in seqs], token_ids=added)
    for index, row in result.rows.items():
        if index not in failed and not flight[index].is_beam:
            add_rare(batch.starts[index], batch.lens[index], flight[index], row, output)
    return output


def add_rare(start: int, length: int, seq: Sequence, row: RowResult, output: StepOutput) -> None:
    """Copy to `output` the log-probabilities, the state and the complete hidden states of a chunk. Its sequence keeps
    the state and the hidden states so far."""
    request_id = seq.request_id
    if row.logprob is not None:
        output.logprobs[request_id] = [row.logprob]
        if row.further_logprobs:
            # The sequence may have ended before the last of them.
            num_added = len(output.token_ids[output.request_ids.index(request_id)])
            output.logprobs[request_id] += row.further_logprobs[: num_added - 1]
    # Rows that were computed before a preemption were reported before it.
    if new := row.prompt_logprobs[max(0, seq.high_water - start) :]:
        output.prompt_logprobs[request_id] = new
    if row.state is not None:
        seq.state, seq.special = row.state, True
        output.states[request_id] = row.state
    if row.pooled:
        seq.pooled = row.pooled
        if start + length == len(seq.tokens):
            output.pooled[request_id] = row.pooled


def stats_of(counters: Stats, pools: list[BlockPool], searches: Searches, num_waiting: int) -> Stats:
    """Return a copy of `counters` with the present gauges."""
    stats = copy.copy(counters)
    stats.num_running = searches.num_requests() if searches.open else len(searches.running)
    stats.num_waiting = num_waiting
    stats.num_blocks_held = pools[0].num_held
    stats.num_blocks_cached = len(pools[0].evictable)
    if len(pools) > 1:
        stats.more_blocks = [(pool.num_blocks, pool.num_held, len(pool.evictable)) for pool in pools[1:]]
    if searches.open:
        stats.num_beam_blocks, stats.num_beam_blocks_unshared = searches.blocks()
    stats.num_accepted_per_pos = list(counters.num_accepted_per_pos)
    return stats
