"""The plan of a comparison: the works, the contenders and the order of turns. Pure.

A `Turn` is one measurement. In a round every contender has its turn at a work, one after another, so that a busy moment
of the machine falls on all of them alike; another contender is the first in each round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from bench.compare.environments import OURS

BITS = {
    "int4": 4, "Q4_0": 4, "Q4_K_M": 4, "int8": 8, "Q8_0": 8, "w8a8": 8, "bf16": 16, "fp32": 32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, order=True)
class Contender:
    peer: str
    quant: str

    def __str__(self) -> str:
        return f"{self.peer} {self.quant}"

    @property
    def ours(self) -> bool:
        return self.peer == OURS

    @property
    def bits(self) -> int:
        return BITS[self.quant]


@dataclasses.dataclass(frozen=True)
class Work:
    """A work that is measured.

    `kind` is the process that does it: "plain", one for all such works; "memory", "prefix" and "context", one started
    for it; "first_token" and "serve", one for each measurement. `rounds` are those of a quick run.
    """

    name: str
    meaning: str
    unit: str
    kind: str = "plain"
    rounds: int = 1
    higher: bool = True


WORKS = {
    work.name: work
    for work in (
        Work("memory", "peak resident memory after decoding", "MiB", "memory", higher=False),
        Work("first_token", "process start to first token", "s", "first_token", rounds=2, higher=False),
        Work("decode", "128 + 128 tokens, one stream", "tok/s", rounds=3),
        Work("prefill512", "512 tokens to the first new one", "tok/s", rounds=3),
        Work("prefill2048", "2,048 tokens to the first new one", "tok/s", rounds=2),
        Work("batch8", "8 streams of 128 + 128", "tok/s"),
        Work("batch32", "32 streams of 128 + 128", "tok/s"),
        Work("step8", "a decode step of 8 streams, against one", "×", higher=False),
        Work("prefix", "cold TTFT over that behind a cached prefix", "×", "prefix"),
        Work("serve", "32 HTTP streams of 128 + 128", "tok/s", "serve"),
        Work("batch16", "16 streams of 128 + 128", "tok/s"),
        Work("context", "decode behind 16,384 tokens, int8 cache", "tok/s", "context"),
    )
}

OURS4, OURS8 = Contender(OURS, "int4"), Contender(OURS, "int8")
LLAMA4, LLAMA8 = Contender("llama-cpp-python", "Q4_0"), Contender("llama-cpp-python", "Q8_0")
OPENVINO4, OPENVINO8 = Contender("openvino-genai", "int4"), Contender("openvino-genai", "int8")
ONNX4 = Contender("onnxruntime-genai", "int4")
CTRANSLATE8 = Contender("ctranslate2", "int8")
VLLM8 = Contender("vllm", "w8a8")
FLOAT = Contender("transformers", "bf16")
WIDE = Contender("transformers", "fp32")

SPEED = ("decode", "prefill512", "prefill2048", "batch8", "batch16", "batch32")
ALL = (LLAMA4, LLAMA8, OPENVINO4, OPENVINO8, ONNX4, CTRANSLATE8, VLLM8, FLOAT, OURS4, OURS8)

FULL: dict[str, dict[str, tuple[Contender, ...]]] = {
    "l1b": dict.fromkeys(SPEED, ALL)
    | {
        "memory": (LLAMA4, OPENVINO4, ONNX4, OURS4),
        "first_token": (LLAMA4, OPENVINO4, OURS4),
        "prefix": (OPENVINO4, OURS4),
        "step8": (OURS4,),
        "serve": (OURS4,),
        "context": (OURS4,),
    },
    "q06": dict.fromkeys(("decode", "prefill512", "batch32"), ALL),
}

# The fastest of earlier full runs, work by work. A quick run has no context: reading 16,384 tokens takes minutes.
QUICK: dict[str, dict[str, tuple[Contender, ...]]] = {
    "l1b": {
        "memory": (LLAMA4, OURS4),
        "first_token": (LLAMA4, OURS4),
        "decode": (ONNX4, OPENVINO8, OURS4, OURS8),
        "prefill512": (OPENVINO4, VLLM8, OURS4, OURS8),
        "prefill2048": (VLLM8, OPENVINO8, OURS4, OURS8),
        "batch8": (OPENVINO4, OURS4),
        "batch32": (OPENVINO8, OURS4, OURS8),
        "step8": (OURS4,),
        "prefix": (OURS4,),
        "serve": (OURS4,),
    },
    "q06": {
        "decode": (OPENVINO4, OURS4),
        "prefill512": (OPENVINO8, OURS4),
        "batch32": (OPENVINO8, OURS4, OURS8),
    },
}

# Those, the rows that a quick run has no time for, and peers that were the fastest in some of the runs.
FASTEST = {shape: dict(rows) for shape, rows in QUICK.items()}
FASTEST["l1b"] |= {
    "decode": (ONNX4, CTRANSLATE8, OPENVINO8, OURS4, OURS8),
    "prefill512": (OPENVINO4, OPENVINO8, VLLM8, OURS4, OURS8),
}
FASTEST["l1b"] |= {"batch16": (OPENVINO8, OURS4, OURS8), "context": (OURS4,)}
FASTEST["q06"] |= {"decode": (OPENVINO4, CTRANSLATE8, OURS4, OURS8)}


@dataclasses.dataclass(frozen=True)
class Turn:
    round: int
    shape: str
    work: str
    contender: Contender

    @property
    def worker(self) -> tuple[str, str, str, str]:
        """The key of the process that takes the turn: (shape, kind, peer, quant)."""
        return (self.shape, WORKS[self.work].kind, self.contender.peer, self.contender.quant)


def contenders(
    table: Mapping[str, Mapping[str, Sequence[Contender]]],
    shapes: Sequence[str],
    works: Collection[str],
    peers: Collection[str],
) -> dict[tuple[str, str], tuple[Contender, ...]]:
    """The contenders of the table, by (shape, work), that are in the selection; a work without any is left out."""
    listed = {}
    for work in WORKS:
        for shape in shapes:
            who = tuple(c for c in table[shape].get(work, ()) if c.peer in peers)
            if who and work in works:
                listed[shape, work] = who
    return listed


def turns(
    who: Mapping[tuple[str, str], Sequence[Contender]], rounds: Callable[[str], int], *, shapes_apart: bool
) -> Iterator[list[Turn]]:
    """The rounds in order, each a list of turns. With `shapes_apart` all rounds of a shape come before those of the
    next: fewer models are in memory, but a run that is cut short has no samples of the later shapes."""
    groups = [[shape] for shape in dict.fromkeys(shape for shape, _ in who)]
    if not shapes_apart:
        groups = [[shape for group in groups for shape in group]] if groups else []
    for shapes in groups:
        mine = {place: members for place, members in who.items() if place[0] in shapes}
        for number in range(max((rounds(work) for _, work in mine), default=0)):
            one = []
            for (shape, work), members in mine.items():
                if number < rounds(work):
                    start = number % len(members)
                    one += [Turn(number, shape, work, c) for c in (*members[start:], *members[:start])]
            if one:
                yield one


def next_use(worker: tuple[str, str, str, str], coming: Sequence[Turn]) -> int:
    """How many turns from now a process is needed again; beyond the end if never."""
    return next((i for i, turn in enumerate(coming) if turn.worker == worker), len(coming) + 1)


def hopeless(value: float, best: float, seconds: float, higher: bool) -> bool:
    """Whether another measurement of a peer is wasted: it takes long, and can not be the best one."""
    behind = value < 0.6 * best if higher else value * 0.6 > best
    return seconds > 20 and behind
