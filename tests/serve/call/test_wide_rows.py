"""Rows of log-probabilities of the whole vocabulary: made, written and freed beside the event loop (R-03)."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support import fake
from tests.support.server import HTTP, Live, inproc

from headrace.engine import generation
from headrace.protocol.config import ServerConfig
from headrace.serve import routing
from headrace.serve.apis.openai import responses
from headrace.serve.apis.openai.responses_replay import Entry, Written
from headrace.serve.errors import OPENAI
from headrace.text.tokenizer import Tokenizer

ALL = fake.VOCAB_SIZE
TEXT: dict[str, Any] = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True, "seed": 1, "request_id": "same"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True, "seed": 1, "logprobs": True,
    "top_logprobs": ALL,
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": "a", "max_output_tokens": 3, "ignore_eos": True, "seed": 1, "top_logprobs": ALL,
    "include": ["message.output_text.logprobs"],
}  # fmt: skip
CALLS = [
    ("/v1/completions", TEXT | {"logprobs": ALL}),
    ("/v1/completions", TEXT | {"prompt_logprobs": -1, "logprobs": ALL, "echo": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSE | {"store": False}),
    ("/completion", {"prompt": "a", "n_predict": 3, "n_probs": ALL, "seed": 1}),
    ("/api/chat", {"model": "fake", "messages": CHAT["messages"], "options": {"num_predict": 3, "seed": 1},
                   "logprobs": True, "top_logprobs": ALL}),
]  # fmt: skip
CHANGING = re.compile(
    r'"(?:timings|created_at|created|completed_at|id|item_id|(?:\w+_)?duration)":(?:\{[^}]*\}|"[^"]*"|[\d.]+)'
)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(max_logprobs=-1), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        yield live


def set_large(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (generation, routing, responses):
        monkeypatch.setattr(module, "LARGE_TEXT", size)


def texts_on_the_loop(monkeypatch: pytest.MonkeyPatch, live: Live, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """The reply without what changes, and how many tokens the server's loop turned into text."""
    threads: Counter[int] = Counter()
    token_bytes = Tokenizer.token_bytes

    def noted(self: Tokenizer, token_id: int, first: bool = False) -> bytes:
        threads[threading.get_ident()] += 1
        return token_bytes(self, token_id, first)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "token_bytes", noted)
        reply = HTTP.post(live.url + path, json=body)
    assert reply.status_code == 200, reply.text
    return CHANGING.sub("", reply.text), threads[live.thread.ident or 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_R_03_wide_rows_become_text_beside_the_loop(
    server: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    set_large(monkeypatch, 16)
    beside, num_beside = texts_on_the_loop(monkeypatch, server, path, body | {"stream": stream})
    set_large(monkeypatch, 10**9)
    at_once, num_at_once = texts_on_the_loop(monkeypatch, server, path, body | {"stream": stream})
    assert beside == at_once
    assert num_beside < 20 < 50 < num_at_once


@pytest.mark.parametrize("stream", [False, True])
def test_R_03_a_stored_response_is_freed_in_slices_beside_the_loop(
    server: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    set_large(monkeypatch, 16)
    freed: list[tuple[int, bool]] = []
    free = routing.free

    def noted(lists: Any) -> None:
        on_loop = threading.get_ident() == server.thread.ident
        freed.extend((len(each), on_loop) for each in lists if each and hasattr(each[0], "top_logprobs"))
        free(lists)

    monkeypatch.setattr(routing, "free", noted)
    reply = HTTP.post(f"{server.url}/v1/responses", json=RESPONSE | {"stream": stream, "max_output_tokens": 30})
    Live.wait(lambda: bool(freed))
    assert [on_loop for _, on_loop in freed] == [False]
    assert freed[0][0] > 10
    # What is stored is whole.
    response_id = re.findall(r"resp_[0-9a-f]{32}", reply.text)[0]
    stored = HTTP.get(f"{server.url}/v1/responses/{response_id}").json()
    assert len(stored["output"][0]["content"][0]["logprobs"]) == freed[0][0]


def test_R_03_a_stored_response_is_read_as_it_was_written(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    written = HTTP.post(f"{server.url}/v1/responses", json=RESPONSE | {"max_output_tokens": 30})
    path = f"/v1/responses/{written.json()['id']}"
    monkeypatch.setattr(routing, "SENT_BYTES", 1000)
    kinds: list[Any] = []
    decode = msgspec.json.decode

    def noted(data: bytes, **more: Any) -> Any:
        kinds.append(more.get("type"))
        return decode(data, **more)

    monkeypatch.setattr(msgspec.json, "decode", noted)
    stored = HTTP.get(server.url + path)
    assert stored.content == written.content
    assert stored.headers["content-type"] == "application/json"
    assert HTTP.head(server.url + path).headers["content-length"] == str(len(stored.content))
    assert Written in kinds
    assert Entry not in kinds
    # The control: one that needs the parts of the entry decodes it.
    HTTP.get(f"{server.url}{path}/input_items")
    assert Entry in kinds


class LongEvent(routing.Readable):
    """One event that is sent in several parts."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(id="a", close=lambda: None), True)
        self.event = b"data: " + b"x" * (3 * routing.SENT_BYTES) + b"\n\n"

    async def whole(self) -> None:
        raise NotImplementedError

    async def events(self) -> AsyncIterator[bytes]:
        yield self.event
        await asyncio.sleep(0.05)


def test_an_event_is_sent_in_parts_and_heartbeats_stand_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "HEARTBEAT_S", 0.005)
    answer, sent = LongEvent(), []

    async def send(message: dict[str, Any]) -> None:
        # The client reads slowly, so that a heartbeat is due between two parts.
        await asyncio.sleep(0.02)
        sent.append(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    asyncio.run(routing.EventStream(answer, {}, OPENAI)({}, receive, send))
    assert max(map(len, sent)) == routing.SENT_BYTES
    assert answer.event in b"".join(sent)
    assert OPENAI.heartbeat in sent
