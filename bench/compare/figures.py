"""From samples to the rows of the table: medians, the best peer, ratios, shares of the limit. Pure.

A sample is a JSON object as the journal has it: shape, work, peer, quant, round, value, foreign, and its details. A
disturbed sample (`bench.compare.disturbance`) is counted and shown as such, and is part of no figure.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from bench.compare.disturbance import Sample, best_pace, is_disturbed
from bench.compare.plan import WORKS, Contender
from bench.compare.shapes import Shape
from bench.peers.protocol import NUM_CONTEXT, NUM_DEEP, NUM_NEW, NUM_PROMPT

MEMORY_KV_TOKENS = 1024
MEMORY_ALLOWANCE = 350_000_000
GROUP, HEAD_GROUP = 64, 32  # of our int4 weights, where a sample has no bytes of weights


@dataclasses.dataclass(frozen=True)
class Goal:
    """A row of the table, and the aims of the project for it.

    `ratio` is the least ratio of our figure to the best peer's, `share` the least share of the limit, `bound` the most
    that our figure may be (the least, where higher is better). `bits` limits the row to contenders of so many bits.
    """

    work: str
    label: str
    bits: int = 0
    ratio: float | None = None
    share: float | None = None
    bound: float | None = None


GOALS: dict[str, tuple[Goal, ...]] = {
    "l1b": (
        Goal("decode", "decode, one stream, int4", 4, ratio=1.5, share=0.9),
        Goal("decode", "decode, one stream, int8", 8, ratio=1.3),
        Goal("prefill512", "prefill 512", ratio=1.5, share=0.85),
        Goal("prefill2048", "prefill 2048", ratio=1.5, share=0.78),
        Goal("batch8", "8 streams of 128 + 128", ratio=2.0, share=0.8),
        Goal("batch16", "16 streams of 128 + 128"),
        Goal("batch32", "32 streams of 128 + 128", ratio=1.9, share=0.8),
        Goal("step8", "8 streams: a decode step against one stream's", bound=1.45),
        Goal("context", "decode at 16k context, int8 KV", share=0.8),
        Goal("prefix", "TTFT behind 2,048 cached + 32 new: below cold", bound=60),
        Goal("memory", "resident memory, int4", bound=0),
        Goal("serve", "serve, 32 HTTP streams: of offline", bound=0.95),
        Goal("first_token", "process start to first token", bound=1.2),
    ),
    "q06": (
        Goal("decode", "decode, one stream, int4", 4, ratio=1.5),
        Goal("decode", "decode, one stream, int8", 8),
        Goal("prefill512", "prefill 512", ratio=1.5),
        Goal("batch32", "32 streams of 128 + 128", ratio=1.9),
    ),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """The median of a contender's undisturbed samples at a work, of which there are `count`."""

    contender: Contender
    value: float
    count: int
    low: float
    high: float
    weight_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Tally:
    """How many samples of a contender at a work there are, and how many of them were disturbed."""

    contender: Contender
    work: str
    num_samples: int
    num_disturbed: int

    @property
    def only_disturbed(self) -> bool:
        return self.num_disturbed == self.num_samples


@dataclasses.dataclass(frozen=True)
class Row:
    """A goal and its result.

    `ratio` is the median of `num_pairs` ratios of samples of one round; where no round has both samples, `num_pairs` is
    0 and the ratio is that of the medians. `share` is the share of `limit`. `disturbed` names the contenders of the row
    that have disturbed samples alone. `met` is None where the goal has no bound or where a figure is missing: a
    disturbed peer may be faster than the best one, so a ratio is enough only if no peer is disturbed.
    """

    goal: Goal
    unit: str
    peer: Figure | None
    ours: Figure | None
    ratio: float | None
    num_pairs: int
    share: float | None
    limit: str
    met: bool | None
    disturbed: tuple[Contender, ...] = ()
    note: str = ""


def undisturbed(samples: Iterable[Sample]) -> list[Sample]:
    """The samples that count."""
    listed = list(samples)
    best = best_pace(listed)
    return [sample for sample in listed if "value" in sample and not is_disturbed(sample, best)]


