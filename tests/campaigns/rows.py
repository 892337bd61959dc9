"""`python -m tests.campaigns.rows`: each control of docs/security.md and docs/reliability.md is removed, and the row's
own test must fail.

The repository is copied to a temporary folder. There the snippets of `removals_security` and `removals_reliability` are
replaced, one after the other, and the named test runs. With all controls it must pass. Counts go to
bench/results/rows.json. `--only S-01,R-05` runs some rows. The exit status is 1 if a test does not notice.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.record import commit
from bench.tied import tied
from tests.campaigns.removal import Removal
from tests.campaigns.removals_reliability import RELIABILITY
from tests.campaigns.removals_security import SECURITY

REMOVALS = [*SECURITY, *RELIABILITY]
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "rows.json"
PAGES = ("docs/security.md", "docs/reliability.md")
COPIED = ("src", "tests", "docs", "bench", "csrc", "examples", "supply", "training")
TIMEOUT_S = 300
PASSED, FAILED = 0, 1
"""Exit statuses of pytest. Others mean that no test has run."""

# Packages that are installed as editable have a finder that comes before every path.
SITE = """import pathlib, sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
sys.path.insert(0, str(pathlib.Path(__file__).parent / "src"))
"""


class Row(NamedTuple):
    """A row of a page, and the tests that it names as path::name below tests/, or as path alone."""

    name: str
    state: str
    tests: frozenset[str]


def rows(text: str) -> list[Row]:
    """The rows of a page's table of faults."""
    result = []
    for line in re.findall(r"^\| [SR]-\d\d .*\|$", text, re.M):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        tests: set[str] = set()
        for path, rest in re.findall(r"\]\(\.\./tests/([\w/]+\.py)\)([^\[]*)", line):
            names = re.findall(r"`(test_\w+)`", rest)
            tests |= {f"{path}::{name}" for name in names} or {path}
        result.append(Row(cells[0][:4], cells[-2], frozenset(tests)))
    return result


def faults(all_rows: Sequence[Row], removals: Sequence[Removal], root: Path = ROOT) -> list[str]:
    """What is wrong with the table of removals: rows without one, snippets that are not there, tests not of the row."""
    covered = {removal.row for removal in removals}
    result = [f"{row.name}: no removal" for row in all_rows if row.state == "passed" and row.name not in covered]
    by_name = {row.name: row for row in all_rows}
    for row, file, original, replacement, test in removals:
        text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
        if text.count(original) != 1:
            result.append(f"{row}: {file} has {text.count(original)} times {original.strip()[:60]!r}")
        if original == replacement:
            result.append(f"{row}: nothing is removed")
        if row not in by_name or not {test, test.partition("::")[0]} & by_name[row].tests:
            result.append(f"{row}: the row does not name {test}")
    return result


class Copy:
    """The repository in a temporary folder, as the tests there see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        for path in ROOT.iterdir():
            if path.is_file() and path.suffix != ".pyc" and path.name != ".git":
                shutil.copy2(path, folder)
        native = importlib.util.find_spec("headrace._native")
        if native is not None and native.origin is not None:
            shutil.copy2(native.origin, folder / "src" / "headrace")
        (folder / "sitecustomize.py").write_text(SITE)
        self._env = os.environ | {"PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", "import headrace; print(headrace.__file__)"]
        place = subprocess.run(command, env=self._env, cwd=folder, capture_output=True, text=True, check=True).stdout
        if not place.startswith(str(folder)):
            raise RuntimeError(f"the tests would run against {place.strip()}")
        self._time = time.time()

    def run(self, *tests: str, seconds: float = TIMEOUT_S) -> tuple[int | None, str]:
        """pytest's exit status, None if it took too long, and its last lines."""
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
        # A session of its own: what a test leaves running ends with it.
        process = subprocess.Popen(
            tied([*command, *(["-x"] if len(tests) == 1 else []), *(f"tests/{test}" for test in tests)]),
            env=self._env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=seconds)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return None, ""

    def red(self, tests: Iterable[str]) -> set[str]:
        """Those of `tests` that fail with all controls in place."""
        expected = sorted(set(tests))
        status, text = self.run(*expected, seconds=len(expected) * TIMEOUT_S)
        failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", text, re.M)
        if status not in (PASSED, FAILED) or (status == FAILED and not failed):
            raise RuntimeError(f"pytest ended with {status}: {text[-2000:]}")
        return {test for test in expected if any(f"{name}[".startswith((f"{test}[", f"{test}::")) for name in failed)}

    def write(self, file: str, text: str) -> None:
        """Replace the text of a file."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        # Compiled modules are kept by the second, and by the size.
        self._time += 2
        os.utime(path, (self._time, self._time))


def verdict(copy: Copy, removal: Removal) -> str:
    """ "killed", or why the removal is not."""
    text = (copy.folder / removal.file).read_text(encoding="utf-8")
    copy.write(removal.file, text.replace(removal.original, removal.replacement, 1))
    try:
        status, _ = copy.run(removal.test)
    finally:
        copy.write(removal.file, text)
    return "killed" if status in (FAILED, None) else "survived" if status == PASSED else f"pytest ended with {status}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.rows", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="rows, with commas between")
    args = parser.parse_args()
    parts = args.only.split(",") if args.only else None
    all_rows = [row for page in PAGES for row in rows((ROOT / page).read_text(encoding="utf-8"))]
    chosen = [removal for removal in REMOVALS if parts is None or removal.row in parts]
    wrong = faults(all_rows, chosen) if parts is None else []
    verdicts: list[tuple[Removal, str]] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        red = copy.red(removal.test for removal in chosen)
        for removal in chosen:
            since = time.monotonic()
            why = "the test fails with the control, too" if removal.test in red else verdict(copy, removal)
            verdicts.append((removal, why))
            print(f"{removal.row} {removal.file}: {why} ({time.monotonic() - since:.1f} s)", flush=True)
    left_out = [f"{row.name}: {row.state}" for row in all_rows if row.name not in {r.row for r in REMOVALS}]
    bad = [*wrong, *(f"{removal.row} {removal.file}: {why}" for removal, why in verdicts if why != "killed")]
    counts = {
        "removals": len(verdicts),
        "killed": sum(why == "killed" for _, why in verdicts),
        "rows": len({removal.row for removal in chosen}),
        "left_out": left_out,
        "bad": bad,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "commit": commit(),
    }
    print(json.dumps(counts, indent=1))
    if parts is None:
        RESULT.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
