"""`python -m bench.scheduler`: what one `schedule()` + `commit()` costs the host, by number of running sequences.

Steady decode: every sequence computes one token per step, takes a new block each `block_size` steps, and publishes
the full one in the prefix cache; starts are staggered, so each step has its share of that. Mixed: the same, while
one long prompt after another is computed in chunks beside the decoding ones. No executor runs: tokens are made up.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import time
from random import Random

from rich.console import Console
from rich.table import Table

from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, ScheduledBatch, StepResult

BLOCK_SIZE = 16
BUDGET = 2048
LONG_PROMPT = 8192


def request(name: str, rng: Random, num_tokens: int, max_tokens: int) -> Request:
    tokens = [rng.randrange(50_000) for _ in range(num_tokens)]
    return Request(request_id=name, prompt_token_ids=tokens, params=SamplingParams(seed=1, max_tokens=max_tokens))


def result_of(batch: ScheduledBatch, rng: Random) -> StepResult:
    token = rng.randrange(50_000)
    return StepResult(
        step_id=batch.step_id, token_ids=[token + i if sampled else -1 for i, sampled in enumerate(batch.samples)]
    )


def measure(num_seqs: int, num_steps: int, mixed: bool) -> dict[str, float]:
    """Seconds per step of `num_seqs` decoding sequences: median, 99th percentile; and the rows of a step."""
    rng = Random(0)
    length = 64 + num_steps + 64
    blocks = num_seqs * (length // BLOCK_SIZE + 2) + 2 * LONG_PROMPT // BLOCK_SIZE
    scheduler = Scheduler(
        SchedulerOptions(
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs + 1,
            max_num_batched_tokens=max(BUDGET, 2 * num_seqs),
            max_model_len=max(length, LONG_PROMPT + 2),
            long_prefill_token_threshold=512,
            eos_token_ids=[2**40],
            cache_key=b"bench",
        )
    )
    for index in range(num_seqs):
        # Lengths modulo the block size are spread, as they are in service.
        scheduler.add(request(f"decode-{index}", rng, 32 + index % BLOCK_SIZE, length))
    names = itertools.count()

    def step() -> tuple[float, int]:
        if mixed and not scheduler.waiting:
            scheduler.add(request(f"prompt-{next(names)}", rng, LONG_PROMPT, 1))
        start = time.perf_counter()
        batch = scheduler.schedule()
        middle = time.perf_counter()
        result = result_of(batch, rng)
        again = time.perf_counter()
        scheduler.commit(batch, result)
        return middle - start + time.perf_counter() - again, len(batch.token_ids)

    for _ in range(64):
        step()
    # As the engine does after start-up: what is alive now is not worth looking at again.
    gc.collect()
    gc.freeze()
    times, rows = zip(*(step() for _ in range(num_steps)), strict=True)
    gc.unfreeze()
    running = scheduler.stats().num_running
    if running < num_seqs:
        raise RuntimeError(f"{running} of {num_seqs} sequences ran to the end of the measurement")
    scheduler.check()
    return {
        "num_seqs": num_seqs,
        "mixed": mixed,
        "median_us": statistics.median(times) * 1e6,
        "p99_us": statistics.quantiles(times, n=100)[98] * 1e6,
        "per_seq_us": statistics.median(times) / num_seqs * 1e6,
        "rows_per_step": statistics.mean(rows),
        "num_steps": num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 256, 1024], help="running sequences")
    parser.add_argument("--steps", type=int, default=500, help="steps measured for each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    args = parser.parse_args()
    rows = [measure(num, args.steps, mixed) for mixed in (False, True) for num in args.num_seqs]
    if args.json:
        for row in rows:
            print(json.dumps({"bench": "scheduler", "python": platform.python_version(), **row}))
        return
    table = Table(title=f"schedule() + commit(), Python {platform.python_version()}, {args.steps} steps each")
    headings = ("load", "sequences", "median [µs]", "p99 [µs]", "a sequence [µs]", "rows")
    for heading in headings:
        table.add_column(heading, justify="right" if heading != "load" else "left")
    for row in rows:
        table.add_row(
            "decode + long prompts" if row["mixed"] else "decode",
            f"{row['num_seqs']:,}",
            f"{row['median_us']:.1f}",
            f"{row['p99_us']:.1f}",
            f"{row['per_seq_us']:.2f}",
            f"{row['rows_per_step']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
