"""Bits per byte of a Llama directory (Hugging Face layout, tied embeddings) on text files: lower is better.

python training/evaluate.py MODEL some.txt other.txt
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from model import Llama, load_model


@torch.inference_mode()
def bits_per_byte(model: Llama, tokenizer: Tokenizer, text: str, window: int = 0) -> float:
    """Every token is scored once, with at least half a window of context before it (less at the start of the text)."""
    window = window or model.shape.max_position_embeddings
    ids = torch.tensor(tokenizer.encode(text).ids)
    nats, scored = 0.0, 1  # the first token is the begin-of-text token, which is given
    while scored < len(ids):
        start = max(0, scored - window // 2)
        end = min(start + window, len(ids))
        logits = model(ids[None, start : end - 1])[0].float()
        nats += F.cross_entropy(logits[scored - start - 1 :], ids[scored:end], reduction="sum").item()
        scored = end
    return nats / math.log(2) / len(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="bits per byte of a Llama directory on text files")
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--max-bytes", type=int, default=0, help="read only the start of each file (0: all of it)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model), Tokenizer.from_file(str(args.model / "tokenizer.json"))
    for path in args.texts:
        data = path.read_bytes()[: args.max_bytes or None]
        value = bits_per_byte(model, tokenizer, data.decode("utf-8", "ignore"))
        print(f"{value:.4f} bits per byte  {len(data)} bytes  {path}")


if __name__ == "__main__":
    main()
