"""What rounding costs a model: its logits beside a reference's on the same tokens, and its weights beside those.

Logits come from `Program`s, as the engine computes them; everything after is float64, and sums are exactly rounded, so
the figures do not depend on how the rows were cut. Knows no config, no text and no torch. Called by
`cli.bench.quality`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Chunks, Program
from headrace.protocol.errors import HeadraceError

MAX_LOGITS = 2**22
"""Numbers of one model's logits that are looked at together (32 MiB of float64)."""
SLAB_NUMBERS = 2**22

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class NamedMatrix(Protocol):
    """A backend's matrix, as far as it is judged."""

    @property
    def name(self) -> str: ...
    @property
    def num_in(self) -> int: ...
    @property
    def num_out(self) -> int: ...

    def dense(self) -> Any:
        """The weights as float32 [num_out, num_in]."""
        ...


@dataclass(slots=True)
class Tally:
    """What each scored token said, in the order of the text. nll and kl in nats."""

    nll: list[float] = field(default_factory=list)
    reference_nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    num_flips: int = 0
    max_difference: float = 0.0

    def add(self, token_ids: Sequence[int], logits: F32, reference: F32 | None) -> None:
        """Rows of logits [S, V] and the tokens [S] that came after them.

        Raises `HeadraceError` for logits that are no distribution.
        """
        at = np.arange(len(token_ids)), np.asarray(token_ids)
        own = log_softmax(logits)
        self.nll += (-own[at]).tolist()
        if reference is None:
            return
        theirs = log_softmax(reference)
        self.reference_nll += (-theirs[at]).tolist()
        # 0 * log 0 is 0: what the reference never says costs nothing (Kullback, Leibler 1951).
        said = np.isfinite(theirs)
        with np.errstate(invalid="ignore"):
            terms = np.where(said, np.exp(theirs) * (theirs - own), 0.0)
            differences = np.abs(logits.astype(np.float64) - reference)[said]
        self.kl += terms.sum(axis=-1).tolist()
        self.num_flips += int((logits.argmax(axis=-1) != reference.argmax(axis=-1)).sum())
        self.max_difference = max(self.max_difference, float(differences.max()))

    def figures(self, num_bytes: int) -> dict[str, float]:
        """By name; `num_bytes` is what the scored tokens stand for in the text. Raises `HeadraceError` without any."""
        num = len(self.nll)
        if not num:
            raise HeadraceError("the text has no token that follows another: there is nothing to judge")
        told = {"num_tokens": num, "perplexity": math.exp(math.fsum(self.nll) / num)}
        if num_bytes:
            told["bits_per_byte"] = math.fsum(self.nll) / math.log(2) / num_bytes
        if self.kl:
            mean = math.fsum(self.kl) / num
            variance = math.fsum((value - mean) ** 2 for value in self.kl) / max(num - 1, 1)
            told["reference_perplexity"] = math.exp(math.fsum(self.reference_nll) / num)
            # Token by token: what makes a text hard for both is in neither figure.
            changes = [own - theirs for own, theirs in zip(self.nll, self.reference_nll, strict=True)]
            change = math.fsum(changes) / num
            spread = math.fsum((value - change) ** 2 for value in changes) / max(num - 1, 1)
            told["loss_change"], told["loss_change_stderr"] = change, math.sqrt(spread / num)
            told["mean_kl"] = mean
            told["mean_kl_stderr"] = math.sqrt(variance / num)
            told["max_kl"] = max(self.kl)
            told["top1_flip_rate"] = self.num_flips / num
            told["max_logit_difference"] = self.max_difference
        return told


def log_softmax(logits: F32) -> F64:
    """Of each row [S, V], in float64. Raises `HeadraceError` for a row with NaN, +inf, or -inf alone."""
    wide = logits.astype(np.float64)
    greatest = wide.max(axis=-1, keepdims=True)
    if not np.isfinite(greatest).all():
        raise HeadraceError("the model's logits are not finite")
    wide -= greatest
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def lockstep(programs: Sequence[Program], token_ids: Sequence[int]) -> Iterator[tuple[int, list[F32]]]:
    """(position of the first row, each program's logits [S, V] of the rows from there on) over one text.

    The logits are lent until the next pair is asked for. The programs' caches are written from block 0 on.
    """
    most_rows = min(program.max_rows for program in programs)
    widest = max(program.vocab_size for program in programs)
    most = max(1, min(MAX_LOGITS // widest, *(program.max_logits for program in programs)))
    for start in range(0, len(token_ids), most_rows):
        own = list(token_ids[start : start + most_rows])
        for program in programs:
            table = list(range(-(-(start + len(own)) // program.block_size)))
            finite, _ = program.forward(Chunks([start], [own], [table]), [])
            if not all(finite):
                raise HeadraceError("the model's hidden states are not finite")
        for first in range(0, len(own), most):
            rows = list(range(first, min(first + most, len(own))))
            yield start + first, [program.logits(rows).rows for program in programs]


def score(program: Program, reference: Program | None, windows: Sequence[Sequence[int]], tally: Tally) -> Iterator[int]:
    """Fill `tally`; -> after each window, how many are done. All tokens of a window but its first are scored.

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
    """Without the "model." that some checkpoints have and others do not."""
    return name.removeprefix("model.")


def layer_errors(matrices: Sequence[NamedMatrix], reference: Sequence[NamedMatrix]) -> Iterator[LayerError]:
    """Each matrix beside the reference's of the same name. One matrix of each is wide at a time.

    Raises `HeadraceError` if the two have other matrices or shapes.
    """
    theirs = {short_name(matrix.name): matrix for matrix in reference}
    if theirs.keys() != {short_name(matrix.name) for matrix in matrices}:
        odd = sorted(theirs.keys() ^ {short_name(matrix.name) for matrix in matrices})
        raise HeadraceError(f"model and reference have different matrices, such as {odd[0]}")
    for matrix in matrices:
        other = theirs[short_name(matrix.name)]
        if (matrix.num_out, matrix.num_in) != (other.num_out, other.num_in):
            raise HeadraceError(
                f"{matrix.name} is [{matrix.num_out}, {matrix.num_in}], the reference's is "
                f"[{other.num_out}, {other.num_in}]"
            )
        relative, greatest = distance(np.asarray(matrix.dense()), np.asarray(other.dense()))
        yield LayerError(short_name(matrix.name), matrix.num_out, matrix.num_in, relative, greatest)


def distance(own: F32, reference: F32) -> tuple[float, float]:
    """(relative error in the Frobenius norm, largest difference of the largest) of [out, in]; 0 of a matrix of zeros
    that was kept."""
    squares, norms, greatest, largest = [], [], 0.0, 0.0
    step = max(1, SLAB_NUMBERS // max(own.shape[1], 1))
    for first in range(0, own.shape[0], step):
        wide = reference[first : first + step].astype(np.float64)
        difference = own[first : first + step] - wide
        squares.append(float(np.square(difference).sum()))
        norms.append(float(np.square(wide).sum()))
        greatest = max(greatest, float(np.abs(difference).max()))
        largest = max(largest, float(np.abs(wide).max()))
    moved, norm = math.fsum(squares), math.fsum(norms)
    if not norm:
        return (math.inf, math.inf) if moved else (0.0, 0.0)
    return math.sqrt(moved / norm), greatest / largest
