"""Chooses the type of the activations of quantised matrices: int8, or floats as they come ("16bit", W8A16).

Int8 has one scale for 32 to 128 inputs, so one input that is much greater than its neighbours leaves them few codes
(LLM.int8(), arXiv 2208.07339). Whether that spoils a product depends on the weights, so it is measured when the model
is loaded: a forward pass of a text computes each product both ways, and a matrix whose products differ by more than
TOLERANCE takes floats from then on, as does a matrix with a table of codes that int8 does not hold. A second pass, with
int8 in all others, shows at the logits how many tokens would change (`quant.flips`); products take floats until few
do. Without a text the first pass is of fixed tokens, and there is no second one. The choice depends on the model alone,
no request changes it. Called by the backend; must not know models.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import SampleText
from headrace.backends.cpu.cache import KVCache
from headrace.backends.cpu.losses.saved import SavedLosses
from headrace.backends.cpu.matrix import CpuMatrix, parts_of
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.products import FLOAT_KINDS, Pair
from headrace.backends.cpu.program import TapedProgram, TapeOptions
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.graph import ROWS
from headrace.backends.key_means import NUM_SEQS, probe_tokens
from headrace.backends.neighbours import Neighbours, neighbours_of
from headrace.backends.step import Chunks, StepSizes
from headrace.protocol.errors import RequestError
from headrace.quant import flips
from headrace.quant.schemes import ROUNDED_BOOKS

TOLERANCE = 0.02
"""Greatest error of int8 products, as a share of the product's size. Gaussian inputs in groups of 128 cost 0.007."""
ROUNDED_BY_OTHERS = {"fp8": "8-bit floats", "int8 by row": "int8, with a scale for each row"}
"""Activations of checkpoints' methods that these kernels do not round so."""
LENGTH = 8
"""Positions of each of the NUM_SEQS sequences of the fixed text."""
SAMPLE_LENGTH = 80
"""Most tokens of a text that are read. The first quarter, often a template's own words, is not judged at the logits."""
SHOWN = 3

logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """losses: how far int8 activations move the products of each matrix, as a share of their size. noisy: the matrices
    that take floats so that few tokens change."""

    losses: dict[CpuMatrix, float]
    noisy: set[CpuMatrix]


def choose_activations(
    ops: CpuOps | RankOps,
    model: Any,
    mode: str,
    num_threads: int,
    stated: str,
    saved: SavedLosses | None = None,
    text: SampleText | None = None,
) -> str:
    """Set `ops.wide` to the matrices that take floats; return "int8", "16bit", "mixed", or "" if none is quantised.

    stated and text: as `Backend.choose_activations` has them. saved: where measurements are kept between starts. Raises
    `RequestError` for a mode that changes nothing (int8 without weights of integer codes of 4 bits and more), and for
    fp8, which has no kernels.
    """
    quantised = [part for matrix in ops.matrices for part in parts_of(matrix) if part.kind != "f"]
    able = [part for part in quantised if part.kind not in FLOAT_KINDS]
    if mode == "fp8":
        raise RequestError("activations", mode, "auto, int8 or 16bit: the CPU's kernels round nothing to 8-bit floats")
    if mode == "auto" and stated in ROUNDED_BY_OTHERS:
        rounded_to = ROUNDED_BY_OTHERS[stated]
        logger.info("the checkpoint's method rounds activations to %s; here they stay in 16 bits", rounded_to)
    rounded = {part for part in able if part.scheme.book in ROUNDED_BOOKS}
    neighbours = neighbours_of(model)
    num_quantised, num_able, num_rounded, num_outliers = _sums(
        neighbours, len(quantised), len(able), len(rounded), sum(part.outliers is not None for part in able)
    )
    # A 16-bit part in a checkpoint comes from its quantisation method; the rest is measured like any other.
    if mode == "auto" and stated == "16bit" and num_able and not num_outliers:
        logger.info("the checkpoint's method has outliers in 16 bits: all activations stay so")
        mode = stated
    if mode == "int8" and not num_able:
        raise RequestError(
            "activations", mode, "auto or 16bit: the model has no weights of integer codes of 4 bits and more"
        )
    if mode == "16bit" and not num_quantised:
        raise RequestError("activations", mode, "auto: the model's weights are not quantised")
    if mode == "16bit":
        ops.wide = set(able)
    # A model whose inputs are another's hidden states takes no text, by which it could be measured.
    elif mode == "auto" and num_able:
        is_measured = num_rounded < num_able and (neighbours is not None or not model.feature_size)
        ops.wide = rounded
        measured = _measured(ops, model, num_threads, able, saved, text) if is_measured else Measured({}, set())
        losses = measured.losses
        spoilt = spoilt_by(losses) & set(able) - rounded
        ops.wide = rounded | spoilt | measured.noisy
        if rounded:
            logger.info(
                "%d matrices have codes from a table that int8 does not hold: their activations stay floats",
                len(rounded),
            )
        worst = sorted(spoilt, key=lambda part: -losses[part])[:SHOWN]
        if worst:
            listing = ", ".join(f"{part.name} ({losses[part]:.1%})" for part in worst)
            more = ", ..." if len(spoilt) > SHOWN else ""
            logger.info(
                "int8 activations would change products by more than %.0f%%: %s", 100 * TOLERANCE, listing + more
            )
    (num_wide,) = _sums(neighbours, len(quantised) - len(able) + len(ops.wide))
    if num_quantised:
        logger.info(
            "activations: %d of %d quantised matrices in 16 bits (W8A16, W4A16), %d in int8 (W8A8, W4A8)",
            num_wide, num_quantised, num_quantised - num_wide,
        )  # fmt: skip
    if not num_wide:
        return "int8" if num_quantised else ""
    return "16bit" if num_wide == num_quantised else "mixed"


