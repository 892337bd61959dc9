"""A server over several engines: probes, metrics and explanations, and an engine that dies unnoticed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support import fake
from tests.support.server import Live, inproc

from headrace.cli.main import main
from headrace.engine.links import ProcessLink
from headrace.fleet.engines.client import Fleet
from headrace.fleet.engines.local import LocalFleet
from headrace.fleet.engines.state import FleetState
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve import app
from headrace.text.tokenizer import Tokenizer


def test_a_server_over_two_engines_is_ready_while_one_serves(tokenizer: Tokenizer) -> None:
    config = EngineConfig(model="fake")
    fleet = Fleet([ProcessLink(config, fake.command(0.001)) for _ in range(2)], router="round-robin", max_restarts=3)
    with Live(fleet, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        live.wait(lambda: all(each.fingerprint for each in fleet.replicas))

        def ask(seed: int) -> dict[str, object]:
            body = {"prompt": "ab", "max_tokens": 8, "seed": seed, "ignore_eos": True}
            reply = live.post("/v1/completions", body)
            assert reply.status_code == 200
            answer: dict[str, object] = reply.json()
            return answer

        answers = [ask(seed) for seed in range(4)]
        replicas = set()
        for answer in answers:
            url = f"{live.url}/v1/requests/{answer['id']}/explain"
            [explained] = httpx.get(url, timeout=10).json()["data"]
            replicas.add(explained["replica"])
        assert replicas == {0, 1}
        assert live.metric("replica_up", replica="0") == live.metric("replica_up", replica="1") == 1
        assert live.metric("replica_generation_tokens_total", replica="0") >= 16

        pid = fleet.replicas[0].link.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        live.wait(lambda: fleet.num_restarts == 1 or not fleet.replicas[0].is_up)
        assert httpx.get(live.url + "/health/ready", timeout=10).status_code == 200
        assert [ask(seed)["choices"] for seed in range(4)] == [answer["choices"] for answer in answers]
        live.wait(lambda: fleet.num_restarts == 1 and all(each.fingerprint for each in fleet.replicas))
        assert live.metric("replica_restarts_total", replica="0") == 1
        assert live.metric("replica_restarts_total", replica="1") == 0


SERVER = ServerConfig(log_stats_interval=0, crash_report_dir="", router="round-robin", max_restarts=3)


@pytest.fixture
def local(tokenizer: Tokenizer) -> Iterator[Live]:
    """A server over two engines of this host, of which a step takes two milliseconds."""
    fleet = LocalFleet(EngineConfig(model="fake"), SERVER, [[], []], fake.command(0.002))
    with Live(fleet, tokenizer, SERVER) as live:
        live.wait(lambda: all(each.fingerprint for each in fleet.replicas))
        yield live


def completion(live: Live, seed: int) -> Any:
    body = {"prompt": "ab", "max_tokens": 200, "seed": seed, "ignore_eos": True, "logprobs": 1}
    reply = live.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def test_an_update_under_load_is_not_noticed(local: Live) -> None:
    before = httpx.get(local.url + "/fleet", timeout=10).json()
    assert [each["replica"] for each in before["replicas"]] == [0, 1]
    assert before["update"] is None
    assert before["router"] == "round-robin"
    expected = [completion(local, seed) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(completion, local, seed % 4) for seed in range(12)]
        reply = local.post("/fleet/update", {"settings": {"max_num_seqs": 32}, "patience": 0})
        assert reply.status_code == 200, reply.text
        assert [answer.result() for answer in answers] == expected * 3
    after = reply.json()
    assert after["update"] | {"seconds": 0} == {
        "state": "done", "num_replaced": 2, "num_replicas": 2, "settings": {"max_num_seqs": 32}, "seconds": 0,
        "error": "",
    }  # fmt: skip
    pids = {each["pid"] for each in before["replicas"]} & {each["pid"] for each in after["replicas"]}
    assert not pids
    assert local.client.info.max_num_seqs == 32
    assert httpx.get(local.url + "/health/ready", timeout=10).status_code == 200
    assert local.metric("replica_info") == 2


def test_an_update_that_can_not_be_is_refused(
    local: Live, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(live: Live, body: dict[str, Any]) -> tuple[int, str]:
        reply = live.post("/fleet/update", body)
        return reply.status_code, reply.json()["error"]["message"]

    assert refused(local, {"settings": {"model": "x"}})[0] == 400
    assert refused(local, {"settings": {"max_num_seqs": -1}})[0] == 400
    assert refused(local, {"patience": -1})[0] == 400
    assert refused(local, {"settings": 3})[0] == 400
    # An engine that does not start.
    monkeypatch.setattr(
        "headrace.fleet.engines.local.ProcessLink",
        lambda engine, command, *args, **options: ProcessLink(engine, ("false",), *args, **options),
    )
    status, message = refused(local, {})
    assert status == 409
    assert "0 of 2 engines were replaced; the next one did not start" in message
    assert [each["phase"] for each in httpx.get(local.url + "/fleet", timeout=10).json()["replicas"]] == ["ready"] * 2
    with Live(inproc(), tokenizer, SERVER) as single:
        status, message = refused(single, {})
        assert status == 409
        assert "it has one engine: start it with --data-parallel-size 2 or more" in message
        assert [each["phase"] for each in httpx.get(single.url + "/fleet", timeout=10).json()["replicas"]] == ["ready"]
    fleet = Fleet([ProcessLink(EngineConfig(model="fake"), fake.command(0.0))])
    with Live(fleet, tokenizer, SERVER) as elsewhere:
        status, message = refused(elsewhere, {})
        assert status == 409
        assert "started elsewhere" in message


def test_a_second_update_is_refused_while_one_runs(local: Live) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(completion, local, 1)
        local.wait(lambda: local.client.num_unfinished > 0)
        # It waits for the answer to end where it is.
        assert local.post("/fleet/update", {"wait": False, "patience": 60}).json()["update"]["state"] == "running"
        for wait in (True, False):
            reply = local.post("/fleet/update", {"wait": wait})
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "update_failed")
            assert "an update is running" in reply.json()["error"]["message"]
        answer.result()
    local.wait(lambda: httpx.get(local.url + "/fleet", timeout=10).json()["update"]["state"] == "done")


def test_the_commands_show_and_update_a_fleet(
    local: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def headrace(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["headrace", "fleet", *words, "--url", local.url])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert end.value.code == 0, printed.err
        return printed.out

    completion(local, 1)
    table = headrace("status").splitlines()
    assert table[0].split() == "REPLICA STATE AGE OPEN KV CACHE HIT RATE MOVED RESTARTS FINGERPRINT".split()
    assert [line.split()[:2] for line in table[1:3]] == [["0", "ready"], ["1", "ready"]]
    assert "router round-robin, 0 requests queued, 0 moved so far" in table[-1]
    assert set(json.loads(headrace("status", "--json"))) == set(FleetState.__struct_fields__)
    lines = headrace("update", "--max-num-seqs", "16", "--no-enable-prefix-caching", "--patience", "0")
    assert "2 of 2 engines are replaced\n" in lines
    assert "update: done, 2 of 2 engines replaced, with enable_prefix_caching=false max_num_seqs=16" in lines
    # Flags that are not given are those of the server's start again.
    assert local.client.info.max_num_seqs == 16
    headrace("update", "--patience", "0")
    assert local.client.info.max_num_seqs == 128


def test_a_server_without_a_model_of_its_own_has_no_fleet(tokenizer: Tokenizer, tmp_path: Any) -> None:
    from headrace.engine.library.model_folder import ModelFolder

    config = ServerConfig(log_stats_interval=0, models_dir=str(tmp_path))
    with Live(inproc(), tokenizer, config, stays=False, folder=ModelFolder(str(tmp_path))) as live:
        for reply in (httpx.get(live.url + "/fleet", timeout=10), live.post("/fleet/update", {})):
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_fleet")


def test_spans_name_the_replica(tokenizer: Tokenizer) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    fleet = LocalFleet(EngineConfig(model="fake"), SERVER, [[], []], fake.command(0.0))
    with Live(fleet, tokenizer, SERVER, exporter=exporter) as live:
        live.wait(lambda: all(each.fingerprint for each in fleet.replicas))
        for seed in range(4):
            completion(live, seed)
    assert {span.attributes["headrace.replica"] for span in exporter.get_finished_spans()} == {0, 1}


def test_a_fleet_sleeps_and_wakes(local: Live) -> None:
    expected = completion(local, 1)
    assert local.post("/sleep", {}).status_code == 200
    assert local.client.pids == []
    reply = local.post("/fleet/update", {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")
    assert local.post("/wake_up", {}).status_code == 200
    assert completion(local, 1) == expected


def test_models_of_a_folder_have_one_engine_each(tmp_path: Any) -> None:
    server = ServerConfig(port=0, models_dir=str(tmp_path), data_parallel_size="2")
    with pytest.raises(RequestError, match="data_parallel_size: '2' is not allowed; it must be 1 without MODEL"):
        app.make_app(EngineConfig(), server, has_model=False)
