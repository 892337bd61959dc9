"""Trains the drafters of a target on the target's own text: draft_model, medusa, eagle, mtp.

    python training/drafters.py TARGET OUT --samples SAMPLES.npz --minutes 5

Each learns the target's odds (soft cross entropy) and, with a smaller weight, its likeliest token. The target rests.
EAGLE and MTP are trained on drafts of four tokens, each fed with the drafter's own state (training-time test).
`--go-on DIR` begins with the drafters in DIR: those of this target, or of the one that it was grown from.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export import write_json
from model import Llama, load_model, save_model
from samples import Samples
from speculators import Eagle, Medusa, Mtp, aux_layers, base_config, draft_config, draft_shape, kept_of, view_of
from train import make_optimizers

METHODS = ("draft_model", "eagle", "mtp", "medusa")
ROWS, STRIDE, WARMUP, DECAY_FROM = 8, 3, 0.03, 0.4  # beyond the first token, drafts at every third position
HARD, FADE = 0.5, 0.85  # weight of the likeliest token; of each depth against the one before
RATES = {"draft_model": 6e-3, "eagle": 2e-3, "mtp": 2e-3, "medusa": 2e-3}


def schedule(progress: float) -> float:
    if progress < DECAY_FROM:
        return min(1.0, progress / WARMUP + 0.02)
    return max(0.0, (1 - progress) / (1 - DECAY_FROM))


def batches(samples: Samples, num_rows: int, seed: int) -> Callable[[], np.ndarray]:
    """Row numbers, every row once in each round; rows of like length together, so that little is padding."""
    rng, waiting = np.random.default_rng(seed), []

    def draw() -> np.ndarray:
        if not waiting:
            order = np.argsort(samples.lengths + rng.uniform(0, 20, len(samples.lengths)))
            groups = [order[i : i + num_rows] for i in range(0, len(order), num_rows)]
            waiting.extend(groups[i] for i in rng.permutation(len(groups)))
        return waiting.pop()

    return draw


def loss_of_drafter(
    target: Llama, drafter: nn.Module, ids: Tensor, lengths: Tensor, anchors: Tensor
) -> tuple[Tensor, list[float]]:
    """The mean loss over depths, and at each depth the share of drafted tokens that are the target's likeliest.

    Beyond the first token only what is drafted at `anchors` counts.
    """
    with torch.no_grad():
        view = view_of(target, ids)
        shares = view.logits.float().softmax(-1)
        likeliest = shares.argmax(-1)
        if (vocabulary := kept_of(drafter)) is not None:  # in numbers of the draft vocabulary; -1: can not be drafted
            there = torch.full((shares.shape[-1],), -1)
            there[vocabulary] = torch.arange(len(vocabulary))
            shares, likeliest = shares[..., vocabulary], there[likeliest]
    length = ids.shape[1]

    padded = F.pad(ids, (0, 8))
    every = torch.arange(length)

    def of_text(depth: int, logits: Tensor) -> Tensor:
        return padded[:, (anchors if depth > 0 else every) + depth + 2]

    total, weight, right = torch.zeros(()), 0.0, []
    for depth, logits in enumerate(drafter.draft(view, of_text, anchors)):
        # At anchor i the token after i + 1 + depth is drafted.
        at = (anchors if depth else every) + depth + 1
        counts = at[None] < lengths[:, None] - 1
        at = at.clamp(max=length - 1)
        logprobs, expected, best = logits.float().log_softmax(-1), shares[:, at], likeliest[:, at]
        soft = -(expected * logprobs).sum(-1)
        hard = -logprobs.gather(-1, best.clamp(min=0)[..., None])[..., 0] * (best >= 0)
        loss = (soft + HARD * hard)[counts].mean()
        total, weight = total + FADE**depth * loss, weight + FADE**depth
        right.append((logprobs.argmax(-1) == best)[counts].float().mean().item())
    return total / weight, right


def loss_of_model(model: Llama, samples: Samples, rows: np.ndarray) -> tuple[Tensor, list[float]]:
    lengths = torch.from_numpy(samples.lengths[rows])
    length = int(lengths.max())
    ids = torch.from_numpy(samples.tokens[rows, :length].astype(np.int64))
    best = torch.from_numpy(samples.best[rows, :length].astype(np.int64))
    shares = torch.from_numpy(samples.logprobs[rows, :length].astype(np.float32)).exp()
    logprobs = model(ids).float().log_softmax(-1)
    counts = torch.arange(length)[None] < lengths[:, None] - 1
    soft = -(shares * logprobs.gather(-1, best)).sum(-1)
    hard = -logprobs.gather(-1, best[..., :1])[..., 0]
    return (soft + HARD * hard)[counts].mean(), [(logprobs.argmax(-1) == best[..., 0])[counts].float().mean().item()]


def started_draft(target: Llama) -> Llama:
    """A draft model whose embedding is the target's, as far as it fits into fewer dimensions."""
    model = Llama(draft_shape(target.shape))
    model.init_weights()
    with torch.no_grad():
        u, s, _ = torch.linalg.svd(target.embed_tokens.weight, full_matrices=False)
        size = model.shape.hidden_size
        rows = u[:, :size] * s[:size]
        model.embed_tokens.weight.copy_(rows * (0.05 / rows.std()))
    return model


