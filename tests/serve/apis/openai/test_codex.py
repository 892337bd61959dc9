"""What the agent codex sends, recorded: a turn with the call of a function in a namespace, that of a custom tool, and a
function's. The model answers by the script that codex was run against; codex is not needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tests.support import scripted
from tests.support.server import Live, lines_of

from headrace.protocol.config import ServerConfig
from headrace.serve.apis.openai.responses_tools import client_tools
from headrace.serve.call.parsing import Warnings
from headrace.text.tools.custom import InputText, input_of

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "codex.json").read_text())


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    rows = msgspec.convert(RECORD["script"], list[scripted.Row])
    client, tokenizer = scripted.parts(rows, tmp_path_factory.mktemp("scripted"))
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as result:
        yield result


def streamed(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = live.post("/v1/responses", body)
    assert reply.status_code == 200, reply.text
    return [json.loads(line.removeprefix("data: ")) for line in lines_of(reply) if line.startswith("data: ")]


def test_K3_a_whole_turn_of_codex(live: Live) -> None:
    """Each item of the reply is the one that codex made of it, and sent back with the tool's output."""
    body = dict(RECORD["request"])
    messages = list(body["input"])
    for call, output in RECORD["turns"]:
        events = streamed(live, body | {"input": messages})
        (item,) = events[-1]["response"]["output"]
        fresh = ("id", "call_id", "status")
        assert {k: v for k, v in item.items() if k not in fresh} == {k: v for k, v in call.items() if k not in fresh}
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        deltas = [event["delta"] for event in events if event["type"].endswith(f"{field}.delta")]
        (done,) = [event for event in events if event["type"].endswith(f"{field}.done")]
        assert "".join(deltas) == done[field] == item[field]
        messages += [call, output]
    last = streamed(live, body | {"input": messages})[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "I made the file."
    assert any("web_search" in warning for warning in last["warnings"])
    assert [tool["type"] for tool in last["tools"]] == [tool["type"] for tool in body["tools"]]


def test_K3_a_stored_custom_call_goes_on_by_its_id(live: Live) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        inputs: dict[str, Any] = {"model": "scripted", "tools": RECORD["request"]["tools"]}
        earlier: Any = RECORD["turns"][0]
        first = client.responses.create(input=earlier, **inputs)
        call = first.output[0]
        assert call.type == "custom_tool_call"
        assert call.name == "apply_patch"
        output: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Success. Updated it"}]
        second = client.responses.create(input=output, previous_response_id=first.id, **inputs)
        assert [item.type for item in second.output] == ["function_call"]


def test_custom_tools_in_chats(live: Live) -> None:
    tools: Any = [{"type": "custom", "custom": {"name": "apply_patch", "description": "d"}}]
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        # The script writes the patch when there was an output.
        messages: Any = [
            {"role": "user", "content": "Make made.txt"},
            {"role": "assistant", "tool_calls": [
                {"id": "c0", "type": "custom", "custom": {"name": "apply_patch", "input": "none"}}]},
            {"role": "tool", "tool_call_id": "c0", "content": "invalid"},
        ]  # fmt: skip
        inputs: dict[str, Any] = {"model": "scripted", "messages": messages, "tools": tools}
        (call,) = client.chat.completions.create(**inputs).choices[0].message.tool_calls or []
        assert call.type == "custom"
        assert call.custom.name == "apply_patch"
        assert call.custom.input == RECORD["turns"][1][0]["input"]
        pieces = [
            piece
            for chunk in client.chat.completions.create(**inputs, stream=True)
            for piece in chunk.choices[0].delta.tool_calls or []
        ]
        customs: list[Any] = [(piece.model_extra or {})["custom"] for piece in pieces]
        assert [custom.get("name") for custom in customs] == ["apply_patch", *[None] * (len(customs) - 1)]
        assert "".join(custom["input"] for custom in customs) == call.custom.input


def test_what_the_model_gets_of_the_tools() -> None:
    warnings = Warnings()
    tools = client_tools(RECORD["request"]["tools"], "auto", True, warnings)
    names = ["exec_command", "apply_patch", "multi_agent_v1__close_agent", "multi_agent_v1__resume_agent", "get_goal"]
    functions = {tool["function"]["name"]: tool["function"] for tool in tools.use.tools}
    assert sorted(functions) == sorted(names)
    assert "begin_patch hunk+ end_patch" in functions["apply_patch"]["description"]
    assert functions["multi_agent_v1__close_agent"]["description"].startswith("Tools for spawning")
    assert tools.called("multi_agent_v1__close_agent") == ("close_agent", "multi_agent_v1", False)
    assert tools.called("apply_patch") == ("apply_patch", None, True)
    assert tools.called("unheard_of") == ("unheard_of", None, False)
    assert len(warnings) == 1
    chosen = client_tools(
        RECORD["request"]["tools"],
        {"type": "function", "namespace": "multi_agent_v1", "name": "close_agent"},
        True,
        Warnings(),
    )
    assert list(chosen.use.schemas) == ["multi_agent_v1__close_agent"]
    # A server of MCP has underscores at the end of its name.
    mcp = {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "custom", "name": "read"}]}
    assert client_tools([mcp], None, True, Warnings()).called("mcp__files__read") == ("read", "mcp__files__", True)


@pytest.mark.parametrize("text", ["", 'a\n"q"\\ é 😀\t/', "*** Begin Patch\n+\\u0041"])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_text_is_the_same_in_whatever_pieces_it_comes(text: str, is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    for step in range(1, len(arguments) + 1):
        reader = InputText()
        pieces = [reader.feed(arguments[at : at + step]) for at in range(0, len(arguments), step)]
        assert "".join([*pieces, reader.close()]) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "cut of', "cut of"),
        ("{", "{"),
        ('{"input": "half \\ud83d!"}', "half \ufffd!"),
    ],
)
def test_nothing_that_the_model_wrote_is_lost(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
