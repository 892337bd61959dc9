"""Law: every answer that the server can give is accepted back, in every API, by every chat template.

An answer has reasoning, text and calls in every combination, calls that were cut among them. It is made into the reply
of each API, and that into the next request, with results where there are calls and a question where there are none.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.text.test_chat_templates import SPECIAL
from tests.text.test_histories import NUM_PARTS, all_sources

from headrace.serve.apis.anthropic import reply as anthropic
from headrace.serve.apis.anthropic import request as anthropic_request
from headrace.serve.apis.ollama import reply as ollama
from headrace.serve.apis.ollama import request as ollama_request
from headrace.serve.apis.openai import responses_input
from headrace.serve.apis.openai.answers import chat_message
from headrace.serve.apis.openai.responses_events import OutputItem, OutputText
from headrace.serve.call.call import arguments_object
from headrace.serve.call.parsing import Warnings, convert
from headrace.text import templates
from headrace.text.messages import ChatMessage, read_messages
from headrace.text.outputs import CallPart, Content, MessageBuilder, Reasoning
from headrace.text.pictures.marks import Pictures
from headrace.text.templates import ChatTemplate
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.formats import FORMATS

CALLS = (
    [],
    ['{"city": "Bern"}'],
    ['{"city": "Bern"}', '{"city": "Rome"}'],
    ['{"city": "Bern"}', '{"city": "Ro'],
    ["{}"],
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = ToolUse.of([{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}], None, True).tools
Message = dict[str, Any]


def answers() -> Iterator[MessageBuilder]:
    """Yield the answers that a model can give, with ids as the formats make them."""
    makers = itertools.cycle({tool_format.new_id for tool_format in FORMATS.values()})
    for reasoning, content, calls in itertools.product(("", "Hm."), ("", "I look."), CALLS):
        message = MessageBuilder()
        message.add(Reasoning(reasoning))
        message.add(Content(content))
        new_id = next(makers)
        for index, arguments in enumerate(calls):
            message.add(CallPart(index, new_id(), "weather", arguments))
        yield message


def as_openai(answer: MessageBuilder, more: bool) -> list[ChatMessage]:
    messages: list[Message] = [{"role": "user", "content": "ask"}]
    messages.append(msgspec.to_builtins(chat_message(answer, ToolUse.of(None, None, True))))
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "cold"} for call in answer.calls]
    return read_messages(messages + [{"role": "user", "content": "more"}] * (more or not answer.calls))


def as_anthropic(answer: MessageBuilder, more: bool) -> list[ChatMessage]:
    content: list[anthropic.Block] = []
    if answer.reasoning:
        content.append(anthropic.ReplyThinking(thinking=answer.reasoning))
    if answer.content:
        content.append(anthropic.ReplyText(text=answer.content))
    for call in answer.calls:
        values = arguments_object(call["arguments"])
        content.append(anthropic.ReplyToolUse(id=call["id"], name=call["name"], input=values))
    results: list[Message] = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "cold"} for call in answer.calls
    ]
    results += [{"type": "text", "text": "more"}] * (more or not answer.calls)
    # Anthropic's clients leave an answer without blocks out.
    turns = [{"role": "assistant", "content": msgspec.to_builtins(content)}] * bool(content)
    messages = [{"role": "user", "content": "ask"}, *turns, {"role": "user", "content": results}]
    body = {"model": "m", "max_tokens": 9, "messages": messages}
    return anthropic_request.chat_call(anthropic_request.read(anthropic_request.MessagesRequest, body)).messages


def as_ollama(answer: MessageBuilder, more: bool) -> list[ChatMessage]:
    calls = [
        ollama.WholeCall(
            id=call["id"],
            function=ollama.CallFunction(name=call["name"], arguments=arguments_object(call["arguments"]), index=index),
        )
        for index, call in enumerate(answer.calls)
    ]
    message = ollama.ReplyMessage(content=answer.content, thinking=answer.reasoning, tool_calls=calls)
    messages = [{"role": "user", "content": "ask"}, msgspec.to_builtins(message)]
    messages += [{"role": "tool", "tool_name": "weather", "content": "cold"} for _ in calls]
    messages += [{"role": "user", "content": "more"}] * (more or not calls)
    request = convert(ollama_request.ChatRequest, {"model": "m", "messages": messages})
    return ollama_request.messages_of(request.messages or [], Pictures())


def as_responses(answer: MessageBuilder, more: bool) -> list[ChatMessage]:
    items: list[OutputItem] = []
    if answer.reasoning:
        part = OutputText(type="reasoning_text", text=answer.reasoning)
        items.append(OutputItem(id="rs_1", type="reasoning", status="completed", summary=[], content=[part]))
    if answer.content:
        part = OutputText(type="output_text", text=answer.content)
        items.append(OutputItem(id="msg_1", type="message", status="completed", role="assistant", content=[part]))
    for call in answer.calls:
        fields = {"call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}
        items.append(OutputItem(id="fc_1", type="function_call", status="completed", **fields))
    entries: list[Any] = ["ask", *msgspec.to_builtins(items)]
    entries += [{"type": "function_call_output", "call_id": call["id"], "output": "cold"} for call in answer.calls]
    entries += ["more"] * (more or not answer.calls)
    body = {"model": "m", "input": entries}
    request, _ = responses_input.read(body)
    named = [responses_input.NamedItem("input", item) for item in responses_input.input_items(request, "0" * 32)]
    return responses_input.messages_of(None, responses_input.without_hosted(named, Warnings()), Warnings(), Pictures())


APIS: dict[str, Callable[[MessageBuilder, bool], list[ChatMessage]]] = {
    "openai": as_openai,
    "anthropic": as_anthropic,
    "ollama": as_ollama,
    "responses": as_responses,
}


@functools.cache
def replays() -> list[tuple[str, MessageBuilder, bool, list[ChatMessage]]]:
    """Every answer in every API: the API, the answer, whether the user says more, and the messages of the request."""
    cases = itertools.product(APIS, answers(), (False, True))
    return [(api, answer, more, APIS[api](answer, more)) for api, answer, more in cases if answer.calls or not more]


def check(sources: dict[str, str]) -> Counter[str]:
    """Render every answer in every API through templates. Raises AssertionError for one that is refused."""
    counts: Counter[str] = Counter()
    for name, source in sources.items():
        template = ChatTemplate({"default": source}, SPECIAL)
        for (api, answer, more, messages), tools in itertools.product(replays(), (TOOLS, None)):
            where = f"{name}, {api}: {vars(answer)}"
            try:
                rendering = template.rendering(messages, tools=tools)
            except templates.RequestError as error:
                raise AssertionError(f"{where}: {error}") from error
            assert "ask" in rendering.text or name == "mistral/v2.jinja", where
            assert "more" in rendering.text or (answer.calls and not more), where
            counts["changed" if rendering.changes else "as it is"] += 1
    return counts


@pytest.mark.sampled(5)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_answer_is_accepted_back(part: int, shared_data: Path) -> None:
    sources = dict(list(all_sources().items())[part::NUM_PARTS])
    counts = check(sources)
    print(f"{len(sources)} templates: {dict(counts)}")
    assert counts["as it is"] > 500
    assert counts["changed"] > 500


def test_control_a_template_that_refuses_an_answer_is_seen(monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> None:
    sources = {name: source for name, source in all_sources().items() if name == "mistral-large-instruct"}
    assert len(sources) == 1
    monkeypatch.setattr(templates, "changed", lambda conversation, names: (conversation, []))
    with pytest.raises(AssertionError, match="must alternate|IDs should be"):
        check(sources)


def test_an_answer_keeps_its_parts_through_every_api() -> None:
    answer = list(answers())[-3]
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("Hm.", "I look.", 2)
    for name, api in APIS.items():
        turn = next(message for message in api(answer, False) if message.role == "assistant")
        assert (turn.reasoning, turn.content) == ("Hm.", "I look."), name
        values = [call.form["function"]["arguments"] for call in turn.tool_calls]
        cities = [json.loads(value) if isinstance(value, str) else value for value in values]
        assert cities == [{"city": "Bern"}, {"city": "Rome"}], name
