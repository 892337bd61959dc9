"""Tools on a model whose chat template has no place for them: they stand in the system message, the model's calls are
read back, and those of earlier turns stand in the same form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import scripted
from tests.support.server import Live

from headrace.protocol.config import ServerConfig

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells how it is",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern"]}},
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": "ask"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\\n' }}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "<start_of_turn>model{{ '\\n' }}"
)
"""In the manner of Gemma 2's."""


@pytest.fixture(scope="module", params=[CHATML, GEMMA], ids=["chatml", "gemma"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    rows = [scripted.Row("<tool_response>", "It is cold."), scripted.Row("<tools>", f"I look.\n{CALL}")]
    folder = tmp_path_factory.mktemp("scripted")
    client, _ = scripted.parts(rows, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": request.param}))
    tokenizer = scripted.Tokenizer.load(folder)
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as result:
        yield result


def chat(live: Live, messages: list[Any], **more: Any) -> Any:
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 200, "return_token_ids": True, **more}
    reply = live.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def prompt_of(reply: Any) -> str:
    """A token is a byte."""
    return bytes(reply["prompt_token_ids"]).decode()


def test_the_model_may_call(live: Live) -> None:
    reply = chat(live, [{"role": "system", "content": "Be brief."}, USER])
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Bern"})
    assert any(warning.startswith("tools: the chat template has no place for tools") for warning in reply["warnings"])
    prompt = prompt_of(reply)
    assert prompt.index("Be brief.") < prompt.index('{"name": "weather"') < prompt.index("ask")
    assert "Tells how it is" in prompt


def test_earlier_calls_stand_in_the_form_in_which_the_model_writes_them(live: Live) -> None:
    first = chat(live, [USER])
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "-3"}
    second = chat(live, [USER, message, result])
    assert second["choices"][0]["message"]["content"] == "It is cold."
    prompt = prompt_of(second)
    assert prompt.startswith(prompt_of(first) + f"I look.\n{CALL}")
    assert "<tool_response>\n-3\n</tool_response>" in prompt
    assert len(second["warnings"]) > len(first["warnings"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_has_the_same_form(live: Live, choice: Any) -> None:
    """The grammar leaves the script no choice."""
    reply = chat(live, [USER], tool_choice=choice)
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    assert "<tools>" in prompt_of(reply)


def test_without_tools_nothing_is_written(live: Live) -> None:
    reply = chat(live, [USER], tool_choice="none")
    assert "<tools>" not in prompt_of(reply)
    assert "warnings" not in reply
    assert "<tools>" not in prompt_of(chat(live, [USER], tools=None))


@pytest.mark.parametrize(("parser", "reads"), [("hermes", True), ("mistral", False)])
def test_a_parser_of_another_form_than_the_prompt_shows_is_told(parser: str, reads: bool, tmp_path: Path) -> None:
    client, _ = scripted.parts([scripted.Row("<tools>", CALL)], tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHATML}))
    config = ServerConfig(log_stats_interval=0, tool_call_parser=parser)
    with Live(client, scripted.Tokenizer.load(tmp_path), config) as live:
        reply = chat(live, [USER])
        assert any("another form" in warning for warning in reply["warnings"]) != reads
        assert bool(reply["choices"][0]["message"].get("tool_calls")) == reads
        assert "warnings" not in chat(live, [USER], tools=None)
