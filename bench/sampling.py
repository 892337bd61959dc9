"""`python -m bench.sampling`: what it costs to sample `--rows` rows of `--vocab` logits, by kind of request.

Logits are normal with a deviation of 3, one draw for all runs; each row has a history of `--history` tokens. Beside
each time is the same with the selection in numpy, which gives the same tokens. Least of `--repeats` runs: whatever
else the machine does only adds. "cpu" is the processor time of all threads, which a busy machine lengthens less.
Prints a table, or JSON lines with `--json`.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.backends.cpu.choose import Chooser
from headrace.protocol.params import SamplingParams
from headrace.runner.drawing import NativeSelect
from headrace.sampling.sampler import Drawn, Row, Sampler

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "top_k 40": {"top_k": 40},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 40, top_p 0.9": {"top_k": 40, "top_p": 0.9},
    "penalties, top_k 40, top_p 0.9": {**PENALTIES, "top_k": 40, "top_p": 0.9},
    "penalties, DRY, min_p 0.05": {**PENALTIES, "dry_multiplier": 0.8, "min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
    "mirostat 2": {"mirostat": 2},
    "min_p 0.05, adaptive_p 0.3": {"min_p": 0.05, "adaptive_target": 0.3},
    "watermark, top_k 40": {"watermark": True, "top_k": 40},
    "temperature only": {},
}


def least(sampler: Sampler, logits: np.ndarray, rows: list[Row], repeats: int) -> tuple[float, float, list[int]]:
    """Seconds and processor seconds of the quickest of `repeats` calls, and the tokens."""
    best = work = float("inf")
    token_ids: list[int] = []
    for _ in range(repeats):
        start, started = time.perf_counter(), time.process_time()
        draws = sampler.sample_rows(logits, rows)
        best, work = min(best, time.perf_counter() - start), min(work, time.process_time() - started)
        token_ids = [each.token_id for each in draws if isinstance(each, Drawn)]
    return best, work, token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--history", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="0: the thread team's default")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (args.rows, args.vocab)).astype(np.float32)
    histories = rng.zipf(1.3, (args.rows, args.history)) % args.vocab
    plain = Sampler(args.vocab, [2])
    native = Sampler(args.vocab, [2], NativeSelect(Chooser(args.vocab, args.threads)))
    table = Table(title=f"{args.rows} rows of {args.vocab} logits, {args.history} tokens before: ms")
    for heading in ("request", "native", "cpu", "numpy"):
        table.add_column(heading, justify="left" if heading == "request" else "right")
    for name, fields in CASES.items():
        params = SamplingParams(seed=1, **fields)  # type: ignore[arg-type]
        rows = [
            Row(params, args.history, 16, history.tolist(), best=int(x.argmax()))
            for history, x in zip(histories, logits, strict=True)
        ]
        (fast, work, token_ids), (slow, _, same) = (least(each, logits, rows, args.repeats) for each in (native, plain))
        if token_ids != same:
            raise SystemExit(f"{name}: native and numpy do not agree")
        table.add_row(name, f"{1e3 * fast:.2f}", f"{1e3 * work:.2f}", f"{1e3 * slow:.2f}")
        if args.json:
            times = {"native_ms": 1e3 * fast, "native_cpu_ms": 1e3 * work, "numpy_ms": 1e3 * slow}
            print(json.dumps({"case": name, "rows": args.rows, "vocab": args.vocab} | times))
    if not args.json:
        Console().print(table)


if __name__ == "__main__":
    main()
