"""The rarer results of a step: log-probabilities, sampler states and hidden states, filed under their requests' ids.

Knows the columns of a step and nothing of blocks or budgets. Called by the scheduler alone.
"""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.protocol.step import ScheduledBatch, StepOutput, StepResult


def add_logprobs(
    batch: ScheduledBatch, flight: list[Sequence], result: StepResult, output: StepOutput, valid: set[int]
) -> None:
    """Copy to `output` the log-probabilities of the chunks whose indices are in `valid`."""
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


def add_states(flight: list[Sequence], result: StepResult, output: StepOutput, valid: set[int]) -> None:
    """Store the samplers' states of the chunks whose indices are in `valid`, and copy them to `output`."""
    for index, state in result.states.items():
        if index in valid:
            flight[index].state, flight[index].special = state, True
            output.states[flight[index].request_id] = state


def add_pooled(
    batch: ScheduledBatch, flight: list[Sequence], result: StepResult, output: StepOutput, valid: set[int]
) -> None:
    """Store the pooled hidden states of the chunks whose indices are in `valid`, and copy complete ones to `output`."""
    for index, vector in result.pooled.items():
        if index in valid:
            seq = flight[index]
            seq.pooled = vector
            if batch.starts[index] + batch.lens[index] == len(seq.tokens):
                output.pooled[seq.request_id] = vector
