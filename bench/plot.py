"""`python -m bench.plot`: pictures of what stands in bench/results, written to docs/figures as SVG.

Reads scheduler.json, batches.json and speculate-prompts.json as `bench.record` wrote them. matplotlib is a dev
dependency.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

from bench.speculation import NAME, TEMPERATURES, pooled

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
BUDGET_US = 300


def load(name: str) -> tuple[Any, str]:
    """A result, and a line with the machine, the commit and the date."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    cpu = record["host"]["cpu"]
    return record["result"], f"{cpu['name']}, {cpu['cores_allowed']} cores, commit {record['commit']}, {record['date']}"


def scheduler() -> None:
    rows, where = load("scheduler")
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for mixed, label in ((False, "decode"), (True, "decode beside a long prompt")):
        group = [row for row in rows if row["mixed"] is mixed]
        axes.plot([r["num_seqs"] for r in group], [r["median_us"] for r in group], marker="o", label=f"{label}, median")
    axes.axhline(BUDGET_US, color="grey", linestyle=":", label=f"budget: {BUDGET_US} µs at 256")
    axes.set(xscale="log", yscale="log", xlabel="running sequences", ylabel="schedule() + commit() [µs a step]")
    axes.set_xticks([1, 16, 64, 256, 1024], labels=["1", "16", "64", "256", "1,024"])
    _finish(figure, axes, "Host cost of a step", where, "scheduler")


def batches() -> None:
    rows, where = load("batches")
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    sizes = [row["batch_size"] for row in rows]
    axes.plot(sizes, [row["tokens_per_s"] for row in rows], marker="o", label="all requests together")
    axes.plot(sizes, [1e3 / row["tpot_ms"] for row in rows], marker="s", label="one request")
    axes.set(xscale="log", yscale="log", xlabel="requests in the batch", ylabel="output [tokens/s]")
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    _finish(figure, axes, "Decode speed of the built-in model, torch_ref", where, "batches")


def speculation() -> None:
    """Guesses kept by position; tokens a pass beside the formula; coupled beside rejection sampling."""
    record, where = load(NAME)
    rows = record["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    names = list(dict.fromkeys(row["texts"] for row in rows))
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.8), layout="constrained")
    for number, method in enumerate(methods):
        colour = f"C{number}"
        mean = [pooled_position(rows, method, place) for place in range(8)]
        share = [each for each in mean if each is not None]
        left.plot(range(1, len(share) + 1), share, "o-", color=colour, label=method)
        left.plot(range(1, len(share) + 1), [share[0] ** i for i in range(1, len(share) + 1)], ":", color=colour)
        for mark, name in zip("os^D", names, strict=False):
            group = [
                each for row in rows if (row["method"], row["texts"]) == (method, name) for each in row["acceptance"]
            ]
            points = [(each["formula"], each["mean_accepted_length"]) for each in group if each["mode"] == "coupled"]
            middle.plot(*zip(*points, strict=True), mark, color=colour, markersize=5)
        for mode, line in (("coupled", "o-"), ("rejection", "s--")):
            lengths = [pooled(rows, method, mode, t) for t in TEMPERATURES]
            if None not in lengths:
                right.plot(TEMPERATURES, lengths, line, color=colour, markersize=4)
    left.plot([], [], ":", color="grey", label="the first one's power")
    left.set(xlabel="position in the draft", ylabel="share of drafts kept up to here", ylim=(0, 1))
    left.set_title("temperature 0, all texts", fontsize=10)
    most = max(each["mean_accepted_length"] for row in rows for each in row["acceptance"])
    middle.axline((1, 1), slope=1, color="grey", linewidth=0.8)
    for mark, name in zip("os^D", names, strict=False):
        middle.plot([], [], mark, color="grey", label=name)
    middle.set(
        xlabel="tokens a pass by the formula", ylabel="measured", xlim=(0.95, most + 0.2), ylim=(0.95, most + 0.2)
    )
    middle.set_title("coupled, all temperatures", fontsize=10)
    for mode, line in (("coupled", "o-"), ("rejection sampling", "s--")):
        right.plot([], [], line, color="grey", label=mode)
    right.set(xlabel="temperature", ylabel="tokens a pass")
    right.set_title("all texts", fontsize=10)
    for axes in (left, middle, right):
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Drafters of the built-in model ({where})", fontsize=11)
    _save(figure, "speculation")


def pooled_position(rows: list[dict[str, Any]], method: str, place: int) -> float | None:
    """Share of drafts whose guesses up to `place` were kept, at temperature 0; None past the deepest draft."""
    group = [row["acceptance"][0] for row in rows if row["method"] == method]
    depth = max(len(each["acceptance_per_position"]) for each in group)
    drafts = sum(each["num_drafts"] for each in group)
    if place >= depth or not drafts:
        return None
    shares = [(each["acceptance_per_position"] + [0.0] * depth)[place] * each["num_drafts"] for each in group]
    return float(sum(shares) / drafts)


def _finish(figure: Any, axes: Any, title: str, where: str, name: str) -> None:
    axes.set_title(f"{title}\n", fontsize=12)
    axes.text(0.5, 1.02, where, transform=axes.transAxes, ha="center", fontsize=8, color="dimgrey")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, name)


def _save(figure: Any, name: str) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    # Without a date and with fixed ids, the same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = name
    path = FIGURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(path.name)


if __name__ == "__main__":
    scheduler()
    batches()
    speculation()
