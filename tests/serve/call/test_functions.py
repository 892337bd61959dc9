"""OpenAI's older form of calls: `functions`, `function_call` and messages of the role `function` are read as tools, and
the reply has its call as `function_call`."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.serve.call.test_tools import CALL, TOOLS, asked, client, echo  # noqa: F401
from tests.support.server import Live

from headrace.protocol.errors import RequestError
from headrace.text.histories.calls import short_id
from headrace.text.messages import read_messages
from headrace.text.tools.functions import tool_use

FUNCTIONS = [tool["function"] for tool in TOOLS]
WEATHER = {"name": "weather", "arguments": '{"city": "Bern"}'}
USER: dict[str, Any] = {"role": "user", "content": "ask"}
HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "function_call": WEATHER},
    {"role": "function", "name": "weather", "content": "cold"},
]


def older(say: str, **more: Any) -> dict[str, Any]:
    body = asked(say, **more)
    del body["tools"]
    return {"functions": FUNCTIONS, **body}


def test_the_call_comes_back_as_function_call(client: openai.OpenAI) -> None:  # noqa: F811
    body = older(f"I look.\n{CALL}\n{CALL}")
    [choice] = client.chat.completions.create(**body).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert choice.message.function_call.model_dump() == {"name": "weather", "arguments": '{"city": "Zürich"}'}
    name = arguments = content = ""
    for chunk in client.chat.completions.create(**body, stream=True):
        [part] = chunk.choices
        assert part.delta.tool_calls is None
        content += part.delta.content or ""
        if part.delta.function_call is not None:
            name += part.delta.function_call.name or ""
            arguments += part.delta.function_call.arguments or ""
    assert (content, name, arguments, part.finish_reason) == (
        "I look.", "weather", '{"city": "Zürich"}', "function_call",
    )  # fmt: skip


def test_a_function_that_must_be_called() -> None:
    use = tool_use(FUNCTIONS, {"name": "time"})
    assert (use.mode, [*use.schemas], use.parallel, use.is_legacy) == ("required", ["time"], False, True)
    assert tool_use(FUNCTIONS, None).mode == "auto"
    assert tool_use(FUNCTIONS, "none").tools == []


def test_a_history_of_functions_is_one_of_tools(echo: Live) -> None:  # noqa: F811
    call_id = "call_1"
    tools = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": WEATHER}],
        },
        {"role": "tool", "name": "weather", "tool_call_id": call_id, "content": "cold"},
    ]
    body: dict[str, Any] = {"model": "fake", "max_tokens": 3, "return_token_ids": True}
    one = echo.post("/v1/chat/completions", body | {"messages": HISTORY, "functions": FUNCTIONS}).json()
    other = echo.post("/v1/chat/completions", body | {"messages": tools, "tools": TOOLS}).json()
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert [warning.partition(":")[0] for warning in one["warnings"]] == ["messages", "functions"]
    assert "warnings" not in other


def test_ids_follow_from_the_place_and_results_from_the_name() -> None:
    time = {"name": "time", "arguments": "{}"}
    history = [
        *HISTORY[:2],
        {"role": "assistant", "content": "", "function_call": time},
        {"role": "function", "name": "time", "content": "noon"},
        HISTORY[2],
        {"role": "function", "name": "weather", "content": "of no call"},
    ]
    read = read_messages(history)
    assert [message.role for message in read] == ["user", "assistant", "assistant", "tool", "tool", "tool"]
    assert [call.form["id"] for message in read for call in message.tool_calls] == ["call_1", "call_2"]
    assert [message.extra["tool_call_id"] for message in read[3:]] == ["call_2", "call_1", "call_5"]
    # More turns change no id.
    assert read_messages([*history, USER])[:6] == read
    assert len({short_id(f"call_{place}") for place in range(1000)}) == 1000


def test_other_messages_stay_as_they_are() -> None:
    warned: list[str] = []
    call = {"id": "x", "type": "function", "function": WEATHER}
    [message] = read_messages(
        [{"role": "assistant", "content": "So.", "function_call": None, "tool_calls": [call]}],
        lambda field, why: warned.append(field),
    )
    assert [call.form["id"] for call in message.tool_calls] == ["x"]
    assert warned == []


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "function", "content": "cold"}], "messages[0].name"),
        ([USER, {"role": "assistant", "function_call": {"arguments": "{}"}}], "messages[1].function_call"),
    ],
)
def test_messages_that_are_refused(messages: list[Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_messages(messages)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("functions", "choice", "field"),
    [
        (FUNCTIONS, "always", "function_call"),
        (FUNCTIONS, {"name": "storm"}, "function_call.name"),
        ([{"name": "a b"}], None, "functions[0].name"),
        ([FUNCTIONS[0], FUNCTIONS[0]], None, "functions[1].name"),
        ([{"name": "a", "parameters": []}], None, "functions[0].parameters"),
    ],
)
def test_functions_that_are_refused(functions: list[Any], choice: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        tool_use(functions, choice)
    assert refused.value.field == field


def test_functions_beside_tools_are_refused(echo: Live) -> None:  # noqa: F811
    body = asked("x") | {"functions": FUNCTIONS}
    reply = echo.post("/v1/chat/completions", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "functions")
    none = echo.post("/v1/chat/completions", asked("x") | {"functions": [], "function_call": "none"})
    assert none.status_code == 200
