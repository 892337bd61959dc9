"""Faults: clients that vanish, stall or talk rubbish, floods, a killed engine, a stopped server. Nothing hangs, nobody
else notices, and the gauges come back to their idle values."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.tied import tied
from tests.engine.test_client import is_running, pid_of
from tests.support import fake
from tests.support.server import HTTP, Live, child, inproc, write_tokenizer

from headrace.engine.client import InprocClient
from headrace.engine.core import EngineCore
from headrace.insight.simulated import Behaviour
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.serve import routing
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
LONG = {"prompt": "a prompt of some length", "max_tokens": 400, "ignore_eos": True, "seed": 1}


def is_idle(live: Live) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(live.metric(name) == 0 for name in names) and HTTP.get(live.url + "/load").json()["server_load"] == 0


def ready(live: Live) -> bool:
    return HTTP.get(live.url + "/health/ready").status_code == 200


def head(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body


def events(text: str) -> tuple[str, list[str]]:
    """The text of a completion's stream, and its data lines."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", [])), lines


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_R_04_a_client_that_leaves_frees_its_blocks(live: Live, path: str, stream: bool) -> None:
    body: dict[str, Any] = dict(LONG, max_tokens=1500, n=4, stream=stream)
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    aborted = live.metric("request_success_total", finished_reason="abort")
    with socket.create_connection(("127.0.0.1", live.port)) as client:
        client.sendall(head(path, json.dumps(body).encode()))
        live.wait(lambda: live.metric("num_requests_running") == 4)
        assert live.metric("kv_cache_usage_perc") > 0
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    live.wait(lambda: is_idle(live))
    assert live.metric("request_success_total", finished_reason="abort") == aborted + 4


def test_control_without_the_watch_a_plain_reply_would_run_on(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def careless(receive: Any, work: Any) -> Any:
        return await work

    monkeypatch.setattr(routing, "until_gone", careless)
    ends = [live.metric("request_success_total", finished_reason=reason) for reason in ("abort", "length")]
    with socket.create_connection(("127.0.0.1", live.port)) as client:
        client.sendall(head("/v1/completions", json.dumps(dict(LONG, max_tokens=1000)).encode()))
        live.wait(lambda: live.metric("num_requests_running") == 1)
    live.wait(lambda: is_idle(live))
    ends[1] += 1
    assert [live.metric("request_success_total", finished_reason=reason) for reason in ("abort", "length")] == ends


def test_garbage_bytes_harm_nobody(live: Live) -> None:
    rng = random.Random(0)
    pieces = [
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        *(rng.randbytes(rng.randrange(1, 3000)) for _ in range(40)),
        *(head("/v1/completions", rng.randbytes(200)) for _ in range(20)),
    ]
    for piece in pieces:
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as client:
            client.sendall(piece)
            try:
                # The server may have closed the connection by now.
                client.shutdown(socket.SHUT_WR)
                reply = client.recv(65536)
            except OSError:
                reply = b""
            assert not reply or reply.startswith(b"HTTP/1.1 4"), (piece[:80], reply[:200])
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    live.wait(lambda: is_idle(live))


def test_200_requests_at_once(live: Live) -> None:
    def one(index: int) -> httpx.Response:
        body = {"prompt": f"number {index}", "max_tokens": 10, "seed": index, "stream": index % 2 == 0}
        return live.post("/v1/completions", body)

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        replies = list(pool.map(one, range(200)))
    assert {reply.status_code for reply in replies} == {200}
    assert all(reply.text.endswith("data: [DONE]\n\n") for reply in replies[::2])
    live.wait(lambda: is_idle(live))


def test_R_12_overload_is_a_429_with_retry_after(tokenizer: Tokenizer) -> None:
    client = inproc(delay=0.002, max_num_seqs=2)
    client.admission.max_reqs = 5
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        with concurrent.futures.ThreadPoolExecutor(60) as pool:
            replies = list(pool.map(lambda _: live.post("/v1/completions", dict(LONG, max_tokens=50)), range(60)))
        codes = [reply.status_code for reply in replies]
        assert set(codes) == {200, 429}
        for reply in replies:
            if reply.status_code == 429:
                assert 1 <= int(reply.headers["retry-after"]) <= 60
                assert reply.json()["error"]["code"] == "queue_full"
        live.wait(lambda: is_idle(live))


def test_R_12_whoever_is_refused_is_neither_rendered_nor_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = inproc(delay=0.002, max_num_seqs=1)
    client.admission.max_reqs = 1
    done: list[str] = []

    def noted(kind: Any, name: str) -> None:
        usual = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, **more: (done.append(name), usual(*args, **more))[1])

    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    short = dict(LONG, max_tokens=1)
    calls = {"/v1/chat/completions": chat, "/v1/completions": short, "/v1/embeddings": {"input": "x"}}
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        with socket.create_connection(("127.0.0.1", live.port)) as first, socket.socket() as second:
            first.sendall(head("/v1/completions", json.dumps(dict(LONG, max_tokens=1500)).encode()))
            live.wait(lambda: live.metric("num_requests_running") == 1)
            second.connect(("127.0.0.1", live.port))
            second.sendall(head("/v1/completions", json.dumps(LONG).encode()))
            live.wait(lambda: client.num_waiting == 1)
            noted(ChatTemplate, "rendering")
            noted(Tokenizer, "encode")
            replies = [live.post(path, body) for path, body in calls.items()]
            assert [reply.json()["error"]["code"] for reply in replies] == ["queue_full"] * 3
            assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
            # A request that is wrong at any time is refused now, too.
            assert live.post("/v1/completions", dict(LONG, temperature=-1)).status_code == 400
            client.is_draining = True
            assert [live.post(path, body).status_code for path, body in calls.items()] == [503] * 3
            client.is_draining = False
            assert done == []
        live.wait(lambda: is_idle(live))
        assert [live.post(path, body).status_code for path, body in calls.items()] == [200] * 3
        assert done == ["rendering", "encode", "encode", "encode"]


