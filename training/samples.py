"""The target's own text, with its own odds: what drafters learn from.

    python training/samples.py TARGET RUN/data/tokens.npz OUT.npz --rows 6000

Documents of the training mixture are begun as they stand and gone on with by the target: half of them with its
likeliest tokens, the rest at temperatures 0.7 and 1. Beside each token lie the target's likeliest next tokens and the
logarithms of their shares, so that a draft model can be trained without the target. `--texts OTHER.npz` takes the rows
of another target besides, as text that this one judges: much cheaper than writing, and of use if both are of a family.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Llama, load_model, rotate

LENGTH, BEST, BATCH = 256, 24, 128
SHARES = {"stories": 0.5, "chat": 0.35, "easy_novels": 0.05, "novels": 0.05, "shakespeare": 0.02, "python": 0.03}
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
ASSISTANT, STOPS = 5, (1, 2)  # ids of the built-in tokenizer


@dataclass(frozen=True)
class Samples:
    """tokens [N, LENGTH] uint16, valid lengths [N], best next ids and log shares [N, LENGTH, BEST]."""

    tokens: np.ndarray
    lengths: np.ndarray
    best: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def load(cls, file: Path) -> Samples:
        return cls(**dict(np.load(file)))


class Cache:
    """Keys and values of equally long rows, [rows, kv_heads, LENGTH, dim] for each layer."""

    def __init__(self, model: Llama, num_rows: int, length: int) -> None:
        shape, dtype = model.shape, model.norm.weight.dtype
        size = (num_rows, shape.num_key_value_heads, length, shape.head_dim)
        self.keys = [torch.zeros(size, dtype=dtype) for _ in range(shape.num_hidden_layers)]
        self.values = [torch.zeros(size, dtype=dtype) for _ in range(shape.num_hidden_layers)]
        self.length = 0


def forward(model: Llama, ids: Tensor, cache: Cache) -> Tensor:
    """Logits [rows, new, V] in float32 of tokens that follow what the cache holds."""
    rows, new = ids.shape
    shape, start, end = model.shape, cache.length, cache.length + ids.shape[1]
    x = model.embed_tokens(ids)
    cos, sin = model.cos[start:end].to(x.dtype), model.sin[start:end].to(x.dtype)
    group = shape.num_attention_heads // shape.num_key_value_heads
    for i, layer in enumerate(model.layers):
        h = layer.input_layernorm(x)
        a = layer.self_attn
        q, k, v = (p(h).view(rows, new, -1, shape.head_dim).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
        cache.keys[i][:, :, start:end] = rotate(k, cos, sin)
        cache.values[i][:, :, start:end] = v
        q = rotate(q, cos, sin).reshape(rows, -1, group * new, shape.head_dim)  # queries of one kv head side by side
        scores = q @ cache.keys[i][:, :, :end].transpose(-1, -2) * shape.head_dim**-0.5
        if new > 1:
            future = torch.full((new, end), float("-inf"), dtype=x.dtype).triu(start + 1)
            scores = scores + future.repeat(group, 1)
        y = scores.softmax(-1) @ cache.values[i][:, :, :end]
        y = y.view(rows, -1, new, shape.head_dim).transpose(1, 2).reshape(rows, new, -1)
        x = x + a.o_proj(y)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    cache.length = end
    return F.linear(model.norm(x), model.embed_tokens.weight).float()


def continued(model: Llama, prompts: Tensor, temperatures: Tensor, length: int, generator: torch.Generator) -> Samples:
    """Prompts [rows, n] gone on with up to `length` tokens."""
    rows, n = prompts.shape
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    tokens[:, :n] = prompts
    best = torch.zeros(rows, length, BEST, dtype=torch.int64)
    logprobs = torch.zeros(rows, length, BEST)
    lengths = torch.full((rows,), length)
    running = torch.ones(rows, dtype=torch.bool)
    cache = Cache(model, rows, length)
    ids, at = prompts, 0
    while running.any() and at < length:
        logits = forward(model, ids, cache).log_softmax(-1)
        new = ids.shape[1]
        logprobs[:, at : at + new], best[:, at : at + new] = logits.topk(BEST)
        at += new
        if at >= length:
            break
        last = logits[:, -1]
        noise = torch.empty_like(last).exponential_(generator=generator).log_()
        chosen = (last - temperatures[:, None] * noise).argmax(-1)  # Gumbel's: the likeliest at temperature 0
        tokens[:, at] = chosen
        ended = running & torch.isin(chosen, torch.tensor(STOPS))
        lengths[ended] = at + 1
        running &= ~ended
        ids = chosen[:, None]
    return Samples(
        tokens.numpy().astype(np.uint16), lengths.numpy(), best.numpy().astype(np.uint16),
        logprobs.numpy().astype(np.float16),
    )  # fmt: skip


@torch.inference_mode()
def judged(model: Llama, other: Samples, most: int = 1 << 30, num_rows: int = 32) -> Samples:
    """The first rows of another target, `most` at most, with this one's likeliest next tokens."""
    other = Samples(other.tokens[:most], other.lengths[:most], other.best[:most], other.logprobs[:most])
    best, logprobs = np.zeros_like(other.best), np.full_like(other.logprobs, -100)
    order = np.argsort(other.lengths, kind="stable")
    for at in range(0, len(order), num_rows):
        rows = order[at : at + num_rows]
        length = int(other.lengths[rows].max())
        ids = torch.from_numpy(other.tokens[rows, :length].astype(np.int64))
        values, names = model(ids).float().log_softmax(-1).topk(BEST)
        best[rows, :length], logprobs[rows, :length] = names.numpy(), values.numpy()
    return Samples(other.tokens, other.lengths, best, logprobs)


