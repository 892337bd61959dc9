"""R-13: a call whose time is over ends with an error, wherever it is then, and never as if it had been long enough.

Time does not pass here: `pass_time` sets the clock of the server's loop forward, once the call is where it should be.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.serve.test_faults import LONG, events, is_idle
from tests.support.server import HTTP, Live, inproc

from headrace.engine import context
from headrace.engine.open_requests import RequestStream
from headrace.protocol.config import ServerConfig
from headrace.serve.gates import calls
from headrace.text.tokenizer import Tokenizer

HEADER = "x-request-timeout"
MANY = 1500
ENDLESS = dict(LONG, max_tokens=MANY)
SAID = {"messages": [{"role": "user", "content": "a story"}], "max_tokens": MANY, "seed": 1, "ignore_eos": True}
FACES: dict[str, dict[str, Any]] = {
    "/v1/completions": ENDLESS,
    "/v1/chat/completions": SAID,
    "/v1/responses": {"input": "a story", "max_output_tokens": MANY},
    "/v1/messages": {"model": "fake", "messages": SAID["messages"], "max_tokens": MANY},
    "/api/chat": {"model": "fake", "messages": SAID["messages"], "options": {"num_predict": MANY}},
    "/api/generate": {"model": "fake", "prompt": "a story", "options": {"num_predict": MANY}},
    "/completion": {"prompt": "a story", "n_predict": MANY, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def slow(tokenizer: Tokenizer) -> Iterator[Live]:
    """One at a time, five milliseconds a token; nothing may take longer than five minutes."""
    with Live(
        inproc(delay=0.005, max_num_seqs=1), tokenizer, ServerConfig(log_stats_interval=0, max_request_timeout=300.0)
    ) as live:
        yield live


def pass_time(live: Live, seconds: float) -> None:
    """Set the clock of the server's loop forward: timers that are due by then go off at once."""
    loop = live.server.servers[0].get_loop()

    def forward() -> None:
        before = loop.time
        loop.time = lambda: before() + seconds  # type: ignore[method-assign]

    loop.call_soon_threadsafe(forward)


def timed_out(
    live: Live, path: str, body: dict[str, Any], header: str | None, passes: float, until: Callable[[], bool]
) -> httpx.Response:
    """The reply to a call after which, once `until` holds, so many seconds pass."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(live.post, path, body, headers={HEADER: header} if header else {})
        live.wait(until)
        pass_time(live, passes)
        return reply.result()


def speaks(live: Live) -> Callable[[], bool]:
    """Whether tokens came since now, enough of them for a letter."""
    enough = live.client.total.num_generated_tokens + 10
    return lambda: live.client.total.num_generated_tokens >= enough


def cut_off(live: Live, path: str, body: dict[str, Any], header: str | None = "50") -> httpx.Response:
    """The reply to a call for which 51 seconds are over as soon as it speaks."""
    live.wait(lambda: is_idle(live))
    return timed_out(live, path, body, header, 51, speaks(live))


@pytest.mark.parametrize("path", FACES)
def test_R_13_time_that_runs_out_while_tokens_come_is_an_error(slow: Live, path: str) -> None:
    expired = slow.metric("requests_expired_total")
    plain = cut_off(slow, path, FACES[path] | {"stream": False})
    assert plain.status_code == 504, plain.text
    assert "time was over" in plain.text
    streamed = cut_off(slow, path, FACES[path] | {"stream": True})
    assert streamed.status_code == 200
    assert "time was over" in streamed.text
    for word in ("[DONE]", '"length"', '"max_tokens"', '"done":true', "message_stop", "response.completed"):
        assert word not in streamed.text.replace(": ", ":"), word
    assert slow.metric("requests_expired_total") == expired + 2
    slow.wait(lambda: is_idle(slow))


@pytest.mark.parametrize("path", FACES)
@pytest.mark.parametrize("stream", [True, False])
def test_R_13_time_that_runs_out_in_the_queue_is_a_408_without_a_step(slow: Live, path: str, stream: bool) -> None:
    with HTTP.stream("POST", slow.url + "/v1/completions", json=dict(ENDLESS, stream=True)) as first:
        lines = first.iter_lines()
        next(lines)
        computed = slow.client.total.num_prompt_tokens
        body = FACES[path] | {"stream": stream}
        reply = timed_out(slow, path, body, "50", 51, lambda: slow.client.num_waiting == 1)
        assert reply.status_code == (200 if stream else 408), reply.text
        assert "time was over in the queue" in reply.text
        assert slow.client.total.num_prompt_tokens == computed
    slow.wait(lambda: is_idle(slow))


def test_R_13_the_body_says_it_too_and_the_shorter_counts(slow: Live) -> None:
    for message, header in (({"timeout": 50}, None), ({"timeout": 250}, "50"), ({"timeout": 50}, "250")):
        reply = cut_off(slow, "/v1/completions", ENDLESS | message, header)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
    body = ENDLESS | {"timeout": 50, "stream": True}
    text, lines = events(cut_off(slow, "/v1/completions", body, None).text)
    assert text
    assert json.loads(lines[-1])["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("header", [None, "1000"])
def test_R_13_the_servers_own_bound_holds_for_all(slow: Live, header: str | None) -> None:
    slow.wait(lambda: is_idle(slow))
    began = speaks(slow)

    def nearly() -> bool:
        """Two hundred seconds change nothing: tokens come afterwards."""
        if not began():
            return False
        pass_time(slow, 200)
        slow.wait(speaks(slow))
        return True

    assert timed_out(slow, "/v1/completions", ENDLESS, header, 101, nearly).status_code == 504


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/apply-template", "/tokenize"])
def test_R_13_R_31_time_that_runs_out_while_a_chat_is_rendered(
    slow: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of templates stands still: the call ends in time, and the server gets another process."""
    slow.wait(lambda: is_idle(slow))
    [worker] = slow.app.state.lifespan.models.default.served.workers
    slow.wait(lambda: worker.status == "ready" and worker.process.pid is not None)
    pid = worker.process.pid
    # However slow this machine is, the process stands still until the call's time is over.
    monkeypatch.setattr(worker.process.watchdog, "timeout", 0.0)
    began, right = threading.Event(), worker.run

    async def run(work: Callable[[], Any]) -> Any:
        if work != worker.process.ping:
            began.set()
        return await right(work)

    monkeypatch.setattr(worker, "run", run)
    expired = slow.metric("requests_expired_total")
    os.kill(pid, signal.SIGSTOP)
    reply = timed_out(slow, path, FACES.get(path, SAID), "50", 51, began.is_set)
    assert reply.status_code == 408, reply.text
    assert "time was over while its prompt was rendered" in reply.text
    assert slow.metric("requests_expired_total") == expired + 1
    os.kill(pid, signal.SIGKILL)
    monkeypatch.undo()
    assert slow.post(path, FACES.get(path, SAID) | {"max_tokens": 1, "options": {"num_predict": 1}}).status_code == 200


