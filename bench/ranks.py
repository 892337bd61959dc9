"""`python -m bench.ranks MODEL`: a step by one process of two threads, and by two ranks of one thread each, in turn.

All are loaded at once and bound to the same two processors; rounds of a few steps alternate between them, so that all
see the same machine. A row each for sequences of one row at `--context`, but for 512, which are 8 chunks of a prompt.
With `--mixture SHAPE` the model is a mixture of random codes, some layers of a shape of `bench.mixture_files`, and
ranks with whole experts are measured too. With `--pipeline` the ranks have layers instead of columns. Beside columns it
measures what a gather costs, over the memory that ranks of one host share, and where torch is installed over gloo, as
ranks of several hosts have it, on the loopback interface. Prints JSON lines for `bench.record`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.mixture_files import SHAPES, write
from bench.tied import tied
from headrace.backends.step import Chunks
from headrace.engine.library.load import build_runner
from headrace.parallel import pipeline
from headrace.protocol.config import EngineConfig

CHUNKS_OF_PROMPT = 8
SLOT_BYTES = 4 * 2**20
LINE = "gather-us"
VOCABULARY = 8192
"""Of a mixture: the head is not what is measured."""


def chunks_of(rows: int, context: int, block_size: int) -> tuple[Chunks, list[int]]:
    """The inputs of a step, and the rows of its logits. The tokens differ, so that rows choose experts of their own."""
    num = rows if rows <= 128 else CHUNKS_OF_PROMPT
    each = rows // num
    per = -(-(context + each) // block_size)
    tables = [list(range(s * per, (s + 1) * per)) for s in range(num)]
    token_ids = [[(7 + 31 * (s * each + i)) % 997 for i in range(each)] for s in range(num)]
    return Chunks([context] * num, token_ids, tables), [each * (s + 1) - 1 for s in range(num)]


def seconds(program: Any, chunks: Chunks, rows: list[int], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        program.forward(chunks, rows)
        times.append(time.perf_counter() - start)
    return times


def programs(args: argparse.Namespace, cpus: list[int]) -> dict[str, Any]:
    """The programs, each with its blocks."""
    by_name: dict[str, Any] = {}
    for name in ("threads", "ranks", "whole_experts")[: 3 if args.mixture else 2]:
        ranks = 1 if name == "threads" else args.ranks
        os.sched_setaffinity(0, cpus)
        config = EngineConfig(
            model=args.model, backend="cpu", quantization=args.quantization,
            tensor_parallel_size=1 if args.pipeline else ranks, pipeline_parallel_size=ranks if args.pipeline else 1,
            num_threads=args.ranks if ranks == 1 else 1, num_gpu_blocks_override=args.blocks, max_num_seqs=128,
            skip_tokenizer_init=True, max_model_len=args.max_model_len, enable_expert_parallel=name == "whole_experts",
        )  # fmt: skip
        by_name[name] = build_runner(config, lambda done, total: None)[0].program
    return by_name


def measure(args: argparse.Namespace) -> None:
    cpus = sorted(os.sched_getaffinity(0))[: args.ranks]
    by_name = programs(args, cpus)
    for rows in args.rows:
        chunks, logits = chunks_of(rows, args.context, by_name["threads"].block_size)
        times: dict[str, list[float]] = {name: [] for name in by_name}
        repeats = max(2, args.repeats // (1 + rows // 32))
        for turn in range(args.rounds + 1):
            for name, program in by_name.items():
                # The thread that calls is where its ranks expect it, or free to leave the others' processors.
                os.sched_setaffinity(0, cpus if name == "threads" else cpus[:1])
                durations = seconds(program, chunks, logits, repeats)
                if turn:  # the first round fills the caches
                    times[name] += durations
        row = {
            name: {"median_ms": 1e3 * statistics.median(durations), "least_ms": 1e3 * min(durations)}
            for name, durations in times.items()
        }
        shares = {
            f"speed_of_{name}": round(row["threads"]["median_ms"] / figures["median_ms"], 3)
            for name, figures in row.items()
            if name != "threads"
        }
        facts = {"model": args.mixture or args.model, "quantization": args.quantization, "num_ranks": args.ranks}
        facts |= {"layers": args.layers} if args.mixture else {}
        if args.pipeline:
            facts["pieces"] = pipeline.num_pieces(rows, args.ranks)
        print(
            json.dumps({"bench": "ranks", **facts, "rows": rows, "context": args.context, **row, **shares}), flush=True
        )
    for program in by_name.values():
        program.close()
    os.sched_setaffinity(0, cpus)


def meeting(kind: str, rank: int, where: str) -> Any:
    """Where the gathers of two ranks meet: in the memory whose descriptor is `where`, or over gloo, whose port is in
    that file."""
    from headrace.backends.native import require_native
    from headrace.parallel.gloo import GlooRanks

    if kind == "memory":
        return require_native().Ranks(int(where), rank, 2, SLOT_BYTES, 10.0, True)
    ranks = GlooRanks(rank, 2, SLOT_BYTES, "lo", 10.0)
    if rank == 0:
        listener = ranks.listen()
        with open(where + ".new", "w") as file:
            file.write(str(listener.getsockname()[1]))
        os.rename(where + ".new", where)
        ranks.connect("127.0.0.1", 0, listener)
        return ranks
    while not os.path.exists(where):
        time.sleep(0.01)
    with open(where) as file:
        ranks.connect("127.0.0.1", int(file.read()))
    return ranks


def gather_seconds(ranks: Any, width: int, repeats: int, rank: int) -> float:
    """Median seconds of a gather of `width` floats."""
    import numpy as np

    from headrace.backends.native import record, require_native

    part = width // 2
    x, out = np.full(part, float(rank), np.float32), np.zeros(width, np.float32)
    spans = np.array([[r, 0, r * part, part] for r in (0, 1)], np.int64)
    tape = require_native().Tape("")
    zeros = dict.fromkeys(
        ("from", "q", "ld_q", "scales", "sums", "ld_s", "to_q", "ld_to_q", "to_scales", "to_sums", "ld_to_s"), 0
    )
    for _ in range(repeats):
        record(
            tape, "gather", dim=0, ranks=ranks.address(), spans=spans.ctypes.data, count=2, width=width,
            x=x.ctypes.data, ld_x=part, out=out.ctypes.data, ld_out=width, group=1, **zeros,
        )  # fmt: skip
    ranks.begin(1)
    tape.run([1, 0, 0], 1)
    nanoseconds = tape.profile([1, 0, 0], 1)
    if out.tolist() != [0.0] * part + [1.0] * part:
        raise SystemExit("a gather gave wrong numbers")
    return float(statistics.median(nanoseconds)) * 1e-9


def gathers(args: argparse.Namespace) -> None:
    """Run both kinds of gathers in two processes, for each width."""
    from headrace.backends.native import require_native

    for kind in ("memory", "gloo"):
        for width in args.widths:
            with tempfile.TemporaryDirectory() as folder:
                memory = os.memfd_create("bench")
                os.ftruncate(memory, require_native().Ranks.bytes(SLOT_BYTES))
                command = [sys.executable, "-m", "bench.ranks", "--gather", kind, "--width", str(width)]
                command += ["--repeats", str(args.gather_repeats)]
                where = str(memory) if kind == "memory" else f"{folder}/store"
                processes = [
                    subprocess.Popen(
                        tied([*command, "--rank", str(rank), "--where", where]),
                        stdout=subprocess.PIPE,
                        text=True,
                        pass_fds=[memory],
                    )
                    for rank in (0, 1)
                ]
                outs = [process.communicate(timeout=300)[0] for process in processes]
                os.close(memory)
            if any(process.returncode for process in processes):
                print(
                    json.dumps({"bench": "gather", "over": kind, "width": width, "error": "it failed; is torch there?"})
                )
                continue
            us = [float(out.split(LINE)[1]) for out in outs]
            print(
                json.dumps({"bench": "gather", "over": kind, "width": width, "median_us": round(max(us), 2)}),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--mixture", choices=SHAPES, help="instead of MODEL")
    parser.add_argument("--layers", type=int, default=4, help="of the mixture (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pipeline", action="store_true", help="ranks have layers instead of columns")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--context", type=int, default=128, help="positions before them (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="steps of one row in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="*", default=[2048, 16384])
    parser.add_argument("--gather-repeats", type=int, default=400)
    parser.add_argument("--gather", choices=["memory", "gloo"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--where", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gather:
        os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[args.rank]])
        duration = gather_seconds(meeting(args.gather, args.rank, args.where), args.width, args.repeats, args.rank)
        print(LINE, 1e6 * duration)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.mixture:
            args.model, args.quantization = f"{folder}/mixture.gguf", None
            shape = SHAPES[args.mixture]
            write(shape._replace(layers=args.layers, vocab=min(shape.vocab, VOCABULARY)), Path(args.model))
        measure(args)
    if not args.pipeline:
        gathers(args)


if __name__ == "__main__":
    main()
