"""`python -m bench.pairs --against PYTHON [WORK ...]`: two checkouts of headrace, the same work for each in turn.

For a change's before and after. PYTHON is the interpreter of the other checkout, with headrace installed from it
(`make setup` there). In a round each work is measured once on either side, the first side another one each time. A
disturbed sample is measured again and is in no figure (`bench.compare.disturbance`). A ratio is that of one round's two
samples, above 1 where this checkout is faster. Each side runs its own `bench`, so both must know the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare.disturbance import FOREIGN_LIMIT, Sample, is_disturbed, until_undisturbed
from bench.compare.environments import PEERS, ROOT, THREADS, Workshop
from bench.compare.shapes import SHAPES
from bench.compare.workers import Watch, Worker, WorkerError, wait_until_quiet
from bench.formats import LEVELS, gguf_file
from bench.tied import tied
from headrace import hub

NUM_TRIES = 3
NUM_STARTS = 7
"""Starts of a process in one sample, which is their median."""
LEAST_SECONDS = 1.0
"""The engine runs for so long in one sample, which is the median: CPU time of others is counted in steps of 10 ms."""
SECONDS = 600.0
"""The longest answer of a process."""
STARTS = {
    "import": ["-c", "import headrace"],
    "version": ["-m", "headrace", "--version"],
    "help": ["-m", "headrace", "--help"],
}
SCHEDULER = ["-m", "bench.scheduler", "--json", "--num-seqs", "256", "--steps", "300"]
ENGINE = ("decode", "prefill512", "batch8", "batch32")
WORKS = ("startup", "scheduler", *ENGINE)

Values = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two checkouts: its name in the table, its interpreter and its root folder."""

    name: str
    python: str
    root: Path


@dataclasses.dataclass(frozen=True)
class Pair:
    """One line of the table: medians of both sides, the ratio of each round that has both, and disturbed samples."""

    work: str
    unit: str
    this: float | None
    against: float | None
    ratios: tuple[float, ...]
    num_disturbed: tuple[int, int]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None


def unit_of(name: str) -> str:
    """ms, µs or tok/s; the first two are better when lower."""
    return {"startup": "ms", "scheduler": "µs"}.get(name.partition(" ")[0], "tok/s")


def side_of(name: str, python: str) -> Side:
    """The checkout that an interpreter imports headrace from. Raises SystemExit if there is none."""
    code = "import headrace, pathlib; print(pathlib.Path(headrace.__file__).resolve().parents[2])"
    process = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"--against: {python} can not import headrace: {process.stderr.strip().splitlines()[-1:]}")
    root = Path(process.stdout.strip())
    if not (root / "bench" / "peers").is_dir():
        raise SystemExit(f"--against: {python} has headrace from {root}, which is no checkout; make setup makes one")
    return Side(name, python, root)


class Bench:
    """Measures works on sides. The engine works have one process for each side, which stays loaded.

    Args:
        model: a directory that `headrace.LLM` takes.
        shape: its name and `vocab` the number of its tokens, for `bench.peers.protocol`.
        quant: a value of `--quantization`, or "none".
        file: of weights that are loaded in place of the directory's.
        quiet_seconds: the longest wait for a quiet moment before each sample.
    """

    def __init__(
        self, model: Path, shape: str, vocab: int, quant: str, log: Path, quiet_seconds: float, file: Path | None = None
    ) -> None:
        self._job = {"do": "work", "shape": shape, "vocab": vocab, "source": str(model), "model": str(file or model)}
        self._job |= {"quant": quant, "threads": THREADS, "max_len": 1024}
        self._log = log
        self._quiet_seconds = quiet_seconds
        self._workers: dict[str, Worker] = {}

    def measure(self, work: str, side: Side) -> dict[str, Any]:
        """One sample: figures by name as "values", and the share that others took as "foreign". Raises WorkerError."""
        if work in ENGINE:
            worker = self._worker(side)
            return self._watched(lambda: {work: self._median(worker, work)}, worker.process.pid)
        return self._watched(lambda: starts(side) if work == "startup" else scheduler(side))

    def warm(self, work: str, side: Side) -> None:
        """Fill caches: of files and bytecode, or of the engine's process."""
        if work in ENGINE:
            self._reply(self._worker(side), work=work, warm=True)
        elif work == "startup":
            starts(side)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def _worker(self, side: Side) -> Worker:
        if side.name not in self._workers:
            command = [side.python, "-m", f"bench.peers.{PEERS['headrace'].module}", json.dumps(self._job)]
            self._workers[side.name] = Worker(command, environment(), self._log, SECONDS, side.root)
        return self._workers[side.name]

    def _median(self, worker: Worker, work: str) -> float:
        values: list[float] = []
        end = time.perf_counter() + LEAST_SECONDS
        while not values or time.perf_counter() < end:
            values.append(float(self._reply(worker, work=work)["value"]))
        return statistics.median(values)

    def _reply(self, worker: Worker, **command: Any) -> dict[str, Any]:
        reply = worker.ask(SECONDS, **command)
        if "error" in reply:
            raise WorkerError(str(reply["error"]))
        return reply

    def _watched(self, measure: Callable[[], Values], pid: int | None = None) -> dict[str, Any]:
        wait_until_quiet(self._quiet_seconds)
        watch = Watch(pid)
        values = measure()
        return {"values": dict(values), "foreign": round(watch.share(), 4)}


