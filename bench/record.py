"""`python -m bench.record NAME -- COMMAND ...`: run a bench that prints JSON and keep what it printed.

Writes bench/results/NAME.json: the command, the commit, the machine, the load before it ran, and the JSON. So that a
figure in the README can be looked up, and two machines can be told apart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from bench.tied import tied
from headrace import doctor

RESULTS = Path(__file__).parent / "results"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """The commit that was measured; marked if the tree had changes beside it. Results themselves do not count."""
    changed = git("status", "--porcelain", "--", ".", ":!bench/results", ":!docs/figures")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def parsed(text: str) -> list[object] | object:
    """One JSON object, or a list of them where each line is one."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit("the command printed no line of JSON")
    values = [json.loads(line) for line in lines]
    return values[0] if len(values) == 1 else values


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.record", description=__doc__)
    parser.add_argument("name", help="file name under bench/results, without .json")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(tied(args.command), stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        print(done.stdout, end="", file=sys.stderr)
        raise SystemExit(f"the command ended with status {done.returncode}; nothing is recorded")
    machine = doctor.examine()
    record = {
        "command": shlex.join(args.command),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "host": {name: machine[name] for name in ("cpu", "memory", "torch", "versions")},
        "load_before": round(load, 2),
        "result": parsed(done.stdout),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
