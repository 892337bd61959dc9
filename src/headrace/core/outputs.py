"""The output of a step: tokens, and the rarer log-probabilities, sampler states, hidden states and gauges.

Knows the columns of a step and decides nothing. Called by the scheduler alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from headrace.core.beams.searches import Row, Searches
from headrace.core.blocks import BlockPool
from headrace.core.sequence import Sequence
from headrace.protocol.step import ScheduledBatch, Stats, StepOutput, StepResult


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
    if result.logprobs or result.prompt_logprobs or result.states or result.pooled:
        valid = {i for i, seq in enumerate(flight) if i not in failed and not seq.is_beam}
        add_rare(batch, flight, result, output, valid)
    return output


def add_rare(
    batch: ScheduledBatch, flight: list[Sequence], result: StepResult, output: StepOutput, valid: set[int]
) -> None:
    """Copy to `output` the log-probabilities, states and complete hidden states of the chunks whose indices are in
    `valid`. Their sequences keep the states and the hidden states so far."""
    for index, logprob in result.logprobs.items():
        if index in valid:
            output.logprobs[flight[index].request_id] = [logprob]
    for index, further in result.further_logprobs.items():
        if index in valid:
            request_id = flight[index].request_id
            # The sequence may have ended before the last of them.
            num_added = len(output.token_ids[output.request_ids.index(request_id)])
            output.logprobs[request_id] += further[: num_added - 1]
    for index, logprobs in result.prompt_logprobs.items():
        # Rows that were computed before a preemption were reported before it.
        new = logprobs[max(0, flight[index].high_water - batch.starts[index]) :]
        if new and index in valid:
            output.prompt_logprobs[flight[index].request_id] = new
    for index, state in result.states.items():
        if index in valid:
            flight[index].state, flight[index].special = state, True
            output.states[flight[index].request_id] = state
    for index, vector in result.pooled.items():
        if index in valid:
            seq = flight[index]
            seq.pooled = vector
            if batch.starts[index] + batch.lens[index] == len(seq.tokens):
                output.pooled[seq.request_id] = vector


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