def test_R_31_a_process_that_fails_again_and_again_is_a_503(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    [worker] = slow.app.state.lifespan.models.default.served.workers
    process = worker.process
    slow.wait(lambda: process.pid is not None)
    num_restarts = slow.metric("helper_restarts_total", helper="templates")
    monkeypatch.setattr(sys, "executable", "/nothing/there")
    os.kill(process.pid, signal.SIGKILL)
    reply = slow.post("/v1/chat/completions", SAID)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1"), reply.text
    assert reply.json()["error"]["code"] == "process_failed"
    assert "messages" not in reply.text, "no field of the client's is blamed"
    assert slow.metric("helper_restarts_total", helper="templates") >= num_restarts + 2
    assert slow.metric("helper_restarts_total", helper="grammars") == 0
    for probe in ("/health/ready", "/health/serving"):
        state = HTTP.get(slow.url + probe)
        assert (state.status_code, state.json()["status"]) == (503, "impaired")
    monkeypatch.undo()
    assert slow.post("/v1/chat/completions", SAID | {"max_tokens": 1}).status_code == 200
    assert HTTP.get(slow.url + "/health/ready").status_code == 200


def test_R_13_enough_time_changes_nothing(slow: Live) -> None:
    requests = dict(LONG, max_tokens=30)
    in_time = slow.post("/v1/completions", requests | {"timeout": 200}, headers={HEADER: "200"})
    assert in_time.json()["choices"] == slow.post("/v1/completions", requests).json()["choices"]
    assert in_time.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e309", "soon", "", "86401"])
def test_R_13_a_header_that_is_no_time_is_refused(slow: Live, value: str) -> None:
    for path, refusal in (("/v1/completions", "error"), ("/v1/messages", "error"), ("/api/chat", "error")):
        reply = slow.post(path, FACES[path], headers={HEADER: value})
        assert reply.status_code == 400, reply.text
        assert HEADER in json.dumps(reply.json()[refusal])


def test_R_13_a_call_that_ended_leaves_no_timer(slow: Live) -> None:
    """A long deadline must not keep what belongs to it: timers are seen through the streams that hold them."""
    result: list[Any] = []
    real = RequestStream.arm

    def arm(self: Any, timer: Any) -> None:
        result.append(timer)
        real(self, timer)

    RequestStream.arm = arm  # type: ignore[method-assign]
    try:
        slow.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    finally:
        RequestStream.arm = real  # type: ignore[method-assign]
    (timer,) = result
    slow.wait(timer.cancelled)


def test_control_a_client_without_deadlines_is_noticed(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow.client, "_expire", lambda stream: None)
    reply = slow.post("/v1/completions", dict(LONG, max_tokens=100), headers={HEADER: "0.1"})
    assert reply.status_code == 200


def test_R_13_a_thousand_calls_end_in_time_or_with_the_error(tokenizer: Tokenizer) -> None:
    """Deadlines from a millisecond to two minutes, against an engine that can not do it all in less than twenty; each
    call is whole or an error."""
    with Live(inproc(delay=0.001, max_num_seqs=16), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        text = live.post("/v1/completions", dict(LONG, max_tokens=20)).json()["choices"][0]["text"]
        actual: list[httpx.Response] = []

        def many(place: int) -> None:
            for turn in range(20):
                seconds = 0.001 * 2.2 ** ((place + turn * 7) % 16)
                requests = dict(LONG, max_tokens=20, timeout=seconds)
                actual.append(live.post("/v1/completions", requests))

        threads = [threading.Thread(target=many, args=(place,)) for place in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(actual) == 240
        for reply in actual:
            assert reply.status_code in (200, 408, 504)
            if reply.status_code == 200:
                assert reply.json()["choices"][0]["text"] == text
        assert {408, 200} <= {reply.status_code for reply in actual} or {504, 200} <= {r.status_code for r in actual}
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


@pytest.mark.parametrize(
    ("text", "most", "seconds"),
    [(None, None, 3600), ("9000", None, 3600), ("5", None, 5), (None, 0, None), ("9000", 0, 9000)],
)
def test_R_13_a_call_has_an_hour_unless_a_flag_says_otherwise(
    text: str | None, most: float | None, seconds: float | None
) -> None:
    bound = ServerConfig().max_request_timeout if most is None else most
    headers = {} if text is None else {HEADER.lower().encode(): [text.encode()]}
    assert calls.time_of_call(headers, bound) == seconds
