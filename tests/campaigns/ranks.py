"""The campaign of ranks (C-10): ranks of one model are killed and stopped in mid-answer, and the group is rebuilt.

`python -m tests.campaigns.ranks --kills 50 --stops 20 --seed 1 --out bench/results/ranks-faults.json` runs the streams
of C-5 against `headrace serve --tensor-parallel-size 2`, and strikes the other rank or the first. Every stream must end
with the bits of the undisturbed run; a death must be noticed within `NOTICED_S`, silence within the timeout and
`SILENCE_S` more. It prints its counts as JSON; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.campaigns import faults

NOTICED_S = 1.0
SILENCE_S = 5.0
LONGEST_S = 30.0
"""After its notice, a group is rebuilt and ready within this."""


def run(
    num_kills: int,
    num_stops: int,
    seed: int,
    ranks: int = 2,
    timeout: float = 10.0,
    num_streams: int = 32,
    max_tokens: int = 96,
    per_round: int = 1,
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The whole campaign. Three of four strikes are at another rank than the first. Returns its report."""
    kinds = ("rank-kill",) * (num_kills - num_kills // 4) + ("kill",) * (num_kills // 4)
    kinds += ("rank-stop",) * (num_stops - num_stops // 4) + ("stop",) * (num_stops // 4)
    options = ("--tensor-parallel-size", str(ranks), "--distributed-timeout", str(timeout), *arguments)
    # Later than the ranks' own timeout, so that it is theirs which ends a group; but for a first rank that is stopped.
    report = faults.run(len(kinds), seed, num_streams, kinds, timeout + SILENCE_S, max_tokens, per_round, options)
    report["campaign"] = "C-10 faults of ranks"
    report["problems"] += late(report["noticed_s"], timeout)
    most = report.get("recovery_s", {}).get("most", 0.0)
    if most > timeout + SILENCE_S + LONGEST_S:
        report["problems"].append(f"a group took {most} s to come back")
    return report | {"ranks": ranks, "distributed_timeout_s": timeout}


def late(noticed: dict[str, float], timeout: float) -> list[str]:
    """What was noticed too late, of the longest seconds of each kind."""
    most = {kind: NOTICED_S if kind.endswith("kill") else timeout + SILENCE_S for kind in noticed}
    return [
        f"{kind}: noticed after {noticed[kind]} s, at most {most[kind]}"
        for kind in noticed
        if noticed[kind] > most[kind]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--per-round", type=int, default=1, help="faults while the same streams run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="further arguments of headrace serve, after --")
    given = parser.parse_args()
    report = run(
        given.kills, given.stops, given.seed, given.ranks, given.timeout, given.streams, given.max_tokens,
        given.per_round, tuple(given.arguments),
    )  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
