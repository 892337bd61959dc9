"""`python -m bench.plot`: pictures of what stands in bench/results, written to docs/figures as SVG.

Reads scheduler.json and batches.json as `bench.record` wrote them. matplotlib is a dev dependency.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
BUDGET_US = 300


def load(name: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a result, and one line that tells where it was measured."""
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    cpu = kept["host"]["cpu"]
    return kept["result"], f"{cpu['name']}, {cpu['cores_allowed']} cores, commit {kept['commit']}, {kept['date']}"


def scheduler() -> None:
    rows, where = load("scheduler")
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for mixed, label in ((False, "decode"), (True, "decode beside a long prompt")):
        own = [row for row in rows if row["mixed"] is mixed]
        axes.plot([r["num_seqs"] for r in own], [r["median_us"] for r in own], marker="o", label=f"{label}, median")
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


def _finish(figure: Any, axes: Any, title: str, where: str, name: str) -> None:
    axes.set_title(f"{title}\n", fontsize=12)
    axes.text(0.5, 1.02, where, transform=axes.transAxes, ha="center", fontsize=8, color="dimgrey")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
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
