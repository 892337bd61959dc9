"""C-2: state machines against naive models: the block pool, the prefix cache, the waiting queue, stop strings.

The first two are those of the unit tests, run longer. `run_campaign` counts the examples and the steps that ran; what
hypothesis finds it shrinks, and the shortest failing run is among the examples of the report.
"""

from __future__ import annotations

import codecs
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.core.test_block_pool import PoolMachine
from tests.core.test_prefix_cache import PrefixMachine
from tests.support.server import write_tokenizer

from headrace.core.queue import WaitingQueue
from headrace.protocol.params import SamplingParams
from headrace.text.tokenizer import DetokenizeStream, Tokenizer


class Waiting:
    """As much of a sequence as the queue sees."""

    def __init__(self, arrival: int, rank: float) -> None:
        self.arrival, self.rank, self.num_overtaken = arrival, rank, 0

    @property
    def order(self) -> tuple[float, int]:
        return self.rank, self.arrival


class QueueMachine(RuleBasedStateMachine):
    """The model: a list, sorted anew whenever it is looked at, and a count of overtakings by arrival."""

    queue_class: type[WaitingQueue] = WaitingQueue

    @initialize(most=st.integers(1, 4))
    def start(self, most: int) -> None:
        self.most = most
        self.queue = self.queue_class(most)
        self.members: list[Any] = []
        self.overtaken: dict[int, int] = {}
        self.num = 0

    def sorted(self) -> list[Any]:
        def place(seq: Any) -> tuple[bool, float, int]:
            aged = self.overtaken[seq.arrival] >= self.most
            return not aged, 0 if aged else seq.given, seq.arrival

        return sorted(self.members, key=place)

    @rule(rank=st.integers(0, 3))
    def arrive(self, rank: int) -> None:
        seq: Any = Waiting(self.num, float(rank))
        seq.given = float(rank)
        self.overtaken[self.num] = 0
        self.num += 1
        self.members.append(seq)
        self.queue.add(seq)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def vanish(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(self.members))
        self.members.remove(seq)
        self.queue.remove(seq)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), patient=st.booleans())
    def leave(self, data: Any, patient: bool) -> None:
        """The first goes, or one behind it that fits; of their own accord those of odd arrival may wait."""
        seq = data.draw(st.sampled_from(self.sorted()[:2]))
        self.members.remove(seq)
        self.queue.remove(seq)
        before = self.sorted()
        for other in self.members:
            if other.arrival < seq.arrival and not (patient and other.arrival % 2):
                self.overtaken[other.arrival] += 1
        changed = self.queue.count_overtaking(seq, lambda other: patient and bool(other.arrival % 2))
        # What reached the bound just now; whether the order is another by that is not promised.
        assert changed or self.sorted() == before

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        expected = self.sorted()
        assert len(self.queue) == len(expected)
        assert [self.queue[i] for i in range(len(expected))] == expected
        assert self.queue.least_rank == (expected[0].rank if expected else float("inf"))


@cache
def letters() -> Tokenizer:
    """Token i is byte i."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_tokenizer(Path(folder)))


class StopMachine(RuleBasedStateMachine):
    """The model: all text so far, searched from its beginning, letter by letter."""

    stream_class: type[DetokenizeStream] = DetokenizeStream

    @initialize(
        stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3, unique=True),
        include=st.booleans(),
        min_tokens=st.integers(0, 6),
    )
    def start(self, stops: list[str], include: bool, min_tokens: int) -> None:
        self.stops, self.include, self.min_tokens = stops, include, min_tokens
        params = SamplingParams(
            stop=stops or None, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=1000
        )
        self.stream = self.stream_class(letters(), params)
        self.tokens: list[int] = []
        self.output = ""
        self.ended = False

    @precondition(lambda self: not self.ended)
    @rule(tokens=st.lists(st.sampled_from([*b"ab", *"é".encode(), 0xE2, *b"ab"]), max_size=4), final=st.booleans())
    def push(self, tokens: list[int], final: bool) -> None:
        self.tokens += tokens
        self.ended = final
        self.output += self.stream.push(tokens, final)
        text, reason, count = self.naive(final)
        assert self.output == text
        assert self.stream.stop_reason == reason
        assert self.stream.num_tokens == count

    @precondition(lambda self: self.ended)
    @rule()
    def push_too_late(self) -> None:
        try:
            self.stream.push([])
        except ValueError:
            return
        raise AssertionError("an ended stream took tokens")

    def naive(self, final: bool) -> tuple[str, str | None, int]:
        """The text that has to be told by now, the stop string, and the number of tokens used."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Letter and number of the token that ended it.
        text = [(letter, i) for i, token in enumerate(self.tokens, 1) for letter in decoder.decode(bytes([token]))]
        if final:
            text += [(letter, len(self.tokens)) for letter in decoder.decode(b"", True)]
        whole = "".join(letter for letter, _ in text)
        for end in range(1, len(whole) + 1):
            stops = [stop for stop in self.stops if whole[:end].endswith(stop)]
            number = text[end - 1][1]
            if stops and number > self.min_tokens:
                stop = max(stops, key=len)
                return whole[: end if self.include else end - len(stop)], stop, number
        lengths = [i for stop in self.stops for i in range(len(stop)) if whole.endswith(stop[:i])]
        num_held = 0 if final or self.include else max(lengths, default=0)
        return whole[: len(whole) - num_held], None, len(self.tokens)


MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    "BlockPool": PoolMachine,
    "PrefixCache": PrefixMachine,
    "WaitingQueue": QueueMachine,
    "DetokenizeStream": StopMachine,
}


def counted(machine: type[RuleBasedStateMachine], counts: dict[str, int]) -> type[RuleBasedStateMachine]:
    """`machine`, counting its examples and steps."""
    checked: Callable[..., None] = machine.check_invariants

    def check_invariants(self: Any, *args: Any, **more: Any) -> None:
        counts["steps"] += 1
        checked(self, *args, **more)

    def teardown(self: Any) -> None:
        counts["examples"] += 1
        machine.teardown(self)

    return type(machine.__name__, (machine,), {"check_invariants": check_invariants, "teardown": teardown})


def run_campaign(
    size: tuple[int, int],
    first: int,
    machines: dict[str, type[RuleBasedStateMachine]] | None = None,
    shrink: bool = True,
) -> dict[str, Any]:
    """`size` is (examples of each machine, steps in one). `shrink`: what is found is made as short as it can be."""
    num_examples, num_steps = size
    report: dict[str, Any] = {"examples": 0, "steps": 0, "machines": {}, "violations": 0, "found": []}
    for name, machine in (machines or MACHINES).items():
        counts = {"examples": 0, "steps": 0}
        chosen = settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            database=None,
            deadline=None,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(seed(first)(counted(machine, counts)), settings=chosen)
        except Exception as error:
            report["violations"] += 1
            report["found"].append(f"{name}: {type(error).__name__}: {error}"[:400])
        report["machines"][name] = counts
        report["examples"] += counts["examples"]
        report["steps"] += counts["steps"]
    return report
