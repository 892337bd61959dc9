"""From chosen sequences to a `ScheduledBatch`: the columns of a step.

Decides nothing and changes no sequence. Called by the scheduler alone, once per step.
"""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.protocol.errors import InvariantError
from headrace.protocol.step import UNDRAWN, Draft, Pooling, ScheduledBatch


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
    return seq.pooling == "mean" or seq.num_computed + length == len(seq.tokens)


def pooling_of(seq: Sequence) -> tuple[Pooling, list[float]]:
    """Return the kind of pooling, and the numbers pooled before; none for a sequence that begins again."""
    return seq.pooling, seq.pooled if seq.num_computed else []