def train(
    module: nn.Module, step_loss: Callable[[], tuple[Tensor, list[float]]], rate: float, minutes: float, label: str
) -> None:
    optimizers = make_optimizers(module, rate)
    began = last_log = time.perf_counter()
    losses: list[float] = []
    rights: list[list[float]] = []
    step = 0
    while (progress := (time.perf_counter() - began) / 60 / minutes) < 1:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = step_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        losses.append(loss.item())
        rights.append(right)
        if time.perf_counter() - last_log > 20:
            mean = np.mean(rights, 0).round(3).tolist()
            print(f"{label} step {step} progress {progress:.2f} loss {np.mean(losses):.4f} right {mean}", flush=True)
            losses, rights, last_log = [], [], time.perf_counter()


def make(method: str, target_path: Path, target: Llama, samples: Samples, out: Path, args: argparse.Namespace) -> None:
    config, directory = base_config(target_path), out / method
    draw = batches(samples, args.rows, args.seed)
    start = args.go_on and args.go_on / method
    rate = RATES[method] * args.rate * (0.5 if start else 1.0)
    if method == "draft_model":
        model = load_model(start) if start else started_draft(target)
        train(model, lambda: loss_of_model(model, samples, draw()), rate, args.minutes, method)
        directory.mkdir(parents=True, exist_ok=True)
        save_model(model, directory)
        write_json(directory / "config.json", draft_config(config, model.shape))
        return
    counts = torch.bincount(
        torch.from_numpy(samples.best[..., 0][samples.logprobs[..., 0] > -20].astype(np.int64)),
        minlength=target.shape.vocab_size,
    )
    drafter: Eagle | Mtp | Medusa
    if method == "eagle":
        drafter = Eagle.load(start, target.shape) if start else Eagle.start(target, counts)
        drafter.layers = aux_layers(target.shape.num_hidden_layers)
    elif method == "mtp":
        drafter = Mtp.load(start, target.shape) if start else Mtp.start(target)
    else:
        drafter = Medusa.load(start, target.shape) if start else Medusa.start(target, counts)

    def step_loss() -> tuple[Tensor, list[float]]:
        rows = draw()
        lengths = torch.from_numpy(samples.lengths[rows])
        ids = torch.from_numpy(samples.tokens[rows, : int(lengths.max())].astype(np.int64))
        offset = int(torch.randint(0, STRIDE, ()))
        return loss_of_drafter(target, drafter, ids, lengths, torch.arange(offset, ids.shape[1], STRIDE))

    train(drafter, step_loss, rate, args.minutes, method)
    drafter.save(directory, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="model directory")
    parser.add_argument("out", type=Path, help="gets one folder for each method")
    parser.add_argument("--samples", type=Path, required=True, help="made by training/samples.py")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--minutes", type=float, default=5.0, help="for each method")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of up to 256 tokens in a step")
    parser.add_argument("--rate", type=float, default=1.0, help="times the method's learning rate")
    parser.add_argument("--go-on", type=Path, help="folder of drafters to begin with, at half the rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = load_model(args.target).eval().requires_grad_(False)
    samples = Samples.load(args.samples)
    for method in args.methods:
        make(method, args.target, target, samples, args.out, args)


if __name__ == "__main__":
    main()
