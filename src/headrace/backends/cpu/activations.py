"""Chooses the type of the activations of quantised matrices: int8, or floats as they come ("16bit", W8A16).

Int8 has one scale for 32 to 128 inputs, so one input that is much greater than its neighbours leaves them few codes
(LLM.int8(), arXiv 2208.07339). Whether that spoils a product depends on the weights, so it is measured when the model
is loaded: a forward pass of fixed tokens computes each product both ways, and a matrix whose products differ by more
than TOLERANCE takes floats from then on, as does a matrix with a table of codes that int8 does not hold. The choice
depends on the model alone, no request changes it. Called by the backend; must not know models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.cache import KVCache
from headrace.backends.cpu.matrix import CpuMatrix, parts_of
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.products import FLOAT_KINDS
from headrace.backends.cpu.program import TapedProgram, TapeOptions
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.cpu.saved_losses import SavedLosses
from headrace.backends.key_means import NUM_SEQS, probe_tokens
from headrace.backends.neighbours import Neighbours, neighbours_of
from headrace.backends.step import Chunks, StepSizes
from headrace.protocol.errors import RequestError
from headrace.quant.schemes import ROUNDED_BOOKS

TOLERANCE = 0.02
"""Greatest error of int8 products, as a share of the product's size. Gaussian inputs in groups of 128 cost 0.007."""
ROUNDED_BY_OTHERS = {"fp8": "8-bit floats", "int8 by row": "int8, with a scale for each row"}
"""Activations of checkpoints' methods that these kernels do not round so."""
LENGTH = 8
"""Positions of each of the NUM_SEQS sequences of the fixed text."""
SHOWN = 3

logger = logging.getLogger(__name__)


def choose_activations(
    ops: CpuOps | RankOps, model: Any, mode: str, num_threads: int, stated: str, saved: SavedLosses | None = None
) -> str:
    """Set `ops.wide` to the matrices that take floats; return "int8", "16bit", "mixed", or "" if none is quantised.

    stated: as `Backend.choose_activations` has it. saved: where losses are kept between starts. Raises
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
        losses = _losses(ops, model, num_threads, able, saved) if is_measured else {}
        spoilt = {part for part, loss in losses.items() if not loss <= TOLERANCE} & set(able) - rounded
        ops.wide = rounded | spoilt
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


def _losses(
    ops: CpuOps | RankOps, model: Any, num_threads: int, able: Sequence[CpuMatrix], saved: SavedLosses | None
) -> dict[CpuMatrix, float]:
    """Return the result of `measure`, or of its call when the weights were packed."""
    # Ranks measure together, or none of them does.
    if saved is None or isinstance(ops, RankOps) or neighbours_of(model) is not None:
        return measure(ops, model, num_threads)
    by_name = saved.read()
    if by_name.keys() == {part.name for part in able} and len(by_name) == len(able):
        return {part: by_name[part.name] for part in able}
    losses = measure(ops, model, num_threads)
    saved.write({part.name: losses[part] for part in able if part in losses})
    return losses


def measure(ops: CpuOps | RankOps, model: Any, num_threads: int) -> dict[CpuMatrix, float]:
    """Return for each matrix of integer codes how far int8 activations move its products, as a share of their size: the
    root of the mean square over the rows of the text. An expert that no row reaches gets the greatest of all."""
    ops.pairs = []
    try:
        cache = KVCache(ops.cache_shapes(model), [NUM_SEQS] * len(model.kinds), LENGTH, "float32")
        sizes = StepSizes(NUM_SEQS * LENGTH, NUM_SEQS, NUM_SEQS)
        program = TapedProgram(model, ops, cache, sizes, TapeOptions(num_threads))
        pairs = ops.pairs
    finally:
        ops.pairs = None
    tokens = probe_tokens(program.vocab_size, LENGTH)
    neighbours = neighbours_of(model)
    features = None if neighbours is None else neighbours.take(NUM_SEQS * LENGTH, model.feature_size)
    num_rows = program.fill(
        Chunks([0] * NUM_SEQS, tokens, [[i] for i in range(NUM_SEQS)], states_in=[-1] * NUM_SEQS), features
    )
    program.logit_rows[:] = range(LENGTH - 1, num_rows, LENGTH)
    dims, tape = [num_rows, NUM_SEQS, NUM_SEQS], program.tape
    losses: dict[CpuMatrix, float] = {}
    done = 0
    for pair in pairs:
        tape.run_range(done, pair.last + 1, dims, num_threads)
        done = pair.last + 1
        rows = tape.sizes(dims)[pair.narrow.dim]
        # Logits lie outside the arena.
        out = tape.nodes[pair.last].fields.get("out")
        wide = out if isinstance(out, np.ndarray) else tape.floats(pair.wide.buffer, rows)
        narrow = tape.floats(pair.narrow.buffer, rows)[:, : pair.narrow.width]
        wide = wide[:, pair.column : pair.column + pair.narrow.width]
        begin = [0, rows] if pair.begin is None else pair.begin.tolist()
        for matrix, first, last in zip(pair.matrices, begin[:-1], begin[1:], strict=True):
            if first < last:
                loss = _loss(narrow[first:last], wide[first:last])
                losses |= {part: max(loss, losses.get(part, 0.0)) for part in parts_of(matrix)}
    worst = max(losses.values(), default=0.0)
    if neighbours is not None:
        # Behind the last product there may be more.
        tape.run_range(done, len(tape.nodes), dims, num_threads)
        neighbours.give(program.hidden_states_of(num_rows))
        worst = max(value for values in neighbours.exchange([worst]) for value in values)
    program.close()
    return {part: losses.get(part, worst) for pair in pairs for matrix in pair.matrices for part in parts_of(matrix)}


def _loss(narrow: NDArray[np.float32], wide: NDArray[np.float32]) -> float:
    """Return the root mean square over the rows of ‖narrow - wide‖ / ‖wide‖; NaN where a product is not finite."""
    error = np.square(narrow.astype(np.float64) - wide).sum(1)
    size = np.square(wide.astype(np.float64)).sum(1)
    shares = np.divide(error, size, out=np.zeros_like(error), where=size > 0)
    return float(np.sqrt(shares.mean()))
