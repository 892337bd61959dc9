"""An engine that is killed while it loads for the first time is started again; one that fails with an error is not."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from tests.engine.test_client import request
from tests.support import remote
from tests.support.server import HTTP, Live
from tests.support.short_lived import link, lives

from headrace.engine import replica
from headrace.engine.client import EngineClient
from headrace.fleet.engines.client import Fleet
from headrace.protocol import frames
from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import CheckpointError, ChildFailedError, EngineDeadError, EngineLostError
from headrace.serve.call.service import ServedModel
from headrace.text.tokenizer import Tokenizer


async def tokens(client: EngineClient) -> list[int]:
    return [token async for deltas in client.submit([request()]) for _, delta in deltas for token in delta.token_ids]


def test_a_killed_engine_is_started_again_and_answers(tmp_path: Path) -> None:
    async def go() -> None:
        file = tmp_path / "lives"
        client = EngineClient(link(file, 2), max_restarts=2)
        await client.start()
        assert (lives(file), client.num_restarts, client.is_alive) == (3, 2, True)
        answer = await tokens(client)
        assert len(answer) == 20
        # It sleeps and wakes, and is killed in that load too.
        await client.close()
        file.unlink()
        client.replicas[0].deaths.clear()
        await client.start()
        assert lives(file) == 3
        assert await tokens(client) == answer
        await client.close()

    asyncio.run(go())


def test_one_that_is_killed_over_and_over_is_given_up_in_clear_words(tmp_path: Path) -> None:
    async def go() -> None:
        client = EngineClient(link(tmp_path / "lives", 9), max_restarts=2)
        with pytest.raises(EngineLostError, match=r"ended while it started \(exit status -9\); it was started 3 times"):
            await client.start()
        assert lives(tmp_path / "lives") == 3

    asyncio.run(go())


def test_one_that_fails_with_an_error_is_not_started_again(tmp_path: Path) -> None:
    async def go() -> None:
        client = EngineClient(link(tmp_path / "lives", 9, "fail"), max_restarts=5)
        with pytest.raises(CheckpointError, match=r"^model\.safetensors: torn$"):
            await client.start()
        assert lives(tmp_path / "lives") == 1

    asyncio.run(go())


def test_control_without_a_second_start_the_first_death_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "EngineLostError", KeyError)

    async def go() -> None:
        with pytest.raises(EngineLostError):
            await EngineClient(link(tmp_path / "lives", 1), max_restarts=2).start()

    asyncio.run(go())


def test_a_client_that_is_closed_starts_no_more(tmp_path: Path) -> None:
    async def go() -> None:
        file = tmp_path / "lives"
        client = EngineClient(link(file, 10_000), max_restarts=10_000)
        start = asyncio.create_task(client.start())
        await remote.until(lambda: lives(file) > 1)
        await client.close()
        with pytest.raises(EngineDeadError):
            await start
        num = lives(file)
        await asyncio.sleep(0.2)
        assert lives(file) == num

    asyncio.run(go())


def test_replicas_are_started_again_each_for_itself(tmp_path: Path) -> None:
    async def go() -> None:
        files = [tmp_path / "first", tmp_path / "second"]
        fleet = Fleet([link(file, num) for num, file in enumerate(files)], max_restarts=1)
        await fleet.start()
        assert [lives(file) for file in files] == [1, 2]
        assert [each.is_alive for each in fleet.replicas] == [True, True]
        await fleet.close()

    asyncio.run(go())


def test_an_engine_on_another_host_is_started_again_there(tmp_path: Path) -> None:
    async def work(client: EngineClient, server: object) -> None:
        assert client.is_alive

    remote.run(work, link(tmp_path / "lives", 2))
    assert lives(tmp_path / "lives") == 3


@pytest.mark.parametrize("kind", ["RankLostError", "EngineLostError"])
def test_a_rank_that_is_killed_while_it_loads_is_no_error_of_the_model(kind: str) -> None:
    assert type(frames.startup_error(frames.Failed(kind, "rank 1 ended"))) is EngineLostError


def test_the_server_says_loading_and_becomes_ready(tmp_path: Path, tokenizer: Tokenizer) -> None:
    client = EngineClient(link(tmp_path / "lives", 2), max_restarts=2)
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        assert HTTP.get(live.url + "/health/ready").json() == {"status": "ready"}
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        assert live.metric("engine_restarts_total") == 2


def test_a_process_of_templates_that_dies_twice_at_the_start_does_not_end_the_server(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: ServedModel, *args: object) -> None:
        raise ChildFailedError("a process of the server failed and is started again")

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(ServedModel, "render", fail)
    client = EngineClient(link(tmp_path / "lives", 0))
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        assert live.app.state.lifespan.failure is None
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert "the chat template is not warm" in caplog.text
