"""What the locks and the commit say: versions, digests and times, for the other programs of this folder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VENDOR = ROOT / "src" / "headrace" / "serve" / "inspector" / "vendor"


class Vendored(NamedTuple):
    """A package of npm that lies in this repository: name, version, licence, and the SHA-256 of each file by name."""

    name: str
    version: str
    licence: str
    files: dict[str, str]


def locked(name: str = "requirements.lock") -> dict[str, tuple[str, list[str]]]:
    """Version and SHA-256 hashes of each package of a lock."""
    found = {}
    for line in (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        match = re.match(r"([a-z0-9-]+)==(\S+)[^#]*?((?:\s+--hash=sha256:[0-9a-f]{64})+)$", line.strip())
        if match:
            found[match[1]] = match[2], re.findall(r"sha256:([0-9a-f]{64})", match[3])
    return found


def vendored() -> list[Vendored]:
    """The libraries of the page, from the two tables of SOURCES.md."""
    text = (VENDOR / "SOURCES.md").read_text(encoding="utf-8")
    files: dict[str, dict[str, str]] = {}
    for file, packages, digest in re.findall(r"(?m)^\| (\S+) \| ([^|]+) \| `[^|]*` \| ([0-9a-f]{64}) \|$", text):
        for package in packages.split(", "):
            files.setdefault(package.strip(), {})[file] = digest
    rows = re.findall(r"(?m)^\| (\S+) \| (\d\S*) \| (\S+) \|", text)
    return [Vendored(name, version, licence, files[name]) for name, version, licence in rows]


def epoch() -> str:
    """The time that the wheel's files and the bill of materials get: SOURCE_DATE_EPOCH, or that of the commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    git = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or "315532800"
