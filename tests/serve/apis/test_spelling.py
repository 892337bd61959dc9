"""Errors and warnings name the fields of the API that was called, not those of the engine or of another API."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.server import Live

from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.serve.call.call import ChatCall, spell, spelled

LONG = "x" * 4000
WRONG = {"type": "nonsense"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "x"}
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_output_tokens": 2048}, "max_output_tokens"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": WRONG}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {"a": [{}] * 30000}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
    ({"guided_json": WRONG}, "guided_json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": LONG}, "input"),
    ({"input": [USER, {"role": "robot", "content": "x"}]}, "input[1].role"),
    ({"input": [USER, {"role": "user", "content": [{"type": "image"}]}]}, "input[1].content[0].type"),
    ({"input": [USER, {"role": "user", "content": 3}]}, "input[1].content"),
    ({"input": [USER, {"type": "gizmo"}]}, "input[1].type"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[1].output"),
    ({"input": [USER, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL | {"description": 3}]}, "tools[0].description"),
    ({"tools": [TOOL | {"strict": 3}]}, "tools[0].strict"),
    ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    (
        {
            "tools": [TOOL, TOOL | {"name": "g", "parameters": {"properties": {"a": WRONG}}}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
        },
        "tools[1].parameters",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"stop": ["x"] * 17}, "stop"),
]
MESSAGES = {"model": "fake", "max_tokens": 2, "messages": [USER]}
GENERATE = {"model": "fake", "prompt": "x", "stream": False}
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", MESSAGES | {"stop_sequences": [""]}, "stop_sequences"),
    ("/v1/messages", MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ("/v1/messages", MESSAGES | {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ("/v1/messages", MESSAGES | {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    (
        "/v1/messages",
        MESSAGES | {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "b"}},
        "tool_choice.name",
    ),
    (
        "/v1/messages",
        MESSAGES | {"output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
        "output_config",
    ),
    ("/api/chat", MESSAGES | {"stream": False, "messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ("/api/chat", GENERATE | {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/api/generate", GENERATE | {"prompt": LONG}, "prompt"),
    ("/api/generate", GENERATE | {"format": WRONG}, "format"),
    ("/api/generate", GENERATE | {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ("/api/generate", GENERATE | {"raw": True, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/completion", {"prompt": "x", "n_probs": 21}, "n_probs"),
    ("/completion", {"prompt": "x", "repeat_penalty": 0}, "repeat_penalty"),
    ("/completion", {"prompt": "x", "grammar": "("}, "grammar"),
    ("/completion", {"prompt": "x", "json_schema": WRONG}, "json_schema"),
    ("/completion", {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
    ("/embedding", {"content": 5}, "content"),
    ("/tokenize", {"content": 3}, "content"),
]


@pytest.mark.parametrize(("body", "field"), RESPONSES)
def test_responses_name_their_own_fields(live: Live, body: dict[str, Any], field: str) -> None:
    reply = live.post("/v1/responses", {"input": "x", "max_output_tokens": 2, "store": False} | body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert f"{field}: " in error["message"], error
    assert error["param"] == field


def test_an_item_is_counted_in_its_own_request(live: Live) -> None:
    first = live.post("/v1/responses", {"input": [USER, USER], "max_output_tokens": 2}).json()
    body = {"input": [{"role": "robot", "content": "x"}], "previous_response_id": first["id"]}
    assert live.post("/v1/responses", body).json()["error"]["param"] == "input[0].role"


@pytest.mark.parametrize(("path", "body", "field"), OTHERS)
def test_other_apis_name_their_own_fields(live: Live, path: str, body: dict[str, Any], field: str) -> None:
    reply = live.post(path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert f"{field}: " in message or f"{field}." in message, message


def test_warnings_name_the_field_too() -> None:
    call = ChatCall(messages=[], spelling={"reasoning_effort": "reasoning.effort"})
    call.warn("reasoning_effort", "ignored")
    call.warn("tools", "ignored")
    assert call.warnings == ["reasoning.effort: ignored", "tools: ignored"]


def test_control_a_field_without_another_name_keeps_its_own() -> None:
    spelling = {"structured_outputs": "format", "stop": "stop"}
    assert spell("structured_outputs.json", spelling) == spell("structured_outputs", spelling) == "format"
    assert spell("stop", spelling) == "stop"
    assert spell("stop_token_ids", spelling) == "stop_token_ids"
    assert spell("structured_outputs.json", {"structured_outputs": "structured_outputs"}) == "structured_outputs.json"
    error = ContextLengthError("stop", 1, "less", 9, 8)
    with pytest.raises(RequestError) as unchanged, spelled(spelling):
        raise error
    assert unchanged.value is error
    with pytest.raises(ContextLengthError, match="n: 1 is") as renamed, spelled({"stop": "n"}):
        raise error
    assert (renamed.value.field, renamed.value.code) == ("n", "context_length_exceeded")
