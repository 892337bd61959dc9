"""`python -m bench.context MODEL TEXT ...`: the loss by position, which shows how far a model's context reaches.

Prints JSON: for each span of positions the mean loss in nats a token, over the first `--tokens` tokens of each text.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from headrace import LLM, SamplingParams

EDGES = (0, 256, 1024, 2048, 4096, 8192, 16384, 32768)


def losses(llm: LLM, token_ids: list[int]) -> list[float]:
    """Return the loss of each token but the first, in nats."""
    (output,) = llm.generate(
        [{"prompt_token_ids": token_ids}], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    )
    rows = (output.prompt_logprobs or [])[1:]
    return [-row[token_id].logprob for row, token_id in zip(rows, token_ids[1:], strict=True) if row is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description="the loss of a model by position")
    parser.add_argument("model")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    llm = LLM(args.model)
    tokenizer = llm.get_tokenizer()
    rows = [
        losses(llm, tokenizer.encode(path.read_text("utf-8")[: 8 * args.tokens])[: args.tokens]) for path in args.texts
    ]
    edges = [edge for edge in EDGES if edge < args.tokens] + [args.tokens]
    spans = []
    for low, high in itertools.pairwise(edges):
        values = [value for row in rows for value in row[low:high]]
        spans.append({"from": low, "to": high, "nats": round(sum(values) / len(values), 3)})
    print(json.dumps({"model": args.model, "texts": [path.name for path in args.texts], "spans": spans}))


if __name__ == "__main__":
    main()
