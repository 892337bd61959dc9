"""What one body may cost: values, levels, time, threads (S-20, R-03), and that replies to panics are shaped (S-22)."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.test_refusals import BODIES, raw, refused
from tests.support.server import HTTP, Live

from headrace.engine import context, generation
from headrace.protocol.errors import RequestError
from headrace.serve import lifespan, routing
from headrace.serve.call.call import Call
from headrace.serve.call.replies import ChatTokenLogprob, Tokenized, TokenPiece, TopLogprob
from headrace.serve.errors import OPENAI
from headrace.serve.gates import calls, limits
from headrace.text.tokenizer import Tokenizer

MIB = 2**20
# Each held the interpreter's lock for 0.2 to 2 s: the unit, and how often it fits into 8 MiB.
BOMBS = {
    "nested": (b"[" * 60 + b"]" * 60, "lists and objects"),
    "lists": (b"[]", "lists and objects"),
    "objects": (b'{"":1}', "texts and keys"),
    "empty objects": (b"{}", "lists and objects"),
    "numbers": (b"1", "values"),
    "texts": (b'"a"', "texts and keys"),
    "escaped quotes": (b'"\\\\\\""', "texts and keys"),
}


def body_of(unit: bytes) -> bytes:
    number = (8 * MIB - 64) // (len(unit) + 1)
    return b'{"prompt":[' + unit + (b"," + unit) * (number - 1) + b"]}"


@pytest.mark.parametrize("name", BOMBS)
def test_S_20_bombs_are_refused_before_they_are_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unit, what = BOMBS[name]
    body = body_of(unit)
    parsed: list[int] = []
    # Threads of other tests may still parse theirs.
    thread = threading.get_ident()
    noted = SimpleNamespace(**vars(json))

    def loads(text: str, **more: Any) -> Any:
        if threading.get_ident() == thread:
            parsed.append(len(text))
        return json.loads(text, **more)

    noted.loads = loads
    monkeypatch.setattr(limits, "json", noted)
    with pytest.raises(RequestError, match=f"at most [0-9]+ {what}"):
        limits.parse_json(body)
    assert not parsed
    # The control: what is small enough is parsed.
    limits.parse_json(b'{"prompt":[' + unit + b"]}")
    assert parsed


VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{},:\n'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[,', max_size=3), inner, max_size=3),
    max_leaves=12,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Levels, texts with keys, lists and objects."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inners = [counted(inner) for inner in (value.values() if isinstance(value, dict) else value)]
    num_texts = sum(inner[1] for inner in inners) + (len(value) if isinstance(value, dict) else 0)
    return 1 + max((inner[0] for inner in inners), default=0), num_texts, 1 + sum(inner[2] for inner in inners)


def disagreement(value: Any) -> str:
    """Compare `check_size` with counts of the parsed value, at bounds that just allow it and just do not."""
    body = json.dumps(value, ensure_ascii=False).encode()
    names = ("MAX_DEPTH", "MAX_TEXTS", "MAX_CONTAINERS")
    depth, num_texts, num_containers = counted(value)
    numbers = (depth, num_texts + body.count(b"\\") // limits.ESCAPES, num_containers)
    for name, number in zip(names, numbers, strict=True):
        for most in (number, number - 1):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(limits, name, most)
                try:
                    limits.check_size(body)
                    refusal = False
                except RequestError:
                    refusal = True
            if most >= 0 and refusal != (most < number):
                return f"{name} {most} for {body!r}"
    return ""


@given(VALUES)
def test_S_20_the_counts_are_those_of_the_parsed_value(value: Any) -> None:
    assert not disagreement(value)


def test_S_20_escapes_count_as_texts() -> None:
    """Each is a piece of its text to the parser, which holds the loop meanwhile."""
    most = limits.MAX_TEXTS * limits.ESCAPES
    limits.check_size(b'{"a":"' + b"\\n" * (most - 2 * limits.ESCAPES) + b'"}')
    with pytest.raises(RequestError, match="2 escapes count as one"):
        limits.check_size(b'{"a":"' + b"\\n" * most + b'"}')


def test_S_20_control_brackets_in_a_text_must_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": '\\"[[[', "b": [1]}
    assert not disagreement(value)
    real = limits.check_size
    monkeypatch.setattr(limits, "check_size", lambda body: real(body.replace(b"\\", b"")))
    assert disagreement(value)


@pytest.fixture
def blocked_parser(live: Live, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parser of large bodies stands still until the event is set; the list has how many were in it at once."""
    release, at_once, real = threading.Event(), [0, 0], limits.parse_json

    def parse(body: bytes) -> dict[str, Any]:
        if len(body) < 2**16:
            return real(body)
        at_once[0] += 1
        at_once[1] = max(at_once)
        release.wait(30)
        at_once[0] -= 1
        return real(body)

    monkeypatch.setattr(routing, "parse_json", parse)
    yield release, at_once
    release.set()


