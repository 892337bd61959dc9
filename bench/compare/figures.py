"""From samples to the rows of the table: medians, the best peer, ratios, shares of the limit. Pure.

A sample is a JSON object as the journal has it: shape, work, peer, quant, round, value, kept, and what it was made of.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.compare.plan import WORKS, Contender
from bench.compare.shapes import Shape
from bench.peers.protocol import NUM_CONTEXT, NUM_DEEP, NUM_NEW, NUM_PROMPT

Sample = Mapping[str, Any]
FOREIGN_LIMIT = 0.04
MEMORY_KV_TOKENS = 1024
MEMORY_ALLOWANCE = 350_000_000
GROUP, HEAD_GROUP = 64, 32  # of our int4 weights, where nobody tells their bytes


@dataclasses.dataclass(frozen=True)
class Goal:
    """A row of the table. `ratio`: our figure over the best peer's, wanted at least. `share`: of the limit, wanted at
    least. `bound`: our figure itself, wanted at most (or at least, where higher is better)."""

    work: str
    label: str
    bits: int = 0
    ratio: float | None = None
    share: float | None = None
    bound: float | None = None


GOALS: dict[str, tuple[Goal, ...]] = {
    "l1b": (
        Goal("decode", "decode, one stream, int4", 4, ratio=1.45, share=0.88),
        Goal("decode", "decode, one stream, int8", 8, ratio=1.3),
        Goal("prefill512", "prefill 512", ratio=1.4, share=0.68),
        Goal("prefill2048", "prefill 2048", ratio=2.0, share=0.68),
        Goal("batch8", "8 streams of 128 + 128", ratio=1.9),
        Goal("batch16", "16 streams of 128 + 128"),
        Goal("batch32", "32 streams of 128 + 128", ratio=2.2),
        Goal("step8", "8 streams: a decode step against one stream's", bound=1.45),
        Goal("context", "decode at 16k context, int8 KV", share=0.75),
        Goal("prefix", "TTFT behind 2,048 cached + 32 new: below cold", bound=60),
        Goal("memory", "resident memory, int4", bound=0),
        Goal("serve", "serve, 32 HTTP streams: of offline", bound=0.95),
        Goal("first_token", "process start to first token", bound=1.2),
    ),
    "q06": (
        Goal("decode", "decode, one stream, int4", 4, ratio=1.5),
        Goal("decode", "decode, one stream, int8", 8),
        Goal("prefill512", "prefill 512", ratio=1.6),
        Goal("batch32", "32 streams of 128 + 128", ratio=2.0),
    ),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """The median of a contender's kept samples at a work. `others`: the largest share of the CPU that others took."""

    contender: Contender
    value: float
    count: int
    low: float
    high: float
    others: float
    weight_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Row:
    """A goal and what came of it; `met` is None where nothing is asked or measured. `share` is of `limit`."""

    goal: Goal
    unit: str
    peer: Figure | None
    ours: Figure | None
    ratio: float | None
    share: float | None
    limit: str
    met: bool | None
    note: str = ""


def kept(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.get("kept") and "value" in sample]


def figures(samples: Iterable[Sample], shape: str, work: str) -> list[Figure]:
    """One for each contender that has a figure, the best first."""
    by: dict[Contender, list[Sample]] = {}
    for sample in kept(samples):
        if (sample["shape"], sample["work"]) == (shape, work):
            by.setdefault(Contender(sample["peer"], sample["quant"]), []).append(sample)
    found = []
    for contender, own in by.items():
        values = [float(sample["value"]) for sample in own]
        told = [sample["weight_bytes"] for sample in own if sample.get("weight_bytes")]
        found.append(
            Figure(
                contender, statistics.median(values), len(values), min(values), max(values),
                max(float(sample.get("foreign", 0.0)) for sample in own), int(told[-1]) if told else None,
            )
        )  # fmt: skip
    # Of the prefix work and of bounds alike, `higher` tells which end is the good one.
    return sorted(found, key=lambda figure: figure.value, reverse=WORKS[work].higher)


def failures(samples: Iterable[Sample], shape: str) -> list[tuple[str, str, str]]:
    """(contender, work, reason) of what failed and never came good."""
    listed = list(samples)
    good = {(s["shape"], s["work"], s["peer"], s["quant"]) for s in kept(listed)}
    found = {}
    for sample in listed:
        place = (sample.get("shape"), sample.get("work"), sample.get("peer"), sample.get("quant"))
        if "error" in sample and sample.get("shape") == shape and place not in good and sample.get("peer"):
            found[f"{sample['peer']} {sample['quant']}", str(sample["work"])] = str(sample["error"])
    return [(who, work, why) for (who, work), why in found.items()]


