"""`python supply/release.py TAG [--notes]` checks that the files that name the version agree with the tag v0.1.0.

These are pyproject.toml, `headrace.__version__`, CITATION.cff, CHANGELOG.md, which must have the version with a day,
and whatever names a wheel or an image of headrace. `--notes` prints the changelog's section of the version besides.
Uses the standard library alone: the workflow runs it before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMING = (
    "README.md",
    "docs/howto-deploy.md",
    "deploy/compose.yaml",
    "deploy/kubernetes/headrace.yaml",
    "supply/real_installs.py",
)
"""Files that name wheels or images of headrace with their version."""
FILES = ("pyproject.toml", "src/headrace/__init__.py", "CITATION.cff", "CHANGELOG.md", *NAMING)


def notes(changelog: str, version: str) -> str:
    """The text of a version's section of the changelog; empty if it has none."""
    match = re.search(rf"(?ms)^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |^\[[^\]]+\]: |\Z)", changelog)
    return match[1].strip() if match else ""


def faults(tag: str, texts: Mapping[str, str]) -> list[str]:
    """What does not agree with the tag, a line for each.

    Args:
        tag: the letter v and the version.
        texts: the contents of `FILES`, by name.
    """
    version = tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        return [f"the tag is {tag!r}; it must be v and three numbers, as in v0.1.0"]
    changelog = texts["CHANGELOG.md"]
    days = re.findall(rf"(?m)^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changelog)
    release_day = days[0] if days else ""
    stated = {
        "pyproject.toml": tomllib.loads(texts["pyproject.toml"])["project"]["version"],
        "src/headrace/__init__.py": "".join(
            re.findall(r'(?m)^__version__ = "(.*)"$', texts["src/headrace/__init__.py"])
        ),
        "CITATION.cff": "".join(re.findall(r'(?m)^version: "?([^"\n]+)"?$', texts["CITATION.cff"])),
    }
    lines = [
        f"{name} has version {other or 'none'}, and the tag is {tag}"
        for name, other in stated.items()
        if other != version
    ]
    if not release_day:
        lines.append(f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'")
    elif not notes(changelog, version):
        lines.append(f"CHANGELOG.md says nothing of {version}")
    released = "".join(re.findall(r'(?m)^date-released: "?([^"\n]+)"?$', texts["CITATION.cff"]))
    if released != release_day:
        lines.append(f"CITATION.cff has date-released {released or 'none'}, and CHANGELOG.md {release_day or 'none'}")
    for name in NAMING:
        others = set(re.findall(r"headrace[-:](\d+\.\d+\.\d+)", texts[name])) - {version}
        lines += [f"{name} names headrace {other}" for other in sorted(others)]
    return lines


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("tag")
    arguments.add_argument("--notes", action="store_true")
    args = arguments.parse_args()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
    lines = faults(args.tag, texts)
    print("\n".join(lines) if lines else f"{args.tag}: {len(FILES)} files agree", file=sys.stderr)
    if args.notes and not lines:
        print(notes(texts["CHANGELOG.md"], args.tag.removeprefix("v")))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
