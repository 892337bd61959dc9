"""`headrace bench throughput` of several models and forms: memory and speed side by side.

Each turn is a process of its own (`python -m headrace.cli.bench.turn`), so that the memory of one is not that of
another. In a round every model and form has one turn, and each round begins with another. Figures are medians over the
rounds; a ratio is the median of the ratios of each round. Called by `bench.commands`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.cli.bench.plans import ThroughputPlan
from headrace.engine.progress import progress_bar
from headrace.plan.words import amount
from headrace.protocol.config import FORMS, EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError

FIGURES = ("weight_bytes", "kv_cache_bytes", "resident_bytes", "peak_resident_bytes", "peak_device_bytes")
AS_STORED = "stored"


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a turn's process."""

    plan: ThroughputPlan
    config: EngineConfig
    goals: dict[str, float] = {}


Run = Callable[[Turn], dict[str, Any]]


def forms_of(text: str) -> list[str | None]:
    """'stored,int8' -> [None, 'int8']. Raises `RequestError`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (AS_STORED, *FORMS):
            raise RequestError("--forms", name, f"of {', '.join((AS_STORED, *FORMS))}, with commas between")
    return [None if name == AS_STORED else name for name in names]


def in_a_process(turn: Turn) -> dict[str, Any]:
    """Do a turn in a new process and return its result. Raises `HeadraceError` with the last line that it wrote."""
    command = [sys.executable, "-m", "headrace.cli.bench.turn"]
    done = subprocess.run(command, input=msgspec.json.encode(turn), capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason was given"]
        raise HeadraceError(f"{turn.config.model} in {turn.config.quantization or 'the stored form'}: {lines[-1]}")
    result: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return result


def measure_comparison(
    plan: ThroughputPlan, configs: Sequence[EngineConfig], goals: dict[str, float], run: Run = in_a_process
) -> dict[str, Any]:
    """Return `rows`, one for each config, in their order. Ratios are to the first row.

    Raises the errors of a turn as `HeadraceError`."""
    turns = [Turn(plan=plan, config=config, goals=goals) for config in configs]
    results: list[list[dict[str, Any]]] = [[] for _ in turns]
    with progress_bar("turns", not plan.json, has_long_steps=True) as show:
        for number in range(plan.rounds):
            for place in range(len(turns)):
                index = (number + place) % len(turns)
                config = turns[index].config
                label = f"{config.model} {config.quantization or AS_STORED}"
                show(number * len(turns) + place, plan.rounds * len(turns), label)
                results[index].append(run(turns[index]))
    first = [result["output_throughput"] for result in results[0]]
    rows = [_row(config, each, first) for config, each in zip(configs, results, strict=True)]
    fields = ("num_prompts", "dataset_name", "input_len", "output_len", "rounds", "seed")
    return {name: getattr(plan, name) for name in fields} | {"rows": rows}


def _row(config: EngineConfig, results: list[dict[str, Any]], first: Sequence[float]) -> dict[str, Any]:
    speeds = [result["output_throughput"] for result in results]
    ratios = [speed / other for speed, other in zip(speeds, first, strict=True)]
    sizes = {name: max((result[name] for result in results if result.get(name)), default=None) for name in FIGURES}
    return {
        "model": config.model,
        "form": results[0]["form"],
        "dtype": results[0]["dtype"],
        "backend": results[0]["backend"],
        **sizes,
        "output_throughput": statistics.median(speeds),
        "throughputs": speeds,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "median_ttft_ms": statistics.median(result["median_ttft_ms"] for result in results),
        "median_tpot_ms": statistics.median(result["median_tpot_ms"] for result in results),
    }


def print_comparison(result: dict[str, Any]) -> None:
    """Print the rows as a table."""
    on_device = any(row["peak_device_bytes"] for row in result["rows"])
    heads = ("model", "form", "weights", "GPU memory at most" if on_device else "memory at most", "tokens/s", "ratio",
             "least", "most", "TTFT ms", "TPOT ms")  # fmt: skip
    rows = [heads]
    for row in result["rows"]:
        memory = row["peak_device_bytes"] if on_device else row["peak_resident_bytes"]
        rows.append((
            row["model"].rstrip("/").rpartition("/")[2], row["form"], amount(row["weight_bytes"] or 0),
            amount(memory) if memory else "?", f"{row['output_throughput']:,.1f}", f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}", f"{max(row['ratios']):.2f}", f"{row['median_ttft_ms']:,.1f}",
            f"{row['median_tpot_ms']:,.1f}",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        left = "  ".join(f"{cell:<{width}}" for cell, width in zip(row[:2], widths, strict=False))
        print(left, *(f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:], strict=True)), sep="  ")
    print(
        f"{result['num_prompts']} requests of {result['input_len']} + {result['output_len']} tokens at once; medians "
        f"of {result['rounds']} rounds, in turns; ratios are to the first row"
    )