def tallies(samples: Iterable[Sample], shape: str) -> list[Tally]:
    """One for each contender and work of the shape that has samples, failed measurements left out."""
    listed = list(samples)
    best = best_pace(listed)
    groups: dict[tuple[Contender, str], list[bool]] = {}
    for sample in listed:
        if sample.get("shape") == shape and "value" in sample:
            place = (Contender(sample["peer"], sample["quant"]), sample["work"])
            groups.setdefault(place, []).append(is_disturbed(sample, best))
    return [Tally(*place, len(flags), sum(flags)) for place, flags in groups.items()]


def compared_by_bits(shape: str, work: str) -> bool:
    """Whether contenders at the work are compared among those of as many bits only."""
    return any(goal.work == work and goal.bits for goal in GOALS[shape])


def paired(
    samples: Iterable[Sample], shape: str, ours: tuple[str, Contender], theirs: tuple[str, Contender]
) -> list[float]:
    """The ratio, above 1 where ours is better, of each round with an undisturbed sample of both (work, contender)."""
    values: dict[tuple[str, Contender], dict[int, float]] = {}
    for sample in undisturbed(samples):
        if sample["shape"] == shape:
            place = (sample["work"], Contender(sample["peer"], sample["quant"]))
            values.setdefault(place, {})[sample["round"]] = float(sample["value"])
    mine, others = values.get(ours, {}), values.get(theirs, {})
    ratios = [mine[number] / others[number] for number in sorted(mine.keys() & others.keys())]
    return ratios if WORKS[ours[0]].higher else [1 / ratio for ratio in ratios]


def figures(samples: Iterable[Sample], shape: str, work: str) -> list[Figure]:
    """One for each contender that has an undisturbed sample, the best first."""
    groups: dict[Contender, list[Sample]] = {}
    for sample in undisturbed(samples):
        if (sample["shape"], sample["work"]) == (shape, work):
            groups.setdefault(Contender(sample["peer"], sample["quant"]), []).append(sample)
    medians = []
    for contender, group in groups.items():
        values = [float(sample["value"]) for sample in group]
        sizes = [int(sample["weight_bytes"]) for sample in group if sample.get("weight_bytes")]
        median = statistics.median(values)
        medians.append(Figure(contender, median, len(values), min(values), max(values), sizes[-1] if sizes else None))
    return sorted(medians, key=lambda figure: figure.value, reverse=WORKS[work].higher)


def failures(samples: Iterable[Sample], shape: str) -> list[tuple[str, str, str]]:
    """(contender, work, reason) of each work at which a contender failed and has no sample."""
    listed = list(samples)
    measured = {(tally.contender, tally.work) for tally in tallies(listed, shape)}
    reasons = {}
    for sample in listed:
        if "error" in sample and sample.get("shape") == shape and sample.get("peer"):
            place = (Contender(sample["peer"], sample["quant"]), str(sample["work"]))
            if place not in measured:
                reasons[place] = str(sample["error"])
    return [(str(contender), work, reason) for (contender, work), reason in reasons.items()]


def instructions(samples: Iterable[Sample], shape: str) -> dict[str, str]:
    """What each engine says of the vector and matrix instructions that it uses here, by its name."""
    speaking = [sample for sample in samples if sample.get("shape") == shape and sample.get("instructions")]
    return {str(sample["peer"]): str(sample["instructions"]) for sample in speaking}


def limit(samples: Iterable[Sample], name: str) -> float | None:
    """Median of a limit over the run: "bandwidth" in GB/s, "int8" in TOPS. Where others disturbed every measurement,
    the highest: a low limit would flatter us."""
    listed = list(samples)
    best = best_pace(listed)
    probes = [sample for sample in listed if sample.get("work") == "limits" and name in sample]
    calm = [float(sample[name]) for sample in probes if not is_disturbed(sample, best)]
    return statistics.median(calm) if calm else max((float(sample[name]) for sample in probes), default=None)


