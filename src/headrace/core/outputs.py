"""The rarer parts of a step's output: log-probabilities, sampler states, hidden states, and the engine's gauges.

Knows the columns of a step and decides nothing. Called by the scheduler alone.
"""

from __future__ import annotations

import copy

from headrace.core.beams.searches import Searches
from headrace.core.blocks import BlockPool
from headrace.core.sequence import Sequence
from headrace.protocol.step import ScheduledBatch, Stats, StepOutput, StepResult


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


def stats_of(counters: Stats, pool: BlockPool, searches: Searches, num_waiting: int) -> Stats:
    """Return a copy of `counters` with the present gauges."""
    stats = copy.copy(counters)
    stats.num_running = searches.num_requests()
    stats.num_waiting = num_waiting
    stats.num_blocks_held = pool.num_held
    stats.num_blocks_cached = len(pool.evictable)
    stats.num_beam_blocks, stats.num_beam_blocks_unshared = searches.blocks()
    stats.num_accepted_per_pos = list(counters.num_accepted_per_pos)
    return stats
