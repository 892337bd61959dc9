"""R-13: a call whose time is over ends with an error, wherever it is then, and never as if it had been long enough."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.serve.test_faults import LONG, events, is_idle
from tests.support.server import HTTP, Live, inproc

from headrace.engine import context
from headrace.engine.request_stream import RequestStream
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

HEADER = "x-request-timeout"
SAID = {"messages": [{"role": "user", "content": "a story"}], "max_tokens": 400, "seed": 1, "ignore_eos": True}
FACES: dict[str, dict[str, Any]] = {
    "/v1/completions": LONG,
    "/v1/chat/completions": SAID,
    "/v1/responses": {"input": "a story", "max_output_tokens": 400},
    "/v1/messages": {"model": "fake", "messages": SAID["messages"], "max_tokens": 400},
    "/api/chat": {"model": "fake", "messages": SAID["messages"], "options": {"num_predict": 400}},
    "/api/generate": {"model": "fake", "prompt": "a story", "options": {"num_predict": 400}},
    "/completion": {"prompt": "a story", "n_predict": 400, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def slow(tokenizer: Tokenizer) -> Iterator[Live]:
    """One at a time, five milliseconds a token; nothing may take longer than three seconds."""
    with Live(
        inproc(delay=0.005, max_num_seqs=1), tokenizer, ServerConfig(log_stats_interval=0, max_request_timeout=3.0)
    ) as made:
        yield made


def body(path: str, stream: bool) -> dict[str, Any]:
    return FACES[path] | {"stream": stream}


@pytest.mark.parametrize("path", FACES)
def test_R_13_time_that_runs_out_while_tokens_come_is_an_error(slow: Live, path: str) -> None:
    expired = slow.metric("requests_expired_total")
    plain = slow.post(path, body(path, False), headers={HEADER: "0.8"})
    assert plain.status_code == 504, plain.text
    assert "time was over" in plain.text
    streamed = slow.post(path, body(path, True), headers={HEADER: "0.8"})
    assert streamed.status_code == 200
    assert "time was over" in streamed.text
    for word in ("[DONE]", '"length"', '"max_tokens"', '"done":true', "message_stop", "response.completed"):
        assert word not in streamed.text.replace(": ", ":"), word
    assert slow.metric("requests_expired_total") == expired + 2
    slow.wait(lambda: is_idle(slow))


@pytest.mark.parametrize("path", FACES)
@pytest.mark.parametrize("stream", [True, False])
def test_R_13_time_that_runs_out_in_the_queue_is_a_408_without_a_step(slow: Live, path: str, stream: bool) -> None:
    with HTTP.stream("POST", slow.url + "/v1/completions", json=dict(LONG, stream=True), timeout=30) as first:
        lines = first.iter_lines()
        next(lines)
        computed = slow.client.total.num_prompt_tokens
        reply = slow.post(path, body(path, stream), headers={HEADER: "0.4"})
        assert reply.status_code == (200 if stream else 408), reply.text
        assert "time was over in the queue" in reply.text
        assert slow.client.total.num_prompt_tokens == computed
    slow.wait(lambda: is_idle(slow))


def test_R_13_the_body_says_it_too_and_the_shorter_counts(slow: Live) -> None:
    for said, header in (
        ({"timeout": 0.5}, {}),
        ({"timeout": 2.5}, {HEADER: "0.5"}),
        ({"timeout": 0.5}, {HEADER: "2"}),
    ):
        start = time.monotonic()
        reply = slow.post("/v1/completions", LONG | said, headers=header)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
        assert time.monotonic() - start < 2
    text, lines = events(slow.post("/v1/completions", LONG | {"timeout": 0.8, "stream": True}).text)
    assert text
    assert json.loads(lines[-1])["error"]["code"] == "deadline_exceeded"


def test_R_13_the_servers_own_bound_holds_for_all(slow: Live) -> None:
    start = time.monotonic()
    for header in ({}, {HEADER: "100"}):
        assert slow.post("/v1/completions", dict(LONG, max_tokens=1500), headers=header).status_code == 504
    assert 6 <= time.monotonic() - start < 20


def test_R_13_enough_time_changes_nothing(slow: Live) -> None:
    asked = dict(LONG, max_tokens=30)
    in_time = slow.post("/v1/completions", asked | {"timeout": 60}, headers={HEADER: "60"})
    assert in_time.json()["choices"] == slow.post("/v1/completions", asked).json()["choices"]
    assert in_time.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e309", "soon", "", "86401"])
def test_R_13_a_header_that_is_no_time_is_refused(slow: Live, value: str) -> None:
    for path, refusal in (("/v1/completions", "error"), ("/v1/messages", "error"), ("/api/chat", "error")):
        reply = slow.post(path, FACES[path], headers={HEADER: value})
        assert reply.status_code == 400, reply.text
        assert HEADER in json.dumps(reply.json()[refusal])


def test_R_13_a_call_that_ended_leaves_no_timer(slow: Live) -> None:
    """A long deadline must not keep what belongs to it: timers are seen through the streams that hold them."""
    made: list[Any] = []
    real = RequestStream.arm

    def arm(self: Any, timer: Any) -> None:
        made.append(timer)
        real(self, timer)

    RequestStream.arm = arm  # type: ignore[method-assign]
    try:
        slow.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    finally:
        RequestStream.arm = real  # type: ignore[method-assign]
    (timer,) = made
    slow.wait(timer.cancelled)


def test_control_a_client_without_deadlines_is_noticed(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow.client, "_expire", lambda stream: None)
    reply = slow.post("/v1/completions", dict(LONG, max_tokens=100), headers={HEADER: "0.1"})
    assert reply.status_code == 200


def test_R_13_a_thousand_calls_end_in_time_or_with_the_error(tokenizer: Tokenizer) -> None:
    """Deadlines from a millisecond up, against an engine that can not do it all; each call is whole or an error."""
    with Live(inproc(delay=0.001, max_num_seqs=16), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        wanted = live.post("/v1/completions", dict(LONG, max_tokens=20)).json()["choices"][0]["text"]
        found: list[httpx.Response] = []

        def many(place: int) -> None:
            for turn in range(20):
                seconds = 0.001 * 1.6 ** ((place + turn * 7) % 16)
                asked = dict(LONG, max_tokens=20, timeout=seconds)
                found.append(live.post("/v1/completions", asked))

        threads = [threading.Thread(target=many, args=(place,)) for place in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 240
        for reply in found:
            assert reply.status_code in (200, 408, 504)
            if reply.status_code == 200:
                assert reply.json()["choices"][0]["text"] == wanted
        assert {408, 200} <= {reply.status_code for reply in found} or {504, 200} <= {r.status_code for r in found}
        live.wait(lambda: is_idle(live))


def test_R_13_a_timeout_in_a_body_is_for_that_body_alone() -> None:
    """Calls that are answered in one task, as the lines of a batch are, do not take over each other's."""
    assert context.deadline() is None
    with context.within(5.0, 100.0):
        assert context.deadline() == 105.0
        with context.within(9.0, 100.0):
            assert context.deadline() == 105.0
        with context.within(None, 100.0):
            assert context.deadline() == 105.0
        with context.within(2.0, 100.0):
            assert context.deadline() == 102.0
        assert context.deadline() == 105.0
    assert context.deadline() is None
