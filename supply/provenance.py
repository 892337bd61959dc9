"""The statement of what went into the wheels of dist: in-toto Statement v1 with a SLSA provenance v1 predicate.

It names each wheel by its digest, and as inputs the commit, every file that was built from, the tools of
requirements-build.lock with the hashes that pip checked, the interpreters and the compiler. The same inputs give the
same bytes: it has no time of day and no name of a machine. It is not signed; sign it (cosign, GPG) where the wheels are
published.

Sources: https://in-toto.io/Statement/v1, https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from versions import ROOT, locked

LOCK = "requirements-build.lock"


def output(*words: str) -> str:
    """The first line that a program prints; empty if it can not be run."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip() if not done.returncode else ""


def commit() -> dict[str, Any]:
    """The commit that is checked out, and whether a file differs from it."""
    if not (number := output("git", "rev-parse", "HEAD")):
        return {}
    changed = bool(output("git", "status", "--porcelain", "--untracked-files=no"))
    return {"digest": {"gitCommit": number}, "annotations": {"filesDiffer": changed}}


def dependencies(sources: Sequence[str]) -> list[dict[str, Any]]:
    """All inputs with their digests: the commit, the files, the tools."""
    found = [{"name": "headrace", **commit()}]
    for name in sorted(sources):
        digest = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        found.append({"name": name, "digest": {"sha256": digest}})
    for name, (version, digests) in locked(LOCK).items():
        # pip takes the one file of these that suits the interpreter.
        found.append({"uri": f"pkg:pypi/{name}@{version}", "annotations": {"sha256 is one of": digests}})
    return found


def statement(wheels: Mapping[str, tuple[str, Path]], sources: Sequence[str], time: str, cross: str = "") -> str:
    """The JSON of the statement.

    Args:
        wheels: SHA-256 of each wheel and the interpreter that built it, by file name.
        sources: files that were copied into the build, relative to the repository.
        time: SOURCE_DATE_EPOCH of the build.
        cross: what the names of a cross compiler's tools begin with.
    """
    compiler = f"{cross}g++" if cross else os.environ.get("CXX") or "c++"
    libc = ("dpkg-query", "--show", "libc6-arm64-cross") if cross else ("ldd", "--version")
    pythons = [output(str(python), "-VV") for _, python in wheels.values()]
    return json.dumps(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": name, "digest": {"sha256": digest}} for name, (digest, _) in wheels.items()],
            "predicateType": "https://slsa.dev/provenance/v1",
            "predicate": {
                "buildDefinition": {
                    "buildType": "urn:headrace:make-wheel:1",
                    "externalParameters": {"SOURCE_DATE_EPOCH": time},
                    "internalParameters": {
                        "interpreters": pythons,
                        "compiler": output(compiler, "--version"),
                        "linker": output(f"{cross}ld", "--version"),
                        "libc": output(*libc),
                    },
                    "resolvedDependencies": dependencies(sources),
                },
                "runDetails": {"builder": {"id": "urn:headrace:supply/wheel.py"}},
            },
        },
        indent=1,
    )
