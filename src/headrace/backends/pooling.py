"""Pools the hidden states of a text: sums, greatest numbers or single rows, in the order of the rows, in float64.

Rows are added one by one, so that the numbers are the same however a prompt is cut into chunks. Knows a program and
numbers. Called by `runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Program
from headrace.protocol.step import ALL_ROWS

F64 = NDArray[np.float64]

ADDED: dict[str, Callable[[F64, F64, int], F64]] = {
    "mean": lambda total, row, position: total + row,
    "mean_sqrt_len_tokens": lambda total, row, position: total + row,
    "weightedmean": lambda total, row, position: total + (position + 1) * row,
    "max": lambda total, row, position: np.maximum(total, row) if position else row,
    "cls": lambda total, row, position: total if position else row,
    "last": lambda total, row, position: row,
    "splade-max": lambda total, row, position: np.maximum(total, row) if position else row,
    "splade-sum": lambda total, row, position: total + row,
}
"""The numbers up to a row, from those before it and the row at `position`, by kind of pooling."""
DIVISORS: dict[str, Callable[[int], float]] = {
    "mean": lambda num: num,
    "mean_sqrt_len_tokens": lambda num: num**0.5,
    "weightedmean": lambda num: num * (num + 1) / 2,
}
"""What a sum is divided by, from the number of rows. The weight of a row in a weightedmean is its place, from 1 on
(SGPT, Muennighoff 2022)."""


class Span(NamedTuple):
    """Rows of a step from `row` on, which are those of a prompt of `num_prompt` tokens from position `start` on."""

    row: int
    start: int
    num_rows: int
    num_prompt: int

    def read(self, kind: str) -> range:
        """Return which of the rows a kind of pooling reads."""
        if kind == "last":
            return range(max(0, self.num_prompt - 1 - self.start), self.num_rows)
        return range(min(self.num_rows, int(not self.start))) if kind == "cls" else range(self.num_rows)


def pool(kind: str, before: Sequence[float], span: Span, program: Program) -> F64:
    """Return the numbers of `kind` after the rows of `span` of the program's last forward pass. `before`: those of the
    rows before, none at the prompt's beginning. Once the whole prompt is known they are complete: of a classifier, a
    number for each class, of a head for masked words the weights that are not 0. Where all rows are wanted, its layers
    are applied to each."""
    read, most = span.read(kind), program.max_logits
    places = [span.row + place for place in read]
    parts = (program.hidden_states(places[at : at + most]) for at in range(0, len(places), most))
    rows = (row.astype(np.float64) for part in parts for row in part)
    classifier = program.model.classifier
    if kind == "splade-sum":
        rows = (classifier.weights(row) for row in rows)
    if kind == ALL_ROWS:
        return np.concatenate([np.array(before, np.float64), *(classifier(row) if classifier else row for row in rows)])
    numbers = pooled(kind, before, rows, span.start + read.start, span.num_prompt)
    is_end = span.start + span.num_rows == span.num_prompt
    return classifier(numbers) if is_end and classifier is not None else numbers


def pooled(kind: str, before: Sequence[float], rows: Iterable[F64], start: int, num_prompt: int) -> F64:
    """Return the numbers of `kind`, or of several kinds joined by "+" side by side, after `rows` [H] from position
    `start` on. `before`: those of the call before, none at the prompt's beginning. Sums are divided once all
    `num_prompt` rows are known. [] where no row is known."""
    kinds = kind.split("+")
    parts = np.split(np.array(before, np.float64), len(kinds)) if before else [np.zeros(1)] * len(kinds)
    stop = start
    for stop, row in enumerate(rows, start + 1):
        parts = [ADDED[each](part, row, stop - 1) for each, part in zip(kinds, parts, strict=True)]
    if stop == start and not before:
        return np.zeros(0)
    if stop >= num_prompt:
        divisors = [DIVISORS[each](num_prompt) if each in DIVISORS else 1.0 for each in kinds]
        parts = [part / divisor for part, divisor in zip(parts, divisors, strict=True)]
    return np.concatenate(parts)
