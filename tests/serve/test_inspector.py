"""A running engine is watched over HTTP, and its blocks are noted only meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.top import limit
from headrace.insight.limits import Share
from headrace.insight.live import MAX_VIEWERS
from headrace.insight.state import State
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer


@contextlib.contextmanager
def watching(live: Live, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with HTTP.stream("GET", f"{live.url}/inspect/live?follow=true", headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        yield (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(delay=0.005), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        yield live


def test_a_viewer_gets_state_snapshot_and_steps(server: Live) -> None:
    body = {"prompt": "Hello there", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with watching(server) as messages:
        assert next(messages)["state"]["is_ready"]
        assert next(messages)["snapshot"]["blocks"] == [[6, [0], []], [3, [0], []]]
        with HTTP.stream("POST", f"{server.url}/v1/completions", json=body):
            steps, state = [], {}
            while not (steps and state.get("requests")):
                message = next(messages)
                steps += [message["step"]] if "step" in message else []
                state = message.get("state", state)
        [request] = state["requests"]
        assert request["phase"] in ("prefill", "decode")
        assert request["num_prompt_tokens"] == 11
        assert steps[0]["blocks"][0][0] == 6  # journal.RESET
        assert (state["num_running"], state["num_waiting"]) == (1, 0)
    Live.wait(lambda: not server.app.state.inspected[0].feed.is_watched)


def test_viewers_are_bounded_and_make_room_again(server: Live) -> None:
    with contextlib.ExitStack() as stack:
        viewers = [stack.enter_context(watching(server)) for _ in range(MAX_VIEWERS)]
        assert all("state" in next(messages) for messages in viewers)
        reply = HTTP.get(f"{server.url}/inspect/live?follow=true")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "too_many_viewers")
        assert "at most 16 viewers" in reply.json()["error"]["message"]

    def is_there_room() -> bool:
        with HTTP.stream("GET", f"{server.url}/inspect/live") as reply:
            return reply.status_code == 200

    Live.wait(is_there_room)


def test_HEAD_opens_no_view(server: Live) -> None:
    with watching(server) as messages:
        assert "state" in next(messages)
        [source] = server.app.state.inspected
        with mock.patch.object(source.feed, "subscribe", wraps=source.feed.subscribe) as subscribe:
            for _ in range(MAX_VIEWERS + 1):
                reply = HTTP.head(f"{server.url}/inspect/live?follow=true")
                assert (reply.status_code, reply.content) == (200, b"")
                assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
                assert "content-length" not in reply.headers
            assert subscribe.call_count == 0
            # The control: GET opens one.
            assert HTTP.get(f"{server.url}/inspect/live").status_code == 200
            assert subscribe.call_count == 1


def test_a_live_stream_ends_when_the_server_drains(server: Live) -> None:
    with watching(server) as messages:
        assert "state" in next(messages)
        assert "snapshot" in next(messages)
        server.server.servers[0].get_loop().call_soon_threadsafe(server.app.state.lifespan.drain, 60.0)
        # A stream that goes on brings the state each second.
        assert len(list(itertools.islice(messages, 10))) < 10
    Live.wait(lambda: not server.app.state.inspected[0].feed.is_watched)


def test_S_24_only_an_administrator_watches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path), log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as locked:
        for key in (None, rig.ALICE):
            headers = {} if key is None else rig.bearer(key)
            assert HTTP.get(f"{locked.url}/inspect/live", headers=headers).status_code in (401, 403)
        with watching(locked, **rig.bearer(rig.ROOT)) as messages:
            assert "state" in next(messages)


def test_top_prints_the_state_once(server: Live) -> None:
    body = {"prompt": "Hello there", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        tokens = reply.iter_lines()
        assert next(tokens)
        outcome = CliRunner().invoke(app, ["top", server.url, "--once"])
    assert outcome.exit_code == 0, outcome.output
    parts = dict(line.split(maxsplit=1) for line in outcome.stdout.splitlines())
    assert not parts["tok/s"].startswith("0.0")
    assert "1 running, 0 waiting" in parts["requests"]
    assert "decode" in outcome.stdout.splitlines()[-1]
    # The engine does not know what its steps read.
    assert parts["limit"] == "nothing was decoded just now"


@pytest.mark.parametrize(
    ("is_measured", "source"), [(True, "the memory's bandwidth"), (False, "the fastest step so far")]
)
def test_top_shows_the_share_of_the_limit(is_measured: bool, source: str) -> None:
    memory = Share(bytes_per_second=7.1e9, limit=1e10, share=0.71, is_measured=is_measured)
    numbers = {field.name: 0 for field in msgspec.structs.fields(State) if field.name not in ("memory", "requests")}
    assert limit(State(**numbers, requests=[], memory=memory)) == f"71% of 10.0 GB/s, {source}"  # type: ignore[arg-type]


def test_top_refuses_what_is_no_server() -> None:
    outcome = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--once"])
    assert outcome.exit_code == 1
    assert "ConnectError" in str(outcome.exception)
