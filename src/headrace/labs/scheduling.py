"""Labs of the schedule, by a modelled clock: the engine's own scheduler, and a formula for the time of a step."""

from __future__ import annotations

import random

from headrace.fleet.simulator import Simulation, Sizes
from headrace.fleet.traces import Call
from headrace.labs.base import Lab
from headrace.plan import hardware, planner
from headrace.plan.plans import Workload


def batching(model: str, small: bool) -> Lab:
    """Static against continuous batching, by how unequal the answers are."""
    num_calls, num_seqs, mean = (24, 4, 24) if small else (256, 16, 128)
    one = planner.Planner(planner.read(model), hardware.TABLE["l4"], Workload())
    sizes = Sizes(num_blocks=num_seqs * 512, max_num_seqs=num_seqs, enable_prefix_caching=False)
    noise = random.Random(4)
    rows: list[list[str | int | float]] = []
    for spread in (0.0, 0.5, 0.9):
        answers = [max(1, round(mean * (1 + spread * (2 * noise.random() - 1)))) for _ in range(num_calls)]
        if spread == 0.9:  # A few long answers among short ones, as in chats.
            answers = [4 * mean if i % num_seqs == 0 else max(1, mean // 4) for i in range(num_calls)]
        calls = [Call(0.0, 64, num) for num in answers]
        together = Simulation(1, "round-robin", sizes, one.step).run(calls)
        # A static batch ends with its longest; the next one begins then.
        batches = [
            Simulation(1, "round-robin", sizes, one.step).run(calls[start : start + num_seqs])
            for start in range(0, num_calls, num_seqs)
        ]
        seconds = max(life.end for life in together.lives)
        static = sum(max(life.end for life in run.lives) for run in batches)
        longest = sum(max(answers[start : start + num_seqs]) for start in range(0, num_calls, num_seqs))
        ideal = longest * num_seqs / sum(answers)
        kind = {0.0: "equal", 0.5: "from half to one and a half"}.get(spread, "few long ones")
        rows.append([kind, sum(answers), 1e3 * static, 1e3 * seconds, static / seconds, ideal])
    return Lab(
        name="batching",
        title="Static and continuous batches",
        measured=f"{num_calls} requests that are all there, {num_seqs} at a time, through the engine's own "
        "scheduler; "
        "the time of a step is a formula's (headrace plan, on an L4). A static batch begins when the one before "
        "has ended "
        "with its longest answer; no row is padded, so a static engine would be slower still.",
        wrong="continuous batching is 23 times as fast as static batches.",
        right=[
            f"The gain is what the longest answer of a batch is to the mean one. With equal answers it is "
            f"{float(rows[0][4]):.2f}, with few long ones among short ones {float(rows[2][4]):.2f}.",
            "Rows that a static batch leaves empty cost little where a step waits for reading weights: the gain "
            "comes from "
            "fewer steps.",
        ],
        columns=["answers", "tokens", "static ms", "continuous ms", "factor", "longest / mean"],
        rows=rows,
        x="answers",
        series=["factor", "longest / mean"],
        y="times",
        counts=["tokens", "static ms", "continuous ms", "factor", "longest / mean"],
    )
