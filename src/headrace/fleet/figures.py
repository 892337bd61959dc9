"""The figures of a simulated fleet, and their table of text with units. Called by `headrace simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.fleet.simulator import SimulatedRun, percentile

SHARES = (50.0, 90.0, 99.0)


def figures(run: SimulatedRun, num_replicas: int, goals: dict[str, float], price: float) -> dict[str, Any]:
    """Return the figures of a run: times in milliseconds, rates in a second."""
    lives, duration = run.lives, run.duration or 1.0
    num_tokens, num_prompt = sum(life.num_new for life in lives), sum(life.num_prompt for life in lives)
    result: dict[str, Any] = {
        "replicas": num_replicas,
        "requests": len(lives),
        "refused": run.num_refused,
        "steps": run.num_steps,
        "preemptions": run.num_preemptions,
        "duration": run.duration,
        "prompt_tokens": num_prompt,
        "output_tokens": num_tokens,
        "requests_per_second": len(lives) / duration,
        "output_tokens_per_second": num_tokens / duration,
        "cached_share": sum(life.num_cached for life in lives) / max(num_prompt, 1),
        "by_replica": [sum(life.replica == index for life in lives) for index in range(num_replicas)],
    }
    columns: dict[str, Sequence[float]] = {
        "ttft": sorted(life.ttft for life in lives),
        "tpot": sorted(life.tpot for life in lives if life.num_new > 1),
        "e2el": sorted(life.e2el for life in lives),
    }
    for name, values in columns.items():
        for share in SHARES:
            result[f"p{share:g}_{name}_ms"] = 1e3 * percentile(values, share) if values else None
    if goals:
        num_good = sum(life.keeps(goals) for life in lives)
        result |= {"goodput": num_good / duration, "kept_share": num_good / max(1, len(lives) + run.num_refused)}
    if price:
        dollars = price * num_replicas * duration / 3600
        result |= {"dollars": dollars, "dollars_per_million": dollars / max(num_tokens, 1) * 1e6}
    return result


def report_of(result: dict[str, Any], goals: dict[str, float]) -> str:
    """Return the figures as lines of text."""
    lowest, highest = min(result["by_replica"]), max(result["by_replica"])
    each = f"{lowest:,} to {highest:,} requests each" if lowest < highest else f"{lowest:,} requests each"
    num = result["replicas"]
    rows = [
        ("fleet", f"{num:,} x {result['hardware']}, {result['router']}, {each}"),
        ("requests", f"{result['requests']:,}, {result['prompt_tokens']:,} tokens of prompts, "
         f"{result['output_tokens']:,} of answers"),
        ("refused", f"{result['refused']:,} requests are too long for the model or its cache"),
        ("duration", f"{result['duration']:,.1f} s, {result['steps']:,} steps, {result['preemptions']:,} preemptions"),
        ("throughput", f"{result['output_tokens_per_second']:,.0f} tokens/s, {result['requests_per_second']:.2f} "
         "requests/s"),
        ("prefix cache", f"{result['cached_share']:.1%} of the prompt tokens" if result["prefixes"] else
         "the trace does not say what prompts share"),
    ]  # fmt: skip
    if not result["refused"]:
        rows = [row for row in rows if row[0] != "refused"]
    if goals:
        words = ", ".join(f"{name} {goal:g} ms" for name, goal in goals.items())
        share = f"{result['kept_share']:.1%} of the requests keep {words}"
        rows.append(("goodput", f"{result['goodput']:.2f} requests/s; {share}"))
    if "dollars" in result:
        rows.append(("price", f"${result['dollars']:,.2f}, ${result['dollars_per_million']:.3f} for a million tokens"))
    lines = [f"{label:<14}{text}" for label, text in rows]
    lines.append("\n" + " " * 14 + "".join(f"{f'p{share:g}':>12}" for share in SHARES))
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "latency")):
        values = [result[f"p{share:g}_{name}_ms"] for share in SHARES]
        lines.append(f"{label:<14}" + "".join(f"{'' if v is None else f'{v:,.1f} ms':>12}" for v in values))
    return "\n".join(lines)
