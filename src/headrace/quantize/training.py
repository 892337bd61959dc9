"""Trains a model with its weights rounded: quantisation-aware training. Called by `quantize.driver`.

Weights go through rounding on the way forward, and gradients past it (the straight-through estimator of Bengio et al.
2013, "Estimating or Propagating Gradients Through Stochastic Neurons"); scales are learned with them (Esser et al.
2020, "Learned Step Size Quantization"). The loss is the divergence from the model as it came, on text that it wrote
itself (Liu et al. 2023, "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models"), or on another.
All weights are trained, and no adapters. Embeddings, head, norms and zero points stay as they are. Without a step the
codes are those of round to nearest, to the bit.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quantize import grid
from headrace.quantize.base import Options
from headrace.quantize.llama import Llama, LlamaShape

FILE = "quantize-training.state"
"""In the directory of an interrupted run: what was learned so far, at each judgement."""
STEP_TOKENS, LENGTH = 2048, 256
HELD_OUT = 16
"""Rows of text that nothing is trained on: the best weights are those that lose least there."""
NUM_JUDGEMENTS = 10
WARMUP = 0.05
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
MOMENTS = 7
"""Numbers in memory for each weight: teacher, student, gradient, two moments, the best, and a copy to be stored."""
MODEL_TYPES = ("llama", "mistral")
MOST_UNLIKE = 1e-3
"""Difference of the last states of the model here and of the engine's own, as a share of their size."""
RATES = {2: 1e-3, 3: 1e-3, 4: 3e-4, 8: 3e-4}
"""Learning rates by bits."""

Progress = Callable[[int, int, str], None]
"""Called with (steps done, in all, the loss so far)."""


