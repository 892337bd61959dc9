"""Fine-tunes a small Llama with its weights rounded to a few bits, and writes the rounded model.

    python training/finetune_quantised.py --model builtin --bits 4 --group-size 64 --out OUT --minutes 10

The same command goes on where it was broken off: OUT.state has what was learned, at each judgement.

Weights go through rounding on the way forward, and gradients past it (the straight-through estimator of Bengio et al.
2013, "Estimating or Propagating Gradients Through Stochastic Neurons"); scales are learned with them (Esser et al.
2020, "Learned Step Size Quantization"). The loss is the divergence from the model as it came, on text that it wrote
itself (Liu et al. 2023, "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models"), or that of
`--text`. Embeddings, head and norms stay as they are. OUT is a compressed-tensors directory, as `headrace quantize
--method rtn` makes it: what it begins from is that command's result, to the bit. Zero points (`--asymmetric`) stay as
rounding to nearest chooses them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace import hub
from headrace.cli.quantize import calibration_text
from headrace.quant.base import QWeight
from headrace.quantize import grid, shards
from headrace.quantize.base import Options
from headrace.quantize.driver import copy_others
from headrace.quantize.writers import compressed_tensors
from model import Llama, load_model

PIECE_TOKENS, LENGTH = 2048, 256
HELD_OUT = 16
"""Rows of text that nothing is trained on: the best weights are those that lose least there."""
WARMUP = 0.05


class RoundedLinear(nn.Module):
    """A linear layer [out, in] whose weights are whole steps of a scale for each group of inputs."""

    def __init__(self, linear: nn.Linear, options: Options, name: str) -> None:
        super().__init__()
        self.options, self.group = options, grid.group_of(options, linear.in_features, name)
        self.weight = nn.Parameter(linear.weight.detach().clone())
        scale, zero = grid.find(self.weight.detach().view(linear.out_features, -1, self.group), options)
        self.log_scale = nn.Parameter(scale.clamp_min(grid.LEAST_F16).log())
        self.register_buffer("zero", zero, persistent=False)

    @property
    def scale(self) -> Tensor:
        """[out, groups], as it is stored."""
        scale = self.log_scale.exp()
        return scale + (grid.stored(scale, self.options.scale_dtype) - scale).detach()

    def steps(self, scale: Tensor) -> Tensor:
        """The weights in steps of their scales, cut off at the outermost codes; [out, groups, group]."""
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
    """The model with all linear layers of its decoder layers rounded; the rest is not trained."""
    copied = copy.deepcopy(model).requires_grad_(False)
    for name, linear in [(n, m) for n, m in copied.layers.named_modules() if isinstance(m, nn.Linear)]:
        parent, _, last = name.rpartition(".")
        setattr(copied.layers.get_submodule(parent), last, RoundedLinear(linear, options, f"layers.{name}"))
    return copied


def divergence(student: Llama, teacher: Llama, ids: Tensor) -> Tensor:
    """Mean KL (nats a token) of the student's predictions from the teacher's, on rows of token ids."""
    with torch.no_grad():
        expected = teacher(ids).flatten(0, 1).log_softmax(-1)
    return F.kl_div(student(ids).flatten(0, 1).log_softmax(-1), expected, reduction="batchmean", log_target=True)


def rows_of(pieces: list[list[int]], length: int) -> Tensor:
    """All token ids one after the other, in rows [rows, length]."""
    ids = torch.tensor([token_id for piece in pieces for token_id in piece])
    if len(ids) < 2 * length:
        raise SystemExit(f"the text has {len(ids)} tokens, and rows of {length} are wanted: two at least")
    return ids[: len(ids) // length * length].view(-1, length)


def batches(rows: Tensor, num_rows: int, seed: int) -> Iterator[Tensor]:
    """Rows in another order each time round, without end."""
    order = torch.Generator().manual_seed(seed)
    while True:
        yield from rows[torch.randperm(len(rows), generator=order)].split(num_rows)


@dataclasses.dataclass
class Course:
    """How far the training is. first, best: nats a token on rows that are held out."""

    step: int = 0
    seconds: float = 0.0
    judged_at: float = 0.0
    first: float = float("inf")
    best: float = float("inf")


class Kept:
    """A file that the training goes on from; None keeps nothing. key: what the training was asked for."""

    def __init__(self, path: Path | None, key: str = "") -> None:
        self.path, self.key = path, key

    def save(self, course: Course, parts: dict[str, dict[str, Tensor]]) -> None:
        if self.path is None:
            return
        tensors = {f"{part}/{name}": t.contiguous() for part, named in parts.items() for name, t in named.items()}
        partial = self.path.with_name(self.path.name + ".partial")
        save_file(tensors, partial, {"key": self.key, "course": json.dumps(dataclasses.asdict(course))})
        partial.rename(self.path)

    def load(self) -> tuple[Course, dict[str, dict[str, Tensor]]] | None:
        """What `save` kept last. Raises SystemExit for a training that was asked for otherwise."""
        if self.path is None or not self.path.is_file():
            return None
        with safe_open(self.path, "pt") as file:
            stated = file.metadata()
            if stated["key"] != self.key:
                raise SystemExit(f"{self.path} is of another training ({stated['key']}); remove it to begin anew")
            parts: dict[str, dict[str, Tensor]] = {}
            for key in file.keys():  # noqa: SIM118 (not a dict)
                part, _, name = key.partition("/")
                parts.setdefault(part, {})[name] = file.get_tensor(key)
        return Course(**json.loads(stated["course"])), parts


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by "parameter/name"."""
    state: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
    return {f"{index}/{name}": t for index, named in state.items() for name, t in named.items()}