def prompts_of(arrays: dict[str, np.ndarray], name: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Beginnings of documents; of a conversation, up to where the assistant speaks."""
    tokens, starts = arrays[f"{name}.tokens"], arrays[f"{name}.starts"]
    result = []
    for i in rng.integers(0, len(starts) - 1, count):
        document = tokens[starts[i] : starts[i + 1]]
        if name == "chat":
            at = np.flatnonzero(document[: LENGTH // 2] == ASSISTANT)
            if len(at):
                result.append(document[: rng.choice(at) + 1])
        elif len(document) > 64:
            result.append(document[: rng.choice([4, 8, 12, 16, 24, 32, 48, 64])])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("tokens", type=Path, help="tokens.npz of a training run")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--texts", type=Path, help="samples of another target with the same tokenizer")
    parser.add_argument("--text-rows", type=int, default=1 << 30, help="rows of them at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.target).bfloat16().eval().requires_grad_(False)
    arrays, rng = dict(np.load(args.tokens)), np.random.default_rng(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    groups: dict[int, list[np.ndarray]] = {}
    for name, share in SHARES.items():
        if f"{name}.tokens" in arrays:
            for prompt in prompts_of(arrays, name, round(args.rows * share), rng):
                groups.setdefault(len(prompt), []).append(prompt)
    batches = [np.stack(g[i : i + BATCH]) for g in groups.values() for i in range(0, len(g), BATCH)]
    batches = [b for b in batches if len(b) >= 16]
    parts, began = [judged(model, Samples.load(args.texts), args.text_rows)] if args.texts else [], time.perf_counter()
    for i in rng.permutation(len(batches)):
        prompts = torch.from_numpy(batches[i].astype(np.int64))
        temperatures = torch.tensor(TEMPERATURES)[torch.arange(len(prompts)) % len(TEMPERATURES)]
        with torch.inference_mode():
            parts.append(continued(model, prompts, temperatures, LENGTH, generator))
        minutes = (time.perf_counter() - began) / 60
        if len(parts) % 5 == 0:
            num_tokens = sum(int(p.lengths.sum()) for p in parts)
            print(f"{len(parts)} of {len(batches)} batches, {num_tokens} tokens, {minutes:.1f} minutes", flush=True)
        if minutes > args.minutes:
            break
    names = ("tokens", "lengths", "best", "logprobs")
    np.savez(args.out, **{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


if __name__ == "__main__":
    main()
