"""What a step tells of its sequences' log-probabilities, hidden states and sampler states, under their requests' ids.

Knows the columns of a step and nothing of blocks or budgets. Called by the scheduler alone.
"""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.protocol.step import ScheduledBatch, StepOutput, StepResult


def pass_on_logprobs(
    batch: ScheduledBatch, flight: list[Sequence], result: StepResult, output: StepOutput, kept: set[int]
) -> None:
    """Copy to `output` the log-probabilities of the chunks whose indices are in `kept`."""
    for index, logprob in result.logprobs.items():
        if index in kept:
            output.logprobs[flight[index].request_id] = [logprob]
    for index, further in result.further_logprobs.items():
        if index in kept:
            name = flight[index].request_id
            # The sequence may have ended before the last of them.
            num_added = len(output.token_ids[output.request_ids.index(name)])
            output.logprobs[name] += further[: num_added - 1]
    for index, logprobs in result.prompt_logprobs.items():
        # Rows that were computed before a preemption have been reported before it.
        fresh = logprobs[max(0, flight[index].high_water - batch.starts[index]) :]
        if fresh and index in kept:
            output.prompt_logprobs[flight[index].request_id] = fresh


def keep_states(flight: list[Sequence], result: StepResult, output: StepOutput, kept: set[int]) -> None:
    """Remember the samplers' states of the chunks whose indices are in `kept`, and tell them."""
    for index, state in result.states.items():
        if index in kept:
            flight[index].state, flight[index].special = state, True
            output.states[flight[index].request_id] = state


def keep_pooled(
    batch: ScheduledBatch, flight: list[Sequence], result: StepResult, output: StepOutput, kept: set[int]
) -> None:
    """Remember what was pooled of the chunks whose indices are in `kept`, and tell what is whole."""
    for index, vector in result.pooled.items():
        if index in kept:
            seq = flight[index]
            seq.pooled = vector
            if batch.starts[index] + batch.lens[index] == len(seq.tokens):
                output.pooled[seq.request_id] = vector
