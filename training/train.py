"""Trains the built-in model on a CPU, in a given number of minutes or steps, and resumes from its checkpoint.

    python training/train.py --corpora CORPORA --run training/runs/small --minutes 60

Matrices are trained with Muon (Jordan et al. 2024), the rest with AdamW; the learning rate warms up, stays, and falls
linearly to zero (warmup-stable-decay). Rows grow from 512 to 1024 tokens in the last part. What is evaluated and
exported is a running average of the weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import Mixture, prepare
from evaluate import bits_per_byte
from model import Llama, LlamaShape

BATCH_TOKENS, PIECE_TOKENS, SHORT, LONG = 8192, 4096, 512, 1024
WARMUP, DECAY_FROM, LONG_FROM = 0.02, 0.55, 0.65  # fractions of the run
AVERAGE = 0.995


def learning_rate_factor(progress: float) -> float:
    if progress < DECAY_FROM:
        return min(1.0, progress / WARMUP + 0.01)
    return max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embeddings = [p for n, p in model.named_parameters() if "embed" in n]
    groups = [{"params": embeddings, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True),
    ]


def finish_step(
    model: nn.Module, average: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, most: float
) -> None:
    """Apply the clipped gradients, and move the running average, of which the old share is at most `most`."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    share = min(most, step / (step + 10))
    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.lerp_(now.data, 1 - share)


def train_step(loss_fn: Callable[[Tensor], Tensor], mixture: Mixture, step: int, length: int) -> float:
    """Accumulate the gradient of one batch in pieces small enough for the cache; returns the mean loss."""
    ids = torch.from_numpy(mixture.batch(step, BATCH_TOKENS // length, length))
    pieces = ids.split(PIECE_TOKENS // length)
    total = 0.0
    for piece in pieces:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(piece) / len(pieces)
        loss.backward()
        total += loss.item()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of the log, the prepared data and the checkpoint"
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="training time; the schedule follows the clock")
    length.add_argument("--steps", type=int, help="training steps; the schedule follows the steps, so runs are alike")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss (needs a C++ compiler)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    shape = LlamaShape()
    tokenizer, mixture, validation = prepare(args.corpora, args.run / "data", shape.vocab_size, args.seed)
    model, average = Llama(shape), Llama(shape)
    model.init_weights()
    average.load_state_dict(model.state_dict())
    optimizers = make_optimizers(model, args.lr)
    step, tokens, elapsed = 0, 0, 0.0
    path = args.run / "checkpoint.pt"
    if args.resume:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        mixture.restore(saved["mixture"])
        step, tokens, elapsed = saved["step"], saved["tokens"], saved["elapsed"]

    def loss_of(ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    loss_fn = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    log = (args.run / "log.txt").open("a", encoding="utf-8", buffering=1)

    def save(progress: float) -> None:
        # Positions that no row has reached yet mean nothing to the model.
        window = LONG if progress > LONG_FROM else SHORT
        bits = {n: round(bits_per_byte(average, tokenizer, t[:40_000], window), 4) for n, t in validation.items()}
        record = {"step": step, "tokens": tokens, "minutes": round(elapsed / 60, 2), "bits_per_byte": bits}
        log.write(json.dumps(record) + "\n")
        state = {
            "shape": asdict(shape), "model": model.state_dict(), "average": average.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers], "mixture": mixture.state,
            "step": step, "tokens": tokens, "elapsed": elapsed,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    losses: list[float] = []
    last_save, last_log = elapsed, elapsed
    began = time.perf_counter() - elapsed
    while True:
        progress = step / args.steps if args.steps else elapsed / 60 / args.minutes
        if progress >= 1.0:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * learning_rate_factor(progress)
        losses.append(train_step(loss_fn, mixture, step, LONG if progress >= LONG_FROM else SHORT))
        finish_step(model, average, optimizers, step, AVERAGE)
        step, tokens = step + 1, tokens + BATCH_TOKENS
        elapsed = time.perf_counter() - began
        if step % 25 == 0:
            rate = BATCH_TOKENS * len(losses) / (elapsed - last_log)
            log.write(f"step {step} progress {progress:.3f} loss {sum(losses) / len(losses):.4f} tokens/s {rate:.0f}\n")
            losses, last_log = [], elapsed
        if elapsed - last_save > 180:
            save(progress)
            last_save = elapsed
    save(progress)


if __name__ == "__main__":
    main()
