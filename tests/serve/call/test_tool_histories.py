"""The second turn of a tool conversation, over each API: a turn without content, and calls that a model left broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.call.test_tools import BEGIN, END, TEMPLATE, TOOLS, Echo, asked
from tests.support import fake
from tests.support.server import Live, write_tokenizer

from headrace.engine.client import InprocClient
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.text.tokenizer import Tokenizer

CONCATENATES = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TAKES_TEXT = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ 'call ' + c.function.arguments }}{% endfor %}"
    "{% endfor %}"
)
SAY = f"Say {chr(BEGIN)}cold{chr(END)}."
CUT = '{"city": "Zür'


@pytest.fixture(scope="module", params=[CONCATENATES, TEMPLATE, TAKES_TEXT], ids=["texts", "objects", "json text"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_tokenizer(tmp_path_factory.mktemp("echo"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": request.param}))
    client = InprocClient(lambda: fake.build(EngineConfig(model="fake"), oracle=Echo(fake.VOCAB_SIZE, [fake.EOS])))
    with Live(client, Tokenizer.load(folder), ServerConfig(log_stats_interval=0)) as result:
        yield result


@pytest.fixture
def takes_text(request: pytest.FixtureRequest) -> bool:
    """Whether the template of `live` takes arguments as JSON text."""
    return "json text" in request.node.name


def openai_call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def chat(arguments: Any = '{"city": "Bern"}', **content: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": SAY},
        {"role": "assistant", "tool_calls": [openai_call(arguments)], **content},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]
    return {"model": "fake", "messages": messages, "tools": TOOLS, "max_tokens": 20}


def messages_body(arguments: Any = None) -> dict[str, Any]:
    block = {"type": "tool_use", "id": "c1", "name": "weather", "input": arguments or {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "cold"}]}
    turns = [("user", SAY), ("assistant", [block]), ("user", [result])]
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"model": "fake", "messages": messages, "max_tokens": 20}


def input_body(arguments: str = '{"city": "Bern"}') -> dict[str, Any]:
    items = [
        {"role": "user", "content": SAY},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
    ]
    return {"model": "fake", "input": items, "max_output_tokens": 20}


def ollama_body(arguments: Any = None) -> dict[str, Any]:
    call = {"function": {"name": "weather", "arguments": arguments or {"city": "Bern"}}}
    messages = [
        {"role": "user", "content": SAY},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "cold"},
    ]
    return {"model": "fake", "messages": messages, "stream": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(content=None)),
        ("/v1/chat/completions", chat()),
        ("/v1/chat/completions", chat(content="")),
        ("/v1/chat/completions", chat(content=[{"type": "text", "text": "so"}])),
        ("/v1/messages", messages_body()),
        ("/v1/messages", messages_body({"_incomplete": CUT})),
        ("/v1/responses", input_body()),
        ("/api/chat", ollama_body()),
    ],
)
def test_K1_a_turn_of_calls_alone_is_taken(live: Live, path: str, body: dict[str, Any]) -> None:
    reply = live.post(path, body)
    assert reply.status_code == 200, reply.text
    assert "cold" in reply.text
    assert "arguments" not in str(reply.json().get("warnings"))


@pytest.mark.parametrize("arguments", [CUT, "[1]", "cold?"])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages[1].tool_calls[0].function.arguments"),
        ("/v1/responses", "input[1].arguments"),
    ],
)
def test_K6_a_broken_call_is_taken_back(live: Live, path: str, field: str, arguments: str, takes_text: bool) -> None:
    reply = live.post(path, chat(arguments) if "chat" in path else input_body(arguments))
    assert reply.status_code == 200, reply.text
    warned = [line for line in reply.json().get("warnings", []) if line.startswith(f"{field}: no JSON object")]
    # A template that writes no calls gets {} too; one that takes text gets the text.
    assert bool(warned) == (not takes_text), reply.text


def test_K6_a_broken_call_that_was_stored_is_taken_back(live: Live, takes_text: bool) -> None:
    """The first answer is cut in its call; the second turn goes on from it, and so does the third."""
    long = '<tool_call>{"name": "weather", "arguments": {"city": "' + "y" * 400
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]

    def respond(**fields: Any) -> Any:
        reply = live.post("/v1/responses", {"model": "fake", "tools": tools, "max_output_tokens": 350} | fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    first = respond(input=f"{chr(BEGIN)}{long}{chr(END)}")
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "cold"}
    second = respond(input=[result], previous_response_id=first["id"], max_output_tokens=9)
    warned = [line for line in second.get("warnings", []) if "previous_response_id.arguments" in line]
    assert bool(warned) == (not takes_text)
    respond(input="Well?", previous_response_id=second["id"], max_output_tokens=9)


def test_a_call_without_a_name_is_still_refused_by_its_own_name(live: Live) -> None:
    body = asked("x")
    body["messages"].insert(0, {"role": "assistant", "tool_calls": [{"id": "c1", "function": {}}]})
    reply = live.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert "messages[0].tool_calls[0]" in reply.json()["error"]["message"]
