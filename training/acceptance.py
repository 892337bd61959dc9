"""How many drafted tokens a target would accept: chains of up to 4 tokens, temperature 0, on held-out stories.

    python training/acceptance.py TARGET DRAFTER [--text FILE]

DRAFTER is a folder of training/drafters.py, or `early_exit:N` for the target's first N layers. Needs no engine: the
target goes on with the beginnings of stories that it was not trained on, one token at a time; then at every place of
its text the drafter drafts four tokens; then the text is walked through as a speculating engine would.

For each k: the share of drafted tokens at each position that were accepted, given that all before were; and the mean
accepted length: tokens per pass of the target, its own token included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from model import Llama, load_model
from samples import STOPS, continued
from speculators import NUM_HEADS, Eagle, Medusa, Mtp, Whole, kept_of, view_of

PROMPT, LENGTH = 24, 224


def load_drafter(name: str, target: Llama) -> nn.Module:
    if name.startswith("early_exit:"):
        return Whole(target, int(name.split(":")[1]))
    directory = Path(name)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    if config["model_type"] == "medusa":
        return Medusa.load(directory, target.shape)
    if config.get("num_nextn_predict_layers"):
        return Mtp.load(directory, target.shape)
    if "draft_vocab_size" in config:
        return Eagle.load(directory, target.shape)
    model = load_model(directory)
    return Whole(model, model.shape.num_hidden_layers)


def target_texts(target: Llama, tokenizer: Tokenizer, text: str, num_prompts: int) -> tuple[Tensor, Tensor]:
    """ids [N, LENGTH] of the target's likeliest continuations, and the rows' lengths."""
    stories = [s for s in text.split("\n\nOnce") if len(s) > 200][:num_prompts]
    prompts = torch.tensor([tokenizer.encode(("Once" + s).removeprefix("OnceOnce")).ids[:PROMPT] for s in stories])
    samples = continued(target, prompts, torch.zeros(len(prompts)), LENGTH, torch.Generator())
    return torch.from_numpy(samples.tokens.astype(np.int64)), torch.from_numpy(samples.lengths)


@torch.inference_mode()
def right_drafts(target: Llama, drafter: nn.Module, ids: Tensor) -> Tensor:
    """[N, LENGTH, 4]: whether the d-th token drafted at each anchor is the target's, whatever came before."""
    result = torch.zeros(*ids.shape, NUM_HEADS, dtype=torch.bool)

    vocabulary = kept_of(drafter)

    def likeliest(logits: Tensor) -> Tensor:
        return logits.argmax(-1) if vocabulary is None else vocabulary[logits.argmax(-1)]

    def chosen(depth: int, logits: Tensor) -> Tensor:
        return torch.cat([ids[:, 1:], ids[:, :1]], 1) if depth < 0 else likeliest(logits)

    for depth, logits in enumerate(drafter.draft(view_of(target, ids), chosen, torch.arange(ids.shape[1]))):
        ends = ids.shape[1] - 2 - depth
        result[:, :ends, depth] = likeliest(logits[:, :ends]) == ids[:, 2 + depth :]
    return result


def walk(right: Tensor, lengths: Tensor, k: int) -> tuple[list[float], float]:
    """Acceptance by position, and tokens per pass."""
    tried, num_accepted, tokens, passes = [0] * k, [0] * k, 0, 0
    for row, length in zip(right.tolist(), lengths.tolist(), strict=True):
        at = PROMPT - 1  # the anchor; the target has sampled the token after it
        while at + 1 + k < length:
            accepted = 0
            for d in range(k):
                tried[d] += 1
                if not row[at][d]:
                    break
                num_accepted[d] += 1
                accepted += 1
            at, tokens, passes = at + accepted + 1, tokens + accepted + 1, passes + 1
    return [b / max(1, a) for a, b in zip(tried, num_accepted, strict=True)], tokens / max(1, passes)


def judged(target: Llama, tokenizer: Tokenizer, text: str, drafters: list[str], num_prompts: int) -> list[str]:
    with torch.inference_mode():
        ids, lengths = target_texts(target, tokenizer, text, num_prompts)
    lines = [f"{len(ids)} prompts, {int(lengths.sum()) - PROMPT * len(ids)} tokens, stops at {STOPS}"]
    for name in drafters:
        drafter = load_drafter(name, target)
        right = right_drafts(target, drafter, ids)
        shares, length = walk(right, lengths, NUM_HEADS)
        size = 0 if ":" in name else sum(p.numel() for p in drafter.parameters())
        each = " ".join(f"{s:.3f}" for s in shares)
        lines.append(f"{name}: {size:,} parameters, accepted by position {each}, mean accepted length {length:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--text", type=Path, required=True, help="held-out stories: validation_stories.txt of a run")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = load_model(args.target).eval(), Tokenizer.from_file(str(args.target / "tokenizer.json"))
    for line in judged(target, tokenizer, args.text.read_text("utf-8"), args.drafters, args.prompts):
        print(line, flush=True)


if __name__ == "__main__":
    main()
