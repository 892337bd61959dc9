"""The table and the picture of an ablation. Called by `bench.commands` and `python -m bench.ablation`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADINGS = ("tok/s", "factor", "least to most", "TTFT p50", "TTFT p99", "TPOT p50", "gap p99", "memory", "at once",
            "work", "empty")  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a rung under `HEADINGS`. "~" marks figures that are derived from a sample."""
    mark = "~" if row["is_derived"] else ""
    spread = f"{min(row['factors']):,.2f} to {max(row['factors']):,.2f}" if row["factors"] else ""
    work, empty = row.get("rows_per_needed"), row.get("empty_share")
    return [
        f"{mark}{_number(row['output_throughput'])}",
        f"{_number(row['factor'])} x" if row["factor"] else "",
        spread,
        mark + _time(row["median_ttft_ms"]),
        mark + _time(row["p99_ttft_ms"]),
        mark + _time(row["median_tpot_ms"]),
        mark + _time(row["p99_itl_ms"]),
        f"{row['memory_bytes'] / 1e6:,.0f} MB",
        str(row.get("most_seqs") or 1),
        f"{work:.2f}" if work else "",
        f"{empty:.0%}" if empty is not None else "",
    ]


def _number(value: float) -> str:
    return f"{value:,.3f}" if value < 1 else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _time(milliseconds: float) -> str:
    if milliseconds >= 3_600_000:
        return f"{milliseconds / 3_600_000:,.1f} h"
    return f"{milliseconds / 1000:,.1f} s" if milliseconds >= 1000 else f"{milliseconds:,.1f} ms"


def notes(result: dict[str, Any]) -> list[str]:
    """Return the facts that the table leaves out, a line each: the requests, the naive library, and the rows that
    textbooks have."""
    rows = {row["rung"]: row for row in result["rungs"]}
    static, contiguous, paged = (rows[name] for name in ("static batches", "continuous, contiguous", "paged"))
    lines = [
        f"{result['num_prompts']} requests at once, {result['total_input_tokens']:,} tokens of prompts (the first "
        f"{result['prefix_len']} of each are the same), {result['total_output_tokens']:,} of answers; the cache of the "
        f"batched rungs has {result['cache_bytes'] / 1e6:,.1f} MB, {result['cache_seqs']} contexts of "
        f"{result['max_model_len']:,} tokens.",
        f"Naive rungs: {result['naive']}. ~: {result['sample']} of the requests ran, the times of the others are "
        "derived.",
        f"Static to continuous batching: {contiguous['factor']:,.2f} x; static batches compute "
        f"{static['rows_per_needed']:.2f} rows for each that is needed.",
        f"Contiguous to paged: {contiguous['empty_share']:.0%} of the cache held is empty, then "
        f"{paged['empty_share']:.0%}; {contiguous['most_seqs']} sequences at once, then {paged['most_seqs']}.",
    ]
    if result["whole_over_naive"]:
        lines.append(f"The whole is {result['whole_over_naive']['factor']:,.0f} x as fast as the naive loop.")
    return lines


def print_ablation(result: dict[str, Any]) -> None:
    """Print both tables, and the notes."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150)
    for title, key, heading in (
        (f"{result['model_id']}: each technique added", "rungs", "+"),
        ("Each left out of the whole: what it is worth there", "without", "without"),
    ):
        table = Table(title=title)
        table.add_column(heading)
        for name in HEADINGS:
            table.add_column(name, justify="right")
        for row in result[key]:
            table.add_row(row["rung"], *cells(row))
        console.print(table)
    for line in notes(result):
        console.print(line, highlight=False)


def markdown(result: dict[str, Any]) -> list[str]:
    """Return both tables as lines of Markdown."""
    lines = list[str]()
    for key, heading in (("rungs", "each technique added"), ("without", "left out of the whole")):
        lines += ["| " + " | ".join((heading, *HEADINGS)) + " |", "|---" * (len(HEADINGS) + 1) + "|"]
        lines += ["| " + " | ".join((row["rung"], *cells(row))) + " |" for row in result[key]]
        lines.append("")
    return lines


def plot(result: dict[str, Any], path: Path, subtitle: str = "") -> None:
    """Draw throughput by rung, and the factor of each technique in the ladder and in the whole. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = path.stem
    rungs: Sequence[dict[str, Any]] = result["rungs"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    names = [row["rung"] for row in rungs]
    speeds = [row["output_throughput"] for row in rungs]
    least = [speed - min(row["throughputs"]) for speed, row in zip(speeds, rungs, strict=True)]
    most = [max(row["throughputs"]) - speed for speed, row in zip(speeds, rungs, strict=True)]
    left.barh(
        names, speeds, xerr=[least, most], color=["C1" if row["is_derived"] else "C0" for row in rungs], capsize=2
    )
    for row in rungs:
        # Right of the bar that shows the spread.
        text = f"  {_number(row['output_throughput'])}"
        left.text(max(row["throughputs"]), row["rung"], text, va="center", fontsize=8)
    left.set(xscale="log", xlabel="output tokens/s (orange: derived from a sample)", title="each technique added")
    left.invert_yaxis()
    left.margins(x=0.15)
    without = result["without"]
    names = [row["rung"] for row in without]
    factors = [row["factor"] for row in without]
    low = [factor - min(row["factors"]) for factor, row in zip(factors, without, strict=True)]
    high = [max(row["factors"]) - factor for factor, row in zip(factors, without, strict=True)]
    right.barh(names, factors, xerr=[low, high], color="C2", capsize=2)
    right.axvline(1.0, color="grey", linewidth=0.8)
    right.set(xscale="log", xlabel="the whole / the whole without it", title="each left out of the whole")
    right.invert_yaxis()
    figure.suptitle(f"{result['model_id']}{subtitle and f' ({subtitle})'}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
