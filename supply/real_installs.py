"""`python supply/real_installs.py [PYTHON ...]` installs headrace with each interpreter, as a stranger would.

For each: a clean clone, an empty home, an isolated pip configuration, the public index alone. `make run` serves, and a
chat is answered; `make test` runs the fast tests. With the first interpreter the other commands of README that change
a machine are run too: `make wheel`, and the wheel in an environment of its own. Without names, the interpreters are
those of PATH, /usr/bin and pyenv. The table goes to docs/maintainers/installs.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from check_install import isolated
from pythons import Interpreter, interpreters

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "installs"
PAGE = ROOT / "docs" / "maintainers" / "installs.md"
FAST = "tests/core tests/protocol tests/text tests/e2e"
README = (
    "make run",
    "make test",
    "make wheel",
    "python3 -m venv",
    "~/headrace/bin/pip install",
    "~/headrace/bin/headrace serve",
)
"""The commands of README that are run here; tests/docs runs the others, and compares."""
HEAD = """\
# Installs

Written by `make check-install REAL=1`: what a stranger's first commands did with each interpreter at hand, in a clean
clone with an empty home, an isolated pip configuration and the public index alone. Times are of two cores,
which may have had other work, and include downloads and the compilation of the kernels; MB are of `.venv`.

| Python | torch | `make run` answers after | MB | `make test` is set up after | MB | fast tests |
|---|---|---|---|---|---|---|
"""


class Row(NamedTuple):
    """A row of the table: seconds and megabytes of both commands, and the last line of the tests."""

    version: str
    torch: str
    run_seconds: float
    run_mb: float
    test_seconds: float
    test_mb: float
    tests: str

    def __str__(self) -> str:
        run, test = f"{self.run_seconds:.0f} s | {self.run_mb:.0f}", f"{self.test_seconds:.0f} s | {self.test_mb:.0f}"
        return f"| {self.version} | {self.torch} | {run} | {test} | {self.tests} |"


def megabytes(folder: Path) -> float:
    """What a folder takes on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 1e6


class Stranger:
    """A clean clone, and the variables of somebody whose home is empty."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.python = interpreter.path
        self.home = WORK / interpreter.version
        shutil.rmtree(self.home, ignore_errors=True)
        self.clone = self.home / "headrace-checkout"
        self.home.mkdir(parents=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        self.variables = isolated() | {"HOME": str(self.home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.log = self.home / "log.txt"

    def run(self, command: str) -> str:
        """Run a shell command in the clone; returns what it printed. Raises `SystemExit` when it fails."""
        with self.log.open("a") as log:
            print(f"$ {command}", file=log, flush=True)
            words = ["bash", "-c", command]
            done = subprocess.run(
                words, cwd=self.clone, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            text = done.stdout.decode(errors="replace")
            print(text, file=log, flush=True)
        if done.returncode:
            raise SystemExit(f"{command}: status {done.returncode}; see {self.log}\n{text[-2000:]}")
        return text

    @contextlib.contextmanager
    def serving(self, command: str, port: int) -> Iterator[float]:
        """A server that `command` starts; yields the seconds until it was ready."""
        began = time.monotonic()
        with self.log.open("a") as log:
            print(f"$ {command}", file=log, flush=True)
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.clone, env=self.variables, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            while not answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None:
                    raise SystemExit(f"{command}: status {process.returncode}; see {self.log}")
                time.sleep(0.2)
            yield time.monotonic() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def answers(url: str) -> bool:
    """Whether a server answers with success."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def chat(port: int) -> str:
    """The answer to README's question. Raises what urllib raises, `SystemExit` for an empty answer."""
    body = {"messages": [{"role": "user", "content": "Tell me a story about a dog."}], "max_tokens": 64, "seed": 7}
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as reply:
        text: str = json.loads(reply.read())["choices"][0]["message"]["content"]
    if not text.strip():
        raise SystemExit("the answer is empty")
    return text


def tried(interpreter: Interpreter) -> Row:
    """Install and try with one interpreter. Raises `SystemExit` when a step fails."""
    stranger, port = Stranger(interpreter), free_port()
    venv = stranger.clone / ".venv"
    with stranger.serving(f"make run PYTHON={interpreter.path} PORT={port}", port) as run_seconds:
        print(f"{interpreter.version}: serves after {run_seconds:.0f} s: {chat(port)[:60]!r}", flush=True)
    run_mb = megabytes(venv)
    extra = stranger.run(
        '.venv/bin/python -c \'import importlib.util as u; print([n for n in ("torch", "pytest") if u.find_spec(n)])\''
    )
    if extra.strip() != "[]":
        raise SystemExit(f"make run installed {extra.strip()}")
    began = time.monotonic()
    stranger.run(f"make setup PYTHON={interpreter.path}")
    test_seconds, test_mb = time.monotonic() - began, megabytes(venv)
    torch = stranger.run(".venv/bin/python -c 'import torch; print(torch.__version__)'").strip()
    print(f"{interpreter.version}: set up for tests after {test_seconds:.0f} s, torch {torch}", flush=True)
    text = stranger.run(f"make test PYTHON={interpreter.path} ARGS='{FAST}'")
    tests = [line for line in text.splitlines() if re.search(r"\d passed", line)]
    counts = [
        sum(int(n) for line in tests for n in re.findall(rf"(\d+) {kind}", line)) for kind in ("passed", "skipped")
    ]
    row = Row(
        interpreter.version, torch, run_seconds, run_mb, test_seconds, test_mb, "{} passed, {} skipped".format(*counts)
    )
    print(row, flush=True)
    return row


def keep(row: Row) -> None:
    """Write a row into the page, in place of an earlier one of the same Python."""
    lines = PAGE.read_text().splitlines() if PAGE.is_file() else []
    rows = {line.split(" | ")[0]: line for line in lines if re.match(r"\| \d", line)} | {f"| {row.version}": str(row)}
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(HEAD + "".join(f"{rows[version]}\n" for version in sorted(rows)))


def readme_wheel(interpreter: Interpreter) -> None:
    """README's commands for a wheel, in the clone that is there."""
    stranger, port = Stranger(interpreter), free_port()
    stranger.run(f"make wheel PYTHON={interpreter.path}")
    stranger.run(f"{interpreter.path} -m venv ~/headrace")
    stranger.run("~/headrace/bin/pip install dist/headrace-0.1.0-*.whl")
    with stranger.serving(f"{stranger.home}/headrace/bin/headrace serve --port {port}", port) as seconds:
        size = megabytes(stranger.home / "headrace")
        print(f"the wheel serves after {seconds:.0f} s: {chat(port)[:60]!r}; {size:.0f} MB", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("python", nargs="*", help="paths of interpreters")
    arguments.add_argument("--wheel", action="store_true", help="README's commands for a wheel alone, with the first")
    args = arguments.parse_args()
    found = [each for each in interpreters() if not args.python or each.path in args.python]
    if not found:
        raise SystemExit("no interpreter was found")
    if not args.wheel:
        for each in found:
            keep(tried(each))
    readme_wheel(found[0])


if __name__ == "__main__":
    main()
