"""Parts that the models here can not read: in what the user has just said they are refused, in what came before short
texts stand in their places, and each has a warning. So no session ends for ever. And what of Anthropic's API is not for
the model: hosted tools, the line for billing, marks for a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.protocol.errors import RequestError, UnsupportedError
from headrace.serve.apis.anthropic import request as anthropic_request
from headrace.serve.apis.ollama import request as ollama_request
from headrace.serve.apis.openai import responses_input
from headrace.serve.call.call import ChatCall, prompt_call
from headrace.serve.call.parsing import Warnings, convert
from headrace.serve.call.schema import ChatCompletionRequest, parse
from headrace.text.messages import ChatMessage, plain, read_messages, without_pictures
from headrace.text.pictures.marks import Pictures

Message = dict[str, Any]
Read = tuple[list[ChatMessage], list[str]]
SO: Message = {"role": "assistant", "content": "so"}
MORE: Message = {"role": "user", "content": "more"}


def unread(messages: list[ChatMessage], pictures: Pictures, warnings: Warnings) -> Read:
    """What a model without a tower gets."""
    return without_pictures(messages, pictures, warnings.add), warnings


def openai(messages: list[Message]) -> Read:
    warnings, pictures = Warnings(), Pictures()
    return unread(read_messages(messages, warnings.add, pictures), pictures, warnings)


def anthropic_call(messages: list[Message], **more: Any) -> ChatCall:
    body = {"model": "m", "max_tokens": 9, "messages": messages, **more}
    return anthropic_request.chat_call(anthropic_request.read(anthropic_request.MessagesRequest, body))


def anthropic(messages: list[Message], **more: Any) -> Read:
    call = anthropic_call(messages, **more)
    return unread(call.messages, call.pictures, call.warnings)


def ollama(messages: list[Message]) -> Read:
    pictures = Pictures()
    request = convert(ollama_request.ChatRequest, {"model": "m", "messages": messages})
    return unread(ollama_request.messages_of(request.messages or [], pictures), pictures, Warnings())


def responses(items: list[Message]) -> Read:
    warnings, pictures = Warnings(), Pictures()
    request, _ = responses_input.read({"model": "m", "input": items})
    named = [responses_input.NamedItem("input", item) for item in responses_input.input_items(request, "0" * 32)]
    rest = responses_input.without_hosted(named, warnings)
    return unread(responses_input.messages_of(None, rest, warnings, pictures), pictures, warnings)


def parts(*kinds: str) -> list[Message]:
    return [{"type": kind, kind: {"url": "data:,"}, "image_url": {"url": "data:,"}} for kind in kinds]


IMAGE: Message = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF: Message = {
    "type": "document",
    "title": "T",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
}
SAID: dict[str, tuple[Callable[[list[Message]], Read], Message, str]] = {
    "openai image": (openai, {"role": "user", "content": parts("image_url")}, "[image url: left out"),
    "openai audio": (openai, {"role": "user", "content": parts("input_audio")}, "[input audio: left out"),
    "openai file": (openai, {"role": "user", "content": parts("file")}, "[file: left out"),
    "anthropic image": (anthropic, {"role": "user", "content": [IMAGE]}, "[image: left out"),
    "anthropic PDF": (anthropic, {"role": "user", "content": [PDF]}, "[document T: left out"),
    "ollama": (ollama, {"role": "user", "content": "see", "images": ["aGk="]}, "[image: left out"),
    "responses image": (responses, {"role": "user", "content": parts("input_image")}, "[input image: left out"),
    "responses file": (responses, {"role": "user", "content": parts("input_file")}, "[input file: left out"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_the_user_has_just_said_must_be_read_and_what_came_before_need_not(name: str) -> None:
    read, reply, text = SAID[name]
    for new in ([reply], [MORE, SO, reply], [MORE, SO, reply, MORE]):
        with pytest.raises((RequestError, UnsupportedError), match="text"):
            read(copy.deepcopy(new))
    messages, warnings = read([reply, SO, MORE])
    assert plain(messages[0]).startswith(text)
    assert len(warnings) == 1
    assert "text" in warnings[0]
    # Control: without such a part there is no warning.
    assert read([MORE, SO, MORE])[1] == []


def test_an_answer_that_is_to_be_gone_on_with_ends_no_turn() -> None:
    with pytest.raises(RequestError):
        anthropic([{"role": "user", "content": [IMAGE]}, SO])


def test_what_a_tool_gives_is_never_refused() -> None:
    use = {"type": "tool_use", "id": "t", "name": "get", "input": {}}
    turns = [MORE, {"role": "assistant", "content": [use]}]
    blocks = [{"type": "text", "text": "a"}, IMAGE, {"type": "tool_reference", "tool_name": "get"}, {"type": "odd"}]
    messages, warnings = anthropic(
        [*turns, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]}]
    )
    texts = plain(messages[-1]).split("\n")
    assert texts[0] == "a"
    assert [text.partition(":")[0] for text in texts[1:]] == ["[image", "[tool reference get", "[odd"]
    assert len(warnings) == 3
    call = {"id": "t", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "t", "content": parts("image_url")}
    messages, warnings = openai([MORE, {"role": "assistant", "tool_calls": [call]}, result])
    assert plain(messages[-1]).startswith("[image url")
    assert len(warnings) == 1
    output = {"type": "function_call_output", "call_id": "t", "output": parts("input_image")}
    items = [MORE, {"type": "function_call", "call_id": "t", "name": "get", "arguments": "{}"}, output]
    messages, warnings = responses(items)
    assert plain(messages[-1]).startswith("[input image")
    assert len(warnings) == 1


def test_texts_in_documents_and_search_results_are_read() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}}
    result = {"type": "search_result", "title": "S", "source": "u", "content": [{"type": "text", "text": "def"}]}
    nested = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "ghi"}]}}
    messages, warnings = anthropic([{"role": "user", "content": [document, result, nested]}])
    assert messages[0].content == ["T\nabc", "S\nu\ndef", "ghi"]
    assert warnings == []


def test_what_a_provider_s_own_tools_leave_in_a_conversation() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "x"},
    ]
    messages, warnings = anthropic([MORE, {"role": "assistant", "content": blocks}, MORE])
    assert [text.partition(":")[0] for text in messages[1].content or ""] == [
        "[server tool use web_search",
        "[web search tool result",
        "x",
    ]
    assert len(warnings) == 2


def test_hosted_tools_are_left_out() -> None:
    client_tool = {"name": "get", "input_schema": {"type": "object"}}
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
    ]
    call = anthropic_call([MORE], tools=[*hosted, client_tool])
    assert [tool["function"]["name"] for tool in call.tools.tools] == ["get"]
    assert [warning.partition(":")[0] for warning in call.warnings] == ["tools[0]", "tools[1]"]
    assert anthropic_call([MORE], tools=hosted, tool_choice={"type": "auto"}).tools.tools == []
    with pytest.raises(RequestError, match="tools"):
        anthropic_call([MORE], tools=hosted, tool_choice={"type": "any"})
    with pytest.raises(RequestError, match=r"tools\[0\].type: 'function'"):
        anthropic_call([MORE], tools=[client_tool | {"type": "function"}])


HEADER = "x-anthropic-billing-header: cc_version=2.1.197.7b4; cc_entrypoint=cli; cch={};"


def system_of(system: Any) -> str:
    call = anthropic_call([MORE], system=system)
    return plain(call.messages[0]) if call.messages[0].role == "system" else ""


def test_the_line_for_billing_is_not_for_the_model() -> None:
    rules = {"type": "text", "text": "Be brief."}
    for number in ("eb6c6", "36ee5"):
        line = HEADER.format(number)
        assert system_of([{"type": "text", "text": line}, rules]) == "Be brief."
        assert system_of([{"type": "text", "text": f"{line}\n\nBe brief."}]) == "Be brief."
        assert system_of(f"{line}\nBe brief.") == "Be brief."
        assert system_of(line) == ""
    assert any("billing" in warning for warning in anthropic_call([MORE], system=line).warnings)
    # Control: the same words elsewhere are the client's.
    assert system_of([rules, {"type": "text", "text": line}]) == f"Be brief.\n{line}"
    assert system_of(f"Say {line}") == f"Say {line}"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_line_for_billing_is_for_no_model_of_the_other_apis(role: str) -> None:
    line = HEADER.format("eb6c6")
    for content in (f"{line}\nBe brief.", [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]):
        messages = [{"role": role, "content": content}, MORE]
        call = prompt_call(parse(ChatCompletionRequest, {"messages": messages}))
        assert [plain(message) for message in call.messages] == ["Be brief.", "more"]
        assert any("billing" in warning for warning in call.warnings)
    assert [message.role for message in ChatCall(messages=[ChatMessage(role=role, content=line)]).messages] == []
    # As /v1/responses builds its calls.
    replaced = replace(ChatCall(messages=[]), messages=[ChatMessage(role=role, content=f"{line}\nBe brief.")])
    assert [plain(message) for message in replaced.messages] == ["Be brief."]
    # Control: a user's words stay.
    text = [ChatMessage(role="user", content=line)]
    assert ChatCall(messages=text).messages == text


def test_a_system_text_is_the_same_as_blocks() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    texts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    marked = [texts[0] | mark, texts[1]]
    assert system_of("Be brief.\nBe kind.") == system_of(texts) == system_of(marked) == "Be brief.\nBe kind."


def test_marks_for_a_cache_change_nothing() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "get", "description": "d", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "t", "name": "get", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "1"}
    text = {"type": "text", "text": "ask"}

    def call(first: Any, last: Message, tools: Message) -> tuple[Any, ...]:
        turns = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [last]},
        ]
        outcome = anthropic_call(turns, tools=[tools])
        return outcome.messages, outcome.tools.tools, list(outcome.warnings)

    # Clients move the mark from turn to turn, and make blocks of a text that gets one.
    assert call([text | mark], result, tool | mark) == call("ask", result | mark, tool) == call([text], result, tool)
