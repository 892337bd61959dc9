"""`python -m bench.tape MODEL`: where the time of a step goes, operator by operator, beside the limits of the machine.

Fills the program with `--rows` sequences of one row each (or `--prompt` rows of one sequence) at position `--context`,
and times every record of the tape. `--dump` prints the records. `--calls` measures what Python costs: each record as a
call of its own against the tape's one call. Prints a table, or JSON lines for `bench.record`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

from rich.console import Console
from rich.table import Table

from headrace.backends.cpu.program import TapedProgram
from headrace.backends.cpu.tape import OpTime
from headrace.backends.native import require_native
from headrace.backends.step import Chunks
from headrace.engine.library.load import build_runner
from headrace.protocol.config import EngineConfig


def fill(program: TapedProgram, rows: int, prompt: int, context: int) -> list[int]:
    """Inputs of a step: `prompt` rows of one sequence, or `rows` sequences with one each. -> dims."""
    size = program.block_size
    if prompt:
        table = [i % program.num_blocks for i in range(-(-(context + prompt) // size))]
        chunks = Chunks([context], [[7] * prompt], [table])
    else:
        each = -(-(context + 1) // size)
        tables = [[(s * each + i) % program.num_blocks for i in range(each)] for s in range(rows)]
        chunks = Chunks([context] * rows, [[7]] * rows, tables)
    ends = itertools.accumulate(map(len, chunks.token_ids))
    return program.fill(chunks.all_read(), [end - 1 for end in ends])


def by_kind(times: list[OpTime]) -> dict[str, tuple[int, float, int, int]]:
    """Number of records, seconds, bytes of weights and operations, by operator and matrix."""
    kinds: dict[str, tuple[int, float, int, int]] = {}
    for t in times:
        name = t.op + (f" {t.note.rsplit('.', 1)[-1]}" if t.note else "")
        count, seconds, read, ops = kinds.get(name, (0, 0.0, 0, 0))
        kinds[name] = (count + 1, seconds + t.seconds, read + t.read_bytes, ops + t.num_ops)
    return kinds


def best_limits(num_threads: int) -> dict[str, float]:
    """What the machine can do, measured now by its best instructions: bytes/s of read, operations/s of int8 and f32."""
    best: dict[str, float] = {}
    for row in require_native().limits(num_threads, 0.5):
        best[row["what"]] = max(best.get(row["what"], 0.0), row["rate"])
    return best


def show(kinds: dict[str, tuple[int, float, int, int]], limits: dict[str, float], title: str) -> None:
    total = sum(seconds for _, seconds, _, _ in kinds.values())
    table = Table(title=title)
    for heading in ("operator", "records", "ms", "share", "GB/s", "of read limit", "TOPS", "of int8 limit"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for name, (count, seconds, read, ops) in sorted(kinds.items(), key=lambda entry: -entry[1][1]):
        rate, tops = read / seconds / 1e9, ops / seconds / 1e12
        of_read = f"{100 * rate / (limits['read'] / 1e9):.0f}%" if read else ""
        of_int8 = f"{100 * tops / (limits['int8'] / 1e12):.0f}%" if read and limits.get("int8") else ""
        cells = [f"{1e3 * seconds:.3f}", f"{100 * seconds / total:.1f}%", f"{rate:.1f}" if read else "", of_read]
        table.add_row(name, str(count), *cells, f"{tops:.3f}" if read else "", of_int8)
    table.add_row("all", str(sum(count for count, *_ in kinds.values())), f"{1e3 * total:.3f}", "100%")
    Console(width=130).print(table)


def calls(program: TapedProgram, dims: list[int], repeats: int) -> dict[str, float]:
    """Seconds of a step as one call, and as one call for each record: the difference is Python and the binding."""
    tape, one, many = program.tape, [], []
    for _ in range(repeats):
        start = time.perf_counter()
        tape.run(dims)
        one.append(time.perf_counter() - start)
        start = time.perf_counter()
        for i in range(len(tape.nodes)):
            tape.run_range(i, i + 1, dims)
        many.append(time.perf_counter() - start)
    return {"one_call_s": statistics.median(one), "call_per_record_s": statistics.median(many)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tape", description=__doc__)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--rows", type=int, default=1, help="sequences of one row (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=0, help="rows of one prompt instead")
    parser.add_argument("--context", type=int, default=128, help="positions before them (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dump", action="store_true")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        backend="cpu",
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        num_threads=args.threads,
        activations=args.activations,
    )
    program = build_runner(config)[0].program
    if not isinstance(program, TapedProgram):
        raise SystemExit("this model does not run on the tape")
    dims = fill(program, args.rows, args.prompt, args.context)
    if args.dump:
        print("\n".join(program.tape.dump()))
    program.tape.run(dims)
    limits = best_limits(args.threads)
    facts = {"model": args.model, "quantization": args.quantization, "rows": dims[0], "context": args.context}
    if args.calls:
        print(json.dumps({"bench": "calls", **facts, **calls(program, dims, args.repeats * 5)}))
        return
    kinds = by_kind(program.tape.profile(dims, args.repeats, args.threads))
    if args.json:
        for name, (count, seconds, read, ops) in kinds.items():
            row = {"op": name, "records": count, "seconds": seconds, "read_bytes": read, "ops": ops}
            print(json.dumps({"bench": "tape", **facts, **row, "limits": limits}))
    else:
        show(kinds, limits, f"{args.model} {args.quantization or ''} {dims[0]} rows at {args.context}")


if __name__ == "__main__":
    main()
