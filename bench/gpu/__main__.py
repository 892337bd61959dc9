"""`python -m bench.gpu [prove|bench|tune ...] [--out DIR] [--minutes N] [--toy]`: the stages in turn, all by default,
those of most value first.

Each stage runs in a process of its own. If that dies or hangs (a fault of the GPU ends every later call of a process),
its item is recorded as failed and another process goes on with the next.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu import goals
from bench.gpu.report import Report, read
from bench.tied import tied

STAGES = ("prove", "bench", "tune")
MINUTES = 15.0
"""What all stages may take together."""
SECONDS = 510
"""A stage's time: nine minutes less what it takes to end a process that does not end by itself."""
GRACE = 15
"""Seconds that an item may go on after the stage's time."""
SILENCE = 240
"""Seconds without a new item after which a process hangs."""
SHARES = {"prove": 0.45, "bench": 0.75}
"""Of the time that is left, what a stage may take while others follow: all types of models take prove long."""
MODULES = {"prove": "bench.gpu.prove", "tune": "bench.gpu.tune", "bench": "bench.gpu.speed"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("stages", nargs="*", default=STAGES, metavar="STAGE", help="prove, bench, tune; default: all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the JSON files")
    parser.add_argument(
        "--minutes", type=minutes, default=MINUTES, help="for all stages together; what finds no time is left out"
    )
    parser.add_argument("--toy", action="store_true", help="toy size; always so without a GPU")
    parser.add_argument("--only", default="", help="items whose names contain one of these parts, divided by |")
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"{unknown[0]} is none of {', '.join(STAGES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.inside is not None:
        [stage] = args.stages
        run_stage(stage, args)
        return
    end = time.time() + 60 * args.minutes
    failed = 0
    for place, stage in enumerate(args.stages, 1):
        failed += supervise(stage, args, share_of_stage(stage, place < len(args.stages), time.time(), end))
    sys.exit(1 if failed else 0)


def minutes(text: str) -> float:
    """Return a number of minutes. Raises `argparse.ArgumentTypeError` for one below 1 or above a day."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 1 <= value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 1 to 1440")
    return value


def share_of_stage(stage: str, is_followed: bool, now: float, end: float) -> float:
    """Return when a stage must leave the time until `end` to others, where any follow."""
    return now + SHARES.get(stage, 1.0) * (end - now) if is_followed else end


def end_of_stage(now: float, end: float) -> float:
    """Return when a stage that begins `now` is over, of stages that together end at `end` at most."""
    return min(now + SECONDS, end - GRACE)


def run_stage(stage: str, args: argparse.Namespace) -> None:
    from bench.gpu.device import Device

    device = Device(args.toy)
    report = Report(args.out / f"{stage}.json", args.inside, args.only)
    report.head = device.describe()
    importlib.import_module(MODULES[stage]).run(report, device)


def supervise(stage: str, args: argparse.Namespace, whole_end: float) -> int:
    """Run a stage to its end, in as many processes as that takes. Returns the number of items that failed."""
    path = args.out / f"{stage}.json"
    path.unlink(missing_ok=True)
    end = end_of_stage(time.time(), whole_end)
    if end <= time.time():
        print(f"{stage}: left out, the {args.minutes:g} minutes are over; --minutes gives more", flush=True)
        return 0
    command = [sys.executable, "-m", "bench.gpu", stage, "--out", str(args.out), "--only", args.only]
    command += ["--inside", str(end)] + ["--toy"] * args.toy
    while time.time() < end:
        process = subprocess.Popen(tied(command), env=os.environ | {"PYTHONUNBUFFERED": "1"})
        items = len(read(path)["items"])
        if watch(process, path, end) == 0:
            break
        if len(read(path)["items"]) == items:
            print(f"{stage}: the process ended before it reached an item", flush=True)
            return 1
    report = Report(path, end, args.only)
    if stage == "bench":
        goals.judge(report)
    return report.close()


def watch(process: subprocess.Popen[bytes], path: Path, end: float) -> int:
    """Wait for the process; kill it if it hangs, or shortly after the stage's time is over."""
    began = time.time()
    while True:
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            last = max(began, path.stat().st_mtime if path.exists() else 0)
            if time.time() > end + GRACE or time.time() - last > SILENCE:
                process.kill()
                process.wait()
                return -1


if __name__ == "__main__":
    main()
