"""`python supply/image.py HADOLINT [--tag NAME] [--required]` lints deploy/Dockerfile, and builds it where it can.

Building needs docker or podman, whichever answers first, and the base image: on this machine, or from its registry. The
image is then run: its version, and one token of the built-in model without a network. Where it can not be built, the
last line begins with NOT BUILT and names the reason. The exit status is the linter's then; with `--required`, 1.

Called by `make image`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = Path("deploy/Dockerfile")
BUILDERS = ("docker", "podman")
ANSWER = ("generate", "builtin", "--prompt", "Once upon a time", "--max-tokens", "1")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def fault(*words: str) -> str:
    """The last line of a program's complaint; empty if it succeeds."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return last_line(done.stderr) if done.returncode else ""


def bases(dockerfile: str) -> list[str]:
    """The images that a Dockerfile starts from, each once, without its own stages."""
    stages = set(re.findall(r"(?im)^FROM \S+ AS (\S+)$", dockerfile))
    return [name for name in dict.fromkeys(re.findall(r"(?m)^FROM (\S+)", dockerfile)) if name not in stages]


def builder(images: list[str]) -> tuple[str, str]:
    """The program that can build, and otherwise the reasons of each that can not."""
    reasons = []
    for name in BUILDERS:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
        elif message := fault(name, "info"):
            reasons.append(f"{name}: {message}")
        elif missing := [
            f"{image}: {message}"
            for image in images
            if fault(name, "image", "inspect", image) and (message := fault(name, "pull", image))
        ]:
            reasons.append(f"{name} has no {'; '.join(missing)}")
        else:
            return name, ""
    return "", "; ".join(reasons)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("hadolint")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    arguments.add_argument("--tag", default=f"headrace:{version}")
    arguments.add_argument("--required", action="store_true")
    args = arguments.parse_args()
    if status := subprocess.run([args.hadolint, str(DOCKERFILE)], cwd=ROOT).returncode:
        return status
    print(f"{DOCKERFILE}: linted", flush=True)
    program, reason = builder(bases((ROOT / DOCKERFILE).read_text(encoding="utf-8")))
    if not program:
        print(f"NOT BUILT, linted alone: {reason}")
        return int(args.required)
    once = [program, "run", "--rm", "--network", "none", args.tag]
    for words in (
        [program, "build", "--file", str(DOCKERFILE), "--tag", args.tag, "."],
        [*once, "--version"],
        [*once, *ANSWER],
    ):
        if status := subprocess.run(words, cwd=ROOT).returncode:
            return status
    print(f"BUILT {args.tag} by {program}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
