"""Tools and reasoning over the API: OpenAI's own client against a live server whose model says what the prompt says."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support import fake
from tests.support.server import Live, write_tokenizer

from headrace.engine.client import InprocClient
from headrace.insight.simulated import Oracle
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.choice import ToolUse

TEMPLATE = (
    "{# <tool_call> </think> #}"
    "{% if tools %}[tools]{% for t in tools %}{{ t['function']['name'] }} {% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}"
    "{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
BEGIN, END = 1, 2
"""Around what the model is to say, in the prompt. They are letters of the tokenizer, whose token i is the byte i."""


class Echo(Oracle):
    """Says what stands between the marks in the prompt, and ends."""

    def next_token(self, context: array[int], params: SamplingParams, num_generated: int) -> int:
        tokens = list(context[1::3])
        prompt = tokens[: len(tokens) - num_generated]
        if BEGIN not in prompt:
            return fake.EOS
        start = len(prompt) - prompt[::-1].index(BEGIN)
        text = prompt[start : prompt.index(END, start)]
        return text[num_generated] if num_generated < len(text) else fake.EOS


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_tokenizer(tmp_path_factory.mktemp("echo"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    client = InprocClient(lambda: fake.build(EngineConfig(model="fake"), oracle=Echo(fake.VOCAB_SIZE, [fake.EOS])))
    with Live(client, Tokenizer.load(folder), ServerConfig(log_stats_interval=0)) as live:
        yield live


@pytest.fixture(scope="module")
def client(echo: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=echo.url + "/v1", api_key="none", max_retries=0, timeout=240) as openai_client:
        yield openai_client


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("time")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def asked(say: str, **more: Any) -> dict[str, Any]:
    """A chat whose answer is `say`."""
    inputs = {"model": "fake", "messages": [{"role": "user", "content": f"Say {chr(BEGIN)}{say}{chr(END)}."}]}
    return inputs | {"tools": TOOLS, "max_tokens": 400, "seed": 1} | more


def streamed(client: openai.OpenAI, say: str, **more: Any) -> dict[str, Any]:
    """The parts of a stream put together, as a client does; fails if they do not come as OpenAI's do."""
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    finish = None
    for chunk in client.chat.completions.create(**asked(say, **more), stream=True):
        [choice] = chunk.choices
        delta = choice.delta
        content += delta.content or ""
        thought = (delta.model_extra or {}).get("reasoning_content")
        assert thought == (delta.model_extra or {}).get("reasoning")
        reasoning += thought or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.id is not None:
                assert call.type == "function"
                assert call.index == len(calls)
                calls.append({"id": call.id, "name": call.function.name or "", "arguments": ""})
            assert (call.function.name is None) == (call.id is None)
            calls[call.index]["arguments"] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return {"content": content, "reasoning": reasoning, "calls": calls, "finish": finish}


def whole(client: openai.OpenAI, say: str, **more: Any) -> dict[str, Any]:
    [choice] = client.chat.completions.create(**asked(say, **more)).choices
    message = choice.message
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or []
        if call.type == "function"
    ]
    reasoning = (message.model_extra or {}).get("reasoning_content") or ""
    assert reasoning == ((message.model_extra or {}).get("reasoning") or "")
    return {"content": message.content or "", "reasoning": reasoning, "calls": calls, "finish": choice.finish_reason}


def both(client: openai.OpenAI, say: str, **more: Any) -> dict[str, Any]:
    """The answer, which is the same streamed and not, but for the ids of its calls."""
    result, parts = whole(client, say, **more), streamed(client, say, **more)
    for answer in (result, parts):
        ids = [call.pop("id") for call in answer["calls"]]
        assert len(set(ids)) == len(ids)
        assert all(ids)
    assert result == parts
    return result


def test_tool_choice_auto(client: openai.OpenAI) -> None:
    call = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert both(client, CALL) == {"content": "", "reasoning": "", "calls": [call], "finish": "tool_calls"}
    result = both(client, f"Let me see.\n{CALL}\n{CALL}")
    assert result == {"content": "Let me see.", "reasoning": "", "calls": [call, call], "finish": "tool_calls"}
    assert both(client, "No tools.")["finish"] == "stop"