def environment() -> dict[str, str]:
    """Return the variables of every process. Bytecode is kept on both sides, or one would compile at each start."""
    threads = str(THREADS)
    variables = dict(os.environ) | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def output_of(side: Side, words: Sequence[str]) -> str:
    """What a process of the side prints. Raises WorkerError if it fails."""
    process = subprocess.run(
        tied([side.python, *words]), capture_output=True, text=True, cwd=side.root, env=environment()
    )
    if process.returncode:
        raise WorkerError(f"{side.name}: status {process.returncode}: {process.stderr.strip()[-300:]}")
    return process.stdout


def starts(side: Side) -> dict[str, float]:
    """Milliseconds of each command of `STARTS`: the median of `NUM_STARTS` processes."""
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(NUM_STARTS):
        for name, words in STARTS.items():
            begin = time.perf_counter()
            output_of(side, words)
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {f"startup {name}": statistics.median(values) for name, values in times.items()}


def scheduler(side: Side) -> dict[str, float]:
    """Median microseconds of `schedule()` + `commit()`, by load."""
    rows = [json.loads(line) for line in output_of(side, SCHEDULER).splitlines()]
    return {f"scheduler {'mixed' if row['mixed'] else 'decode'}": float(row["median_us"]) for row in rows}


def take_turns(
    works: Iterable[str],
    sides: tuple[Side, Side],
    num_rounds: int,
    measure: Callable[[str, Side], Sample],
    say: Callable[[str], None],
) -> list[Sample]:
    """All samples: each work in turn on both sides, round after round, disturbed ones repeated."""
    listed = list(works)
    samples: list[Sample] = []
    for number in range(num_rounds):
        for work in listed:
            for side in sides if number % 2 == 0 else sides[::-1]:
                for sample in until_undisturbed(lambda work=work, side=side: measure(work, side), NUM_TRIES):  # type: ignore[misc]
                    samples.append({"work": work, "side": side.name, "round": number, **sample})
        say(
            f"round {number + 1} of {num_rounds}: {sum(map(is_disturbed, samples))} of {len(samples)} samples disturbed"
        )
    return samples