def set_moments(optimizer: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, t in moments.items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = t
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def finetune(
    student: Llama,
    teacher: Llama,
    rows: Tensor,
    *,
    minutes: float,
    steps: int = 0,
    lr: float = 3e-4,
    seed: int = 0,
    saved: Kept | None = None,
    amp: bool = False,
) -> tuple[float, float]:
    """Train until `minutes` are over (or for `steps`), from the state in `saved` on; leaves the best weights in place.

    amp: products of the training (not of the judgements) in bfloat16.
    -> (loss before, loss of the best) on rows that are held out, nats a token.
    """
    saved = saved or Kept(None)
    num_held = min(HELD_OUT, len(rows) // 2)
    held_rows, rows = rows[:num_held], rows[num_held:]
    scales = [p for n, p in student.named_parameters() if n.endswith("log_scale")]
    weights = [p for n, p in student.named_parameters() if p.requires_grad and not n.endswith("log_scale")]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": scales}], lr=lr, betas=(0.9, 0.95), weight_decay=0)

    def judged() -> float:
        with torch.no_grad():
            parts = held_rows.split(max(PIECE_TOKENS // held_rows.shape[1], 1))
            return sum(float(divergence(student, teacher, part)) * len(part) for part in parts) / len(held_rows)

    def trained() -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in student.named_parameters() if p.requires_grad}

    if (before := saved.load()) is not None:
        course, parts = before
        student.load_state_dict(parts["weights"], strict=False)
        set_moments(optimizer, parts["moments"])
        best_weights = parts["best"]
    else:
        course, best_weights = Course(), trained()
        course.first = course.best = judged()
    began = time.perf_counter() - course.seconds
    order = batches(rows, max(PIECE_TOKENS // rows.shape[1], 1), seed)
    for ids in itertools.islice(order, course.step, None):
        course.seconds = time.perf_counter() - began
        progress = course.step / steps if steps else course.seconds / 60 / minutes
        if progress - course.judged_at >= 0.1 or progress >= 1:
            kl, course.judged_at = judged(), progress
            print(json.dumps({"step": course.step, "progress": round(progress, 3), "kl": round(kl, 6)}), flush=True)
            if kl < course.best:
                course.best, best_weights = kl, trained()
            saved.save(course, {"weights": trained(), "best": best_weights, "moments": moments(optimizer)})
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * min(progress / WARMUP + 0.01, 1.0, (1 - progress) / (1 - WARMUP))
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = divergence(student, teacher, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        course.step += 1
    student.load_state_dict(best_weights, strict=False)
    return course.first, course.best


def export(student: Llama, source: Path, out: Path, options: Options) -> None:
    """Write the rounded model as a compressed-tensors directory; all that was not trained is copied unchanged."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    for name, layer in student.layers.named_modules():
        if isinstance(layer, RoundedLinear):
            full = f"model.layers.{name}"
            del tensors[f"{full}.weight"]
            tensors |= compressed_tensors.tensors(full, layer.codes(), options)
    out.mkdir(parents=True, exist_ok=True)
    copy_others(source, out)
    file = "model-00001-of-00001.safetensors"
    shards.write(out / file, tensors)
    config = hub.read_json(source / "config.json")
    config["quantization_config"] = compressed_tensors.quantization_config(options, ["lm_head"])
    compressed_tensors.finish(out, {file: list(tensors)}, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", help="directory of a Llama with tied embeddings, or builtin")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--text", type=Path, help="to learn from; by default what the model writes")
    parser.add_argument("--num-tokens", type=int, default=2**18, help="of that text")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bfloat16", action="store_true", help="products of the training in bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"{args.out} is not empty")
    options = Options(method="rtn", bits=args.bits, group_size=args.group_size, symmetric=not args.asymmetric)
    grid.verify(options, symmetric=True)
    options = dataclasses.replace(options, scale_dtype=compressed_tensors.scale_dtype(torch.bfloat16))
    source = hub.resolve(args.model)
    pieces = calibration_text(args.model, source, args.text, args.num_tokens, 512)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    teacher = load_model(source).requires_grad_(False)
    student = rounded_copy(teacher, options)
    rows = rows_of(pieces, LENGTH)
    settings: dict[str, Any] = {
        name: str(value) for name, value in vars(args).items() if name not in ("threads", "out")
    }
    saved = Kept(args.out.with_name(args.out.name + ".state"), json.dumps(settings, sort_keys=True))
    before, after = finetune(
        student, teacher, rows, minutes=args.minutes, lr=args.lr, seed=args.seed, saved=saved, amp=args.bfloat16
    )
    export(student, source, args.out, options)
    saved.path.unlink(missing_ok=True)
    print(f"{args.out}: {1e3 * before:.2f} mnats from the model when rounded, {1e3 * after:.2f} when fine-tuned")


if __name__ == "__main__":
    main()
