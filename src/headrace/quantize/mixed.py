"""Mixed precision: chooses the type of each matrix of a GGUF file by measured loss, for a budget of bits per weight.

Matrices with the same inputs (q, k and v; gate and up; all experts) are one group and get one type, because kernels
compute them together. For each group the model is run with that group alone quantised; the group's loss is the
divergence of its predictions from the float model's on a calibration text. For other types the loss is scaled by the
weights' squared error, to which small losses are proportional. Then bits go where they save most: along each group's
lower convex hull, the steepest step first (Fox 1966, "Discrete Optimization via Marginal Analysis"). The model is in
memory once, in float32. The measurements are stored next to the file until it is whole, so that an interrupted run can
be resumed. Called by `cli.quantize`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headrace import models
from headrace.backends.base import Backend, Matrix
from headrace.backends.step import Chunks, num_block_kinds
from headrace.backends.torch_ref import TorchRef
from headrace.backends.torch_ref.batch import make_forward_batch
from headrace.backends.torch_ref.cache import make_caches
from headrace.backends.torch_ref.ops import RefMatrix, RefOps
from headrace.backends.torch_ref.tensors import tensor
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.protocol.errors import RequestError
from headrace.quant.formats import gguf_blocks
from headrace.quantize import gguf_writer
from headrace.quantize.gguf_encode import bits_per_weight, encode
from headrace.quantize.gguf_file import Notes
from headrace.quantize.gguf_model import Planned
from headrace.quantize.gguf_writer import Progress, Source, Written

LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16")
"""Types to choose from, for rows of whole blocks of 256."""
SHORT_LADDER = ("Q4_0", "Q5_0", "Q8_0", "BF16")
"""For rows of whole blocks of 32 only."""
PROBE = "Q4_K"
"""The type at which a group's loss is measured (or another that fits its rows)."""
MAX_TOKENS = 1024
"""Tokens of the calibration text that are used; the model runs over them once for each group."""
SLAB_WEIGHTS = 2**22


class Step(NamedTuple):
    """A type of a group: the bits of all its weights, and their estimated loss in nats per token."""

    kind: str
    bits: float
    loss: float


@dataclass(slots=True)
class Group:
    """Matrices that get one type, with the tensors of the file that hold them."""

    plans: list[Planned]
    matrices: list[RefMatrix] = field(default_factory=list)
    table: Tensor | None = None
    num_weights: int = 0
    steps: list[Step] = field(default_factory=list)


class MixedFile(NamedTuple):
    """predicted: sum of the groups' losses. measured: divergence (nats a token) of the model with all of them."""

    written: Written
    predicted: float
    measured: float


class _FastOps(RefOps):
    """The reference with faster products, whose bits may depend on the number of rows."""

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        weights = cast(RefMatrix, matrix)
        out = x @ weights.data[: weights.num_in, : weights.num_out]
        return out if weights.bias is None else out + weights.bias


def write(
    directory: Path, path: Path, bits: float, calibration: Sequence[Sequence[int]], progress: Progress | None = None
) -> MixedFile:
    """Write the model in `directory` as the GGUF file `path`, of at most `bits` a weight, all tensors counted.

    calibration: token ids of pieces of text. Raises `RequestError` without such text, or for a budget below the bits of
    the smallest types; `CheckpointError` as `gguf_writer.convert`.
    """
    source = Source(directory)
    with torch.inference_mode():
        model = Measured(source, calibration)
        stamp = hashlib.sha256(json.dumps([source.stamp, model.pieces, LADDER, SHORT_LADDER]).encode()).hexdigest()
        notes = Notes(path, stamp, ".steps.json")
        measured_steps: dict[str, Any] = notes.read().get("steps", {})
        for num_done, group in enumerate(model.groups):
            name = group.plans[0].name
            if name in measured_steps:
                group.steps = [Step(*step) for step in measured_steps[name]]
            else:
                model.measure(group)
                measured_steps[name] = [tuple(step) for step in group.steps]
                notes.write({"steps": measured_steps})
            if progress is not None:
                progress(num_done + 1, len(model.groups))
        chosen = choose(model, bits)
        kinds = source.kinds(gguf_writer.LEVELS["F32"])
        for group, step in zip(model.groups, chosen, strict=True):
            kinds |= {plan.name: step.kind for plan in group.plans}
            model.apply(group, step.kind)
        measured = model.divergence()
    written = gguf_writer.write(source, path, kinds, None, None)
    notes.remove()
    return MixedFile(written, sum(step.loss for step in chosen), measured)


