"""What is to be reached, and whether a run has reached it.

The goals stand here alone; docs/gpu.md has the same table for readers. Decode is judged by steps through the engine.
Knows no torch: the goals are judged when the processes that measured have ended.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bench.gpu.report import Report, Result


class Goal(NamedTuple):
    """What an item of the stage `bench` is to reach: `field` of its result at least (or at most) `bound`. item: the
    first of several, divided by |, that was measured."""

    text: str
    item: str
    field: str
    bound: float
    at_most: bool = False


LARGEST = "engine 8b bf16 x256|engine 8b bf16 x128"
"""A GPU of 80 GB has room for 128 sequences of 2k."""

GOALS = (
    Goal("8B bf16, batch 1: share of the floor", "engine 8b bf16 x1", "share", 0.85),
    Goal("8B bf16, batch 64: share of the floor", "engine 8b bf16 x64", "share", 0.80),
    Goal("8B bf16, batch 256: share of the floor", LARGEST, "share", 0.80),
    Goal("l1b bf16, batch 1: share of the floor", "engine l1b bf16 x1", "share", 0.70),
    Goal("8B int4, batch 1: share of the floor", "engine 8b int4 x1", "share", 0.60),
    Goal("8B int4, batch 1: times bf16", "engine 8b int4 x1", "times_bf16", 2.6),
    Goal("gpt-oss-20b, batch 1: share of the floor", "engine gpt-oss-20b mxfp4 x1", "share", 0.60),
    Goal("8B bf16, prefill of 2k: share of the floor", "prefill 8b bf16 2048", "share", 0.80),
    Goal("8B bf16, prefill of 8k: share of the floor", "prefill 8b bf16 8192", "share", 0.80),
    Goal("price of the law, decode", "price of the law 8b", "decode", 0.05, True),
    Goal("price of the law, prefill", "price of the law 8b", "prefill", 0.10, True),
    Goal("attention, decode: speed beside SDPA", "attention 8b decode", "times_yardstick", 0.90),
    Goal("attention, prefill: speed beside SDPA", "attention 8b prefill", "times_yardstick", 0.90),
    Goal("GPU idle, batch 64", "engine 8b bf16 x64", "idle", 0.03, True),
    Goal("GPU idle, batch 256", LARGEST, "idle", 0.03, True),
    Goal("drawing 256 rows of 128k, ms", "draw 256 x 128256", "ms", 0.3, True),
    Goal("drawing 1 row of 128k, ms", "draw 1 x 128256", "temperature_ms", 0.02, True),
    Goal("256 sequences: times transformers", "transformers l1b x256", "times", 5.0),
    Goal("8B: seconds from start to first token", "start 8b bf16", "seconds_to_token", 15.0, True),
)


def judge(report: Report) -> None:
    """Add an item for each goal. Costs no time, so it runs also when the stage's time is over."""
    for goal in GOALS:
        report.run(f"goal: {goal.text}", lambda goal=goal: judged(report, goal), is_free=True)  # type: ignore[misc]


def judged(report: Report, goal: Goal) -> Result:
    results = [report.result_of(name) for name in goal.item.split("|")]
    item: dict[str, Any] = next((result for result in results if result), {})
    bound = f"{'at most' if goal.at_most else 'at least'} {goal.bound:g}"
    if goal.field not in item:
        return {"value": "not measured", "goal": bound}
    value = float(item[goal.field])
    met = value <= goal.bound if goal.at_most else value >= goal.bound
    return {"value": value, "goal": bound, "met": "yes" if met else "no"}
