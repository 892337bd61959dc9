"""`python -m tests.programs.llama_server [--only NAME ...] [--jobs N]`: llama.cpp's own tests of its server, run here.

The tests come with the source package of llama-cpp-python, which is fetched into build/llama-server when it is not
there, as is the environment that they run in. `headrace serve` stands in llama-server's place (`stand_in`). A test
passes, or differs for a reason that differences.toml gives, with the failure that shows it, or has failed. Those that
need what is not here (other models, pictures, MCP) are not run; the table says which. Prints the counts and everything
that is not as the table says. Exit status 1: a test failed, or an entry of the table is stale.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.serving import free_port

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "llama-server"
DATA = ROOT.parent / "shared" / "data"
MODEL = DATA / "models" / "derived" / "gguf" / "stories260K.F32.gguf"
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
TESTS = FOLDER / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
UNPACKED = ("tools/server/tests/", "models/templates/", "LICENSE")
"""What of llama.cpp is unpacked."""
FILE_SECONDS = 1800
OWN_SERVERS = ("test_metrics.py", "test_sleep.py", "test_slot_save.py")
"""Files whose tests have a server each: what they count begins with it."""


class Difference(NamedTuple):
    """An entry of the table: why a test differs, and a part of the failure that shows it."""

    reason: str
    failure: str


class Outcome(NamedTuple):
    """What came of one test: `kind` is passed, skipped, differs, stale or failed."""

    name: str
    kind: str
    message: str


def fetch() -> None:
    """Unpack the tests, and make their environment, unless they are there."""
    if not TESTS.is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            # pip reads the package's metadata with this environment's tools; it builds nothing.
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            words = [
                "download",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                ":all:",
                "--dest",
                folder,
            ]
            _run(sys.executable, "-m", "pip", *words, f"{PACKAGE}=={VERSION}", PATH=path)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                vendor = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
                expected = tuple(vendor + part for part in UNPACKED)
                tar.extractall(folder, [each for each in tar if each.name.startswith(expected)], filter="data")
            shutil.move(Path(folder) / f"llama_cpp_python-{VERSION}", TESTS.parents[4])
    if not (FOLDER / "environment" / "complete").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(FOLDER / "environment"))
        install = ["-m", "pip", "install", "--quiet", "-r", str(TESTS / "requirements.txt")]
        _run(str(FOLDER / "environment" / "bin" / "python"), *install)
        (FOLDER / "environment" / "complete").touch()


def _run(*words: str, **variables: str) -> None:
    subprocess.run(words, check=True, env=os.environ | variables, stdout=subprocess.DEVNULL)


def stand_in() -> Path:
    """Return a program that starts headrace with llama-server's command line."""
    path = FOLDER / "llama-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "stand_in.py"}" "{DATA}" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def collected() -> list[str]:
    """Return the names of all tests but the slow ones, such as `test_basic.py::test_no_ui`."""
    words = ["-m", "pytest", "--collect-only", "-q", "-m", "not slow", "-p", "no:cacheprovider", "unit"]
    python = str(FOLDER / "environment" / "bin" / "python")
    listed = subprocess.run([python, *words], cwd=TESTS, check=True, capture_output=True, text=True).stdout
    return [line.removeprefix("unit/") for line in listed.splitlines() if line.startswith("unit/")]


def is_among(name: str, entries: Collection[str]) -> bool:
    """Whether a table names a test: by itself, without the brackets of its case, or by its file."""
    return bool({name, name.partition("[")[0], name.partition("::")[0]} & set(entries))


