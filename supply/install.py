"""`python supply/install.py run|tests [--locked] [PIP_ARGUMENT ...]` installs headrace for the Python that runs it.

`run` installs what serving needs and compiles the kernels; `tests` adds torch, transformers and the tools of the
tests. Versions come from constraints.txt. Before more than 500 MB are downloaded, it says how much and why, and then
shows pip's progress. Where the kernels can not be compiled, it takes a wheel of dist/ that suits, or else says what to
install and goes on with the reference backend, which needs torch.

Called by the Makefile. Uses the standard library alone: the environment is empty when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LARGE = 500e6
"""Bytes of a download that is announced."""
TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")
"""The packages that build headrace; the first alone does without the native core."""


class Pip:
    """pip of this environment, through constraints.txt."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = list(words)

    def __call__(self, *words: str, quiet: bool = True, may_fail: bool = False, locked: bool = False) -> bool:
        """Install; returns whether it worked. Raises `SystemExit` with pip's status unless it may fail."""
        command = [sys.executable, "-m", "pip", "install", *(["--quiet"] if quiet else []), *self.words, *words]
        if not locked:
            command += ["--constraint", str(CONSTRAINTS)]
        # The tools of the environment, such as cmake, must be found.
        paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": paths})
        if done.returncode and not may_fail:
            raise SystemExit(done.returncode)
        return not done.returncode

    def missing(self, requirements: Iterable[str]) -> dict[str, str]:
        """URLs of what pip would download for the requirements, by package."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            self("--dry-run", "--report", str(report), *requirements)
            found = json.loads(report.read_text())["install"]
        return {item["metadata"]["name"]: item["download_info"]["url"] for item in found}


def size(url: str) -> int:
    """Bytes of a wheel; 0 where its server does not tell."""
    if url.startswith("file:"):
        return Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)).stat().st_size
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as reply:
            return int(reply.headers.get("Content-Length") or 0)
    except OSError:
        return 0


def announcement(sizes: dict[str, int], why: str) -> str:
    """The text that comes before a large download; empty before a small one. `sizes`: bytes by package."""
    total = sum(sizes.values())
    if total <= LARGE:
        return ""
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {bytes_ / 1e6:,.0f}" for name, bytes_ in largest)
    text = (
        f"{why}: {len(sizes)} packages, {total / 1e6:,.0f} MB to download, of which {parts}. What pip has cached is not"
    )
    text += " downloaded again."
    if any(name.startswith("nvidia-") for name in sizes):
        text += (
            "\nThis torch brings CUDA. Without a GPU, the build for CPUs does, and takes a tenth: end this, and set"
            "\nPIP_EXTRA_INDEX_URL to the index that torch's install page names for CPUs."
        )
    return text


def install(pip: Pip, requirements: Sequence[str], why: str) -> None:
    """Install the requirements; a large download is announced, and pip's progress shown."""
    urls = pip.missing(requirements)
    if not urls:
        return
    with ThreadPoolExecutor(16) as pool:
        sizes = dict(zip(urls, pool.map(size, urls.values()), strict=True))
    text = announcement(sizes, why)
    if text:
        print(text, flush=True)
    pip(*requirements, quiet=not text)


def lacking() -> list[str]:
    """What the kernels can not be compiled without, and is not there."""
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = [] if any(map(shutil.which, compilers)) else ["a C++17 compiler (on Debian and Ubuntu: apt install g++)"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        found.append("the headers of Python (on Debian and Ubuntu: apt install python3-dev)")
    return found


def has_kernels() -> bool:
    """Whether the headrace that is installed has its native kernels."""
    code = "import headrace._native"
    return not subprocess.run([sys.executable, "-I", "-c", code], cwd=ROOT.parent, capture_output=True).returncode


def install_run(pip: Pip) -> None:
    """headrace and what serving needs: from this checkout, else from a wheel of dist/, else without native kernels."""
    missing = lacking()
    editable = ("--no-build-isolation", "--editable", ".")
    pip(*(TOOLS[:1] if missing else TOOLS))
    if not missing:
        pip(*editable)
        if has_kernels():
            return
        missing = ["a C++17 compiler that can build them (make native shows its messages)"]
    print(f"The native kernels can not be compiled here: {' and '.join(missing)} is missing.", flush=True)
    if any((ROOT / "dist").glob("*.whl")):
        words = (
            "--only-binary=:all:",
            "--no-index",
            "--no-deps",
            "--force-reinstall",
            "--find-links",
            "dist",
            "headrace",
        )
        if pip(*words, may_fail=True) and has_kernels():
            pip(*project()["dependencies"])
            print("headrace comes from the wheel in dist/, not from this checkout.", flush=True)
            return
    print(
        "Install that, remove the environment and run make again. Going on with the reference backend, which is much\n"
        "slower and needs torch.",
        flush=True,
    )
    pip(*editable, "--config-settings=wheel.cmake=false", "--config-settings=wheel.py-api=py3")
    install(pip, project()["optional-dependencies"]["torch"], "The reference backend needs torch")


def project() -> dict[str, dict[str, list[str]]]:
    """The table `project` of pyproject.toml."""
    table: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("part", choices=("run", "tests"))
    arguments.add_argument(
        "--locked", action="store_true", help="take what serving and building need by the hashes of the locks"
    )
    args, words = arguments.parse_known_args()
    pip = Pip(words)
    if args.part == "run":
        # The pip that comes with Python may be years old, and download whole packages to read what they need.
        pip("pip")
        if args.locked:
            for lock in ("requirements-build.lock", "requirements.lock"):
                pip("--require-hashes", "--no-deps", "--requirement", lock, locked=True)
        install_run(pip)
    else:
        why = "The tests need torch, transformers, and the tools that pyproject.toml lists as dev"
        install(pip, project()["optional-dependencies"]["dev"], why)


if __name__ == "__main__":
    main()
