"""`python -m bench.beams`: what a beam search holds of the KV cache, shared and unshared, by its width.

One prompt, one search after the other, on a cold cache. "Shared" is the most blocks that the beams held at once; each
beam with blocks of its own would have held those under "unshared" at that same length. The seconds are of whole
searches, prompt included, and the least of `--repeats`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace import LLM, BeamSearchParams


def measure(llm: LLM, width: int, prompt: list[int], max_tokens: int, repeats: int) -> dict[str, Any]:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    seconds, steps = [], 0
    for _ in range(repeats):
        llm.reset_prefix_cache()
        before, start = llm.get_metrics().num_steps, time.perf_counter()
        (output,) = llm.beam_search([prompt], params)
        seconds.append(time.perf_counter() - start)
        steps = llm.get_metrics().num_steps - before
    return {
        "width": width,
        "num_prompt_tokens": len(prompt),
        "num_tokens": max_tokens,
        "num_blocks": output.num_blocks,
        "num_blocks_unshared": output.num_blocks_unshared,
        "num_steps": steps,
        "seconds": min(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.beams", description=__doc__)
    parser.add_argument("--model", default="builtin", help="model to search with (default: %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="beams")
    parser.add_argument("--input-len", type=int, default=512, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="searches of each width (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    args = parser.parse_args()
    llm = LLM(args.model, block_size=args.block_size, max_num_seqs=max(args.widths))
    noise = random.Random(0)
    prompt = [noise.randrange(llm.core.info.vocab_size) for _ in range(args.input_len)]
    rows = [measure(llm, width, prompt, args.output_len, args.repeats) for width in args.widths]
    llm.close()
    if args.json:
        for row in rows:
            print(json.dumps({"bench": "beams", "model": args.model, "python": platform.python_version(), **row}))
        return
    title = f"beam search on {args.model}: {args.input_len} + {args.output_len} tokens, blocks of {args.block_size}"
    table = Table(title=title)
    for heading in ("beams", "blocks shared", "unshared", "saved", "search [s]", "a token of a beam [ms]"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['width']}",
            f"{row['num_blocks']}",
            f"{row['num_blocks_unshared']}",
            f"{1 - row['num_blocks'] / row['num_blocks_unshared']:.0%}",
            f"{row['seconds']:.3f}",
            f"{1000 * row['seconds'] / row['width'] / row['num_tokens']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