def ladder_of(num_in: int) -> tuple[str, ...]:
    """Return types for rows of so many inputs, the smallest first."""
    return LADDER if num_in % 256 == 0 else SHORT_LADDER if num_in % 32 == 0 else ("F16", "BF16")


def least_bits(source: Source) -> float:
    """Of a weight, all tensors counted, where each matrix has its smallest type."""
    total = num_weights = 0.0
    for plan in source.plans:
        shape = source.shape(plan)
        kind = ladder_of(shape[-1])[0] if source.is_matrix(plan) else "F32"
        total += bits_per_weight(kind) * math.prod(shape)
        num_weights += math.prod(shape)
    return total / num_weights


def verify(source: Source, bits: float) -> None:
    """Raise the errors of `write`, except for the calibration text: `RequestError` for a budget below the bits of the
    smallest types, and `CheckpointError` as `gguf_writer.convert`."""
    gguf_writer.verify(source)
    if bits < (least := least_bits(source)):
        raise RequestError("bits", bits, f"at least {least:.2f}, which the smallest types take for this model")


def choose(model: Measured, bits: float) -> list[Step]:
    """Choose a step for each group. Raises `RequestError` for a budget below the bits of the smallest steps."""
    hulls = [lower_hull(group.steps) for group in model.groups]
    places = [0] * len(hulls)
    room = bits * model.num_weights - model.other_bits - sum(steps[0].bits for steps in hulls)
    if room < 0:
        least = (bits * model.num_weights - room) / model.num_weights
        raise RequestError("bits", bits, f"at least {least:.2f}, which the smallest types take for this model")
    while True:
        best, gain = -1, 0.0
        for i, steps in enumerate(hulls):
            if places[i] + 1 < len(steps) and steps[places[i] + 1].bits - steps[places[i]].bits <= room:
                now, after = steps[places[i]], steps[places[i] + 1]
                slope = (now.loss - after.loss) / (after.bits - now.bits)
                if slope > gain:
                    best, gain = i, slope
        if best < 0:
            return [steps[place] for steps, place in zip(hulls, places, strict=True)]
        room -= hulls[best][places[best] + 1].bits - hulls[best][places[best]].bits
        places[best] += 1


def lower_hull(steps: Sequence[Step]) -> list[Step]:
    """Return the steps of the lower convex hull of loss over bits, falling; fewest bits first."""
    steps_of_hull: list[Step] = []
    for step in sorted(steps, key=lambda step: (step.bits, step.loss)):
        if steps_of_hull and step.loss >= steps_of_hull[-1].loss:
            continue
        while len(steps_of_hull) > 1:
            (_, b0, l0), (_, b1, l1) = steps_of_hull[-2:]
            if (l0 - l1) * (step.bits - b1) > (l1 - step.loss) * (b1 - b0):
                break
            steps_of_hull.pop()
        steps_of_hull.append(step)
    return steps_of_hull