LARGE = json.dumps({"prompt": "x", "max_tokens": 1, "user": " " * 2, "unknown": "x" * 2**17}).encode()


def test_S_20_a_deadline_ends_a_call_whose_body_is_parsed(live: Live, blocked_parser: Any) -> None:
    reply = raw(live, "/v1/completions", LARGE, **{"x-request-timeout": "0.05"})
    assert reply.status_code == 408
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    # Others are served meanwhile.
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_S_20_control_without_the_deadline_it_waits(
    live: Live, blocked_parser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def patient(work: Any, what: str) -> Any:
        return await work

    monkeypatch.setattr(routing, "in_time", patient)
    with pytest.raises(httpx.TimeoutException):
        HTTP.post(live.url + "/v1/completions", content=LARGE, headers={"x-request-timeout": "0.05"}, timeout=0.5)


def test_S_20_one_large_body_is_parsed_at_a_time(live: Live, blocked_parser: Any) -> None:
    release, at_once = blocked_parser
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(raw(live, "/v1/completions", LARGE).status_code))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    Live.wait(lambda: at_once[0] > 0)
    release.set()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 4
    assert at_once[1] == 1


def test_a_calls_time_counts_from_its_headers() -> None:
    with context.arrived(5.0):
        assert Call().arrival_time == 5.0
    assert abs(Call().arrival_time - time.monotonic()) < 60


def test_R_03_the_lag_of_the_event_loop_is_measured(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    Live.wait(lambda: live.metric("event_loop_lag_seconds_count") > 0)

    def late() -> float:
        return live.metric("event_loop_lag_seconds_count") - live.metric("event_loop_lag_seconds_bucket", le="0.5")

    before, real = late(), limits.parse_json

    def slow(body: bytes) -> dict[str, Any]:
        threading.Event().wait(1.0)
        return real(body)

    monkeypatch.setattr(routing, "parse_json", slow)
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    Live.wait(lambda: late() > before)


def test_R_03_threads_hand_the_lock_over_after_a_millisecond_while_a_server_runs(live: Live) -> None:
    assert sys.getswitchinterval() == pytest.approx(lifespan.SWITCH_S)


def test_R_03_other_tasks_run_between_the_parts_of_a_large_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "SENT_BYTES", 100)
    stream = routing.EventStream(SimpleNamespace(media_type="text/event-stream"), {}, OPENAI)

    async def turns(num_bytes: int) -> tuple[int, int]:
        """How often another task ran while an event was sent to a client that reads at once, and in how many parts."""
        num_turns, parts = 0, []

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async def send(message: dict[str, Any]) -> None:
            parts.append(message["body"])

        task = asyncio.create_task(other())
        await stream._send(send, b"x" * num_bytes, more=True)
        task.cancel()
        return num_turns, len(parts)

    assert asyncio.run(turns(1000)) == (9, 10)
    # The control: a small event is sent at once.
    assert asyncio.run(turns(100)) == (0, 1)


# -- what a breakdown of native code shows


class Breakdown(BaseException):
    """Stands for a panic of another library."""


PanicException = type("PanicException", (BaseException,), {})
FAULTS: dict[str, Callable[[], BaseException]] = {
    "panic": lambda: PanicException("retry-limit-in-match over"),
    "memory": MemoryError,
    "other": Breakdown,
}
PATHS = sorted(set(BODIES) - {"/api/show", "/api/pull"})


