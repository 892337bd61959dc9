"""`python supply/lock.py` prints requirements.lock: every package that headrace needs to run, with the hashes of its
wheels, so that an index can give nothing else (S-36).

The versions are those that are installed beside this Python, which the tests ran with. pip is asked for the wheels of
each platform and Python below, and tells their hashes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64",)
HEAD = """\
# Written by `make lock`: what headrace needs to run, each with the hashes of its wheels for Linux on x86-64.
# pip install --require-hashes --no-deps -r requirements.lock
"""


def normal(name: str) -> str:
    """A package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(names: list[str]) -> dict[str, str]:
    """Versions of packages and of all that they need here, by name."""
    found: dict[str, str] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = normal(wanted.name)
        if name in found:
            continue
        installed = metadata.distribution(name)
        found[name] = installed.version
        for text in installed.requires or ():
            other = Requirement(text)
            if other.marker is None or any(other.marker.evaluate({"extra": e}) for e in wanted.extras or ("",)):
                todo.append(other)
    return dict(sorted(found.items()))


def direct() -> list[str]:
    """What pyproject.toml says that the package needs."""
    dependencies: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return dependencies


def hashes(pins: dict[str, str], python: str, machine: str) -> dict[str, str]:
    """SHA-256 of the wheel that pip would install of each, by name."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(39, 4, -1)]
    platforms += [f"manylinux2014_{machine}"]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "pins.txt"
        listed.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--only-binary=:all:", "--target", folder, "--python-version", python, "--implementation", "cp"]
        command += ["--report", f"{folder}/report.json", "-r", str(listed)]
        command += [word for platform in platforms for word in ("--platform", platform)]
        subprocess.run(command, check=True)
        report = json.loads((Path(folder) / "report.json").read_text())
    return {
        normal(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in report["install"]
    }


def main() -> None:
    pins = needed(direct())
    found: dict[str, set[str]] = defaultdict(set)
    for python in PYTHONS:
        for machine in MACHINES:
            for name, digest in hashes(pins, python, machine).items():
                found[name].add(digest)
    print(HEAD, end="")
    for name, version in pins.items():
        if not found[name]:
            raise SystemExit(f"{name} {version}: no wheel was found to hash")
        lines = [f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in sorted(found[name]))]
        print(" \\\n".join(lines))


if __name__ == "__main__":
    main()
