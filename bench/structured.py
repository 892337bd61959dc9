"""`python -m bench.structured`: what structured output costs, and what jump-ahead gains. Prints JSON lines.

First documents of one schema by the engine: with forced tokens appended without a forward pass, with every token
through the model (the same tokens), and as many tokens of free text. Then masks alone, over the vocabulary of
`--tokenizer` (a file or directory; the model's own if not given): microseconds of each mask of `--documents` walks,
and of the first one, with which a grammar is built. Least of `--rounds` runs: whatever else the machine does only adds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import llguidance

from headrace import LLM, SamplingParams, hub
from headrace.grammar import matchers
from headrace.grammar.compile import build_matcher, compile_grammar
from headrace.grammar.vocabulary import Vocabulary, make_tokenizer
from headrace.protocol.constraints import StructuredOutputs
from headrace.text.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 24},
        "order_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "delivery_status": {"enum": ["waiting for payment", "on its way", "delivered to the customer"]},
        "items_in_the_order": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "product_name": {"type": "string", "maxLength": 16},
                    "number_of_pieces": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["product_name", "number_of_pieces"],
                "additionalProperties": False,
            },
        },
        "is_a_gift": {"type": "boolean"},
    },
    "required": ["customer_name", "order_number", "delivery_status", "items_in_the_order", "is_a_gift"],
    "additionalProperties": False,
}
FORM = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)


def documents(llm: LLM, batch: int, rounds: int) -> dict[str, Any]:
    """Milliseconds for a document with and without jump-ahead, and for as many tokens of free text."""
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=400, structured_outputs=FORM) for seed in range(batch)
    ]
    prompts = ["The order of the day:"] * batch
    in_use = llm.core.executor.matchers  # type: ignore[attr-defined]
    took: dict[str, list[float]] = {"jump": [], "no_jump": [], "free": []}
    texts: dict[str, list[str]] = {}
    figures: dict[str, Any] = {"batch": batch}
    right = matchers.jumps
    for _ in range(rounds):
        for kind in took:
            if kind == "free":
                num = figures["tokens"] // batch
                sampling = [
                    SamplingParams(temperature=0.8, seed=i, max_tokens=num, ignore_eos=True) for i in range(batch)
                ]
            else:
                sampling = params
            matchers.jumps = right if kind == "jump" else (lambda params: False)
            forced, steps, start = in_use.num_forced, llm.core.num_steps, time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            took[kind].append(1e3 * (time.perf_counter() - start) / batch)
            figures[f"steps_{kind}"] = llm.core.num_steps - steps
            texts[kind] = [output.outputs[0].text for output in outputs]
            if kind == "jump":
                figures["tokens"] = sum(len(output.outputs[0].token_ids) for output in outputs)
                figures["forced_share"] = round((in_use.num_forced - forced) / figures["tokens"], 3)
    matchers.jumps = right
    if texts["jump"] != texts["no_jump"]:
        raise SystemExit("jump-ahead changed a document")
    for text in texts["jump"]:
        json.loads(text)
    return figures | {f"ms_per_document_{kind}": round(min(times), 2) for kind, times in took.items()}


def masks(path: Path, num_documents: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a mask, of taking a token in, and of the first mask."""
    tokenizer = Tokenizer.load(path)
    ends = [tokenizer.eos_token_id or 0]
    size = tokenizer.vocab_size
    start = time.perf_counter()
    vocabulary = Vocabulary.of(tokenizer.token_bytes, tokenizer.is_special, size, size, ends)
    ll = make_tokenizer(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False))
    read = time.perf_counter() - start
    built: list[float] = []
    filled: dict[tuple[int, int], float] = {}
    commit_costs: dict[tuple[int, int], float] = {}
    for _ in range(rounds):
        start = time.perf_counter()
        first = build_matcher(ll, compile_grammar(FORM), FORM)
        built.append(time.perf_counter() - start)
        for document in range(num_documents):
            _walk(first.deep_copy(), size, document, filled, commit_costs)
    costs = sorted(1e6 * cost for cost in filled.values())
    return {
        "vocabulary": size,
        "vocabulary_ms": round(1e3 * read, 1),
        "build_ms": round(1e3 * min(built), 2),
        "masks": len(costs),
        "mask_us_median": round(statistics.median(costs), 1),
        "mask_us_p99": round(costs[int(0.99 * len(costs))], 1),
        "mask_us_max": round(costs[-1], 1),
        "take_us_median": round(statistics.median(1e6 * cost for cost in commit_costs.values()), 1),
    }


def _walk(
    matcher: llguidance.LLMatcher,
    size: int,
    seed: int,
    filled: dict[tuple[int, int], float],
    commit_costs: dict[tuple[int, int], float],
) -> None:
    dice = random.Random(seed)
    place = 0
    while not matcher.is_stopped():
        start = time.perf_counter()
        mask = matcher.compute_bitmask()
        middle = time.perf_counter()
        allowed = [8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        token_id = dice.choice([i for i in allowed if i < size])
        begin = time.perf_counter()
        matcher.consume_token(token_id)
        matcher.compute_ff_tokens()
        end = time.perf_counter()
        key = (seed, place)
        filled[key] = min(filled.get(key, 1.0), middle - start)
        commit_costs[key] = min(commit_costs.get(key, 1.0), end - begin)
        place += 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, max_num_seqs=64)
    documents(llm, 1, 1)
    for batch in args.batch_sizes:
        print(json.dumps(documents(llm, batch, args.rounds)), flush=True)
    llm.close()
    print(json.dumps(masks(args.tokenizer or hub.resolve(args.model), args.documents, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