class Native:
    """A tokenizer's native part, one call of which breaks down."""

    def __init__(self, inner: Any, name: str, error: Callable[[], BaseException]) -> None:
        self.inner, self.name, self.error = inner, name, error

    def __getattr__(self, name: str) -> Any:
        return self.fail if name == self.name else getattr(self.inner, name)

    def fail(self, *args: Any, **more: Any) -> Any:
        raise self.error()


def break_down(live: Live, patch: pytest.MonkeyPatch, place: str, error: Callable[[], BaseException]) -> None:
    front = next(cell for cell in _fronts(live))
    tokenizer: Tokenizer = front.tokenizer
    if place == "template":
        patch.setattr("headrace.text.templates.ChatTemplate.rendering", Native(None, "x", error).fail)
    else:
        patch.setattr(tokenizer, "_coder", Native(tokenizer._coder, place, error))
        patch.setattr(tokenizer, "_inner", [None] * tokenizer.vocab_size)


def _fronts(live: Live) -> list[Any]:
    return [live.app.state.lifespan.models.default.served.front]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["encode", "id_to_token", "template"])
def test_S_22_a_breakdown_of_native_code_gets_a_shaped_reply(
    live: Live, monkeypatch: pytest.MonkeyPatch, place: str, fault: str
) -> None:
    num_broken = 0
    for path in PATHS:
        with monkeypatch.context() as patch:
            break_down(live, patch, place, FAULTS[fault])
            reply = live.post(path, BODIES[path][1])
        if reply.status_code == 200:
            continue
        num_broken += 1
        refused(reply, status=500)
        assert "retry-limit" not in reply.text
    assert num_broken >= 3
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_S_22_control_without_the_gate_the_reply_has_no_shape(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (routing, calls):
        monkeypatch.setattr(module, "ENDINGS", (BaseException,))
    break_down(live, monkeypatch, "encode", Breakdown)
    reply = live.post("/v1/completions", BODIES["/v1/completions"][1])
    assert not reply.headers["content-type"].startswith("application/json")


def test_S_22_a_stream_that_breaks_down_ends_with_an_error(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    break_down(live, monkeypatch, "id_to_token", FAULTS["panic"])
    text = live.post("/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True}).text
    assert "broke down" in text
    assert "[DONE]" not in text


# -- large replies


class Inner(msgspec.Struct, rename={"body": "text"}):
    body: str
    values: list[Any]
    none: int | msgspec.UnsetType = msgspec.UNSET


TOP = TopLogprob(token="a", logprob=-1.5, bytes=(97,))
WIDE = ChatTokenLogprob(token="a", logprob=-1.0, bytes=(97,), top_logprobs=(TOP,) * 3000)


def test_large_replies_are_written_in_pieces_of_the_same_bytes() -> None:
    pieces = [TokenPiece(id=i, piece="é") for i in range(3000)]
    for value in (
        Tokenized(count=1, max_model_len=2, tokens=pieces, token_strs=[str(i) for i in range(3000)]),
        [Inner("a", [Inner("b", list(range(5000)))] * 3)],
        Inner("", []), [], {"a": [1]}, None, Inner("a", [Inner("b", [Inner("c", [WIDE] * 3)])]),
    ):  # fmt: skip
        written = list(routing.json_pieces(value))
        assert b"".join(written) == msgspec.json.encode(value)
        assert max(map(len, written)) < 2**15
    # The control: without levels a row is written in one piece.
    assert max(map(len, routing.json_pieces(Inner("a", [Inner("b", [WIDE])]), 0))) > 2**15


def test_large_replies_come_whole(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "ab" * 4000, "return_token_strs": True}
    large = live.post("/tokenize", body)
    monkeypatch.setattr(routing, "LARGE_TEXT", 10**9)
    assert large.content == live.post("/tokenize", body).content
    assert large.headers["content-length"] == str(len(large.content))


def test_in_time_leaves_other_timeouts_alone() -> None:
    async def fail() -> None:
        raise TimeoutError("of the work itself")

    with pytest.raises(TimeoutError, match="of the work itself"):
        asyncio.run(generation.in_time(fail(), "it failed"))