def weight_bytes(shape: Shape, figure: Figure) -> int:
    """Bytes of weights that a decoded token reads: the contender's own count, else by shape and bits."""
    if figure.weight_bytes:
        return figure.weight_bytes
    if figure.contender.peer == "vllm":
        return shape.weight_bytes(8, 0, 16)
    bits = figure.contender.bits
    return shape.weight_bytes(bits, GROUP, 0, HEAD_GROUP) if bits == 4 else shape.weight_bytes(bits, 0)


def load_on(shape: Shape, work: str, figure: Figure) -> tuple[str, float] | None:
    """(limit, the use of it) at the figure's speed: GB/s or TOPS, end to end; None where no limit is compared."""
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
    listed = [f for f in figures(samples, shape.name, goal.work) if goal.bits in (0, f.contender.bits)]
    ours = next((f for f in listed if f.contender.ours), None)
    peer = next((f for f in listed if not f.contender.ours), None)
    disturbed = tuple(
        tally.contender
        for tally in tallies(samples, shape.name)
        if tally.only_disturbed and tally.work == goal.work and goal.bits in (0, tally.contender.bits)
    )
    ratio = share = None
    num_pairs = 0
    against = note = ""
    if ours and peer:
        ratio, num_pairs = ratio_of(samples, shape.name, (goal.work, ours), (goal.work, peer))
    if ours and (use := load_on(shape, goal.work, ours)):
        against = use[0]
        most = limit(samples, against)
        share = use[1] / most if most else None
    if goal.bits and ours and peer:
        mine, theirs = weight_bytes(shape, ours), weight_bytes(shape, peer)
        note = f"{mine / 2**20:.0f} MiB of weights; the peer's file has {theirs / 2**20:.0f}"
    met = judged(goal, ours, ratio, share)
    if met and goal.ratio is not None and any(not contender.ours for contender in disturbed):
        met = None
    if goal.work == "memory" and ours:
        most = memory_bound(shape, ours)
        met, note = ours.value <= most, f"at most {most:.0f} MiB: weights, cache and 350 MB"
    if goal.work == "serve":
        ratio, num_pairs, met = None, 0, None
        offline = next(
            (f for f in figures(samples, shape.name, "batch32") if ours and f.contender == ours.contender), None
        )
        if ours and offline:
            ratio, num_pairs = ratio_of(samples, shape.name, ("serve", ours), ("batch32", offline))
            met, note = ratio >= (goal.bound or 0), f"offline {offline.value:.1f}"
    return Row(goal, work.unit, peer, ours, ratio, num_pairs, share, against, met, disturbed, note)


def ratio_of(
    samples: Sequence[Sample], shape: str, ours: tuple[str, Figure], theirs: tuple[str, Figure]
) -> tuple[float, int]:
    """(ratio, number of pairs): the median over the rounds that have both, else the ratio of the medians and 0."""
    ratios = paired(samples, shape, (ours[0], ours[1].contender), (theirs[0], theirs[1].contender))
    if ratios:
        return statistics.median(ratios), len(ratios)
    ratio = ours[1].value / theirs[1].value
    return (ratio if WORKS[ours[0]].higher else 1 / ratio), 0


def judged(goal: Goal, ours: Figure | None, ratio: float | None, share: float | None) -> bool | None:
    """Whether every bound of the goal is kept; None if a figure for one is missing, or the goal has no bound."""
    verdicts: list[bool | None] = []
    if goal.ratio is not None:
        verdicts.append(None if ratio is None else ratio >= goal.ratio)
    if goal.share is not None:
        verdicts.append(None if share is None else share >= goal.share)
    if goal.bound is not None:
        higher = WORKS[goal.work].higher
        verdicts.append(None if ours is None else ours.value >= goal.bound if higher else ours.value <= goal.bound)
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


def rows(shape: Shape, samples: Sequence[Sample]) -> list[Row]:
    return [row(goal, shape, samples) for goal in GOALS[shape.name]]
