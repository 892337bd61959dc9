"""Labs of the schedule, by a modelled clock: the engine's own scheduler, and a formula for the time of a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.fleet.simulator import SimulatedRun, Simulation, Sizes
from headrace.fleet.traces import Call
from headrace.labs.base import Lab
from headrace.plan import hardware, planner
from headrace.plan.plans import Workload

LOAD = 0.8
"""Requests come at this share of the rate at which continuous batches could serve them."""
Run = Callable[[Sequence[Call]], SimulatedRun]


class Served(NamedTuple):
    """Seconds from the first arrival to the last end, the steps in between, and the mean latency in seconds."""

    seconds: float
    num_steps: int
    latency: float


def continuous(run: Run, calls: Sequence[Call], num_seqs: int) -> Served:
    """Serve the calls as the engine does."""
    result = run(calls)
    ends = [life.end for life in result.lives]
    return Served(max(ends), result.num_steps, sum(life.e2el for life in result.lives) / len(ends))


def static(run: Run, calls: Sequence[Call], num_seqs: int) -> Served:
    """Serve the calls in batches: each begins when the one before has ended, with those that have come by then, and
    ends with its longest."""
    now, num_steps, latencies, rest = 0.0, 0, 0.0, list(calls)
    while rest:
        now = max(now, rest[0].time)
        batch = [call for call in rest[:num_seqs] if call.time <= now]
        rest = rest[len(batch) :]
        # They are all there, and their answers go back together.
        result = run([call._replace(time=0.0) for call in batch])
        now += max(life.end for life in result.lives)
        num_steps += result.num_steps
        latencies += sum(now - call.time for call in batch)
    return Served(now, num_steps, latencies / len(calls))


def batching(model: str, small: bool) -> Lab:
    """Static against continuous batching, by how unequal the answers are, for requests that are all there and for a
    stream of them."""
    num_calls, num_seqs, mean = (24, 4, 24) if small else (256, 16, 128)
    one = planner.Planner(planner.read(model), hardware.TABLE["l4"], Workload())
    sizes = Sizes(num_blocks=num_seqs * 512, max_num_seqs=num_seqs, enable_prefix_caching=False)
    noise = random.Random(4)

    def run(calls: Sequence[Call]) -> SimulatedRun:
        return Simulation(1, "round-robin", sizes, one.step).run(calls)

    rows: list[list[str | int | float]] = []
    for spread in (0.0, 0.5, 0.9):
        answers = [max(1, round(mean * (1 + spread * (2 * noise.random() - 1)))) for _ in range(num_calls)]
        if spread == 0.9:  # A few long answers among short ones, as in chats.
            answers = [4 * mean if i % num_seqs == 0 else max(1, mean // 4) for i in range(num_calls)]
        longest = sum(max(answers[start : start + num_seqs]) for start in range(0, num_calls, num_seqs))
        ideal = longest * num_seqs / sum(answers)
        kind = {0.0: "equal", 0.5: "from half to one and a half"}.get(spread, "few long ones")
        times, arrivals = [0.0] * num_calls, "all there"
        for _ in range(2):
            calls = [Call(time, 64, num) for time, num in zip(times, answers, strict=True)]
            theirs, ours = static(run, calls, num_seqs), continuous(run, calls, num_seqs)
            use = [sum(answers) / (each.num_steps * num_seqs) for each in (theirs, ours)]
            latencies = [1e3 * theirs.latency, 1e3 * ours.latency]
            factor = theirs.seconds / ours.seconds
            row = [sum(answers), 1e3 * theirs.seconds, 1e3 * ours.seconds, factor, ideal, *use, *latencies]
            rows.append([f"{kind}, {arrivals}", *row])
            gaps = [noise.expovariate(LOAD * num_calls / ours.seconds) for _ in answers]
            times, arrivals = [sum(gaps[:i]) for i in range(num_calls)], "a stream"
    return Lab(
        name="batching",
        title="Static and continuous batches",
        measured=f"{num_calls} requests, {num_seqs} at a time, through the engine's own scheduler: all there at once, "
        f"or a stream of them at {LOAD:.0%} of the rate that continuous batches serve. The time of a step is a "
        "formula's (headrace plan, on an L4). A static batch begins when the one before has ended, with those that "
        "have come by then, and its answers go back when the longest is there; no row is padded, so a static engine "
        "would be slower still. Used is the share of the steps' places that got a token.",
        wrong="continuous batching is 23 times as fast as static batches.",
        right=[
            f"The gain is what the longest answer of a batch is to the mean one. With equal answers it is "
            f"{float(rows[0][4]):.2f}, with few long ones among short ones {float(rows[4][4]):.2f}.",
            f"Of a stream a static engine also lets the newcomers wait: with equal answers a request takes "
            f"{float(rows[1][8]) / float(rows[1][9]):.1f} times as long, with few long ones "
            f"{float(rows[5][8]) / float(rows[5][9]):.1f} times, for it cannot keep up: {float(rows[5][6]):.0%} of its "
            f"places are used, of the others {float(rows[5][7]):.0%}.",
            "Rows that a static batch leaves empty cost little where a step waits for reading weights: the gain "
            "comes from "
            "fewer steps.",
        ],
        columns=[
            "answers",
            "tokens",
            "static ms",
            "continuous ms",
            "factor",
            "longest / mean",
            "static used",
            "continuous used",
            "static latency",
            "continuous latency",
        ],
        rows=rows,
        x="answers",
        series=["factor", "longest / mean"],
        y="times",
        counts=["tokens", "static ms", "continuous ms", "factor", "longest / mean"],
    )
