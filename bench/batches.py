"""`python -m bench.batches`: decode speed by batch size, one engine, interleaved. Prints JSON lines for `bench.record`.

All requests of a batch start together. A round runs every batch size once, so that a busy moment of the machine falls
on all of them alike. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics

from headrace import LLM, SamplingParams
from headrace.text.outputs import RequestOutput


def figures(outputs: list[RequestOutput]) -> tuple[float, float]:
    """Output tokens per second of a batch, and milliseconds between two tokens of one request (median)."""
    times = [output.metrics for output in outputs if output.metrics is not None]
    starts = [t.first_scheduled_time for t in times if t.first_scheduled_time is not None]
    ends = [t.finished_time for t in times if t.finished_time is not None]
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    gaps = [
        1e3 * t.decode_time / (len(output.outputs[0].token_ids) - 1)
        for t, output in zip(times, outputs, strict=True)
        if t.decode_time is not None
    ]
    return num_tokens / (max(ends) - min(starts)), statistics.median(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model)
    seen: dict[int, list[tuple[float, float]]] = {size: [] for size in args.batch_sizes}
    for turn in range(args.rounds + 1):
        for size in args.batch_sizes:
            # Prompts that never come again: the prefix cache has nothing to give.
            prompts = [
                {"prompt_token_ids": [3 + (turn * 7919 + size * 131 + i * 17 + p) % 200 for p in range(args.input_len)]}
                for i in range(size)
            ]
            params = SamplingParams(temperature=0.8, seed=turn, max_tokens=args.output_len, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if turn:  # the first round warms up
                seen[size].append(figures(outputs))
    for size, pairs in seen.items():
        speeds, gaps = zip(*pairs, strict=True)
        row = {"batch_size": size, "tokens_per_s": statistics.median(speeds), "tpot_ms": statistics.median(gaps)}
        print(json.dumps({"bench": "batches", "model": args.model, "rounds": args.rounds, **row}))
    llm.close()


if __name__ == "__main__":
    main()
