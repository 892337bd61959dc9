"""Measures the cost of rounding a model: compares its logits on the same tokens, and its weights, with a reference's.

Logits come from `Program`s, as the engine computes them; everything after is float64, and sums are exactly rounded, so
the figures do not depend on how the rows were split. Knows no config, no text and no torch. Called by
`cli.bench.quality`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Program
from headrace.backends.step import Chunks
from headrace.protocol.errors import HeadraceError

MAX_LOGITS = 2**22
"""Numbers of one model's logits that are compared at once (32 MiB of float64)."""
SLAB_NUMBERS = 2**22

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class NamedMatrix(Protocol):
    """The attributes of a backend's matrix that its measurement needs."""

    @property
    def name(self) -> str: ...
    @property
    def num_in(self) -> int: ...
    @property
    def num_out(self) -> int: ...

    def dense(self) -> Any:
        """Return the weights as float32 [num_out, num_in]."""
        ...


@dataclass(slots=True)
class Tally:
    """The figures of each scored token, in the order of the text. nll and kl in nats."""

    nll: list[float] = field(default_factory=list)
    reference_nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    num_flips: int = 0
    max_difference: float = 0.0

    def add(self, token_ids: Sequence[int], logits: F32, reference: F32 | None) -> None:
        """Add rows of logits [S, V] and the tokens [S] that follow them.

        Raises `HeadraceError` for logits that are no distribution.
        """
        places = np.arange(len(token_ids)), np.asarray(token_ids)
        actual = log_softmax(logits)
        self.nll += (-actual[places]).tolist()
        if reference is None:
            return
        expected = log_softmax(reference)
        self.reference_nll += (-expected[places]).tolist()
        # 0 * log 0 is 0: tokens of probability 0 in the reference add nothing (Kullback, Leibler 1951).
        possible = np.isfinite(expected)
        with np.errstate(invalid="ignore"):
            terms = np.where(possible, np.exp(expected) * (expected - actual), 0.0)
            differences = np.abs(logits.astype(np.float64) - reference)[possible]
        self.kl += terms.sum(axis=-1).tolist()
        self.num_flips += int((logits.argmax(axis=-1) != reference.argmax(axis=-1)).sum())
        self.max_difference = max(self.max_difference, float(differences.max()))

    def figures(self, num_bytes: int) -> dict[str, float]:
        """The means by name; num_bytes: of the scored tokens' text. Raises `HeadraceError` if no token was scored."""
        num = len(self.nll)
        if not num:
            raise HeadraceError("the text has no token that follows another: there is nothing to judge")
        figures = {"num_tokens": num, "perplexity": math.exp(math.fsum(self.nll) / num)}
        if num_bytes:
            figures["bits_per_byte"] = math.fsum(self.nll) / math.log(2) / num_bytes
        if self.kl:
            figures["reference_perplexity"] = math.exp(math.fsum(self.reference_nll) / num)
            # Token by token, so that a text that is hard for both models widens neither figure.
            changes = [loss - reference_loss for loss, reference_loss in zip(self.nll, self.reference_nll, strict=True)]
            figures["loss_change"], figures["loss_change_stderr"] = mean_and_error(changes)
            figures["mean_kl"], figures["mean_kl_stderr"] = mean_and_error(self.kl)
            figures["max_kl"] = max(self.kl)
            figures["top1_flip_rate"] = self.num_flips / num
            figures["max_logit_difference"] = self.max_difference
        return figures


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of some values and its standard error."""
    num, mean = len(values), math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(num - 1, 1)
    return mean, math.sqrt(variance / num)


def log_softmax(logits: F32) -> F64:
    """Log softmax of each row [S, V], in float64. Raises `HeadraceError` for a row with NaN, +inf, or only -inf."""
    wide = logits.astype(np.float64)
    greatest = wide.max(axis=-1, keepdims=True)
    if not np.isfinite(greatest).all():
        raise HeadraceError("the model's logits are not finite")
    wide -= greatest
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def lockstep(programs: Sequence[Program], token_ids: Sequence[int]) -> Iterator[tuple[int, list[F32]]]:
    """(position of the first row, each program's logits [S, V] of the rows from there on) over one text.

    The logits are valid until the next pair is taken. The programs' caches are written from block 0 on.
    """
    most_rows = min(program.max_rows for program in programs)
    widest = max(program.vocab_size for program in programs)
    most = max(1, min(MAX_LOGITS // widest, *(program.max_logits for program in programs)))
    for start in range(0, len(token_ids), most_rows):
        piece = list(token_ids[start : start + most_rows])
        for program in programs:
            table = list(range(-(-(start + len(piece)) // program.block_size)))
            finite, _ = program.forward(Chunks([start], [piece], [table]).all_read(), [])
            if not all(finite):
                raise HeadraceError("the model's hidden states are not finite")
        for first in range(0, len(piece), most):
            rows = list(range(first, min(first + most, len(piece))))
            yield start + first, [program.logits(rows).fetch() for program in programs]


def score(program: Program, reference: Program | None, windows: Sequence[Sequence[int]], tally: Tally) -> Iterator[int]:
    """Fill `tally` and yield the number of windows done after each. All tokens of a window but the first are scored.

    Raises `HeadraceError` if the two have different vocabularies, or for logits that are no distribution.
    """
    programs = [program] if reference is None else [program, reference]
    if reference is not None and program.vocab_size != reference.vocab_size:
        raise HeadraceError(
            f"the model has {program.vocab_size} logits and the reference {reference.vocab_size}: no KL between them"
        )
    for num_done, window in enumerate(windows, 1):
        for first, logits in lockstep(programs, window):
            after = list(window[first + 1 : first + 1 + len(logits[0])])
            if after:
                tally.add(after, logits[0][: len(after)], logits[1][: len(after)] if reference is not None else None)
        yield num_done


class LayerError(NamedTuple):
    """How far one matrix is from the reference's. relative_error: the Frobenius norm of the difference, of the norm of
    the reference's. max_error: the largest difference, of the reference's largest weight."""

    name: str
    num_out: int
    num_in: int
    relative_error: float
    max_error: float


def short_name(name: str) -> str:
    """Return the name without the "model." that only some checkpoints have."""
    return name.removeprefix("model.")


def layer_errors(matrices: Sequence[NamedMatrix], reference: Sequence[NamedMatrix]) -> Iterator[LayerError]:
    """Compare each matrix with the reference's of the same name. One matrix of each is in float32 at a time.

    Raises `HeadraceError` if the two have different matrices or shapes.
    """
    by_name = {short_name(matrix.name): matrix for matrix in reference}
    if by_name.keys() != {short_name(matrix.name) for matrix in matrices}:
        unmatched = sorted(by_name.keys() ^ {short_name(matrix.name) for matrix in matrices})
        raise HeadraceError(f"model and reference have different matrices, such as {unmatched[0]}")
    for matrix in matrices:
        other = by_name[short_name(matrix.name)]
        if (matrix.num_out, matrix.num_in) != (other.num_out, other.num_in):
            raise HeadraceError(
                f"{matrix.name} is [{matrix.num_out}, {matrix.num_in}], the reference's is "
                f"[{other.num_out}, {other.num_in}]"
            )
        relative, greatest = distance(np.asarray(matrix.dense()), np.asarray(other.dense()))
        yield LayerError(short_name(matrix.name), matrix.num_out, matrix.num_in, relative, greatest)


def distance(actual: F32, reference: F32) -> tuple[float, float]:
    """(relative error in the Frobenius norm, largest difference as a share of the largest weight) of [out, in]; 0 for
    a matrix of zeros that did not change."""
    squares, norms, greatest, largest = [], [], 0.0, 0.0
    step = max(1, SLAB_NUMBERS // max(actual.shape[1], 1))
    for first in range(0, actual.shape[0], step):
        wide = reference[first : first + step].astype(np.float64)
        difference = actual[first : first + step] - wide
        squares.append(float(np.square(difference).sum()))
        norms.append(float(np.square(wide).sum()))
        greatest = max(greatest, float(np.abs(difference).max()))
        largest = max(largest, float(np.abs(wide).max()))
    error, norm = math.fsum(squares), math.fsum(norms)
    if not norm:
        return (math.inf, math.inf) if error else (0.0, 0.0)
    return math.sqrt(error / norm), greatest / largest
