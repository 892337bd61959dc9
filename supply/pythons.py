"""The interpreters at hand, and the wheels that each CPython can install.

For wheel.py and real_installs.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lock import PYTHONS
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

LEAST = (3, 11)
GLIBC = 36
"""The minor version of glibc that wheels may ask for at most: Debian 12 has 2.36."""
ASK = "import ensurepip, os, sys, venv; print(*sys.version_info[:3], os.path.realpath(sys.executable))"


class Interpreter(NamedTuple):
    """A Python that can make an environment: its version with three numbers, and its path."""

    version: str
    path: str

    @property
    def series(self) -> str:
        """The version with two numbers, as in `PYTHONS`."""
        return self.version.rpartition(".")[0]


def interpreter(path: str | Path, real: bool = True) -> Interpreter | None:
    """The Python of a path or a name, with its real path or as it is named; None if it can make no environment, or is
    older than `LEAST`."""
    try:
        done = subprocess.run([str(path), "-c", ASK], capture_output=True, text=True)
    except OSError:
        return None
    if done.returncode:
        return None
    *numbers, actual = done.stdout.split()
    if (int(numbers[0]), int(numbers[1])) < LEAST:
        return None
    return Interpreter(".".join(numbers), actual if real else str(path))


def interpreters() -> list[Interpreter]:
    """Those of PATH, /usr/bin and pyenv, new enough, one for each version."""
    places = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)] + [Path("/usr/bin")]
    places += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
    names = [path for place in places for path in (*place.glob("python3.[1-9][0-9]"), place / "python3")]
    by_version: dict[str, Interpreter] = {}
    for path in names:
        if path.is_file() and sys.prefix not in str(path) and (each := interpreter(path)):
            by_version.setdefault(each.version, each)
    return [by_version[version] for version in sorted(by_version)]


def of_each_series(candidates: Iterable[Interpreter]) -> dict[str, Interpreter]:
    """The first of the candidates for each of `PYTHONS`, in their order; a series without one is absent."""
    by_series: dict[str, Interpreter] = {}
    for each in candidates:
        by_series.setdefault(each.series, each)
    return {series: by_series[series] for series in PYTHONS if series in by_series}


def installs(wheel: str, series: str, machine: str) -> bool:
    """Whether CPython `series` on Linux with glibc 2.`GLIBC` takes a wheel of this file name, by its tags."""
    version = tuple(map(int, series.split(".")))
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    tags = {
        *cpython_tags(version, [f"cp{version[0]}{version[1]}"], platforms),
        *compatible_tags(version, None, platforms),
    }
    return not tags.isdisjoint(parse_wheel_filename(wheel)[3])


def cover(wheels: Iterable[str], machine: str) -> dict[str, str]:
    """For each of `PYTHONS` the wheel that it installs; empty where none of them is for it."""
    names = list(wheels)
    return {series: next((name for name in names if installs(name, series, machine)), "") for series in PYTHONS}
