"""Streams that wait for their first token: they begin at once, and heartbeats follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from tests.support.server import HTTP, Live, inproc, lines_of

from headrace.protocol.config import ServerConfig
from headrace.serve import routing
from headrace.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 2,
    "stream": True,
}
STREAMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, '"role":"assistant"'),
    ("/v1/messages", CHAT, "message_start"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 2, "stream": True}, "response.created"),
]


@pytest.fixture(scope="module")
def slow(tokenizer: Tokenizer) -> Iterator[Live]:
    """A server whose steps take half a second."""
    with Live(inproc(delay=0.5), tokenizer, ServerConfig(log_stats_interval=0)) as server:
        yield server


def streamed(server: Live, path: str, body: dict[str, Any]) -> list[str]:
    with HTTP.stream("POST", server.url + path, json=body, timeout=240) as reply:
        assert reply.status_code == 200
        return [line for line in lines_of(reply) if line]


@pytest.mark.parametrize(("path", "body", "opening"), STREAMS)
def test_a_stream_begins_before_its_first_token_and_beats(
    slow: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], opening: str
) -> None:
    monkeypatch.setattr(routing, "HEARTBEAT_S", 0.02)
    lines = streamed(slow, path, body)
    beat = "event: ping" if path == "/v1/messages" else ": heartbeat"
    content = next(i for i, line in enumerate(lines) if "delta" in line and opening not in line and "data:" in line)
    assert opening in "".join(lines[:2])
    assert lines[2:content].count(beat) >= 2
    # A heartbeat stands between two events, never in one.
    for line in lines:
        assert line == beat or line.startswith(("data: ", "event: "))
        if line.startswith("data: {"):
            json.loads(line[6:])


def test_control_no_heart_beats_in_a_quick_stream_or_in_lines_of_json(
    slow: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ": heartbeat" not in streamed(slow, "/v1/chat/completions", CHAT)
    monkeypatch.setattr(routing, "HEARTBEAT_S", 0.02)
    for line in streamed(
        slow, "/api/chat", {"model": "fake", "messages": CHAT["messages"], "options": {"num_predict": 2}}
    ):
        json.loads(line)


def test_clients_pass_over_heartbeats(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "HEARTBEAT_S", 0.02)
    chat: Any = {name: value for name, value in CHAT.items() if name != "stream"}
    with openai.OpenAI(base_url=slow.url + "/v1", api_key="none") as client:
        whole = client.chat.completions.create(**chat, seed=1)
        chunks = list(client.chat.completions.create(**chat, seed=1, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    with anthropic.Anthropic(base_url=slow.url, api_key="none") as claude, claude.messages.stream(**chat) as stream:
        message = stream.get_final_message()
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens == 2
