"""The part of docs/reliability.md that quotes the campaigns' counts: written from bench/results/campaign-*.json.

`python -m tests.campaigns.page` writes it; a law test holds the page to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- written by python -m tests.campaigns.page -->", "<!-- end -->"
TIERS = ("commit", "nightly", "release")
NOT_COUNTS = ("seed", "violations", "minutes")
NOT_SUMMED = ("most_at_once", "streams_at_once", "requests_a_second", "rounds", "cases", "pairs_covered")
"""Whole numbers that are measures: the largest of all pieces counts."""


def section(folder: Path = RESULTS) -> str:
    """A table for each tier that was run."""
    parts = []
    for tier in TIERS:
        file = folder / f"campaign-{tier}.json"
        if file.is_file():
            parts.append(table(json.loads(file.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) or "No campaign has been run to its end yet."


def summed(pieces: list[dict[str, Any]]) -> dict[str, int | float]:
    """Counts and minutes of all pieces together; of what is a measure and no count, the largest or the last piece's."""
    result: dict[str, int | float] = {}
    for piece in pieces:
        for key, value in piece.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                if key in NOT_SUMMED:
                    result[key] = max(result.get(key, 0), value)
                elif isinstance(value, int) or key == "minutes":
                    result[key] = round(result.get(key, 0) + value, 2)
                else:
                    result[key] = value
    return result


def in_order(name: str) -> tuple[int, str]:
    """C-2 before C-11."""
    return int(re.findall(r"\d+", name)[0]), name


def number(value: int | float) -> str:
    """As one reads it: 1,000,000 and 5.04e-30."""
    return f"{value:,}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.4g}"


def told(counts: dict[str, int | float]) -> list[str]:
    """Each count with its name."""
    return [f"{key.replace('_', ' ')} {number(value)}" for key, value in counts.items() if key not in NOT_COUNTS]


def ranges(seeds: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1 to 3, 7"."""
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and runs[-1][-1] == seed - 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def host_of(piece: dict[str, Any], report: dict[str, Any]) -> str:
    """The machine that counted a piece; older files have one for all."""
    host = piece.get("host") or report["host"]
    return f"{host['name']}, {host['cores_allowed']} cores"


def table(report: dict[str, Any]) -> str:
    """The counts of one tier."""
    rows = {name: (summed(pieces), pieces) for name, pieces in report["campaigns"].items()}
    total = sum(counts["minutes"] for counts, _ in rows.values())
    lines = [
        f"`make campaign-{report['tier']}`, {total:.1f} minutes:",
        "",
        "| campaign | counts | violations | seeds | minutes | commits | hosts |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(rows, key=in_order):
        counts, pieces = rows[name]
        bad = f"**{counts['violations']}**" if counts["violations"] else "0"
        commits = ", ".join(dict.fromkeys(piece["commit"] for piece in pieces))
        cells = (name, ", ".join(told(counts)), bad, ranges([piece["seed"] for piece in pieces]))
        hosts = "; ".join(dict.fromkeys(host_of(piece, report) for piece in pieces))
        lines.append(f"| {' | '.join(cells)} | {counts['minutes']:.1f} | {commits} | {hosts} |")
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
