"""Grows a trained model by depth and trains it on, so that the larger one starts where the smaller one ended.

    python training/grow.py --start SMALL --layers 14 --corpora CORPORA --run RUN --minutes 110

The layers of the start come first; each new one is a copy of one of them whose output projections are zero, so it
does nothing at first (LLaMA Pro, arXiv 2401.02415, section 3.2). Beside the loss of the last layer, a small one is
taken at the last layer of the start, through the same norm and head (LayerSkip, arXiv 2404.16710, section 4.1), so
that this layer stays an early exit which drafts well. The rest is as in train.py. When the learning rate begins to
fall, the checkpoint is kept as constant.pt: `--resume --from-constant` goes on from there, for a longer run.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from data import FAMILY_WEIGHTS, prepare
from evaluate import bits_per_byte
from model import Llama, load_model
from train import finish_step, make_optimizers

STEP_TOKENS, PIECE_TOKENS = 4096, 2048
LENGTHS = ((0.0, 256), (0.45, 512), (0.85, 1024))  # from this part of the run on, rows of so many tokens
WARMUP, DECAY_FROM, AVERAGE = 0.015, 0.5, 0.99
EXIT_WEIGHT = 0.15


def grown(start: Llama, num_layers: int) -> Llama:
    """The start with more layers, which add nothing to the residual stream yet."""
    model = Llama(replace(start.shape, num_hidden_layers=num_layers))
    state, old = start.state_dict(), start.shape.num_hidden_layers
    for i in range(old, num_layers):
        for name, value in start.layers[i % old].state_dict().items():
            silent = "o_proj" in name or "down_proj" in name
            state[f"layers.{i}.{name}"] = torch.zeros_like(value) if silent else value
    model.load_state_dict(state)
    return model


def losses_of(model: Llama, ids: Tensor, exit_layer: int, offset: int) -> tuple[Tensor, Tensor]:
    """Cross entropy of the last layer, and of the early exit at every other position."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    length = inputs.shape[1]
    x = model.embed_tokens(inputs)
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
    cos, sin = model.cos[:length].to(dtype), model.sin[:length].to(dtype)
    early = x
    for i, layer in enumerate(model.layers, 1):
        x = layer(x, cos, sin)
        early = x if i == exit_layer else early
    head = model.embed_tokens.weight
    last = F.cross_entropy(F.linear(model.norm(x), head).flatten(0, 1).float(), targets.flatten())
    early = F.linear(model.norm(early[:, offset::2]), head)
    return last, F.cross_entropy(early.flatten(0, 1).float(), targets[:, offset::2].flatten())


def learning_rate_factor(progress: float) -> float:
    if progress < DECAY_FROM:
        return min(1.0, progress / WARMUP + 0.01)
    return max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="model directory that is grown")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder of log, prepared data and checkpoints")
    parser.add_argument("--minutes", type=float, required=True, help="training time; the schedule follows the clock")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from-constant", action="store_true", help="resume from before the learning rate fell")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start = load_model(args.start)
    exit_layer = start.shape.num_hidden_layers
    tokenizer, mixture, validation = prepare(
        args.corpora,
        args.run / "data",
        start.shape.vocab_size,
        args.seed,
        FAMILY_WEIGHTS,
        args.start / "tokenizer.json",
    )
    model, average = grown(start, args.layers), grown(start, args.layers)
    optimizers = make_optimizers(model, args.lr)
    step, tokens, elapsed = 0, 0, 0.0
    path, constant = args.run / "checkpoint.pt", args.run / "constant.pt"
    if args.resume:
        saved = torch.load(constant if args.from_constant else path, weights_only=True)
        model.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        mixture.restore(saved["mixture"])
        step, tokens, elapsed = saved["step"], saved["tokens"], saved["elapsed"]
    log = (args.run / "log.txt").open("a", encoding="utf-8", buffering=1)

    def save(file: Path) -> None:
        state = {
            "shape": asdict(model.shape), "model": model.state_dict(), "average": average.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers], "mixture": mixture.state,
            "step": step, "tokens": tokens, "elapsed": elapsed,
        }  # fmt: skip
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def judge(window: int) -> None:
        bits = {n: round(bits_per_byte(average, tokenizer, t[:12_000], window), 4) for n, t in validation.items()}
        record = {"step": step, "tokens": tokens, "minutes": round(elapsed / 60, 2), "bits_per_byte": bits}
        log.write(json.dumps(record) + "\n")

    losses: list[tuple[float, float]] = []
    last_save = last_log = last_judged = elapsed
    began = time.perf_counter() - elapsed
    while (progress := elapsed / 60 / args.minutes) < 1.0:
        if progress >= DECAY_FROM and not constant.exists():
            save(constant)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * learning_rate_factor(progress)
        length = [n for since, n in LENGTHS if progress >= since][-1]
        ids = torch.from_numpy(mixture.batch(step, STEP_TOKENS // length, length))
        pieces = ids.split(PIECE_TOKENS // length)
        for piece in pieces:
            with torch.autocast("cpu", torch.bfloat16, enabled=not args.float32):
                last, early = losses_of(model, piece, exit_layer, step % 2)
            ((last + EXIT_WEIGHT * early) / len(pieces)).backward()
            losses.append((last.item(), early.item()))
        finish_step(model, average, optimizers, step, AVERAGE)
        step, tokens = step + 1, tokens + STEP_TOKENS
        elapsed = time.perf_counter() - began
        if step % 20 == 0:
            last_mean, early_mean = (sum(x) / len(losses) for x in zip(*losses, strict=True))
            rate = 20 * STEP_TOKENS / (elapsed - last_log)
            log.write(
                f"step {step} progress {progress:.3f} loss {last_mean:.4f} early {early_mean:.4f} tokens/s {rate:.0f}\n"
            )
            losses, last_log = [], elapsed
        if elapsed - last_judged > 2400:
            judge(length)
            last_judged = elapsed
        if elapsed - last_save > 180:
            save(path)
            last_save = elapsed
    save(path)
    judge(LENGTHS[-1][1])


if __name__ == "__main__":
    main()
