"""A server over several engines: probes, metrics and explanations, and an engine that dies unnoticed."""

from __future__ import annotations

import os
import signal

import httpx
from tests.support import fake
from tests.support.server import Live

from headrace.engine.links import ProcessLink
from headrace.fleet.engines.client import Fleet
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.text.tokenizer import Tokenizer


def test_a_server_over_two_engines_is_ready_while_one_serves(tokenizer: Tokenizer) -> None:
    config = EngineConfig(model="fake")
    fleet = Fleet([ProcessLink(config, fake.command(0.001)) for _ in range(2)], router="round-robin", max_restarts=3)
    with Live(fleet, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        live.wait(lambda: all(fleet.fingerprints))

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
        live.wait(lambda: fleet.num_restarts == 1 and all(fleet.fingerprints))
        assert live.metric("replica_restarts_total", replica="0") == 1
        assert live.metric("replica_restarts_total", replica="1") == 0