def limit(samples: Iterable[Sample], name: str) -> float | None:
    """Median of a limit over the run: "bandwidth" in GB/s, "int8" in TOPS. Where others disturbed every measurement,
    the highest: a low limit would flatter us."""
    found = [s for s in samples if s.get("work") == "limits" and name in s]
    calm = [float(s[name]) for s in found if float(s.get("foreign", 0.0)) <= FOREIGN_LIMIT]
    return statistics.median(calm) if calm else max((float(s[name]) for s in found), default=None)


def weight_bytes(shape: Shape, figure: Figure) -> int:
    """Bytes of weights that a decoded token reads: as the contender told, else by shape and bits."""
    if figure.weight_bytes:
        return figure.weight_bytes
    if figure.contender.peer == "vllm":
        return shape.weight_bytes(8, 0, 16)
    bits = figure.contender.bits
    return shape.weight_bytes(bits, GROUP, 0, HEAD_GROUP) if bits == 4 else shape.weight_bytes(bits, 0)


def load_on(shape: Shape, work: str, figure: Figure) -> tuple[str, float] | None:
    """(limit, what of it is used) at the figure's speed: GB/s or TOPS, end to end; None where no limit is compared."""
    if work == "decode":
        return "bandwidth", weight_bytes(shape, figure) * figure.value / 1e9
    if work == "context":
        context = NUM_CONTEXT + NUM_DEEP / 2
        return "bandwidth", (weight_bytes(shape, figure) + context * shape.kv_bytes("int8")) * figure.value / 1e9
    if work.startswith("prefill"):
        num = int(work.removeprefix("prefill"))
        return "int8", shape.operations(num, 1) * figure.value / num / 1e12
    if work.startswith("batch"):
        each = shape.operations(NUM_PROMPT + NUM_NEW - 1, NUM_NEW)
        return "int8", each * figure.value / NUM_NEW / 1e12
    return None


def memory_bound(shape: Shape, figure: Figure) -> float:
    """MiB that the engine may have: weights, the cache of that run, and 350 MB."""
    total = weight_bytes(shape, figure) + MEMORY_KV_TOKENS * shape.kv_bytes("float32") + MEMORY_ALLOWANCE
    return total / 2**20


def row(goal: Goal, shape: Shape, samples: Sequence[Sample]) -> Row:
    work = WORKS[goal.work]
    found = [f for f in figures(samples, shape.name, goal.work) if goal.bits in (0, f.contender.bits)]
    ours = next((f for f in found if f.contender.ours), None)
    peer = next((f for f in found if not f.contender.ours), None)
    ratio = share = None
    against = note = ""
    if ours and peer:
        ratio = ours.value / peer.value if work.higher else peer.value / ours.value
    if ours and (used := load_on(shape, goal.work, ours)):
        against = used[0]
        most = limit(samples, against)
        share = used[1] / most if most else None
    if goal.bits and ours and peer:
        mine, theirs = weight_bytes(shape, ours), weight_bytes(shape, peer)
        note = f"{mine / 2**20:.0f} MiB of weights; the peer's file has {theirs / 2**20:.0f}"
    met = judged(goal, ours, ratio, share)
    if goal.work == "memory" and ours:
        most = memory_bound(shape, ours)
        met, note = ours.value <= most, f"at most {most:.0f} MiB: weights, cache and 350 MB"
    if goal.work == "serve":
        offline = {f.contender: f.value for f in figures(samples, shape.name, "batch32")}
        ratio = met = None
        if ours and ours.contender in offline:
            ratio = ours.value / offline[ours.contender]
            met, note = ratio >= (goal.bound or 0), f"offline {offline[ours.contender]:.1f}"
    return Row(goal, work.unit, peer, ours, ratio, share, against, met, note)


def judged(goal: Goal, ours: Figure | None, ratio: float | None, share: float | None) -> bool | None:
    """Whether all that the goal asks for was reached; None if something of it was not measured or nothing is asked."""
    told: list[bool | None] = []
    if goal.ratio is not None:
        told.append(None if ratio is None else ratio >= goal.ratio)
    if goal.share is not None:
        told.append(None if share is None else share >= goal.share)
    if goal.bound is not None:
        higher = WORKS[goal.work].higher
        told.append(None if ours is None else ours.value >= goal.bound if higher else ours.value <= goal.bound)
    if False in told:
        return False
    return None if None in told or not told else True


def rows(shape: Shape, samples: Sequence[Sample]) -> list[Row]:
    return [row(goal, shape, samples) for goal in GOALS[shape.name]]