def test_a_call_of_a_tool_that_was_not_given_is_told(client: openai.OpenAI) -> None:
    [call] = both(client, CALL.replace("weather", "storm"))["calls"]
    assert call["name"] == "storm"


def test_an_ill_formed_call_is_content(client: openai.OpenAI) -> None:
    bad = CALL.replace("}}", "}")
    assert both(client, bad) == {"content": bad, "reasoning": "", "calls": [], "finish": "stop"}


def test_a_call_cut_by_max_tokens_is_length(client: openai.OpenAI) -> None:
    assert both(client, CALL, max_tokens=40) == {"content": "", "reasoning": "", "calls": [], "finish": "length"}
    result = both(client, CALL, max_tokens=56)
    assert (result["content"], result["finish"]) == ("", "length")
    assert result["calls"] == [{"name": "weather", "arguments": '{"city": "Z'}]
    long = CALL.replace("Zürich", "x" * 600)
    result = both(client, long, max_tokens=500)
    assert result["finish"] == "length"
    assert long.encode()[:500].decode().endswith(result["calls"][0]["arguments"])


def test_tool_choice_none_has_no_calls_and_no_tools(client: openai.OpenAI) -> None:
    result = both(client, CALL, tool_choice="none")
    assert (result["content"], result["calls"], result["finish"]) == (CALL, [], "stop")
    with_tools, without = (
        client.chat.completions.create(**asked("x", tool_choice=choice)).usage for choice in ("auto", "none")
    )
    assert with_tools is not None
    assert without is not None
    assert with_tools.prompt_tokens > without.prompt_tokens


def test_parallel_tool_calls_off_ends_with_the_first(client: openai.OpenAI) -> None:
    result = both(client, CALL + CALL + "!", parallel_tool_calls=False)
    assert (len(result["calls"]), result["content"], result["finish"]) == (1, "", "tool_calls")
    # Without it the reply has both.
    assert len(both(client, CALL + CALL)["calls"]) == 2


def test_n_answers_have_their_own_calls(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**asked(CALL, n=3))
    ids = [call.id for choice in reply.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 3


def test_reasoning_apart_from_content_and_calls(client: openai.OpenAI) -> None:
    say = f"<think>\nhm {CALL}\n</think>\n\nWell.\n{CALL}"
    result = both(client, say)
    # The call in the reasoning is one, and it is not made once more after it.
    assert (result["reasoning"], result["content"], len(result["calls"])) == ("hm", "Well.", 1)
    quiet: Any = {"include_reasoning": False}
    assert both(client, say, extra_body=quiet)["reasoning"] == ""
    plain = both(client, "<think>a</think>b", tools=openai.omit)
    assert (plain["reasoning"], plain["content"], plain["finish"]) == ("a", "b", "stop")
    never = both(client, "<think>on and on", tools=openai.omit)
    assert (never["reasoning"], never["content"]) == ("on and on", "on and on")
    cut = both(client, "<think>on and on", tools=openai.omit, max_tokens=12)
    assert (cut["reasoning"], cut["content"], cut["finish"]) == ("on an", "", "length")


def test_reasoning_that_the_template_opened(client: openai.OpenAI) -> None:
    thinking: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    result = both(client, f"hm\n</think>\n{CALL}", extra_body=thinking)
    assert (result["reasoning"], result["content"], len(result["calls"])) == ("hm", "", 1)


def test_stop_strings_look_at_the_content(client: openai.OpenAI) -> None:
    say = "<think>one STOP two</think>three STOP four"
    result = both(client, say, tools=openai.omit, stop="STOP")
    assert (result["reasoning"], result["content"], result["finish"]) == ("one STOP two", "three ", "stop")
    with_stop = both(client, say, tools=openai.omit, stop="STOP", extra_body={"include_stop_str_in_output": True})
    assert with_stop["content"] == "three STOP"
    everywhere = both(client, say, tools=openai.omit, stop="STOP", extra_body={"stop_in_reasoning": True})
    assert (everywhere["reasoning"], everywhere["content"], everywhere["finish"]) == ("one ", "", "stop")
    # They end nothing in a call.
    called = both(client, f"Well.\n{CALL}\nDone STOP more", stop=["Z", "name", "STOP"])
    assert (called["content"], called["calls"][0]["name"]) == ("Well.\n\nDone ", "weather")


def test_tool_results_go_through_the_template(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**asked(CALL)).choices[0].message
    messages: list[Any] = [
        {"role": "user", "content": "Weather?"},
        reply.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": (reply.tool_calls or [])[0].id, "content": f"{chr(BEGIN)}Sunny.{chr(END)}"},
    ]
    result = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=50)  # type: ignore[arg-type]
    assert result.choices[0].message.content == "Sunny."