def pairs(samples: Iterable[Sample], sides: tuple[Side, Side]) -> list[Pair]:
    """The lines of the table. Disturbed samples are counted, and are in no median and no ratio."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    disturbed: dict[tuple[str, str], int] = {}
    for sample in samples:
        for name, value in sample["values"].items():
            by_round = values.setdefault(name, {side.name: {} for side in sides})[sample["side"]]
            if is_disturbed(sample):
                disturbed[name, sample["side"]] = disturbed.get((name, sample["side"]), 0) + 1
            else:
                by_round[sample["round"]] = float(value)
    lines = []
    for name, by_side in values.items():
        this, against = (by_side[side.name] for side in sides)
        ratios = [this[number] / against[number] for number in sorted(this.keys() & against.keys())]
        if unit_of(name) != "tok/s":
            ratios = [1 / ratio for ratio in ratios]
        medians = [statistics.median(by_round.values()) if by_round else None for by_round in (this, against)]
        counts = (disturbed.get((name, sides[0].name), 0), disturbed.get((name, sides[1].name), 0))
        lines.append(Pair(name, unit_of(name), medians[0], medians[1], tuple(ratios), counts))
    return lines


def table(lines: Sequence[Pair], sides: tuple[Side, Side]) -> Table:
    grid = Table(title=f"{sides[0].root} against {sides[1].root}; a ratio above 1: the first is faster")
    for heading in ("work", "this", "against", "ratio", "pair by pair", "disturbed"):
        grid.add_column(heading, justify="left" if heading == "work" else "right", no_wrap=heading == "work")
    for line in lines:
        medians = ["disturbed" if value is None else f"{value:.4g} {line.unit}" for value in (line.this, line.against)]
        ratio = "–" if line.ratio is None else f"{line.ratio:.3f}"
        each = " ".join(f"{value:.3f}" for value in line.ratios)
        grid.add_row(line.work, *medians, ratio, each, " + ".join(map(str, line.num_disturbed)))
    return grid


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__)
    options.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)} (default: all)")
    options.add_argument("--against", required=True, metavar="PYTHON", help="interpreter of the other checkout")
    options.add_argument("--rounds", type=int, default=7, help="pairs of each work (default: %(default)s)")
    options.add_argument("--model", default="builtin", help=f"builtin, or a shape: {', '.join(SHAPES)}")
    options.add_argument("--quantization", default="", help="default: int4 for a shape, none for builtin")
    options.add_argument("--gguf", default="", metavar="LEVEL", help="a GGUF file of the shape, such as Q4_K_M")
    options.add_argument("--work", type=Path, default=Path("~/.cache/headrace/compare"), help="folder of the shapes")
    options.add_argument(
        "--quiet-seconds", type=float, default=10.0, help="wait for a quiet moment (default: %(default)s)"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object, for bench.record")
    return options


def main() -> None:
    args = parser().parse_args()
    works = args.works or list(WORKS)
    if unknown := [work for work in works if work not in WORKS]:
        raise SystemExit(f"WORK: {unknown[0]!r} is none of {', '.join(WORKS)}")
    if args.rounds < 1:
        raise SystemExit(f"--rounds: {args.rounds} is less than 1")
    if args.model not in ("builtin", *SHAPES):
        raise SystemExit(f"--model: {args.model!r} is none of builtin, {', '.join(SHAPES)}")
    if args.gguf and (args.gguf not in LEVELS or args.model == "builtin" or args.quantization):
        raise SystemExit(
            f"--gguf: {args.gguf!r}, with a shape and without --quantization, is one of {', '.join(LEVELS)}"
        )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    sides = (Side("this", sys.executable, ROOT), side_of("against", args.against))
    if args.model == "builtin":
        model = hub.resolve("builtin")
    else:
        model = Workshop(args.work.expanduser().resolve(), say).checkpoint(SHAPES[args.model])
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    quant = args.quantization or ("none" if args.model == "builtin" or args.gguf else "int4")
    file = gguf_file(SHAPES[args.model], args.gguf) if args.gguf else None
    with tempfile.NamedTemporaryFile(prefix="headrace-pairs-", suffix=".log") as log:
        bench = Bench(model, args.model, vocab, quant, Path(log.name), args.quiet_seconds, file)
        try:
            for work in works:
                for side in sides:
                    bench.warm(work, side)
            samples = take_turns(works, sides, args.rounds, bench.measure, say)
        except WorkerError as error:
            raise SystemExit(f"headrace: {error}") from error
        finally:
            bench.close()
    lines = pairs(samples, sides)
    if args.json:
        result = [dataclasses.asdict(line) | {"ratio": line.ratio} for line in lines]
        print(
            json.dumps(
                {
                    "bench": "pairs",
                    "model": args.model,
                    "gguf": args.gguf,
                    "limit": FOREIGN_LIMIT,
                    "pairs": result,
                    "samples": samples,
                }
            )
        )
        return
    Console(width=None if sys.stdout.isatty() else 180).print(table(lines, sides))


if __name__ == "__main__":
    main()