def run_file(file: str, selected: list[str], names: list[str], program: Path, folder: Path) -> list[dict[str, Any]]:
    """Run the tests `names` of one file, or those of them that contain one of `selected`. Returns a record for each."""
    record = folder / f"{file}.jsonl"
    variables = {
        "RECORD": str(record),
        "PORT": str(free_port()),
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PYTHONPATH": str(HERE),
        "OWN_SERVERS": "1" if file in OWN_SERVERS else "",
    }
    words = ["-q", "-m", "not slow", "-p", "recorder", "-p", "no:cacheprovider", *(f"unit/{name}" for name in names)]
    if selected:
        words += ["-k", " or ".join(selected)]
    command = [str(FOLDER / "environment" / "bin" / "python"), "-m", "pytest", *words]
    with open(FOLDER / f"{file}.log", "w", encoding="utf-8") as log:
        subprocess.run(
            command, cwd=TESTS, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT, timeout=FILE_SECONDS
        )
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def judge(record: dict[str, Any], table: dict[str, Difference]) -> Outcome:
    """Hold what came of a test against the table."""
    name = record["id"].removeprefix("unit/")
    difference = table.get(name) or table.get(name.partition("[")[0])
    message = record["message"].strip()
    if record["outcome"] == "passed":
        return Outcome(name, "passed" if difference is None else "stale", "passes, but stands in the table")
    if record["outcome"] == "skipped":
        return Outcome(name, "skipped", message)
    if difference is None:
        return Outcome(name, "failed", message)
    if difference.failure not in message:
        return Outcome(name, "failed", f"the table expects {difference.failure!r}: {message}")
    return Outcome(name, "differs", difference.reason)


def read_table(path: Path) -> tuple[dict[str, Difference], dict[str, str]]:
    """Return the differences by test, and why files are not run, or tests of them."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    differences = {
        test: Difference(entry["reason"], entry["failure"])
        for entry in table.get("differs", [])
        for test in entry["tests"]
    }
    return differences, {name: entry["reason"] for entry in table["not_run"] for name in entry["tests"]}


def unknown_entries(outcomes: Iterable[Outcome], table: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return the entries of the table, of files that ran, which name no test."""
    names = {name for outcome in outcomes for name in (outcome.name, outcome.name.partition("[")[0])}
    return [entry for entry in table if entry.partition("::")[0] in files and entry not in names]


def main() -> int:
    options = argparse.ArgumentParser(prog="make test-llama-server")
    options.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="files (test_basic.py) or parts of names"
    )
    options.add_argument("--jobs", type=int, default=2, help="files at a time")
    options.add_argument("--show", action="store_true", help="print why each test differs, too")
    args = options.parse_args()
    if not MODEL.is_file():
        print(f"not run: {MODEL.name}, the model of the tests, is not in ../shared/data")
        return 0
    fetch()
    table, not_run = read_table(HERE / "differences.toml")
    program = stand_in()
    every = collected()
    chosen = [name for name in every if not is_among(name, not_run)]
    all_files = sorted({name.partition("::")[0] for name in every})
    parts = [name for name in args.only if name not in all_files]
    files = sorted({name.partition("::")[0] for name in chosen})
    files = [file for file in files if file in args.only or not set(args.only) - set(parts)]
    outcomes: list[Outcome] = []
    left_out: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        tests = {file: [name for name in chosen if name.startswith(file)] for file in files}
        runs = [pool.submit(run_file, file, parts, tests[file], program, Path(folder)) for file in files]
        for file, run in zip(files, runs, strict=True):
            records = run.result()
            fresh = [judge(record, table) for record in records]
            outcomes += fresh
            for name in (name for record in records for name in record["left_out"]):
                left_out[name] = left_out.get(name, 0) + 1
            print(f"{file}: {counts(fresh)}", flush=True)
    unknown = [] if parts else unknown_entries(outcomes, table, files)
    unknown += [entry for entry in not_run if not any(is_among(name, [entry]) for name in every)]
    for name, kind, message in sorted(outcomes):
        if kind in ("failed", "stale", *(["differs", "skipped"] if args.show else [])):
            print(f"{kind}: {name}: {' '.join(message.split())[:400]}")
    for entry in unknown:
        print(f"stale: {entry}: there is no such test, or it did not run")
    for name, num in sorted(left_out.items()):
        print(f"left out of the command line of {num} tests: {name}")
    reasons = Counter(reason for name in every for entry, reason in not_run.items() if is_among(name, [entry]))
    for reason, num in sorted(reasons.items()):
        print(f"not run: {num}, {reason}")
    print(f"of {len(every)} tests: {counts(outcomes)}, {len(every) - len(chosen)} not run")
    return int(bool(unknown) or any(outcome.kind in ("failed", "stale") for outcome in outcomes))


def counts(outcomes: Iterable[Outcome]) -> str:
    """The outcomes in one line."""
    kinds = [outcome.kind for outcome in outcomes]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "differs", "failed", "stale", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