def test_reasoning_effort_is_a_variable_of_the_template(echo: Live) -> None:
    body = asked("x") | {"messages": [{"role": "user", "content": "x"}]}
    lengths = []
    for effort in ("none", "high"):
        reply = echo.post("/tokenize", {"messages": body["messages"], "reasoning_effort": effort}).json()
        lengths.append(reply["count"])
    assert lengths[1] - lengths[0] == len("<think>\n")
    assert echo.post("/tokenize", {"messages": body["messages"], "reasoning_effort": "huge"}).status_code == 400


def test_strict_that_is_not_enforced_is_told(echo: Live) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    reply = echo.post("/v1/chat/completions", asked("x", tools=[strict])).json()
    assert "strict" in reply["warnings"][0]
    assert "warnings" not in echo.post("/v1/chat/completions", asked("x")).json()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "wand"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].custom"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
        "tools[0].custom.format.grammar",
    ),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
        "tools[0].function.parameters.properties",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [tool(f"t{i}") for i in range(1025)]}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tools"),
    ({"parallel_tool_calls": 3}, "parallel_tool_calls"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
def test_bad_tools_are_refused_naming_the_field(echo: Live, body: dict[str, Any], field: str) -> None:
    reply = echo.post("/v1/chat/completions", asked("x") | body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"].startswith(f"{field}: "), reply.text


def test_allowed_tools_are_the_only_ones() -> None:
    named = [{"type": "function", "function": {"name": "time"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    use = ToolUse.of(TOOLS, choice, True)
    assert (use.mode, [*use.schemas], len(use.tools), use.parallel) == ("required", ["time"], 1, True)
    choice["allowed_tools"]["tools"] = []  # type: ignore[index]
    with pytest.raises(RequestError, match=r"tool_choice\.allowed_tools\.tools"):
        ToolUse.of(TOOLS, choice, True)


def test_a_named_tool_is_called_once() -> None:
    use = ToolUse.of(TOOLS, {"type": "function", "function": {"name": "weather"}}, True)
    assert (use.mode, [*use.schemas], len(use.tools), use.parallel) == ("required", ["weather"], 2, False)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [({"enable_auto_tool_choice": False}, True), ({"tool_call_parser": "none"}, True), ({}, False)],
)
def test_flags_for_tools(tmp_path: Path, flags: dict[str, Any], refused: bool) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    client = InprocClient(lambda: fake.build(EngineConfig(model="fake"), oracle=Echo(fake.VOCAB_SIZE, [fake.EOS])))
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0, **flags)) as live:
        reply = live.post("/v1/chat/completions", asked(CALL))
        assert reply.status_code == (400 if refused else 200)
        if not refused:
            assert "no place for tools" in reply.json()["warnings"][0]
            assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_when_the_server_starts(name: str, tokenizer: Tokenizer) -> None:
    flags: dict[str, Any] = {name: "nonsense"}
    with pytest.raises(RequestError, match=f"{name}: 'nonsense' is not allowed"):
        Live(InprocClient(lambda: fake.build(EngineConfig(model="fake"))), tokenizer, ServerConfig(**flags))
