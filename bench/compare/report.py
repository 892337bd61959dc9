"""The comparison as a table for readers, as JSON for bench/results, and as pictures for docs/figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare import figures
from bench.compare.disturbance import FOREIGN_LIMIT, PACE_LIMIT, Sample
from bench.compare.environments import OURS
from bench.compare.figures import Figure, Row
from bench.compare.plan import WORKS
from bench.compare.shapes import Shape

LIMITS = {"bandwidth": "GB/s read", "int8": "TOPS int8"}
PLOTTED = ("decode", "prefill512", "prefill2048", "batch8", "batch16", "batch32")


def number(value: float, unit: str) -> str:
    """A figure with three significant digits and its unit."""
    if unit == "MiB":
        return f"{value:,.0f} MiB"
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def spread(figure: Figure, unit: str) -> str:
    """A median, and of several samples the least and the greatest."""
    median, low, high = (
        number(value, unit).removesuffix(f" {unit}") for value in (figure.value, figure.low, figure.high)
    )
    return f"{median} ({f'{low} to {high}' if figure.count > 1 else 'n=1'}) {unit}"


def labelled(figure: Figure | None, unit: str, disturbed: bool) -> str:
    """The contender and its figure; "disturbed" where a contender has disturbed samples alone, and "–" without any."""
    if figure is None:
        return "disturbed" if disturbed else "–"
    return f"{figure.contender} {number(figure.value, unit)}"


def aim(row: Row) -> str:
    """The bounds of the goal, in words."""
    parts = []
    if row.goal.ratio is not None:
        parts.append(f"≥ {row.goal.ratio:g}×")
    if row.goal.share is not None:
        parts.append(f"≥ {row.goal.share:.0%} of {row.limit or 'the limit'}")
    if row.goal.work == "serve":
        parts.append(f"≥ {row.goal.bound:.0%}")
    elif row.goal.bound:
        sign = "≥" if WORKS[row.goal.work].higher else "≤"
        parts.append(f"{sign} {number(row.goal.bound, row.unit)}")
    return ", ".join(parts)


def verdict(row: Row) -> str:
    """Whether the goal is reached; "disturbed" where a missing figure could change the answer."""
    if row.met is not None:
        return "yes" if row.met else "no"
    if row.ours is None and not any(contender.ours for contender in row.disturbed):
        return "not measured"
    return "disturbed" if row.disturbed and aim(row) else ""


def table(shape: Shape, rows: Sequence[Row], title: str) -> Table:
    grid = Table(title=f"{shape.name} ({shape.stands_for}): {title}", title_justify="left")
    for name in ("work", "best peer", "headrace", "ratio (of pairs)", "aim", "reached", "share of the limit", ""):
        grid.add_column(name, justify="right" if name in ("ratio (of pairs)", "share of the limit") else "left")
    for row in rows:
        share = "" if row.share is None else f"{row.share:.0%} {row.limit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}× (of {row.num_pairs})"
        peers = [contender for contender in row.disturbed if not contender.ours]
        peer = labelled(row.peer, row.unit, bool(peers)) if row.peer or row.goal.ratio or peers else ""
        ours = labelled(row.ours, row.unit, len(peers) < len(row.disturbed)).removeprefix(f"{OURS} ")
        notes = [row.note] if row.note else []
        notes += [f"disturbed: {', '.join(map(str, row.disturbed))}"] if row.disturbed else []
        grid.add_row(row.goal.label, peer, ours, ratio, aim(row), verdict(row), share, "; ".join(notes))
    return grid


def medians(shape: Shape, samples: Sequence[Sample]) -> Table:
    """Medians of all contenders at all works between their least and greatest, and how many of each one's samples were
    disturbed."""
    counts = figures.tallies(samples, shape.name)
    works = [work for work in WORKS if any(tally.work == work for tally in counts)]
    cells = {(tally.contender, tally.work): "disturbed" for tally in counts}
    for work in works:
        for figure in figures.figures(samples, shape.name, work):
            cells[figure.contender, work] = spread(figure, WORKS[work].unit).removesuffix(" tok/s")
    grid = Table(
        title=f"{shape.name}: medians, least to greatest (tok/s unless said). Disturbed: samples in which others "
        f"took over {FOREIGN_LIMIT:.0%} of the CPU, or slowed it below {PACE_LIMIT:.0%} of its best pace; no median "
        "has them",
        title_justify="left",
    )
    grid.add_column("")
    for heading in (*works, "disturbed"):
        grid.add_column(heading, justify="right")
    for contender in sorted({tally.contender for tally in counts}):
        mine = [tally for tally in counts if tally.contender == contender]
        share = f"{sum(tally.num_disturbed for tally in mine)} of {sum(tally.num_samples for tally in mine)}"
        grid.add_row(str(contender), *(cells.get((contender, work), "–") for work in works), share)
    return grid


def show(console: Console, shape: Shape, samples: Sequence[Sample], title: str) -> None:
    console.print(table(shape, figures.rows(shape, samples), title))
    console.print(medians(shape, samples))
    for peer, instructions in figures.instructions(samples, shape.name).items():
        console.print(f"instructions, {peer}: {instructions}", markup=False)
    for name, unit in LIMITS.items():
        most = figures.limit(samples, name)
        reason = next((str(s["error"]) for s in samples if s.get("work") == "limits" and "error" in s), "not measured")
        console.print(f"limit, {name}: " + (reason if most is None else f"{most:.3g} {unit}"))
    for contender, work, reason in figures.failures(samples, shape.name):
        console.print(f"failed: {contender} at {work}: {reason}", markup=False)


def as_json(shape: Shape, samples: Sequence[Sample], head: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run, for one shape."""
    listed = [sample for sample in samples if sample.get("shape") in (None, shape.name) and sample.get("work") != "run"]
    return {
        **head,
        "model": dataclasses.asdict(shape),
        "limits": {name: figures.limit(samples, name) for name in LIMITS},
        "instructions": figures.instructions(samples, shape.name),
        "rows": [_row_json(row) for row in figures.rows(shape, samples)],
        "disturbed": [
            {**dataclasses.asdict(tally), "contender": str(tally.contender)}
            for tally in figures.tallies(samples, shape.name)
        ],
        "failures": figures.failures(samples, shape.name),
        "samples": listed,
    }


