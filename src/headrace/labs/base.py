"""`Lab`: the result of an experiment, as a table, a text, a page and a plot. Knows no engine. Called by all labs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.protocol.errors import HeadraceError

Cell = str | int | float


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment.

    measured: the quantity, and how it is measured. wrong: the statement of textbooks. right: the true statement, with
    figures of this run. `x` and `series` are the columns of a plot. `counts`: columns that are the same on every
    machine.
    """

    name: str
    title: str
    measured: str
    wrong: str
    right: list[str]
    columns: list[str]
    rows: list[list[Cell]]
    x: str
    series: list[str]
    y: str
    logarithmic: bool = False
    counts: list[str] = []

    def column(self, name: str) -> list[Cell]:
        """Return the cells of a column. Raises `HeadraceError` if there is none of that name."""
        if name not in self.columns:
            raise HeadraceError(f"lab {self.name} has no column {name!r}: it has {', '.join(self.columns)}")
        return [row[self.columns.index(name)] for row in self.rows]

    def numbers(self, name: str) -> list[float]:
        """Return a column of numbers."""
        return [float(cell) for cell in self.column(name)]


def words(cell: Cell) -> str:
    """Return a cell as text: whole numbers with commas, others with four digits."""
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.2f}" if abs(cell) >= 100 else f"{cell:.4g}"


def report_of(lab: Lab) -> str:
    """Return the text that the command prints."""
    cells = [lab.columns, *([words(cell) for cell in row] for row in lab.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(lab.columns))]
    table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(
        [lab.title, "", lab.measured, "", *table, "", f"Textbooks: {lab.wrong}", *(f"- {line}" for line in lab.right)]
    )


def page_of(lab: Lab, host: str) -> str:
    """Return the lab as a page of Markdown. `host`: where it was measured, in words."""
    lines = [f"# {lab.title}", "", lab.measured, "", "```bash", f"headrace lab {lab.name}", "```", ""]
    lines += [f"| {' | '.join(lab.columns)} |", "|" + "--:|" * len(lab.columns)]
    lines += [f"| {' | '.join(words(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in lab.rows]
    lines += ["", f"![{lab.y} by {lab.x}](figures/lab-{lab.name}.svg)", "", f"**Textbooks** print: {lab.wrong}", ""]
    return "\n".join([*lines, *(f"- {line}" for line in lab.right), "", host, ""])


def plot(lab: Lab, path: Path) -> None:
    """Draw the series by `x`: lines over numbers, bars over names. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Fixed ids and no date: the same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = lab.name
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    cells: Sequence[Cell] = lab.column(lab.x)
    if all(isinstance(cell, str) for cell in cells):
        width = 0.8 / len(lab.series)
        for number, name in enumerate(lab.series):
            places = [i - 0.4 + width * (number + 0.5) for i in range(len(cells))]
            axes.bar(places, lab.numbers(name), width=width, label=name)
        axes.set_xticks(range(len(cells)), [str(cell) for cell in cells], rotation=20, ha="right")
    else:
        for name in lab.series:
            axes.plot(lab.numbers(lab.x), lab.numbers(name), "o-", label=name)
        axes.set_xlabel(lab.x)
    axes.set_ylabel(lab.y)
    if lab.logarithmic:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    pyplot.close(figure)
