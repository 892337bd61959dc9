"""The part of docs/reliability.md that quotes the campaigns' counts: written from bench/results/campaign-*.json.

`python -m tests.campaigns.page` writes it; a law test holds the page to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- written by python -m tests.campaigns.page -->", "<!-- end -->"
TIERS = ("commit", "nightly", "release")
NOT_COUNTS = ("seed", "violations")


def section(folder: Path = RESULTS) -> str:
    """A table for each tier that was run."""
    parts = []
    for tier in TIERS:
        file = folder / f"campaign-{tier}.json"
        if file.is_file():
            parts.append(table(json.loads(file.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) or "No campaign has been run to its end yet."


def table(report: dict[str, Any]) -> str:
    """The counts of one tier."""
    minutes = sum(counts["minutes"] for counts in report["campaigns"].values())
    lines = [
        f"`make campaign-{report['tier']}`, commit {report['commit']}, {report['host']}, {minutes:.1f} minutes:",
        "",
        "| campaign | counts | violations | seed | minutes |",
        "|---|---|---|---|---|",
    ]
    for name, counts in sorted(report["campaigns"].items()):
        told = ", ".join(
            f"{key.replace('_', ' ')} {value:,}"
            for key, value in counts.items()
            if isinstance(value, int | float) and key not in (*NOT_COUNTS, "minutes")
        )
        lines.append(f"| {name} | {told} | {counts['violations']} | {counts['seed']} | {counts['minutes']} |")
    return "\n".join(lines)


def quoted(page: str) -> str:
    """What stands between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def written(page: str, text: str) -> str:
    """`page` with `text` between its marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has not the marks {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def write() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), section()), encoding="utf-8")


if __name__ == "__main__":
    write()
