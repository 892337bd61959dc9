"""`python -m tests.campaigns.foreign`: every causal type of transformers through `--model-impl transformers`.

Of each type a tiny checkpoint with random weights: headrace's log-probabilities of two texts and their answers beside
transformers' own, and the bits of the answers in a batch, alone, in chunks, after a hit of the prefix cache and after a
preemption (`tests.support.foreign_types.check`). A type is right, wrong, refused (a `HeadraceError` with its reason) or
unmade (transformers itself fails on the tiny config). Types that headrace has a file for take the same path here.

A type is one process. Counts go to bench/results/foreign.json. The exit status is 1 if a type is wrong, or ends in
anything but a `HeadraceError`.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench.record import commit
from rich.console import Console
from rich.table import Table
from tests.support.foreign_types import Outcome, check, types

from headrace import models

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "foreign.json"
CONTEXT = multiprocessing.get_context("forkserver")
"""Types begin with what they share imported already."""
MAX_BYTES = 9 * 2**30
TIMEOUT_S = 300


def child(model_type: str, answer: Connection) -> None:
    """Check a type and send a line of JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        answer.send_bytes(json.dumps(check(model_type, Path(folder))).encode())


def outcome_of(model_type: str) -> Outcome:
    """The outcome of a type, from a process of its own. One that ends early is an outcome too."""
    parent, end = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=child, args=(model_type, end))
    process.start()
    end.close()
    try:
        if not parent.poll(TIMEOUT_S):
            return Outcome(model_type, "failed", f"no end after {TIMEOUT_S} s")
        outcome = Outcome(*json.loads(parent.recv_bytes()))
        process.join(10)
        return outcome
    except EOFError:
        process.join()
        return Outcome(model_type, "failed", f"status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts of all types and of those that headrace has no file for, and the names of those that are not right."""
    native = models.names()
    others = [each for each in outcomes if each.name not in native]
    return {
        "counts": dict(Counter(each.kind for each in outcomes)),
        "without a file": dict(Counter(each.kind for each in others)),
        "right without a file": [each.name for each in others if each.kind == "right"],
        "others": [list(each) for each in outcomes if each.kind != "right"],
    }


def show(report: dict[str, Any]) -> None:
    table = Table("outcome", "types", "of them without a model file", title="--model-impl transformers")
    for kind, number in sorted(report["counts"].items()):
        table.add_row(kind, str(number), str(report["without a file"].get(kind, 0)))
    console = Console()
    console.print(table)
    for name, kind, why in report["others"]:
        console.print(f"{kind} {name}: {why.splitlines()[0] if why else ''}", highlight=False, markup=False)


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at a time (default: %(default)s)")
    chosen = options.parse_args(arguments)
    CONTEXT.set_forkserver_preload(["tests.campaigns.foreign", "headrace.transformers_models.loading"])
    start = time.monotonic()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        outcomes = list(pool.map(outcome_of, chosen.types or types()))
    report = summary(outcomes)
    show(report)
    report |= {"commit": commit(), "seconds": round(time.monotonic() - start)}
    if not chosen.types:
        RESULT.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["counts"].get("wrong") or report["counts"].get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
