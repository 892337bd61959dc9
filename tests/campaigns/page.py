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
NOT_COUNTS = ("seed", "violations", "minutes")


def section(folder: Path = RESULTS) -> str:
    """A table for each tier that was run."""
    parts = []
    for tier in TIERS:
        file = folder / f"campaign-{tier}.json"
        if file.is_file():
            parts.append(table(json.loads(file.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) or "No campaign has been run to its end yet."


def summed(pieces: list[dict[str, Any]]) -> dict[str, int | float]:
    """Counts and minutes of all pieces together; what is a measure and no count is that of the last piece."""
    told: dict[str, int | float] = {}
    for piece in pieces:
        for key, value in piece.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                is_sum = isinstance(value, int) or key == "minutes"
                told[key] = round(told.get(key, 0) + value, 2) if is_sum else value
    return told


def table(report: dict[str, Any]) -> str:
    """The counts of one tier."""
    rows = {name: (summed(pieces), pieces) for name, pieces in sorted(report["campaigns"].items())}
    minutes = sum(counts["minutes"] for counts, _ in rows.values())
    host = report["host"]
    lines = [
        f"`make campaign-{report['tier']}` on {host['name']}, {host['cores_allowed']} cores, {minutes:.1f} minutes:",
        "",
        "| campaign | counts | violations | seeds | minutes | commits |",
        "|---|---|---|---|---|---|",
    ]
    for name, (counts, pieces) in rows.items():
        told = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in counts.items() if key not in NOT_COUNTS)
        seeds = ", ".join(str(piece["seed"]) for piece in pieces)
        commits = ", ".join(dict.fromkeys(piece["commit"] for piece in pieces))
        lines.append(f"| {name} | {told} | {counts['violations']} | {seeds} | {counts['minutes']:.1f} | {commits} |")
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