def _row_json(row: Row) -> dict[str, Any]:
    record = {**dataclasses.asdict(row), "work": row.goal.label, "aim": aim(row)}
    record["disturbed"] = [str(contender) for contender in row.disturbed]
    for side in ("peer", "ours"):
        figure = getattr(row, side)
        record[side] = figure and {**dataclasses.asdict(figure), "contender": str(figure.contender)}
    return record


def plot(shape: Shape, samples: Sequence[Sample], where: str, path: Path) -> bool:
    """Bars of every contender's speed, a panel for each work, with the limit where there is one; False if there is
    nothing to draw."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    works = [work for work in PLOTTED if figures.figures(samples, shape.name, work)]
    if not works:
        return False
    columns = min(3, len(works))
    lines = -(-len(works) // columns)
    most = max(len(figures.figures(samples, shape.name, work)) for work in works)
    size = (4.3 * columns, lines * (0.28 * most + 1.1) + 0.6)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    flat = list(grid.flat)
    for axes, work in zip(flat, works, strict=False):
        _panel(axes, shape, samples, work)
    for axes in flat[len(works) :]:
        axes.set_visible(False)
    figure.suptitle(f"{shape.name} ({shape.stands_for}), tokens/s, 2 threads\n", fontsize=12)
    figure.text(0.5, 1.0 - 0.42 / size[1], where, ha="center", fontsize=8, color="dimgrey")
    # Without a date and with fixed ids, the same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True


def _panel(axes: Any, shape: Shape, samples: Sequence[Sample], work: str) -> None:
    listed = figures.figures(samples, shape.name, work)[::-1]
    values = [figure.value for figure in listed]
    colours = ["tab:orange" if figure.contender.ours else "tab:blue" for figure in listed]
    bars = axes.barh([str(figure.contender) for figure in listed], values, color=colours)
    axes.bar_label(bars, labels=[f"{value:.3g}" for value in values], label_type="center", color="white", fontsize=7)
    axes.set_title(WORKS[work].meaning, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)
    for place, figure in enumerate(listed):
        load = figures.load_on(shape, work, figure)
        most = figures.limit(samples, load[0]) if load else None
        if load is None or most is None:
            continue
        speed = most / load[1] * figure.value
        if load[0] == "bandwidth":  # contenders have weights of different sizes, so each has a limit of its own
            axes.plot([speed, speed], [place - 0.4, place + 0.4], color="grey", linewidth=1.5)
            label = "grey: what its bytes allow at the read bandwidth"
        else:
            label = "dotted: int8 peak"
            if place == 0:
                axes.axvline(speed, color="grey", linestyle=":", linewidth=1)
        if place == 0:
            axes.set_xlabel(f"{label}", fontsize=7, color="grey", loc="right")


def save(folder: Path, shape: Shape, record: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"compare-{shape.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
