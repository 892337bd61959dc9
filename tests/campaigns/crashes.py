"""C-15: the storage after a crash of the machine, at every moment of many runs, and of the runs that continue them."""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.crashed_storage import Scenario
from tests.support.crashes import FOLDERS

SYNCS = ("part-", "files/file-", FOLDERS)
MOST_OF_A_MOMENT = 30


def run_campaign(num: int, seed: int) -> dict[str, Any]:
    """Try so many states. Each run without one of its syncs, tried beside the others, must be noticed."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    bad: list[str] = []

    def cuts(length: int) -> list[int]:
        return [draw.randrange(length + 1) for _ in range(3)]

    with tempfile.TemporaryDirectory() as name:
        run, after, later = (Path(name) / each for each in ("run", "after", "later"))
        while counts["states"] < num:
            scenario = fresh(run, draw)
            counts["runs"] += 1
            counts["operations"] += len(scenario.recording.ops)
            bad += verdicts(scenario, after, cuts, counts, "states", num)
            # A server that continues may crash, too.
            for _ in range(3):
                continued = copy.copy(scenario)
                num_ops = draw.randrange(len(scenario.recording.ops))
                state = draw.choice(list(scenario.recording.states(num_ops, cuts, MOST_OF_A_MOMENT)))
                continued.continue_from(num_ops, state, after)
                bad += verdicts(continued, later, cuts, counts, "states_of_continued_runs", num)
        for sync in SYNCS:
            scenario = fresh(run, draw, sync)
            if verdicts(scenario, after, cuts, Counter(), "states", 10_000, stop=True):
                counts["syncs_missed_and_noticed"] += 1
            else:
                bad.append(f"a run without the syncs of {sync!r} was not noticed")
    return dict(counts) | {"violations": len(bad), "examples": bad[:5]}


def fresh(folder: Path, draw: random.Random, without: str = "\n") -> Scenario:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Scenario(folder, draw.randrange(10**6), draw.randint(1, 12), without)


def verdicts(
    scenario: Scenario,
    folder: Path,
    cuts: Callable[[int], list[int]],
    counts: Counter[str],
    name: str,
    most: int,
    stop: bool = False,
) -> list[str]:
    """What is wrong after a crash at each moment; with `stop`, the first only."""
    bad: list[str] = []
    for num_ops in range(len(scenario.recording.ops) + 1):
        for state in scenario.recording.states(num_ops, cuts, MOST_OF_A_MOMENT):
            if counts[name] >= most or (stop and bad):
                return bad
            counts[name] += 1
            wrong = scenario.judge(num_ops, state, folder)
            bad += [f"{scenario.lines[0]}, operation {num_ops}: {wrong}"] if wrong else []
    return bad
