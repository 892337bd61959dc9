"""The first request of each agent of docs/howto-agents.md, recorded and shortened: it is taken, and what the model
writes comes back as the agent's own API has it. The agents are not needed; `test_codex` has a whole turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import scripted
from tests.support.server import Live, lines_of

from headrace.protocol.config import ServerConfig

RECORDS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "recorded" / "agents.json").read_text())
SAID = "I look at it."


def call(record: dict[str, Any]) -> str:
    return json.dumps({"name": record["tool"], "arguments": record["arguments"]})


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    rows = [
        scripted.Row(json.dumps(next(iter(record["arguments"]))), f"{SAID}\n<tool_call>{call(record)}</tool_call>")
        for record in RECORDS
        if record["tool"]
    ]
    client, tokenizer = scripted.parts([*rows, scripted.Row("", SAID)], tmp_path_factory.mktemp("scripted"))
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as made:
        yield made


def answer(path: str, events: list[dict[str, Any]]) -> tuple[str, str | None, str]:
    """The text, the name of the tool that is called, and its arguments."""
    text, name, arguments = "", None, ""
    for event in events:
        if path == "/v1/messages":
            name = event.get("content_block", {}).get("name", name)
            delta = event.get("delta", {})
            text += delta.get("text", "")
            arguments += delta.get("partial_json", "")
            continue
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", []):
                name = part["function"].get("name", name)
                arguments += part["function"]["arguments"]
    return text, name, arguments


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["client"].partition(" ")[0])
def test_the_first_request_of_an_agent(live: Live, record: dict[str, Any]) -> None:
    reply = live.post(record["path"], record["request"])
    assert reply.status_code == 200, reply.text
    data = [line.removeprefix("data: ") for line in lines_of(reply) if line.startswith("data: {")]
    text, name, arguments = answer(record["path"], [json.loads(each) for each in data])
    assert (text, name) == (SAID, record["tool"])
    assert (json.loads(arguments) if arguments else None) == record["arguments"]
