"""`python -m bench.compare`: headrace beside other engines on this machine, the same work for each, in turn.

Makes the peers' environments and models under --work the first time (an hour or two), then measures, prints the table,
and writes bench/results/compare-<model>.json and docs/figures/compare-<model>.svg.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import record
from bench.compare import figures, plan, report
from bench.compare.conductor import Conductor, Journal
from bench.compare.environments import PEERS, ROOT, SetupError, Workshop
from bench.compare.plan import WORKS, Contender
from bench.compare.shapes import SHAPES
from headrace import doctor

QUICK_MINUTES = 9.0
NUM_TRIES = 3


def names(text: str, known: Iterable[str], what: str) -> list[str]:
    """A comma list of known names. Raises SystemExit for another."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    listed = list(known)
    if bad := [name for name in chosen if name not in listed]:
        raise SystemExit(f"{what}: {bad[0]!r} is none of {', '.join(listed)}")
    return chosen or listed


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    options.add_argument("--work", type=Path, default=Path("~/.cache/headrace/compare"), help="work folder, some 30 GB")
    options.add_argument("--peers", default="", help=f"comma list of {', '.join(PEERS)} (default: all)")
    options.add_argument("--models", default="", help=f"comma list of {', '.join(SHAPES)} (default: all)")
    options.add_argument("--works", default="", help=f"comma list of {', '.join(WORKS)} (default: all)")
    options.add_argument("--rounds", type=int, help="rounds of each work (default: 3; quick: 1 to 3)")
    options.add_argument(
        "--quick", action="store_true", help="the fastest peers of earlier runs alone, within 10 minutes"
    )
    options.add_argument(
        "--fastest", action="store_true", help="every row, beside the fastest peers of earlier runs alone"
    )
    options.add_argument("--minutes", type=float, help=f"stop measuring after so long (quick: {QUICK_MINUTES})")
    options.add_argument("--setup-only", action="store_true", help="make environments and models, measure nothing")
    options.add_argument("--resume", action="store_true", help="go on with the last run, if it was of this commit")
    options.add_argument("--report", action="store_true", help="measure nothing: table, plot and JSON of the last run")
    options.add_argument(
        "--no-save", action="store_true", help="print the table alone, write nothing into the repository"
    )
    return options


def set_up(
    workshop: Workshop, who: Mapping[tuple[str, str], Sequence[Contender]], say: Any
) -> dict[tuple[str, str, str], str]:
    """Make environments and models of the contenders, each once. Returns the failures by (peer, shape, quant)."""
    failed: dict[tuple[str, str, str], str] = {}
    broken: dict[str, str] = {}
    models = dict.fromkeys((c.peer, shape, c.quant) for (shape, _), listed in who.items() for c in listed)
    for shape in dict.fromkeys(shape for _, shape, _ in models):
        workshop.source(SHAPES[shape])
    for peer, shape, quant in models:
        try:
            if peer in broken:
                raise SetupError(broken[peer])
            try:
                workshop.install(PEERS[peer])
            except SetupError as error:
                broken[peer] = str(error)
                raise
            workshop.convert(PEERS[peer], SHAPES[shape], quant)
        except SetupError as error:
            failed[peer, shape, quant] = str(error)
            say(f"{peer} {quant} {shape} is left out: {error}")
    return failed


def latest(workshop: Workshop) -> Path:
    journals = sorted((workshop.folder / "results").glob("*.jsonl"))
    if not journals:
        raise SystemExit("there is no earlier run")
    return journals[-1]


def head() -> dict[str, Any]:
    """What identifies a run: its command, date, commit and machine."""
    machine = doctor.examine()
    return {
        "command": shlex.join(["python", "-m", "bench.compare", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": record.commit(),
        "host": {name: machine[name] for name in ("cpu", "memory", "torch", "versions")},
    }


def opened(args: argparse.Namespace, workshop: Workshop) -> Journal:
    """The journal to write, or to report. Raises SystemExit if the last run can not be gone on with."""
    if args.report or args.resume:
        journal = Journal(latest(workshop))
        about = next((sample for sample in journal.samples if sample.get("work") == "run"), None)
        if about is None:
            raise SystemExit(f"{journal.path} has no beginning")
        if args.resume and about["head"]["commit"] != record.commit():
            raise SystemExit(f"the last run is of commit {about['head']['commit']}: begin a new one")
        return journal
    journal = Journal(workshop.folder / "results" / time.strftime("%Y%m%d-%H%M%S.jsonl"))
    pins = {peer.name: [word for words in peer.installs for word in words if "=" in word] for peer in PEERS.values()}
    journal.add({"work": "run", "head": head() | {"peers": pins, "quick": args.quick}})
    return journal


def measure(args: argparse.Namespace, workshop: Workshop, say: Any) -> Journal:
    shapes = names(args.models, SHAPES, "--models")
    works = names(args.works, WORKS, "--works")
    table = plan.QUICK if args.quick else plan.FASTEST if args.fastest else plan.FULL
    who = plan.contenders(table, shapes, works, names(args.peers, PEERS, "--peers"))
    failed = set_up(workshop, who, say)
    if args.setup_only:
        raise SystemExit(1 if failed else 0)
    journal = opened(args, workshop)
    for (peer, shape, quant), reason in failed.items():
        journal.add({"shape": shape, "work": "setup", "peer": peer, "quant": quant, "round": 0, "error": reason})
    able = {
        (shape, work): tuple(c for c in listed if (c.peer, shape, c.quant) not in failed)
        for (shape, work), listed in who.items()
    }
    minutes = args.minutes if args.minutes is not None else QUICK_MINUTES if args.quick else None
    conductor = Conductor(
        workshop,
        journal,
        say,
        measure_seconds=120.0 if args.quick else 600.0,
        num_tries=NUM_TRIES,
        quiet_seconds=3.0 if args.quick or args.fastest else 60.0,
        budget_seconds=None if minutes is None else minutes * 60,
    )
    rounds = (lambda work: args.rounds) if args.rounds else (lambda work: WORKS[work].rounds if args.quick else 3)
    conductor.run(plan.turns({k: v for k, v in able.items() if v}, rounds, shapes_apart=not args.quick))
    return journal


def main() -> None:
    args = parser().parse_args()
    # Ends as Ctrl-C does, so that no worker is left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=None if sys.stdout.isatty() else 200)
    begin = time.monotonic()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    workshop = Workshop(args.work.expanduser().resolve(), say)
    journal = opened(args, workshop) if args.report else measure(args, workshop, say)
    about = next(sample["head"] for sample in journal.samples if sample.get("work") == "run")
    cpu = about["host"]["cpu"]
    # Two threads of one core have its units between them. (A virtual machine may not be told.)
    each = cpu["cores_logical"] // (cpu["cores_physical"] or cpu["cores_logical"])
    threads = f"{cpu['cores_allowed']} threads, {each} on a core"
    where = f"{cpu['name']}, {threads}, commit {about['commit']}, {about['date']}"
    for shape in SHAPES.values():
        if not figures.tallies(journal.samples, shape.name):
            continue
        report.show(console, shape, journal.samples, where)
        if args.no_save:
            continue
        result = report.as_json(shape, journal.samples, about)
        say(f"{report.save(record.RESULTS, shape, result).relative_to(ROOT)}")
        path = ROOT / "docs" / "figures" / f"compare-{shape.name}.svg"
        if report.plot(shape, journal.samples, where, path):
            say(f"{path.relative_to(ROOT)}")
    say(f"{(time.monotonic() - begin) / 60:.1f} minutes; every sample: {journal.path}")


if __name__ == "__main__":
    main()
