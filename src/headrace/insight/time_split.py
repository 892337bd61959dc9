"""Splits the time of a step among prompts, draft tokens, and the rest.

By rows, each row takes an equal part. By fitted step times (`headrace plan --check`), prompts take the time by which
the step would have been shorter without them, and draft tokens the further time by which it would then have been
shorter. Every step reads the weights, whatever its rows are; that time stays with the sequences that decode. Called by
`insight.lives`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from headrace.core.journal import Step
from headrace.protocol.step_model import StepModel, num_alone, num_seen

BY_ROWS, BY_FIT = "rows", "fitted step times"


class TimeSplit(NamedTuple):
    """Seconds of a step: of the chunks of prompts, by column, and of draft tokens."""

    prompts: dict[int, float]
    guesses: float

    @property
    def prefill(self) -> float:
        """The seconds of all prompts."""
        return sum(self.prompts.values())


def by_rows(step: Step, seconds: float, prompts: Collection[int], num_guesses: int) -> TimeSplit:
    """Split `seconds` by rows. `prompts`: columns that compute prompts."""
    row = seconds / max(1, sum(step.lens) + num_guesses)
    return TimeSplit({i: row * step.lens[i] for i in prompts}, row * num_guesses)


def by_fit(
    model: StepModel,
    step: Step,
    seconds: float,
    prompts: Collection[int],
    ends: Collection[int],
    guesses: Mapping[int, int],
) -> TimeSplit:
    """Split `seconds` in the proportions of the model's times. Prompts divide their part as each adds to the step.

    prompts: columns that compute prompts; ends: the columns among them that compute the last token of their prompt.
    guesses: draft tokens by column. No part is below 0, and all together take no more than the step.
    """
    if not prompts and not guesses:
        return TimeSplit({}, 0.0)
    starts, lens = step.starts, step.lens
    num_guesses = sum(guesses.values())
    rows, logits = sum(lens) + num_guesses, len(lens) - len(prompts) + len(ends) + num_guesses
    stops = [starts[i] + lens[i] for i in guesses]
    guess_seen = num_seen(stops, [*guesses.values()])
    seen = num_seen(starts, lens) + guess_seen
    # A row with guesses is not alone in its chunk.
    guessing = num_alone([starts[i] for i in guesses], [lens[i] for i in guesses])
    alone = num_alone(starts, lens) - guessing
    parts = {
        i: (lens[i], int(i in ends), num_seen([starts[i]], [lens[i]]), num_alone([starts[i]], [lens[i]]))
        for i in prompts
    }
    whole = model.of(rows, logits, seen, alone)
    prompt_rows, _, prompts_seen, prompts_alone = (sum(part[at] for part in parts.values()) for at in range(4))
    rest = rows - int(prompt_rows), logits - len(ends), seen - prompts_seen, alone - prompts_alone
    without = min(whole, model.of(*rest))
    decode = min(
        without,
        model.of(rest[0] - num_guesses, rest[1] - num_guesses, rest[2] - guess_seen, rest[3] + guessing),
    )
    added = {
        i: max(0.0, whole - model.of(rows - n, logits - end, seen - s, alone - a))
        for i, (n, end, s, a) in parts.items()
    }
    if not any(added.values()):
        added = {i: float(lens[i]) for i in prompts}
    prefill, weight = seconds * (whole - without) / whole, sum(added.values()) or 1.0
    return TimeSplit({i: prefill * each / weight for i, each in added.items()}, seconds * (without - decode) / whole)
