"""Anthropic's own Python client against a live server, over the fake engine; what it sends that must be refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import msgspec
import pytest
from tests.support.server import HTTP, Live, brittle, inproc

from headrace.protocol.config import ServerConfig
from headrace.serve.apis.anthropic.reply import MessagesAnswer
from headrace.serve.apis.anthropic.request import MessagesRequest
from headrace.serve.call.parsing import Warnings, convert
from headrace.text.outputs import CallPart, Content, MessagePart, Reasoning, TextDelta
from headrace.text.tokenizer import Tokenizer

ASKED: Any = {"model": "fake", "max_tokens": 40, "messages": [{"role": "user", "content": "Wer fährt so spät?"}]}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=240) as result:
        yield result


def post(live: Live, **more: Any) -> Any:
    return live.post("/v1/messages", ASKED | more)


def test_anthropic_messages(client: anthropic.Anthropic, say: Callable[[str], None]) -> None:
    say("Der Vater mit seinem Kind.")
    message = client.messages.create(**ASKED)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [
        ("text", "Der Vater mit seinem Kind.")
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == 27
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == 29


def test_anthropic_stop_reasons(client: anthropic.Anthropic, say: Callable[[str], None]) -> None:
    say("one two three")
    cut = client.messages.create(**ASKED | {"max_tokens": 3})
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one")  # type: ignore[union-attr]
    stopped = client.messages.create(**ASKED, stop_sequences=["wo", " thr"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wo")
    assert stopped.content[0].text == "one t"  # type: ignore[union-attr]


def test_anthropic_stream_events(client: anthropic.Anthropic, live: Live, say: Callable[[str], None]) -> None:
    say("Siehst, Väter, du?")
    lines = post(live, stream=True).text
    names = [line[7:] for line in lines.split("\n") if line.startswith("event: ")]
    bodies = [json.loads(line[6:]) for line in lines.split("\n") if line.startswith("data: ")]
    assert names == [body["type"] for body in bodies]
    inner = names[3:-3]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert inner
    assert set(inner) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = bodies[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == "Siehst, Väter, du?"  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(text.encode()) + 1


def test_anthropic_cache_read_input_tokens(client: anthropic.Anthropic) -> None:
    """Three counts that add up to the prompt; the second time all but the last token comes from the cache."""
    system: Any = [{"type": "text", "text": "S" * 100, "cache_control": {"type": "ephemeral"}}]
    first, second = (client.messages.create(**ASKED, system=system).usage for _ in range(2))
    read = first.cache_read_input_tokens or 0
    # Others' prompts may begin with the same word.
    assert read < 16
    total = first.input_tokens + (first.cache_creation_input_tokens or 0) + read
    assert first.cache_creation_input_tokens == total // 16 * 16 - read
    assert second.cache_read_input_tokens == total - 1
    assert second.cache_creation_input_tokens == 0
    assert second.input_tokens == 1
    plain = client.messages.create(**ASKED, system="T" * 100).usage
    assert plain.cache_creation_input_tokens == 0
    assert (plain.cache_read_input_tokens or 0) < 16


def test_anthropic_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="fake", messages=ASKED["messages"], system="Kurz.")
    usage = client.messages.create(**ASKED, system="Kurz.").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    # llama-server's callers name no model.
    body = {"messages": ASKED["messages"]}
    named, unnamed = (
        HTTP.post(str(client.base_url).rstrip("/") + "/v1/messages/count_tokens", json=body | more).json()
        for more in ({"model": "fake"}, {})
    )
    assert named == unnamed


def test_anthropic_conversation_is_what_the_template_gets(client: anthropic.Anthropic, live: Live) -> None:
    """System, texts, thinking, calls and results of tools, a prefill: the prompt is that of the same chat."""
    blocks: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "s", "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "assistant", "content": "So it"},
    ]
    counted = client.messages.count_tokens(model="fake", messages=blocks, system="sys").input_tokens
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    results = "<tool_response>\nr\n</tool_response>\n<tool_response>\nError: s\n</tool_response>"
    text = f"[system]sys[user]a\nb[assistant]c\n{call}[user]{results}[user]d[assistant]So it"
    assert counted == len(text)


def test_anthropic_bearer_and_x_api_key(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(api_key="k", log_stats_interval=0)) as locked:
        for right in ({"api_key": "k"}, {"auth_token": "k", "api_key": None}):
            with anthropic.Anthropic(base_url=locked.url, max_retries=0, **right) as result:  # type: ignore[arg-type]
                assert result.messages.create(**ASKED | {"max_tokens": 2}).usage.output_tokens == 2
        with (
            anthropic.Anthropic(base_url=locked.url, max_retries=0, api_key="x") as result,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            result.messages.create(**ASKED)
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


def test_anthropic_models(client: anthropic.Anthropic) -> None:
    assert [(model.id, model.type, model.display_name) for model in client.models.list()] == [("fake", "model", "fake")]
    assert client.models.retrieve("fake").id == "fake"


def test_a_label_of_a_user_has_a_bound(live: Live) -> None:
    assert post(live, metadata={"user_id": "u" * 512}).status_code == 200
    reply = post(live, metadata={"user_id": "u" * 513})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message == "metadata.user_id: 513 is not allowed; it must be a length from 0 to 512"


def test_anthropic_warnings(client: anthropic.Anthropic, live: Live) -> None:
    message: Any = client.messages.create(
        **ASKED, service_tier="auto", extra_body={"top_q": 1, "metadata": {"user_id": "u", "x": 1}}
    )
    output = [
        "service_tier: ignored: there is one tier",
        "top_q: unknown, and ignored; did you mean top_p?",
        "metadata.x: unknown, and ignored",
    ]
    assert sorted(message.warnings) == sorted(output)
    first = post(live, stream=True, service_tier="auto").text.split("data: ")[1]
    assert json.loads(first.partition("\n")[0])["message"]["warnings"] == output[:1]
    block = {"type": "text", "text": "x", "colour": "red"}
    reply = post(live, messages=[{"role": "user", "content": [block]}], max_tokens=1).json()
    assert reply["warnings"] == ["messages[0].content[0].colour: unknown, and ignored"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"system": [{"text": "x"}]}, "system[0].type"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages[0]"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"type": "function", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
    ],
)
def test_anthropic_refusals_name_the_field(live: Live, more: dict[str, Any], field: str) -> None:
    inputs = {name: value for name, value in (ASKED | more).items() if value is not None}
    reply = live.post("/v1/messages", inputs)
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(field)


def test_anthropic_unknown_models_are_404(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ASKED | {"model": "claude"})


def test_anthropic_a_broken_stream_ends_with_an_error_event(tokenizer: Tokenizer) -> None:
    with Live(brittle(8), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        text = post(live, stream=True).text
        last = text.strip().split("\n\n")[-1].split("\n")
        assert last[0] == "event: error"
        body = json.loads(last[1][6:])
        assert (body["type"], body["error"]["type"]) == ("error", "api_error")
        assert "message_stop" not in text
        with (
            anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0) as result,
            pytest.raises(anthropic.APIStatusError),
        ):
            result.messages.create(**ASKED)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Aix"}}\n</tool_call>'
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}


def test_anthropic_tools_and_thinking(tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
    say("<think>Hm, so.</think>I look." + CALL)
    requests = ASKED | {"tools": [TOOL], "max_tokens": 400}
    with (
        Live(inproc(), tokenizer, ServerConfig(reasoning_parser="deepseek_r1", log_stats_interval=0)) as live,
        anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0) as client,
    ):
        whole = client.messages.create(**requests)
        with client.messages.stream(**requests) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text, call = message.content
        assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Hm, so.")  # type: ignore[union-attr]
        assert (text.type, text.text.strip()) == ("text", "I look.")  # type: ignore[union-attr]
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Aix"})  # type: ignore[union-attr]
        assert message.stop_reason == "tool_use"


class Scripted:
    """A chat's answer with parts that somebody else made."""

    def __init__(self, parts: list[list[MessagePart]]) -> None:
        state = SimpleNamespace(
            request=SimpleNamespace(prompt_token_ids=[1, 2, 3]), num_cached_tokens=0, token_ids=[4], finish=None
        )
        self.id = "chatcmpl-1"
        self.generation = SimpleNamespace(states=[state])
        self.call = SimpleNamespace(warnings=Warnings())
        self._parts = parts

    async def parts(self) -> AsyncIterator[tuple[int, TextDelta, list[MessagePart]]]:
        for each in self._parts:
            yield 0, TextDelta("", [], []), each

    def finish_reason(self, place: int) -> str:
        return "tool_calls"


