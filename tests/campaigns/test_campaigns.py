"""The campaigns notice what they are there for: each judge is shown what must not pass."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.campaigns import children, load, long, machines, operations, parsers, probing
from tests.campaigns.isolation import foreign_hits

from headrace.core.queue import WaitingQueue
from headrace.text.stops import StopFinder
from headrace.text.tokenizer import DetokenizeStream


def first(sort: str) -> load.Asked:
    """A request of this sort that is a stream, or of the invalid ones any."""
    numbers = (load.asked(number, 0, sort) for number in range(100))
    return next(one for one in numbers if one.stream or sort == "invalid")


def stream(one: load.Asked, **more: Any) -> bytes:
    """The body of its right answer, with something changed."""
    answers = more.get("answers", one.wanted)
    events = [
        {"choices": [{"index": i, "token_ids": ids, "finish_reason": more.get("finish", "length")}]}
        for i, ids in enumerate(answers)
    ]
    lines = [f"data: {json.dumps(event)}\n\n" for event in [*events, *more.get("events", [])]]
    return "".join([*lines, more.get("end", "data: [DONE]\n\n")]).encode()


def test_C_4_the_judge_takes_what_is_right() -> None:
    for sort in ("plain", "several", "slow", "deadline"):
        one = first(sort)
        assert load.judge(one, load.Reply(200, stream(one), True)) == ("answered", "")
    late = [{"error": {"code": "deadline_exceeded"}}]
    body = stream(first("deadline"), events=late, end="")
    assert load.judge(first("deadline"), load.Reply(200, body, True)) == ("expired", "")
    assert load.judge(first("invalid"), load.Reply(400, b'{"error": {}}', True)) == ("refused", "")
    assert load.judge(first("plain"), load.Reply(429, b'{"error": {}}', True)) == ("turned away", "")


def test_C_4_a_line_of_a_stream_ends_at_a_newline_only() -> None:
    one = first("plain")
    body = stream(one).replace(b'"finish_reason"', '"text": "\x85\u2028", "finish_reason"'.encode())
    assert load.judge(one, load.Reply(200, body, True)) == ("answered", "")


WRONG: dict[str, Callable[[load.Asked], load.Reply]] = {
    "cut off": lambda one: load.Reply(200, stream(one), False),
    "without its end": lambda one: load.Reply(200, stream(one, end=""), True),
    "another's tokens": lambda one: load.Reply(200, stream(one, answers=[[1] * len(one.wanted[0])]), True),
    "a token too few": lambda one: load.Reply(200, stream(one, answers=[one.wanted[0][:-1]]), True),
    "an answer too few": lambda one: load.Reply(200, stream(one, answers=[]), True),
    "another end": lambda one: load.Reply(200, stream(one, finish="abort"), True),
    "an error": lambda one: load.Reply(200, stream(one, events=[{"error": {"code": "internal_error"}}]), True),
    "late without a deadline": lambda one: load.Reply(504, b'{"error": {}}', True),
    "a 500": lambda one: load.Reply(500, b'{"error": {}}', True),
    "no JSON": lambda one: load.Reply(200, b"data: {\n\n", True),
}


@pytest.mark.parametrize("name", WRONG)
def test_C_4_the_judge_notices(name: str) -> None:
    one = first("plain")
    assert load.judge(one, WRONG[name](one))[1]


def test_C_4_the_judge_notices_what_should_have_been_refused() -> None:
    assert load.judge(first("invalid"), load.Reply(200, b"{}", True))[1]
    assert load.judge(first("invalid"), load.Reply(500, b'{"error": {}}', True))[1]


def test_C_4_a_reply_is_whole_with_its_last_byte_only() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert load.parse(chunked) == load.Reply(200, b"abcde", True)
    plain = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nabcd"
    assert load.parse(plain) == load.Reply(400, b"abcd", True)
    for whole in (chunked, plain):
        assert not any(load.parse(whole[:end]).whole for end in range(len(whole)))


def test_C_4_the_ledger_balances_or_says_why() -> None:
    ledger, one = load.Ledger(), first("several")
    count = len(one.wanted)
    ledger.opened(one)
    assert ledger.balance({}, {}) == [f"{one.number} was lost"]
    ledger.closed(one, "answered")
    assert ledger.balance({}, {"request_success_total/length": float(count)}) == []
    assert ledger.balance({}, {"request_success_total/length": float(count - 1)})
    assert ledger.balance({}, {"request_success_total/length": float(count), "request_success_total/abort": 1.0})
    assert not ledger.problems
    ledger.closed(one, "answered")
    assert "ended twice" in ledger.problems[0]


def test_C_4_the_phases_have_all_requests() -> None:
    assert [number for _, numbers in load.phases(57) for number in numbers] == list(range(57))


class Unaged(WaitingQueue):
    def count_overtaking(self, by: Any, passed_by: Any) -> bool:
        return False


class Late(WaitingQueue):
    """One overtaking more than promised."""

    def __init__(self, max_overtaking: int) -> None:
        super().__init__(max_overtaking + 1)


class HastyFinder(StopFinder):
    """Tells what may still become a stop string."""

    def push(self, text: str, exempt: bool = False) -> str:
        output = super().push(text, exempt)
        withheld, self._withheld = self._withheld, ""
        return output + withheld


class Hasty(DetokenizeStream):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self._stops is not None:
            self._stops.__class__ = HastyFinder


class UnboundQueue(machines.QueueMachine):
    queue_class = Unaged


class LateQueue(machines.QueueMachine):
    queue_class = Late


class HastyStream(machines.StopMachine):
    stream_class = Hasty


@pytest.mark.parametrize("machine", [UnboundQueue, LateQueue, HastyStream])
def test_C_2_planted_bugs_are_found(machine: Any) -> None:
    # One in a few dozen examples finds them; what is found ends the run.
    report = machines.run_campaign((2000, 20), 1, {"planted": machine}, shrink=False)
    assert report["violations"] == 1
    assert "AssertionError" in report["found"][0]


@pytest.mark.parametrize("machine", [machines.QueueMachine, machines.StopMachine])
def test_C_2_machines_agree_with_their_models(machine: Any) -> None:
    report = machines.run_campaign((40, 20), 2, {"sound": machine})
    assert report["violations"] == 0, report
    assert report["examples"] >= 10
    assert report["steps"] > report["examples"]


@pytest.mark.parametrize("name", ["bodies", "frames", "safetensors", "configs", "tokenizers", "constraints"])
def test_C_6_a_slice_of_the_parsers(name: str, tmp_path: Any) -> None:
    result = {
        "bodies": parsers.bodies,
        "frames": parsers.wire_frames,
        "safetensors": lambda: parsers.safetensors(tmp_path),
        "configs": lambda: parsers.configs(tmp_path),
        "tokenizers": lambda: parsers.tokenizers(tmp_path),
        "constraints": parsers.constraints,
    }[name]()
    outcomes, wrong = parsers.attack(result, name, 100, 5)
    assert not wrong
    assert outcomes["refused"] > 20
    assert outcomes["sound"] == len(result.corpus)


def test_C_6_an_error_that_is_not_clear_is_noticed() -> None:
    def careless(data: bytes) -> None:
        if not data.startswith(b"{"):
            raise KeyError(data[:1])

    outcomes, wrong = parsers.attack(parsers.Target([b"{}"], careless, ValueError), "planted", 50, 1)
    assert outcomes["KeyError"] == len(wrong) > 0


def test_C_6_mutations_repeat() -> None:
    corpus = [b"some text", b"another"]
    result = [parsers.damaged(corpus, "a", 1, number) for number in range(50)]
    assert result == [parsers.damaged(corpus, "a", 1, number) for number in range(50)]
    assert len(set(result)) > 30


def test_C_8_a_leak_is_a_slope() -> None:
    rng = random.Random(1)
    noise = [rng.uniform(0, 20_000) for _ in range(100)]
    still = [(200.0 * i, 5e7 + noise[i]) for i in range(100)]
    assert abs(operations.slope(still)) < 5
    assert 190 < operations.slope([(x, y + 200 * x) for x, y in still]) < 210


def times(num: int = 20_000, **more: Callable[[int], float]) -> dict[str, list[float]]:
    """Of so many steps, of which every third is disturbed. Beyond 20,000 tokens a read takes half as long again."""
    read = {"native": lambda at: 1e-4 + 1e-7 * at + 5e-8 * max(0, at - 20_000)}
    result = read | {"engine": lambda at: 3e-4, "text": lambda at: 1e-5} | more
    return {name: [cost(at) * (1.0 if at % 100 < 60 else 3.0) for at in range(num)] for name, cost in result.items()}


def test_C_8_an_answer_gets_slower_by_attention_only() -> None:
    read = partial(long.judge, token_bytes=1024, cache=32 << 20)
    for num in (20_000, 50_000):
        output, problems = read(times(num))
        assert not problems
        assert 99 < output["us_per_1000_tokens_in_cache"] < 101
    assert 149 < output["us_per_1000_tokens_beyond_it"] < 151
    (content,) = read(times(text=lambda at: 1e-5 + 3e-8 * at))[1]
    assert "beside attention" in content
    # With the square: half of the last step, and a third, which could be the memory.
    (content,) = read(times(50_000, native=lambda at: 1e-4 + 1e-7 * at + 2.2e-12 * at * at))[1]
    assert "a token takes" in content
    assert not read(times(50_000, native=lambda at: 1e-4 + 1e-7 * at + 1e-12 * at * at))[1]
    content = read(times(native=lambda at: 1e-4 + 1e-7 * at + (2e-4 if at > 7000 else 0)))[1][0]
    assert "far from the line" in content


def judged(*reply: Any) -> list[str]:
    """What the campaign of the children says to a reply (status, text, seconds, deadline)."""
    campaign = children.Campaign.__new__(children.Campaign)
    campaign.counts, campaign.problems, campaign.lateness = Counter(), [], []
    campaign.expected = {"template": "right"}
    campaign.expect("template", {}, *reply)
    return campaign.problems


def test_C_5_the_judge_of_the_children_notices() -> None:
    for right in ((200, "right", 9.0), (200, "right", 0.5, 1.0), (408, "", 1.9, 1.0)):
        assert not judged(*right)
    for wrong in ((200, "left", 0.1), (400, "your fault", 0.1), (500, "", 0.1), (408, "", 0.1), (503, "", 0.1)):
        assert judged(*wrong)
    assert judged(200, "right", 2.1, 1.0)
    assert judged(408, "", 2.1, 1.0)


def test_C_11_no_tenant_finds_anothers_prompt() -> None:
    assert foreign_hits(20, 1) == 0


def test_the_probes_statistic_is_mann_and_whitneys() -> None:
    same, other = [float(i % 7) for i in range(40)], [float((3 * i) % 7) for i in range(40)]
    assert probing.mann_whitney(same, other) > 0.5
    assert probing.mann_whitney(same, [each + 2 for each in other]) < 1e-3
    # 3 values below 3 others: U is 0, its mean 4.5 and its variance 5.25.
    assert probing.mann_whitney([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(math.erfc(4.5 / math.sqrt(10.5)))
