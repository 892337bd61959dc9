"""`python supply/check_install.py` checks that what headrace needs can be installed on machines that are not this one.

pip's own resolver finds the packages for each Python and machine, through constraints.txt and as wheels alone: first
those of all extras at once, which settles each of them, since packages that agree still do so when there are fewer.
Where that fails, each extra is tried, to name the ones at fault. Nothing of this machine helps pip: no configuration,
no `PIP_` variable, no other index, no local wheel. pip evaluates markers for the Python that runs it, whatever
`--python-version` says, so it runs with the markers of the target here. Then pins that can not be met are planted, and
must be noticed. Installs nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lock import CONSTRAINTS, LOCK, MACHINES, PYTHONS, ROOT, environment

NUM_AT_ONCE = os.cpu_count() or 1
GLIBC = 36
"""The minor version of glibc of the machines: Debian 12 has 2.36."""
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""Variables that pip sees; certificates belong to the network. Those of proxies are kept too."""
PIP = """
import json, sys
import pip._vendor.packaging.markers as markers
target = json.loads(sys.argv.pop(1))
markers.default_environment = lambda: dict(target)
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
PLANTED = (("cuda", "triton==3.6.0"), ("serve", "numpy==1.0.99"))
"""Extras, and pins that can not be met: one against another package's own, and one that does not exist."""


class Target(NamedTuple):
    """A Python and a machine to install on."""

    python: str
    machine: str

    def __str__(self) -> str:
        return f"{self.python} {self.machine}"


class Outcome(NamedTuple):
    """What pip found: versions by package, or its complaint."""

    versions: dict[str, str]
    fault: str
    seconds: float


def isolated() -> dict[str, str]:
    """The variables for a pip that knows nothing of this machine but its network."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.lower().endswith("_proxy")}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def resolve(target: Target, *words: str) -> Outcome:
    """Let pip find what `words` ask for, on `target`."""
    began = time.monotonic()
    tags = [f"manylinux_2_{minor}_{target.machine}" for minor in range(GLIBC, 4, -1)]
    platforms = [*tags, f"manylinux2014_{target.machine}", f"linux_{target.machine}"]
    markers = environment(target.python, target.machine)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-I", "-c", PIP, json.dumps(markers), "install", "--isolated", "--quiet"]
        command += ["--disable-pip-version-check", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
        command += ["--python-version", target.python, "--implementation", "cp", "--target", folder]
        command += [word for platform in platforms for word in ("--platform", platform)]
        command += ["--report", str(report), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=isolated(), cwd=ROOT)
        seconds = time.monotonic() - began
        if done.returncode:
            return Outcome({}, done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}", seconds)
        found = json.loads(report.read_text())
    if found["environment"]["python_version"] != target.python:
        return Outcome({}, "pip did not take the markers of the target", seconds)
    versions = {item["metadata"]["name"]: item["metadata"]["version"] for item in found["install"]}
    return Outcome(versions, "", seconds)


def resolve_surely(target: Target, *words: str) -> Outcome:
    """`resolve`, with a second try: an index may be out of reach for a moment."""
    outcome = resolve(target, *words)
    return resolve(target, *words) if outcome.fault else outcome


def requirements() -> dict[str, list[str]]:
    """What each extra asks for, with what headrace itself needs; `serve` is headrace alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    own: list[str] = project["dependencies"]
    return {"serve": own} | {name: own + needs for name, needs in extras.items()}


def cases() -> dict[str, list[str]]:
    """The words for pip, by row of the table."""
    everything = list(dict.fromkeys(need for needs in requirements().values() for need in needs))
    return {
        "all": [*everything, "--constraint", str(CONSTRAINTS)],
        "lock": ["--require-hashes", "--no-deps", "--requirement", str(LOCK)],
    }


def faults_by_extra(target: Target) -> dict[str, str]:
    """The complaints about single extras on a target where all of them together can not be had."""
    outcomes = {
        extra: resolve_surely(target, *needs, "--constraint", str(CONSTRAINTS))
        for extra, needs in requirements().items()
    }
    return {extra: outcome.fault for extra, outcome in outcomes.items() if outcome.fault}


def unnoticed(target: Target) -> list[str]:
    """The planted pins that pip took all the same."""
    found = []
    for extra, pin in PLANTED:
        name = pin.partition("==")[0]
        lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith(f"{name}==")]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as planted:
            planted.write("\n".join([*lines, pin]) + "\n")
            planted.flush()
            fault = resolve(target, *requirements()[extra], "--constraint", planted.name).fault
        if name not in fault:
            found.append(f"{pin} ({extra}): {fault or 'no complaint'}")
    return found


def line(name: str, cells: Iterable[object]) -> str:
    """A row of the table."""
    return f"{name:<9}" + "".join(f"{cell!s:>14}" for cell in cells)


def main() -> int:
    began = time.monotonic()
    targets = [Target(python, machine) for machine in MACHINES for python in PYTHONS]
    faults = num_resolved = 0
    print(f"all: {', '.join(requirements())}")
    print(line("packages", targets), flush=True)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        rows = {
            row: [pool.submit(resolve_surely, target, *words) for target in targets] for row, words in cases().items()
        }
        controls = pool.submit(unnoticed, targets[0])
        for row, waiting in rows.items():
            outcomes = [each.result() for each in waiting]
            print(line(row, ["FAILED" if each.fault else len(each.versions) for each in outcomes]), flush=True)
            for target, outcome in zip(targets, outcomes, strict=True):
                num_resolved += 1
                if outcome.fault:
                    faults += 1
                    print(f"{row} on {target}: {outcome.fault}", flush=True)
                    for extra, fault in faults_by_extra(target).items() if row == "all" else ():
                        print(f"{extra} on {target}: {fault}", flush=True)
        taken = controls.result()
    for pin in taken:
        print(f"a planted pin was not noticed: {pin}")
    print(
        f"{num_resolved} resolutions, {faults} failed; {len(PLANTED) - len(taken)} of {len(PLANTED)} planted pins "
        f"noticed; {time.monotonic() - began:.0f} s"
    )
    return bool(faults or taken)


if __name__ == "__main__":
    sys.exit(main())