def test_anthropic_stream_of_thinking_text_and_calls() -> None:
    """Each block is opened once, filled, and closed before the next; the client puts it together again."""
    parts: list[list[MessagePart]] = [
        [Reasoning("hm"), Reasoning(" so")],
        [Content("I'll "), Content("look.")],
        [CallPart(0, "c0", "f", '{"x"'), CallPart(0, "c0", None, ": 1}"), CallPart(1, "c1", "g", "")],
        [],
    ]
    answer = MessagesAnswer(Scripted(parts), convert(MessagesRequest, ASKED), 16)  # type: ignore[arg-type]

    async def read() -> list[dict[str, Any]]:
        return [msgspec.json.decode(each.split(b"data: ")[1]) async for each in answer.events()]

    events = asyncio.run(read())
    opened: list[int] = []
    for body in events:
        if body["type"] == "content_block_start":
            opened.append(body["index"])
        elif body["type"].startswith("content_block"):
            assert body["index"] == opened[-1]
    assert opened == [0, 1, 2, 3]
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for body in events:
        if body["type"] != "ping":
            snapshot = accumulate_event(event=body, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    kinds = [block.type for block in snapshot.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert snapshot.content[0].thinking == "hm so"
    assert snapshot.content[1].text == "I'll look."
    assert (snapshot.content[2].name, snapshot.content[2].input) == ("f", {"x": 1})
    assert (snapshot.content[3].id, snapshot.content[3].input) == ("c1", {})
    assert snapshot.stop_reason == "tool_use"


def test_anthropic_hang_up_ends_the_request(live: Live) -> None:
    body = ASKED | {"stream": True, "max_tokens": 1500}
    with HTTP.stream("POST", live.url + "/v1/messages", json=body, timeout=240) as reply:
        next(reply.iter_lines())
    live.wait(lambda: live.client.num_unfinished == 0)