class Measured:
    """The float model, parts of which can be rounded to a type, and a text to measure its loss on."""

    def __init__(self, source: Source, calibration: Sequence[Sequence[int]]) -> None:
        backend = TorchRef("cpu", "float32")
        backend.ops = _FastOps(torch.device("cpu"), torch.float32)
        weights = SafetensorsWeights(source.checkpoint, cast(Backend, backend))
        longest = source.config.max_positions()
        self.pieces = _cut(calibration, longest)
        module = models.find(source.config.values["model_type"])
        self.model: Any = module.Model(source.config, weights, backend.ops, max(max(map(len, self.pieces)), 2))
        weights.finish()
        wrong = max(max(piece) for piece in self.pieces)
        if wrong >= self.model.vocab_size:
            raise RequestError("calibration", wrong, f"token ids below {self.model.vocab_size}, the vocabulary")
        self.groups = _groups(source, list(backend.ops.parts()), self.model.embedding)
        grouped = {plan.name for group in self.groups for plan in group.plans}
        sizes = {plan.name: math.prod(source.shape(plan)) for plan in source.plans}
        self.num_weights = sum(sizes.values())
        self.other_bits = sum(32.0 * size for name, size in sizes.items() if name not in grouped)
        for group in self.groups:
            group.num_weights = sum(sizes[plan.name] for plan in group.plans)
        self.expected = [self._log_probabilities(piece) for piece in self.pieces]

    def measure(self, group: Group) -> None:
        """Fill in the group's steps."""
        num_in = group.matrices[0].num_in if group.matrices else cast(Tensor, group.table).shape[1]
        ladder = ladder_of(num_in)
        probe = gguf_writer.fitting(PROBE, num_in)
        probe = probe if probe in ladder else ladder[0]
        errors = {kind: sum(_squared_error(part, kind) for part in self._parts(group)) for kind in ladder}
        copies = [part.clone() for part in self._parts(group)]
        self.apply(group, probe)
        loss = self.divergence()
        for part, copy in zip(self._parts(group), copies, strict=True):
            part.copy_(copy)
        share = max(loss, 0.0) / errors[probe] if errors[probe] else 0.0
        group.steps = [
            Step(kind, bits_per_weight(kind) * group.num_weights, share * error) for kind, error in errors.items()
        ]

    def apply(self, group: Group, kind: str) -> None:
        """Round the group's weights to `kind`."""
        for part in self._parts(group):
            for piece in _pieces(part):
                piece.copy_(rounded(piece, kind))

    def divergence(self) -> float:
        """KL divergence of the next token, in nats, from the float model's; a mean over the text."""
        total, count = 0.0, 0
        for piece, expected in zip(self.pieces, self.expected, strict=True):
            actual = self._log_probabilities(piece)
            total += float((expected.exp() * (expected - actual)).double().sum())
            count += len(piece)
        return total / count

    def _log_probabilities(self, piece: list[int]) -> Tensor:
        """float32 [tokens, V]."""
        cpu, num_kinds = torch.device("cpu"), len(self.model.kinds)
        kv = make_caches(self.model.cache_shapes, [1] * num_kinds, len(piece), "float32", cpu)
        rows = make_forward_batch(
            Chunks([0], [piece], [[0]], states_in=[-1]), len(piece), cpu, num_block_kinds(self.model.kinds)
        )
        hidden = self.model.forward(rows, kv)
        return torch.log_softmax(self.model.logits(hidden, torch.arange(len(piece))).float(), -1)

    def _parts(self, group: Group) -> list[Tensor]:
        """Return views [out, in] of the group's weights."""
        views = [matrix.data[: matrix.num_in, : matrix.num_out].t() for matrix in group.matrices]
        return views if group.table is None else [*views, group.table]


def _cut(calibration: Sequence[Sequence[int]], longest: int) -> list[list[int]]:
    pieces: list[list[int]] = []
    for piece in calibration:
        pieces.append(list(piece[: min(MAX_TOKENS - sum(map(len, pieces)), longest)]))
    pieces = [piece for piece in pieces if piece]
    if not pieces:
        raise RequestError("calibration", None, "a text for method mixed: types are chosen by what they cost on it")
    return pieces


def _groups(source: Source, matrices: Sequence[RefMatrix], table: Tensor) -> list[Group]:
    """One group for each set of tensors of the file that the model stacks or routes together, in the file's order."""
    plan_of = {name.removesuffix(".weight"): plan for plan in source.plans for name in plan.sources}
    groups: dict[str, Group] = {}
    for matrix in matrices:
        path, _, tail = matrix.name.rpartition(".")
        names = [f"{path}.{part}" if path else part for part in tail.split("+")]
        if matrix.name == "lm_head" and source.tied:
            names = ["token_embd"]
            plan_of["token_embd"] = next(plan for plan in source.plans if plan.name == "token_embd.weight")
        plans = [plan_of[name] for name in names]
        if not all(source.is_matrix(plan) for plan in plans):
            continue
        group = groups.setdefault(plans[0].name, Group(plans))
        group.matrices.append(matrix)
    embedding = "token_embd.weight"
    if embedding not in groups:
        groups[embedding] = Group([plan for plan in source.plans if plan.name == embedding])
    groups[embedding].table = table
    return list(groups.values())


def _pieces(part: Tensor) -> Sequence[Tensor]:
    pieces: tuple[Tensor, ...] = torch.split(part, max(SLAB_WEIGHTS // part.shape[1], 1))
    return pieces


def _squared_error(part: Tensor, kind: str) -> float:
    return sum(float((rounded(piece, kind) - piece).square().sum(dtype=torch.float64)) for piece in _pieces(part))


def rounded(weight: Tensor, kind: str) -> Tensor:
    """Return floats [out, in] rounded to the type `kind`."""
    if kind == "F32":
        return weight
    raw = encode(kind, np.ascontiguousarray(weight.numpy()))
    if kind in gguf_blocks.TYPES:
        return tensor(gguf_blocks.decode(kind, raw).dequantize())
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    return torch.from_numpy(raw).view(dtype).view(weight.shape).float()
