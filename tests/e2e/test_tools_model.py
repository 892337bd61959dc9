"""Tool calls and reasoning of a real model, held to their form by a grammar, with OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tests.support.serving import serve

# The built-in model has learnt neither tools nor reasoning; its template would open the reasoning as Qwen's does.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
    "{% endif %}{# tools: <tool_call> #}"
)
MESSAGES: Any = [{"role": "user", "content": "Tell me a story."}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
QUIET: Any = {"chat_template_kwargs": {"enable_thinking": False}}
BRIEF: Any = {"thinking_token_budget": 6}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path: Path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE)
    with (
        serve("builtin", "--chat-template", str(path)) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=240) as openai_client,
    ):
        yield openai_client


def answer(client: openai.OpenAI, **more: Any) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Content, reasoning, calls and finish reason: the same streamed and not."""
    requests: Any = {"model": "builtin", "messages": MESSAGES, "max_tokens": 400, "seed": 3} | more
    [choice] = client.chat.completions.create(**requests).choices
    message = choice.message
    calls = [
        (call.function.name, call.function.arguments) for call in message.tool_calls or [] if call.type == "function"
    ]
    reasoning = (message.model_extra or {}).get("reasoning_content") or ""
    whole = (message.content or "", reasoning, calls, choice.finish_reason)
    content = thought = ""
    parts: list[list[str]] = []
    for chunk in client.chat.completions.create(**requests, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought += (delta.model_extra or {}).get("reasoning_content") or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                parts.append([call.function.name or "", ""])
            parts[call.index][1] += call.function.arguments or ""
    assert (content, thought, [tuple(part) for part in parts], chunk.choices[0].finish_reason) == whole
    return whole


@pytest.mark.parametrize("thinks", [False, True])
def test_required_calls_obey_the_schema(client: openai.OpenAI, thinks: bool) -> None:
    more = BRIEF if thinks else QUIET
    content, reasoning, calls, finish = answer(
        client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra_body=more
    )
    [(name, arguments)] = calls
    assert (content, bool(reasoning), finish) == ("", thinks, "tool_calls")
    schema = {"weather": PARAMETERS, "time": {"type": "object", "additionalProperties": False}}[name]
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("name", ["weather", "time"])
def test_a_named_tool_is_called(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    _, _, calls, finish = answer(client, tools=TOOLS, tool_choice=choice, extra_body=QUIET)
    assert ([call[0] for call in calls], finish) == ([name], "tool_calls")


def test_a_form_holds_for_the_answer_after_the_reasoning(client: openai.OpenAI) -> None:
    content, reasoning, _, finish = answer(client, response_format=FORM, extra_body=BRIEF)
    assert finish == "stop"
    assert reasoning
    jsonschema.validate(json.loads(content), SCHEMA)
    content, reasoning, _, finish = answer(client, response_format=FORM, reasoning_effort="none")
    assert (reasoning, finish) == ("", "stop")
    jsonschema.validate(json.loads(content), SCHEMA)
    # Reasoning that takes all the room leaves no document, and that is said.
    reply = client.chat.completions.create(
        model="builtin", messages=MESSAGES, response_format=FORM, max_tokens=20, seed=3
    )
    assert reply.choices[0].finish_reason == "length"
    assert not reply.choices[0].message.content
    assert "incomplete" in (reply.choices[0].model_extra or {})["warnings"][0]


def test_tools_and_a_form_are_calls_or_the_form(client: openai.OpenAI) -> None:
    content, _, calls, _ = answer(
        client, tools=TOOLS, response_format=FORM, parallel_tool_calls=False, extra_body=QUIET
    )
    assert bool(content) != bool(calls)
    if content:
        jsonschema.validate(json.loads(content), SCHEMA)


def test_a_schema_that_can_not_be_held_to_is_refused_naming_the_tool(client: openai.OpenAI) -> None:
    bad: Any = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a)\\1"}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.function\.parameters"):
        client.chat.completions.create(model="builtin", messages=MESSAGES, tools=tools, tool_choice="required")
    # Where the model may choose, nothing is held to it.
    client.chat.completions.create(model="builtin", messages=MESSAGES, tools=tools, max_tokens=2)


CLOCK = 'start: HOUR ":" MINUTE "\\n" NOTE?\nHOUR: /[01][0-9]/\nMINUTE: /[0-5][0-9]/\nNOTE: /"[a-z]{1,4}"/\n'


def test_K3_a_custom_tool_s_text_follows_its_grammar(client: openai.OpenAI) -> None:
    lark: Any = {"type": "grammar", "syntax": "lark", "definition": CLOCK}
    tools: Any = [{"type": "custom", "name": "clock", "format": lark}, TOOLS[0]["function"] | {"type": "function"}]
    inputs: dict[str, Any] = {"model": "builtin", "input": "Tell me a story.", "tools": tools}
    inputs |= {"tool_choice": {"type": "custom", "name": "clock"}, "extra_body": QUIET | {"seed": 3}}
    (call,) = client.responses.create(**inputs).output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(r'[01][0-9]:[0-5][0-9]\n("[a-z]{1,4}")?', call.input)
    with client.responses.stream(**inputs) as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == call.input
    # The same as a regular expression, in a chat.
    regex: Any = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"^\d{2}:\d{2}\n$"}}
    chosen: Any = {"type": "custom", "custom": {"name": "clock"}}
    reply = client.chat.completions.create(
        model="builtin",
        messages=MESSAGES,
        tools=[{"type": "custom", "custom": {"name": "clock", "format": regex}}],
        tool_choice=chosen,
        seed=3,
        extra_body=QUIET,
    )
    (custom,) = reply.choices[0].message.tool_calls or []
    assert custom.type == "custom"
    assert re.fullmatch(r"\d{2}:\d{2}\n", custom.custom.input)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_grammar_that_can_not_be_held_to_is_refused_naming_rule_and_tool(client: openai.OpenAI, choice: Any) -> None:
    bad: Any = {"type": "grammar", "syntax": "lark", "definition": "start: hour\nhour: /1(?=x)/"}
    tools: Any = [TOOLS[0]["function"] | {"type": "function"}, {"type": "custom", "name": "clock", "format": bad}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.format.*hour: the group"):
        client.responses.create(model="builtin", input="Hi", tools=tools, tool_choice=choice)


def test_K3_a_turn_of_codex_on_the_built_in_model(client: openai.OpenAI) -> None:
    """Its recorded request, but that the model, which would not call a tool, must; then the tool's result."""
    recorded = Path(__file__).parents[1] / "serve" / "apis" / "openai" / "recorded" / "codex.json"
    request = json.loads(recorded.read_text())["request"]
    inputs: dict[str, Any] = {"model": "builtin", "tools": request["tools"], "parallel_tool_calls": False}
    inputs |= {"max_output_tokens": 2000, "extra_body": QUIET | {"seed": 1}}
    (call,) = client.responses.create(input=request["input"], tool_choice="required", **inputs).output
    assert call.type in ("function_call", "custom_tool_call")
    output = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "It is done."}
    items: Any = [*request["input"], call.model_dump(exclude_none=True), output]
    final = client.responses.create(input=items, tool_choice="none", **inputs | {"max_output_tokens": 20})
    assert final.output_text
