"""`python supply/lock.py [--upgrade NAME ...]` writes constraints.txt and two locks from pyproject.toml.

constraints.txt has the version of every package that any extra or target of the Makefile installs, for each Python and
machine below. requirements.lock has those that headrace needs to run, and requirements-build.lock those that build its
wheel, with the hashes of their files, so that an index can give nothing else (S-36). uv finds versions that suit all of
them at once. A version that stands in constraints.txt stays while a requirement allows it; `--upgrade` takes the newest
of the named packages.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
CONSTRAINTS = ROOT / "constraints.txt"
LOCK = ROOT / "requirements.lock"
BUILD_LOCK = ROOT / "requirements-build.lock"
CONSTRAINTS_HEAD = """\
# Written by `make lock` from pyproject.toml: the versions that the tests ran with, for CPython {pythons} on Linux
# ({machines}). Everything is installed through this file. To take a newer one: make lock ARGS="--upgrade NAME".
"""
LOCK_HEAD = """\
# Written by `make lock`: what headrace needs to run, with the hashes of its files (CPython {pythons}, Linux).
# pip install --require-hashes --no-deps -r requirements.lock
"""
BUILD_LOCK_HEAD = """\
# Written by `make lock`: what builds headrace's wheel, with the hashes of its files (CPython {pythons}, Linux).
# pip install --require-hashes --no-deps -r requirements-build.lock
"""


def normal(name: str) -> str:
    """A package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def environment(python: str, machine: str) -> dict[str, str]:
    """What the markers of requirements are evaluated with, for CPython on Linux."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def marker(requirement: Requirement) -> str | None:
    """The shortest marker that means the same on every Python and machine; None where it holds on none of them.

    Raises `SystemExit` where neither Pythons alone nor machines alone tell them apart.
    """
    if requirement.marker is None:
        return ""
    found = {(p, m) for p in PYTHONS for m in MACHINES if requirement.marker.evaluate(environment(p, m))}
    pythons, machines = sorted({p for p, _ in found}, key=PYTHONS.index), sorted({m for _, m in found})
    if not found:
        return None
    if len(found) != len(pythons) * len(machines):
        raise SystemExit(f"{requirement}: its marker mixes Pythons and machines")
    first, last = PYTHONS.index(pythons[0]), PYTHONS.index(pythons[-1])
    if pythons != list(PYTHONS[first : last + 1]):
        raise SystemExit(f"{requirement}: its Pythons {', '.join(pythons)} do not follow each other")
    terms = [f'python_version >= "{pythons[0]}"'] if first else []
    terms += [f'python_version < "{PYTHONS[last + 1]}"'] if last + 1 < len(PYTHONS) else []
    terms += [f'platform_machine == "{machines[0]}"'] if len(machines) < len(MACHINES) else []
    return " and ".join(terms)


def simplified(text: str) -> str:
    """The lines that `uv` wrote, with short markers."""

    def lines() -> Iterator[str]:
        for entry in re.split(r"\n(?=\S)", text.strip()):
            words, *hashes = entry.split(" \\\n")
            requirement = Requirement(words)
            short = marker(requirement)
            if short is not None:
                pin = f"{normal(requirement.name)}{requirement.specifier}"
                yield " \\\n".join([f"{pin} ; {short}" if short else pin, *hashes])

    return "\n".join(lines()) + "\n"


def solved(kept: str, *flags: str) -> str:
    """The versions that `uv` finds for the requirements that `flags` name, those of `kept` first."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        out.write_text(kept)
        command = ["uv", "pip", "compile", "--universal", "--python-version", PYTHONS[0]]
        command += ["--quiet", "--no-annotate", "--no-header", "--output-file", str(out), *flags]
        subprocess.run(command, cwd=ROOT, check=True)
        return out.read_text()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--upgrade", nargs="*", default=[], metavar="NAME")
    upgrades = [word for name in arguments.parse_args().upgrade for word in ("--upgrade-package", name)]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    named = [word for name in groups for word in ("--group", name)]
    names = {"pythons": ", ".join(PYTHONS), "machines": " and ".join(MACHINES)}
    text = simplified(solved(CONSTRAINTS.read_text(), "pyproject.toml", "--all-extras", *named, *upgrades))
    CONSTRAINTS.write_text(CONSTRAINTS_HEAD.format_map(names) + text)
    hashes = ("--generate-hashes", "--constraints", str(CONSTRAINTS))
    LOCK.write_text(LOCK_HEAD.format_map(names) + simplified(solved("", "pyproject.toml", *hashes)))
    BUILD_LOCK.write_text(BUILD_LOCK_HEAD.format_map(names) + simplified(solved("", "--group", "wheel", *hashes)))


if __name__ == "__main__":
    main()
