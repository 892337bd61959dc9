"""Requests of each agent of docs/howto-agents.md, recorded and shortened: the first is taken, and what the model writes
comes back as the agent's own API has it; three turns of one session are found in the cache but for what is new. The
agents are not needed; `test_codex` has a whole turn."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import scripted
from tests.support.server import Live, lines_of

from headrace.protocol.config import ServerConfig
from headrace.serve.call import call as calls

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
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as result:
        yield result


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


BLOCK = 16
"""Tokens of a block of the cache: what is found of a prompt ends with a whole one."""
MARK = {"cache_control": {"type": "ephemeral"}}


def turns(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Three requests of a session, as the agent sends them: a call and its result, and another question."""
    first = copy.deepcopy(record["request"])
    first |= {"stream": False, "max_tokens": 200}
    first.pop("stream_options", None)
    is_claude = record["path"] == "/v1/messages"
    requests = [first]
    for number in (1, 2):
        request = copy.deepcopy(requests[-1])
        messages = request["messages"]
        if is_claude:
            for block in messages[0]["content"]:
                block.pop("cache_control", None)
        if number == 1 and record["tool"] and is_claude:
            use = {"type": "tool_use", "id": "toolu_1", "name": record["tool"], "input": record["arguments"]}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": f"1 {name}", **MARK}
            messages += [{"role": "assistant", "content": [{"type": "text", "text": SAID}, use]}]
            messages += [{"role": "user", "content": [result]}]
        elif number == 1 and record["tool"]:
            function = {"name": record["tool"], "arguments": json.dumps(record["arguments"])}
            calls = [{"id": "call_1", "type": "function", "function": function}]
            messages += [{"role": "assistant", "content": SAID, "tool_calls": calls}]
            messages += [{"role": "tool", "tool_call_id": "call_1", "content": f"1 {name}"}]
        else:
            messages += [{"role": "assistant", "content": f"It is {name}."}, {"role": "user", "content": "And why?"}]
        requests.append(request)
    for number, request in enumerate(requests):
        if is_claude:
            line = request["system"][0]
            assert line["text"].startswith("x-anthropic-billing-header:")
            line["text"] = f"{line['text']} cch=e{number}6c{number}; {name}"
            # The rules are as long as an agent's: the recorded ones were cut.
            request["system"][-1]["text"] += f"{name} " * 200
        else:
            request["messages"][0]["content"] += f"{name} " * 200
    return requests


def shares(live: Live, record: dict[str, Any], name: str) -> list[tuple[int, int]]:
    """Of each turn, the tokens of its prompt and those of them that were found in the cache."""
    result = []
    for request in turns(record, name):
        reply = live.post(record["path"], request)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        if record["path"] == "/v1/messages":
            cached = usage["cache_read_input_tokens"]
            result.append((cached + usage["input_tokens"] + usage["cache_creation_input_tokens"], cached))
        else:
            result.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    return result


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["client"].partition(" ")[0])
def test_three_turns_of_an_agent_are_found_in_the_cache(live: Live, record: dict[str, Any]) -> None:
    result = shares(live, record, "warm")
    print(record["client"], result)
    for (before, _), (_, cached) in itertools.pairwise(result):
        assert cached >= before - 2 * BLOCK
    assert result[2][1] > 0.9 * result[2][0]


def test_control_a_line_that_changes_leaves_only_the_tools_in_the_cache(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = next(record for record in RECORDS if record["path"] == "/v1/messages")
    monkeypatch.setattr(calls, "without_billing", lambda messages: messages)
    result = shares(live, record, "cold")
    assert result[1][1] <= result[2][1] < 0.7 * result[2][0]
