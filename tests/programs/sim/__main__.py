"""`python -m tests.programs.sim`: many seeds of the simulation, on some processes, with a count of what happened.

`--seed N` replays one seed and prints its event log; the digest is the same whenever and wherever it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from functools import partial
from multiprocessing import Pool

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.programs.sim.simulation import Report, Simulation, Violation

from headrace.protocol.errors import HeadraceError

# Each of so many seeds is run twice, and the digests of the two event logs are compared (I-20).
REPLAY_EVERY = 20


def run_seed(seed: int, num_steps: int, keep_log: bool = False) -> Report:
    """One seed; the report has a violation with its step. Every second one has several kinds of cache."""
    simulation = Simulation(seed, keep_log=keep_log, overlapping=seed % 3 == 2, kinds=seed % 2 == 1)
    try:
        simulation.run(num_steps)
    except (Violation, HeadraceError) as error:
        simulation.report.violation = f"step {simulation.report.num_steps}: {error}"
    except Exception:
        simulation.report.violation = f"step {simulation.report.num_steps}: {traceback.format_exc()}"
    return simulation.report


def run_and_replay(seed: int, num_steps: int) -> Report:
    report = run_seed(seed, num_steps)
    if seed % REPLAY_EVERY == 0 and not report.violation:
        report.events["replay"] += 1
        if run_seed(seed, num_steps).digest != report.digest:
            report.violation = "I-20: a replay gave another event log"
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps with events per seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="replay this one seed and print its event log")
    args = parser.parse_args()
    if args.seed is not None:
        return replay(args.seed, args.steps)
    return campaign(args.first_seed, args.seeds, args.steps, args.jobs)


def replay(seed: int, num_steps: int) -> int:
    report = run_seed(seed, num_steps, keep_log=True)
    sys.stdout.write("".join(f"{line}\n" for line in report.log))
    print(report.violation or f"0 violations, digest {report.digest}")
    return 1 if report.violation else 0


def campaign(first: int, num_seeds: int, num_steps: int, num_jobs: int) -> int:
    console = Console()
    start = time.perf_counter()
    seeds = range(first, first + num_seeds)
    work = partial(run_and_replay, num_steps=num_steps)
    with Pool(num_jobs) as pool:
        done = pool.imap_unordered(work, seeds)
        reports = list(track(done, "simulating", total=num_seeds, console=console, disable=not console.is_terminal))
    seconds = time.perf_counter() - start
    bad = sorted((r for r in reports if r.violation), key=lambda r: r.seed)
    events: Counter[str] = Counter()
    for report in reports:
        events.update(report.events)
    total = sum(r.num_steps for r in reports)
    table = Table("event", "count", title="events")
    table.columns[1].justify = "right"
    for name, count in sorted(events.items()):
        table.add_row(name, f"{count:,}")
    console.print(table)
    computed = sum(r.num_computed for r in reports)
    console.print(
        f"{num_seeds:,} seeds, {total:,} steps in {seconds:.1f} s ({total / seconds:,.0f} steps/s on {num_jobs} "
        f"processes)\n{sum(r.num_tokens for r in reports):,} tokens compared, {computed:,} rows computed, "
        f"{sum(r.num_recomputed for r in reports) / max(1, computed):.1%} of them again, "
        f"{sum(r.num_hits for r in reports):,} prompt tokens found in the cache\n{len(bad)} violations"
    )
    for report in bad[:20]:
        console.print(f"seed {report.seed}: {report.violation}", markup=False)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