def test_R_14_a_client_that_does_not_read_holds_up_nobody(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "STALL_S", 1.0)
    body = json.dumps(dict(LONG, max_tokens=1500, n=16, logprobs=20, stream=True)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", live.port))
        client.sendall(head("/v1/completions", body))
        live.wait(lambda: live.metric("num_requests_running") >= 16)
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 20}).status_code == 200
        live.wait(lambda: is_idle(live))


def test_R_03_probes_stay_quick_beside_large_prompts(live: Live) -> None:
    text = "many words " * 20_000
    stop = threading.Event()

    def heavy() -> None:
        while not stop.is_set():
            live.post("/tokenize", {"prompt": text})

    threads = [threading.Thread(target=heavy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            # Far above what it takes, far below what tokenising on the loop would take.
            assert HTTP.get(live.url + "/health/ready", timeout=5).status_code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_R_17_a_request_that_fails_fails_alone(tokenizer: Tokenizer) -> None:
    failing = threading.Event()

    def fail_once(step_id: int, index: int) -> bool:
        # Chunk 0 of a step is the oldest request's, as they come one after the other here.
        if index or not failing.is_set():
            return False
        failing.clear()
        return True

    def build() -> EngineCore:
        core = fake.build(EngineConfig(model="fake"), delay=0.003)
        executor: Any = core.executor
        executor.behaviour = Behaviour(fail=fail_once)
        return core

    with Live(InprocClient(build), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        for stream in (True, False):
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                bad = pool.submit(live.post, "/v1/completions", dict(LONG, max_tokens=1500, stream=stream))
                live.wait(lambda: live.client.stats.num_running == 1)
                good = pool.submit(live.post, "/v1/completions", dict(LONG, max_tokens=200))
                live.wait(lambda: live.client.stats.num_running == 2)
                failing.set()
                if stream:
                    text, lines = events(bad.result().text)
                    assert text
                    assert json.loads(lines[-1])["error"]["code"] == "numerical_error"
                else:
                    assert bad.result().status_code == 500
                    assert bad.result().json()["error"]["code"] == "numerical_error"
            undisturbed = live.post("/v1/completions", dict(LONG, max_tokens=200)).json()
            assert good.result().json()["choices"] == undisturbed["choices"]
        assert live.metric("request_success_total", finished_reason="error") == 2
        live.wait(lambda: is_idle(live))


@pytest.fixture(scope="module")
def mortal(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(child(delay=0.003, max_restarts=10), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        yield live


def test_a_killed_engine_is_a_pause_in_the_streams(mortal: Live) -> None:
    """Promise 2, over HTTP: same text as undisturbed, streamed and plain, and one clean end each."""

    def one(index: int) -> str:
        body = dict(LONG, max_tokens=250, seed=index, stream=index % 2 == 0, logprobs=1)
        reply = mortal.post("/v1/completions", body)
        assert reply.status_code == 200
        if index % 2:
            return str(reply.json()["choices"][0]["text"])
        text, lines = events(reply.text)
        assert lines.count("[DONE]") == 1
        return text

    before = mortal.client.num_restarts
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(one, index) for index in range(16)]
        for kills in range(before + 1, before + 4):
            mortal.wait(lambda: mortal.client.is_alive and mortal.client.stats.num_running > 0)
            at_least = mortal.client.total.num_generated_tokens + 32
            mortal.wait(lambda at_least=at_least: mortal.client.total.num_generated_tokens >= at_least)
            os.kill(pid_of(mortal.client), signal.SIGKILL)
            # The restart may be over before anybody looked.
            mortal.wait(lambda kills=kills: not ready(mortal) or mortal.client.num_restarts == kills)
        texts = [one.result() for one in running]
    assert mortal.client.num_restarts == before + 3
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert texts == list(pool.map(one, range(16)))
    assert mortal.metric("engine_restarts_total") == before + 3
    mortal.wait(lambda: is_idle(mortal))
    assert HTTP.get(mortal.url + "/health/ready").status_code == 200


def test_R_15_a_stream_that_breaks_ends_with_an_error_and_no_done(tokenizer: Tokenizer) -> None:
    client = child(delay=0.005, max_restarts=0)
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(live.post, "/v1/completions", dict(LONG, stream=True))
            plain = pool.submit(live.post, "/v1/completions", LONG)
            live.wait(lambda: client.stats.num_running == 2 and client.total.num_generated_tokens >= 20)
            os.kill(pid_of(client), signal.SIGKILL)
        text, lines = events(streamed.result().text)
        assert text
        assert "[DONE]" not in lines
        assert json.loads(lines[-1])["error"]["code"] == "engine_dead"
        assert plain.result().status_code == 503
        assert live.post("/v1/completions", LONG).status_code == 503
        assert HTTP.get(live.url + "/health").status_code == 503
        assert HTTP.get(live.url + "/health/live").status_code == 200
        assert is_idle(live)


def test_R_02_a_frozen_engine_is_not_ready(mortal: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    dog = mortal.client.replicas[0].watchdog
    monkeypatch.setattr(dog, "timeout", 4.0)
    monkeypatch.setattr(dog, "interval", 0.05)
    pid = pid_of(mortal.client)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(mortal.post, "/v1/completions", dict(LONG, max_tokens=100))
        mortal.wait(lambda: mortal.client.stats.num_running > 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            mortal.wait(lambda: HTTP.get(mortal.url + "/health/ready").json()["status"] == "stalled")
        finally:
            os.kill(pid, signal.SIGCONT)
        mortal.wait(lambda: ready(mortal))
        assert reply.result().status_code == 200
    assert pid_of(mortal.client) == pid


class Served:
    """A server process, and the process of its engine; both are gone when it is left."""

    def __init__(
        self, directory: Path, delay: float, max_restarts: int = 3, drain: float = 30.0, leave: float = 0.0
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, str(ROOT / "tests/programs/serve_fake.py"), str(write_tokenizer(directory))]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            tied([*command, str(self.port), str(delay), str(max_restarts), str(drain), str(leave)]),
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Served:
        try:
            Live.wait(lambda: HTTP.get(self.url + "/health").status_code == 200, 120)
        except BaseException:
            self.__exit__()
            raise
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        self.children = list(commands)
        (self.engine,) = [pid for pid, command in commands.items() if "fake.py" in command]
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def end(self) -> tuple[int, str]:
        _, log = self.process.communicate(timeout=120)
        return self.process.returncode, log


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_R_23_a_signal_drains_and_exits_clean(tmp_path: Path, name: signal.Signals) -> None:
    with Served(tmp_path, delay=0.005) as served:
        with HTTP.stream("POST", served.url + "/v1/completions", json=dict(LONG, stream=True)) as reply:
            lines = reply.iter_lines()
            next(lines)
            served.process.send_signal(name)
            # To the engine as well, as a terminal or a supervisor would: it must see its streams out.
            os.kill(served.engine, name)
            assert list(lines)[-2] == "data: [DONE]"
        status, log = served.end()
    assert status == 0, log
    assert not is_running(served.engine)
    assert "KV cache size: 16,384 tokens in none; maximum concurrency for 2,048 tokens per request: 8.00x" in log
    assert "Avg generation throughput" in log
    with pytest.raises(httpx.ConnectError):
        HTTP.get(served.url + "/health/live")


def test_R_01_a_server_whose_engine_is_dead_for_good_exits_non_zero(tmp_path: Path) -> None:
    with Served(tmp_path, delay=0.005, max_restarts=0) as served:
        os.kill(served.engine, signal.SIGKILL)
        status, log = served.end()
    assert status == 1
    assert "giving up" in log


def test_R_23_streams_that_outlast_the_drain_end_with_an_error(tmp_path: Path) -> None:
    with Served(tmp_path, delay=0.02, drain=0.5) as served:
        with HTTP.stream("POST", served.url + "/v1/completions", json=dict(LONG, stream=True)) as reply:
            lines = reply.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            result = [line for line in lines if line]
        assert "data: [DONE]" not in result
        assert "shutting down" in json.loads(result[-1].removeprefix("data: "))["error"]["message"]
        assert served.end()[0] == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_R_23_a_killed_server_leaves_no_process_and_no_port(tmp_path: Path, frozen: bool) -> None:
    """All children are gone soon, those that are stopped too, and another may listen at once."""
    with (
        Served(tmp_path, delay=0.005) as served,
        HTTP.stream("POST", served.url + "/v1/completions", json=dict(LONG, stream=True)) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        for pid in served.children if frozen else ():
            os.kill(pid, signal.SIGSTOP)
        served.process.kill()
        served.process.wait(timeout=60)
        with socket.create_server(("127.0.0.1", served.port)):
            pass
        end = time.monotonic() + 60
        while left := [pid for pid in served.children if is_running(pid)]:
            assert time.monotonic() < end, left
            time.sleep(0.02)
        with pytest.raises(httpx.TransportError):
            list(lines)


def test_I_24_serving_is_true_both_ways(mortal: Live) -> None:
    """An idle engine that was stopped is not serving, though nobody has missed it yet."""

    def serving() -> bool:
        return HTTP.get(mortal.url + "/health/serving").status_code == 200

    pid = pid_of(mortal.client)
    assert serving()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert HTTP.get(mortal.url + "/health/ready").status_code == 200
        mortal.wait(lambda: not serving())
    finally:
        os.kill(pid, signal.SIGCONT)
    mortal.wait(serving)
    restarts = mortal.client.num_restarts
    os.kill(pid, signal.SIGKILL)
    # Either it says that nobody serves, or what it says is the new engine's answer.
    mortal.wait(lambda: not serving() or mortal.client.num_restarts > restarts)
    mortal.wait(serving)
    assert mortal.client.num_restarts == restarts + 1
    assert pid_of(mortal.client) != pid


def test_a_server_that_drains_takes_nothing_new(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        live.client.is_draining = True
        live.app.state.lifespan.draining = True
        reply = live.post("/v1/completions", LONG)
        assert reply.status_code == 503
        assert "shutting down" in reply.json()["error"]["message"]
        assert HTTP.get(live.url + "/health/ready").json()["status"] == "draining"