def _sums(neighbours: Neighbours | None, *values: int) -> list[int]:
    """Return the sums of each value over all processes that have layers of the model."""
    every: Sequence[Sequence[float]] = [values] if neighbours is None else neighbours.exchange(values)
    return [int(sum(column)) for column in zip(*every, strict=True)]


def _measured(
    ops: CpuOps | RankOps,
    model: Any,
    num_threads: int,
    able: Sequence[CpuMatrix],
    saved: SavedLosses | None,
    text: SampleText | None,
) -> Measured:
    """Return the result of `measure`, or of its call when the weights were packed."""
    # Ranks measure together, or none of them does.
    if saved is None or isinstance(ops, RankOps) or neighbours_of(model) is not None:
        return measure(ops, model, num_threads, read(text, model))
    mark = "" if text is None else text.mark()
    names = {part.name: part for part in able}
    by_name, noisy = saved.read(mark)
    if by_name.keys() == names.keys() and len(names) == len(able) and names.keys() >= noisy:
        return Measured({part: by_name[part.name] for part in able}, {names[name] for name in noisy})
    measured = measure(ops, model, num_threads, read(text, model))
    losses = {part.name: measured.losses[part] for part in able if part in measured.losses}
    saved.write(mark, losses, sorted(part.name for part in measured.noisy))
    return measured


def read(text: SampleText | None, model: Any) -> list[int]:
    """Return the tokens of a text; none where there is no text, or no text of the model's vocabulary."""
    token_ids = [] if text is None else text.read()[:SAMPLE_LENGTH]
    return token_ids if token_ids and max(token_ids) < model.vocab_size else []


def spoilt_by(losses: dict[CpuMatrix, float]) -> set[CpuMatrix]:
    return {part for part, loss in losses.items() if not loss <= TOLERANCE}


def parts_in(pair: Pair) -> list[CpuMatrix]:
    return [part for matrix in pair.matrices for part in parts_of(matrix)]


