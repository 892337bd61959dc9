"""`headrace bench sweep`: request rates one after the other, up to the highest at which a server keeps its goals.

Knows results by vLLM's names; the caller measures. Called by `bench.commands`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Measure = Callable[[float], dict[str, Any]]
COLUMNS = (("rate", "request_rate", "{:.2f}"), ("requests/s", "request_throughput", "{:.2f}"),
           ("goodput", "request_goodput", "{:.2f}"), ("kept", "kept_share", "{:.1%}"),
           ("tokens/s", "output_throughput", "{:,.0f}"), ("TTFT p50", "median_ttft_ms", "{:,.1f}"),
           ("p99", "p99_ttft_ms", "{:,.1f}"), ("TPOT p50", "median_tpot_ms", "{:,.1f}"),
           ("p99", "p99_tpot_ms", "{:,.1f}"))  # fmt: skip


def sweep(measure: Measure, first: float, share: float, num_rates: int) -> dict[str, Any]:
    """Measure at most `num_rates` rates: from `first` by doubling (or halving) until the goals break (or hold), then
    between the two. `measure` returns a result with `request_goodput` and `completed`, `failed`, `duration`.

    Returns the results as `runs`, by rate, and `best_rate`, the highest at which `share` of the requests kept all goals
    (0: none did).
    """
    runs = list[dict[str, Any]]()

    def keeps(rate: float) -> bool:
        result = dict(measure(rate))
        num = result["completed"] + result["failed"]
        result["request_rate"] = rate
        result["kept_share"] = result["request_goodput"] * result["duration"] / num
        runs.append(result)
        return bool(result["kept_share"] >= share)

    good, bad, rate = 0.0, 0.0, first
    for _ in range(num_rates):
        if keeps(rate):
            good = rate
        else:
            bad = rate
        rate = (good + bad) / 2 if good and bad else 2 * good or bad / 2
    runs.sort(key=lambda run: run["request_rate"])
    return {"best_rate": good, "share": share, "is_bounded": bool(bad), "runs": runs}


def print_sweep(result: dict[str, Any]) -> None:
    """Print a line for each rate, and the highest that is kept."""
    cells = [[title for title, _, _ in COLUMNS]]
    cells += [[form.format(run[name]) for _, name, form in COLUMNS] for run in result["runs"]]
    for row in cells:
        print("".join(f"{cell:>12}" for cell in row))
    best, share = result["best_rate"], f"{result['share']:.0%} of the requests keep all goals"
    if not best:
        print(f"At no rate {share}.")
    elif result["is_bounded"]:
        print(f"The highest rate at which {share}: {best:.2f} requests/s.")
    else:
        print(
            f"At every rate {share}: the highest is above {best:.2f} requests/s; raise --request-rate or --num-rates."
        )


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw goodput and the share that is kept by rate. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rates = [run["request_rate"] for run in result["runs"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(rates, [run["request_goodput"] for run in result["runs"]], "o-")
    left.set(xlabel="requests/s sent", ylabel="requests/s that keep all goals")
    right.plot(rates, [run["p99_ttft_ms"] for run in result["runs"]], "o-", label="TTFT p99")
    right.plot(rates, [run["p99_tpot_ms"] for run in result["runs"]], "o-", label="TPOT p99")
    right.set(xlabel="requests/s sent", ylabel="ms", yscale="log")
    right.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