class RoundedLinear(nn.Module):
    """A linear layer [out, in] whose weights are whole steps of a scale for each group of inputs."""

    zero: Tensor

    def __init__(self, linear: nn.Linear, options: Options, name: str) -> None:
        super().__init__()
        self.options, self.group = options, grid.group_of(options, linear.in_features, name)
        self.weight = nn.Parameter(linear.weight.detach().clone())
        scale, zero = grid.find(self.weight.detach().view(linear.out_features, -1, self.group), options)
        grid.verify_scales(scale, self.weight.detach(), name)
        # One scale of the whole layer learns as one.
        first = scale[:1, :1] if options.group_size == 0 else scale
        self.log_scale = nn.Parameter(first.clamp_min(grid.LEAST_F16).log())
        self.register_buffer("zero", zero, persistent=False)

    @property
    def scale(self) -> Tensor:
        """[out, groups], as it is stored."""
        scale = self.log_scale.exp().expand_as(self.zero)
        return scale + (grid.stored(scale, self.options.scale_dtype) - scale).detach()

    def steps(self, scale: Tensor) -> Tensor:
        """Return the weights in steps of their scales, cut off at the outermost codes; [out, groups, group]."""
        least = -self.zero.unsqueeze(-1)
        steps = self.weight.view(*scale.shape, self.group) / scale.unsqueeze(-1)
        return steps.clamp(least, least + 2**self.options.bits - 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        steps = self.steps(scale)
        whole = steps + (steps.round() - steps).detach()
        return F.linear(x, (whole * scale.unsqueeze(-1)).view_as(self.weight))

    def codes(self) -> QWeight:
        scale = self.scale.detach()
        codes = (self.steps(scale).detach().round() + self.zero.unsqueeze(-1)).to(torch.uint8).view(self.weight.shape)
        return QWeight(codes, scale, self.zero, group=self.group, bits=self.options.bits)


def rounded_copy(model: Llama, options: Options) -> Llama:
    """Return the model with all linear layers of its decoder layers rounded; the rest is not trained."""
    rounded = copy.deepcopy(model).requires_grad_(False)
    for name, linear in [(n, m) for n, m in rounded.layers.named_modules() if isinstance(m, nn.Linear)]:
        parent, _, last = name.rpartition(".")
        setattr(rounded.layers.get_submodule(parent), last, RoundedLinear(linear, options, f"layers.{name}"))
    return rounded


def divergence(student: Llama, teacher: Llama, ids: Tensor) -> Tensor:
    """Return the mean KL (nats a token) of the student's predictions from the teacher's, on rows of token ids."""
    with torch.no_grad():
        expected = teacher(ids).flatten(0, 1).log_softmax(-1)
    return F.kl_div(student(ids).flatten(0, 1).log_softmax(-1), expected, reduction="batchmean", log_target=True)


def rows_of(pieces: list[list[int]]) -> Tensor:
    """Return all token ids one after the other, in rows of `LENGTH`, or shorter ones where there are few.

    Raises `RequestError` for a text of fewer than 8 tokens."""
    ids = torch.tensor([token_id for piece in pieces for token_id in piece], dtype=torch.int64)
    length = min(LENGTH, len(ids) // 4)
    if length < 2:
        raise RequestError("calibration", len(ids), "a text of 8 tokens at least for method qat")
    return ids[: len(ids) // length * length].view(-1, length)


def batches(rows: Tensor, num_rows: int, seed: int) -> Iterator[Tensor]:
    """Yield rows in another order each time round, without end."""
    order = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.split(rows[torch.randperm(len(rows), generator=order)], num_rows)


@dataclasses.dataclass
class Course:
    """How far the training is. first, best: nats a token on rows that are held out."""

    step: int = 0
    first: float = float("inf")
    best: float = float("inf")


Parts = dict[str, dict[str, Tensor]]


class StateFile:
    """A file from which an interrupted training resumes; None keeps nothing. key: of all that the training depends
    on."""

    def __init__(self, path: Path | None, key: str = "") -> None:
        self.path, self.key = path, key

    def save(self, course: Course, parts: Parts) -> None:
        if self.path is None:
            return
        tensors = {f"{part}/{name}": t.contiguous() for part, named in parts.items() for name, t in named.items()}
        partial = self.path.with_name(self.path.name + ".partial")
        save_file(tensors, partial, {"key": self.key, "course": json.dumps(dataclasses.asdict(course))})
        partial.rename(self.path)

    def load(self) -> tuple[Course, Parts] | None:
        """Return what `save` wrote last. Raises `CheckpointError` for the file of another training."""
        if self.path is None or not self.path.is_file():
            return None
        with safe_open(self.path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            if metadata.get("key") != self.key:
                raise CheckpointError(f"{self.path} is of another training; remove it to begin anew")
            parts: Parts = {}
            for key in file.keys():  # noqa: SIM118 (not a dict)
                part, _, name = key.partition("/")
                parts.setdefault(part, {})[name] = file.get_tensor(key)
        return Course(**json.loads(metadata["course"])), parts


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by "parameter/name"."""
    state: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
    return {f"{index}/{name}": t for index, named in state.items() for name, t in named.items()}


def set_moments(optimizer: torch.optim.Optimizer, stored: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, t in stored.items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = t
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def train(
    student: Llama, teacher: Llama, rows: Tensor, options: Options, state_file: StateFile, show: Progress | None = None
) -> Course:
    """Train for `options.num_steps`, from the state in `state_file` on; leaves the best weights in place.

    The rate rises over the first twentieth of the steps and then falls to 0, so the steps depend on their number."""
    num_steps, lr = options.num_steps, options.learning_rate or RATES[options.bits]
    num_held = min(HELD_OUT, len(rows) // 2)
    held_rows, rows = rows[:num_held], rows[num_held:]
    scales = [p for n, p in student.named_parameters() if n.endswith("log_scale")]
    weights = [p for n, p in student.named_parameters() if p.requires_grad and not n.endswith("log_scale")]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": scales}], lr=lr, betas=(0.9, 0.95), weight_decay=0)

    def judged() -> float:
        with torch.no_grad():
            parts = torch.split(held_rows, max(STEP_TOKENS // held_rows.shape[1], 1))
            return sum(float(divergence(student, teacher, part)) * len(part) for part in parts) / len(held_rows)

    def trained() -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in student.named_parameters() if p.requires_grad}

    if (before := state_file.load()) is not None:
        course, parts = before
        student.load_state_dict(parts["weights"], strict=False)
        set_moments(optimizer, parts.get("moments", {}))
        best_weights = parts["best"]
    else:
        course, best_weights = Course(), trained()
        course.first = course.best = judged()
    order = batches(rows, max(STEP_TOKENS // rows.shape[1], 1), options.seed)
    for ids in itertools.islice(order, course.step, num_steps):
        if show is not None:
            show(course.step, num_steps, f"{1e3 * course.best:.1f} mnats, {1e3 * course.first:.1f} when rounded")
        progress = course.step / num_steps
        for group in optimizer.param_groups:
            group["lr"] = lr * min(progress / WARMUP + 0.01, 1.0, (1 - progress) / (1 - WARMUP))
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
            loss = divergence(student, teacher, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        course.step += 1
        share = NUM_JUDGEMENTS * course.step
        if share // num_steps != (share - NUM_JUDGEMENTS) // num_steps:
            kl = judged()
            if kl < course.best:
                course.best, best_weights = kl, trained()
            state_file.save(course, {"weights": trained(), "best": best_weights, "moments": moments(optimizer)})
    student.load_state_dict(best_weights, strict=False)
    return course


class Source(NamedTuple):
    """A checkpoint: `stored` returns a tensor by one of its `names`; the `values` of its config.json."""

    stored: Callable[[str], Tensor]
    names: Iterable[str]
    values: dict[str, Any]


def trained(
    source: Source,
    options: Options,
    calibration: list[list[int]],
    states: Tensor,
    state_file: StateFile,
    show: Progress | None,
) -> Trained:
    """Train a model and return its codes.

    states: [n, hidden], the last ones of the first n tokens of `calibration` by the engine's own model file. Raises
    `CheckpointError` for a model that can not be trained here."""
    rows = rows_of(calibration)
    teacher = load_model(source).requires_grad_(False)
    with torch.no_grad():
        ours = teacher.hidden(torch.tensor([calibration[0][: len(states)]]))[0]
        error = float(torch.linalg.vector_norm(ours - states) / torch.linalg.vector_norm(states))
    if not error < MOST_UNLIKE:
        raise CheckpointError(
            f"config.json: this {source.values.get('model_type')} computes otherwise than a plain Llama (its last "
            f"states are {100 * error:.2g}% away), and method qat trains that alone; gptq and awq take the model"
        )
    student = rounded_copy(teacher, options)
    return Trained(student, train(student, teacher, rows, options, state_file, show))


def load_model(source: Source) -> Llama:
    """Return the model in float32. Raises `CheckpointError` for tensors or sizes that are no Llama's, or too large."""
    config = ModelConfig(source.values)
    config.choice("model_type", {name: name for name in MODEL_TYPES})
    heads = config.integer("num_attention_heads")
    shape = LlamaShape(
        **{name: config.integer(name) for name in SIZES},
        num_attention_heads=heads,
        num_key_value_heads=config.integer("num_key_value_heads", heads),
        max_position_embeddings=LENGTH,
        rope_theta=config.rope.number("rope_theta", 10000.0),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
    )
    tied = config.flag("tie_word_embeddings", False)
    theirs = {name for name in source.names if not (tied and name == "lm_head.weight")}
    needed = MOMENTS * 4 * sum(source.stored(name).numel() for name in theirs)
    if needed > (available := psutil.virtual_memory().available):
        raise CheckpointError(
            f"training takes {needed / 1e9:.1f} GB of memory for this model, and {available / 1e9:.1f} GB are free"
        )
    with torch.device("meta"):
        parameters = Llama(shape, tied).state_dict()
    sizes = {name if name.startswith("lm_head") else f"model.{name}": t.shape for name, t in parameters.items()}
    if unlike := [name for name in sorted(theirs | set(sizes)) if name not in theirs or name not in sizes
                  or source.stored(name).shape != sizes[name]]:  # fmt: skip
        raise CheckpointError(
            f"{unlike[0]} is not as in a plain Llama, and method qat trains that alone; gptq and awq take the model"
        )
    model = Llama(shape, tied)
    model.load_state_dict({name.removeprefix("model."): source.stored(name).float() for name in theirs})
    return model


class Trained:
    """`quantize.base.Method` whose codes were learned. kl: nats a token from the model on text that was held out, when
    rounded to nearest and now."""

    CALIBRATED = True

    def __init__(self, student: Llama, course: Course) -> None:
        self.kl = course.first, course.best
        self._codes = {
            f"model.layers.{name}": layer.codes()
            for name, layer in student.layers.named_modules()
            if isinstance(layer, RoundedLinear)
        }

    def verify(self, options: Options) -> Options:
        return options

    def prepare(self, layer: Any, options: Options) -> None:
        """Change nothing."""

    def quantise(self, weight: Tensor, statistics: Any, options: Options, name: str) -> QWeight:
        return self._codes[name]