class Pass:
    """A program that computes the sample, or the fixed tokens, in one step, with the choices that `ops` has now."""

    def __init__(self, ops: CpuOps | RankOps, model: Any, num_threads: int, token_ids: Sequence[int]) -> None:
        num_seqs, length = (1, len(token_ids)) if token_ids else (NUM_SEQS, LENGTH)
        self.rows = list(range(length // 4, length) if token_ids else range(length - 1, num_seqs * length, length))
        cache = KVCache(ops.cache_shapes(model), [num_seqs] * len(model.kinds), length, "float32")
        sizes = StepSizes(num_seqs * length, max(num_seqs, len(self.rows)), num_seqs)
        options = TapeOptions(num_threads, reads_all=True)
        self.program = program = TapedProgram(model, ops, cache, sizes, options)
        self.neighbours, self.num_threads, self.done = neighbours_of(model), num_threads, 0
        features = None if self.neighbours is None else self.neighbours.take(num_seqs * length, model.feature_size)
        tokens = [list(token_ids)] if token_ids else probe_tokens(program.vocab_size, length)
        tables = [[i] for i in range(num_seqs)]
        chunks = Chunks([0] * num_seqs, tokens, tables, states_in=[-1] * num_seqs)
        self.dims = program.fill(chunks, self.rows, features)
        self.num_rows = self.dims[ROWS]

    def run(self, last: int | None = None) -> None:
        """Run the records that have not run yet, up to the one before `last`; without it all, and hand the hidden
        states to the layers behind."""
        end = len(self.program.tape.nodes) if last is None else last
        self.program.tape.run_range(self.done, end, self.dims, self.num_threads)
        self.done = end
        if last is None and self.neighbours is not None:
            self.neighbours.give(self.hidden())

    def hidden(self) -> NDArray[np.float32]:
        return self.program.hidden_states_of(self.num_rows)

    def products(self, pair: Pair) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return a pair's products with int8 activations and with floats, of which the last record has run."""
        tape = self.program.tape
        rows = tape.sizes(self.dims)[pair.narrow.dim]
        # Logits lie outside the arena.
        out = tape.nodes[pair.last].fields.get("out")
        wide = out[:rows] if isinstance(out, np.ndarray) else tape.floats(pair.wide.buffer, rows)
        narrow = tape.floats(pair.narrow.buffer, rows)[:, : pair.narrow.width]
        return narrow, wide[:, pair.column : pair.column + pair.narrow.width]


def measure(ops: CpuOps | RankOps, model: Any, num_threads: int, token_ids: Sequence[int] = ()) -> Measured:
    """Measure every matrix of integer codes on a text of these tokens, or on the fixed ones. The loss is the root of
    the mean square over the rows; an expert that no row reaches gets the greatest of all."""
    begin_s = time.monotonic()
    ops.pairs = []
    try:
        first = Pass(ops, model, num_threads, token_ids)
        pairs = ops.pairs
    finally:
        ops.pairs = None
    losses: dict[CpuMatrix, float] = {}
    noises: list[tuple[Pair, flips.Noise]] = []
    for pair in pairs:
        first.run(pair.last + 1)
        narrow, wide = first.products(pair)
        begin = [0, len(narrow)] if pair.begin is None else pair.begin.tolist()
        for matrix, at, end in zip(pair.matrices, begin[:-1], begin[1:], strict=True):
            if at < end:
                loss = _loss(narrow[at:end], wide[at:end])
                losses |= {part: max(loss, losses.get(part, 0.0)) for part in parts_of(matrix)}
        cost = pair.matrices[0].num_in * pair.narrow.width * len(narrow) / first.num_rows
        square = _loss(narrow, wide) ** 2
        is_head = pair.last >= first.program.num_forward
        noises.append((pair, flips.Noise(square if math.isfinite(square) else 0.0, cost, is_head)))
    first.run()
    neighbours = first.neighbours
    worst = max(losses.values(), default=0.0)
    if neighbours is not None:
        worst = max(value for values in neighbours.exchange([worst]) for value in values)
    losses |= {part: worst for pair in pairs for part in parts_in(pair) if part not in losses}
    noisy = _noisy(ops, model, first, token_ids, noises, losses) if token_ids else set()
    first.program.close()
    logger.info("int8 activations were measured in %.1f s", time.monotonic() - begin_s)
    return Measured(losses, noisy)


def _noisy(
    ops: CpuOps | RankOps,
    model: Any,
    first: Pass,
    token_ids: Sequence[int],
    pairs: Sequence[tuple[Pair, flips.Noise]],
    losses: dict[CpuMatrix, float],
) -> set[CpuMatrix]:
    """Return the matrices that take floats beside the spoilt ones, so that few tokens change. first: the pass with
    floats, whose products are `pairs`."""
    before, neighbours = ops.wide, first.neighbours
    spoilt = before | spoilt_by(losses)
    ops.wide = spoilt
    second = Pass(ops, model, first.num_threads, token_ids)
    second.run()
    ops.wide = before
    at_logits = flips.Spread(0.0, 0.0, 0.0, 0.0)
    if getattr(model, "is_last", True):
        plain, noisy = (each.program.last_logits(len(each.rows)).fetch() for each in (first, second))
        best = flips.likeliest(plain)
        judged = flips.said(best, [*token_ids, -1], first.rows)
        of_all = flips.gaps(noisy, best)  # before the next call, which overwrites the logits
        of_head = second.program.logits_of(first.hidden(), first.rows).fetch()
        at_logits = flips.spread(
            *(each[judged] for each in (flips.gaps(plain, best), of_all, flips.gaps(of_head, best)))
        )
    second.program.close()
    mine = [noise for pair, noise in pairs if not spoilt >= set(parts_in(pair))]
    every = mine
    if neighbours is not None:
        numbers = neighbours.exchange([*at_logits, *(float(number) for noise in mine for number in noise)])
        at_logits = flips.Spread(*numbers[-1][: len(at_logits)])
        every = [
            flips.Noise(of_one[at], of_one[at + 1], bool(of_one[at + 2]))
            for of_one in numbers
            for at in range(len(at_logits), len(of_one), len(flips.Noise._fields))
        ]
    chosen = flips.chosen(every, at_logits)
    logger.info(
        "int8 activations would change %.2f%% of the tokens, at most %.2f%% may",
        100 * at_logits.rate,
        100 * flips.MAX_RATE,
    )
    return {part for pair, noise in pairs if noise in chosen for part in parts_in(pair)}


def _loss(narrow: NDArray[np.float32], wide: NDArray[np.float32]) -> float:
    """Return the root mean square over the rows of ‖narrow - wide‖ / ‖wide‖; NaN where a product is not finite."""
    error = np.square(narrow.astype(np.float64) - wide).sum(1)
    size = np.square(wide.astype(np.float64)).sum(1)
    shares = np.divide(error, size, out=np.zeros_like(error), where=size > 0)
    return float(np.sqrt(shares.mean()))
