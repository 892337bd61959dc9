"""Histories of every kind through every chat template: as transformers renders them, and never refused where vLLM's
way of preparing messages gives a prompt (nulls and lists replaced, arguments as objects)."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.histories import change_traits
from tests.text.test_chat_templates import SPECIAL, TOOL, is_whole, outcome, rendered, sources

from headrace.text.histories.changes import takes_late_system
from headrace.text.messages import read_messages
from headrace.text.templates import ChatTemplate
from headrace.text.traits import Traits

Message = dict[str, Any]
ARGUMENTS = {"city": "Zürich"}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def call(arguments: Any, call_id: str = "123456789") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def turn(**fields: Any) -> Message:
    return {"role": "assistant", **fields}


def parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


USER, AGAIN = {"role": "user", "content": "ask"}, {"role": "user", "content": "more"}
CALL, OTHER = call(ARGUMENTS), call({"city": "Bern"}, "987654321")
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "123456789", "content": "cold"}
HISTORIES: dict[str, tuple[list[Message], bool]] = {
    "null": ([USER, turn(content=None, tool_calls=[CALL]), RESULT], True),
    "missing": ([USER, turn(tool_calls=[CALL]), RESULT], True),
    "empty": ([USER, turn(content="", tool_calls=[CALL]), RESULT], True),
    "text and call": ([USER, turn(content="so", tool_calls=[CALL]), RESULT], True),
    "json arguments": ([USER, turn(content=None, tool_calls=[call(TEXT)]), RESULT], True),
    "two results": (
        [USER, turn(content=None, tool_calls=[CALL, OTHER]), RESULT, {**RESULT, "tool_call_id": "987654321"}],
        True,
    ),
    "later turn": ([USER, turn(content=None, tool_calls=[CALL]), RESULT, turn(content="cold"), AGAIN], True),
    "cut answer": ([USER, turn(content=None), AGAIN], False),
    "no content": ([USER, turn(), AGAIN], False),
    "no calls": ([USER, turn(content="so", tool_calls=[]), AGAIN], False),
    "parts": ([{"role": "user", "content": parts("ask", "well")}, turn(content=parts("so")), AGAIN], False),
    "result parts": ([USER, turn(content=None, tool_calls=[CALL]), {**RESULT, "content": parts("cold")}], True),
    "developer": ([{"role": "developer", "content": "brief"}, USER], False),
    "reasoning": ([USER, turn(content="so", reasoning_content="hm"), AGAIN], False),
    "reasoning and call": ([USER, turn(content=None, reasoning_content="hm", tool_calls=[CALL]), RESULT], True),
}


def with_objects(message: Message) -> Message:
    return _with_arguments(message, lambda value: json.loads(value) if isinstance(value, str) else value)


def with_texts(message: Message) -> Message:
    return _with_arguments(
        message, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if not message.get("tool_calls"):
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return message | {"tool_calls": [call(change(c["function"]["arguments"]), c["id"]) for c in message["tool_calls"]]}


def as_vllm(message: Message, listed: bool) -> Message:
    """The message as vLLM gives it to a template that takes lists, or texts."""
    text = joined(message)
    content = message.get("content") if isinstance(message.get("content"), list) else parts(text) if text else []
    return with_objects(message) | {"content": content if listed and message["role"] != "tool" else text}


def joined(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_system(message: Message) -> Message:
    return message | ({"role": "system"} if message["role"] == "developer" else {})


def reason(name: str, history: str, expected: str) -> str:
    """Why a prompt is not what transformers makes of the history as it stands."""
    if "None" in expected:
        return "writes None for a null"
    if history in ("parts", "result parts") and ("'text'" in expected or '"text"' in expected):
        return "writes a list as Python or JSON does"
    if (history == "parts" and "ask" not in expected) or (history == "result parts" and "cold" not in expected):
        return "leaves a list out"
    if history == "developer" and "brief" not in expected:
        return "leaves the developer's message out"
    if history == "json arguments" and '\\"city\\"' in expected:
        return "quotes JSON text once more"
    if history == "cut answer" and "deepseek" in name:
        return "takes a null for calls"
    raise AssertionError(f"{name}, {history}: no reason is known")


def compare(only: str = "") -> Counter[str]:
    """Count how prompts compare. Raises AssertionError for one that is refused or differs without a reason."""
    oracle = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    counts: Counter[str] = Counter()

    def render(source: str, messages: list[Message], tools: list[Message] | None) -> str | None:
        try:
            text: str = oracle([messages], tools=tools, chat_template=source, add_generation_prompt=True, **SPECIAL)[0][
                0
            ]
        except Exception:  # A template may raise whatever it likes.
            return None
        # Where a template says |safe, jinja2 escapes what is added to the text. Here it does not.
        return html.unescape(text)

    for name, source in sources().items():
        if only not in name:
            continue
        listed = ChatTemplate({"default": source}, SPECIAL).traits().content_form != "string"
        for history, (messages, with_tools) in HISTORIES.items():
            tools = [TOOL] if with_tools else None
            got = outcome(source, messages, tools=tools)
            expected = render(source, messages, tools)
            prepared = render(source, [as_vllm(message, listed) for message in messages], tools)
            where = f"{name}, {history}"
            assert got is not None, f"{where}: refused"
            if got == expected:
                counts["equal"] += 1
                continue
            if not any(text and is_whole(text, messages, tools) for text in (expected, prepared)):
                # Some take no text beside calls.
                needed = [message | {"content": ""} if message.get("tool_calls") else message for message in messages]
                assert is_whole(got, needed, tools), f"{where}: {got!r}"
                counts["transformers loses or refuses" if expected is not None else "transformers refuses"] += 1
                continue
            counts[reason(name, history, expected) if expected is not None else "transformers refuses"] += 1
            forms = [[as_system(message) for message in messages]]
            for empty in ("", None):
                filled = [as_vllm(m, False) | {"content": joined(m) or empty} for m in messages]
                forms += [[with_texts(message) for message in filled], [with_objects(message) for message in filled]]
            others = {render(source, form, tools) for form in forms} | {prepared}
            listed_source = source.replace("| tojson(indent=2)", "| list | tojson(indent=2)")
            others |= {render(listed_source, form, tools) for form in forms} if listed_source != source else set()
            assert got in others, f"{where}: {got!r} is not of {others!r}"
    return counts


def test_K1_every_history_through_every_template() -> None:
    counts = compare()
    assert sum(counts.values()) == len(sources()) * len(HISTORIES)
    assert counts["equal"] > 320
    assert counts["transformers refuses"] > 300
    assert counts["transformers loses or refuses"] < 120


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("DeepSeek-R1-Distill-Llama", lambda traits: msgspec.structs.replace(traits, takes_null=False, loses=())),
        ("qwen38", lambda traits: msgspec.structs.replace(traits, text_arguments=True)),
        ("DeepSeek-R1-Distill-Llama", lambda traits: msgspec.structs.replace(traits, content_form="parts")),
        ("DeepSeek-R1-Distill-Llama", lambda traits: msgspec.structs.replace(traits, loses=())),
    ],
)
def test_the_comparison_sees_other_traits(
    name: str, broken: Callable[[Traits], Traits], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name)
    change_traits(monkeypatch, broken)
    with pytest.raises(AssertionError):
        compare(name)


CONCATENATES = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"


def test_K1_a_template_that_concatenates_takes_histories_with_tools() -> None:
    """As ChatML's does, which knows no tools."""
    messages = HISTORIES["null"][0]
    for written in (messages, HISTORIES["missing"][0]):
        assert rendered(CONCATENATES, written) == (
            '<user>ask<assistant><tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
            "<user><tool_response>\ncold\n</tool_response>"
        )
    listed = [USER, {**RESULT, "content": parts("a", "b")}]
    assert rendered(CONCATENATES, listed) == "<user>ask<user><tool_response>\na\nb\n</tool_response>"
    assert rendered(CONCATENATES, [{"role": "user"}, {"role": "system", "content": None}]) == "<user><system>"


TAKES_TEXT = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ 'call ' + c.function.arguments }}{% endfor %}{% endfor %}"
)
TAKES_OBJECT = "{% for c in messages[-1].tool_calls %}call {{ c.function.arguments.items() | list }}{% endfor %}"


@pytest.mark.parametrize("arguments", ['{"a": "cut', "[1]", "7", '"x"', "[" * 99999, [1], 7])
def test_K6_what_a_model_wrote_is_taken_back(arguments: Any) -> None:
    messages = read_messages([turn(content=None, tool_calls=[call(arguments)])])
    taking_text, taking_object = (ChatTemplate({"default": source}, {}) for source in (TAKES_TEXT, TAKES_OBJECT))
    assert taking_object.render(messages) == "call []"
    assert taking_object.dropped_arguments(messages, False) == ["messages[0].tool_calls[0].function.arguments"]
    assert taking_text.render(messages) == "call " + (arguments if isinstance(arguments, str) else "{}")
    assert taking_text.dropped_arguments(messages, False) == []


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, "", " ", "null", None])
def test_arguments_that_are_an_object_or_nothing_are_no_fault(arguments: Any) -> None:
    messages = read_messages([turn(content=None, tool_calls=[call(arguments)])])
    template = ChatTemplate({"default": TAKES_OBJECT}, {})
    assert template.render(messages) == ("call [('a', 1)]" if "a" in (arguments or "") else "call []")
    assert template.dropped_arguments(messages, False) == []


def test_a_late_system_message_is_never_refused_where_a_first_one_is_taken(shared_data: Path) -> None:
    """Agents send instructions in the middle of a conversation. Templates that refuse them get them as the user's."""
    first, late, last = ({"role": "system", "content": text} for text in ("be brief", "be kind", "be quick"))
    moved = 0
    for name, source in sources().items():
        template = ChatTemplate({"default": source}, SPECIAL)
        for messages in ([first, USER, late, turn(content="so"), AGAIN, last], [first, late, USER, last]):
            got = outcome(source, messages)
            assert got is not None, name
            assert all(text in got for text in ("be brief", "be kind", "be quick", "ask")), name
            moved += not takes_late_system(template.traits(False))
    assert moved >= 4


def test_where_late_system_messages_go() -> None:
    refusing = ChatTemplate(
        {"default": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
                    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"}, {}
    )  # fmt: skip
    system = {"role": "system", "content": "B"}
    messages = [{"role": "system", "content": "A"}, system, USER, system, AGAIN, turn(content="so"), system]
    assert refusing.render(messages) == "[system]A\n\nB[user]ask\n\nB\n\nmore[assistant]so[user]B"
    # Control: a template that takes them gets them as they are.
    taking = ChatTemplate({"default": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"}, {})
    assert taking.render(messages).count("[system]B") == 3
    assert not taking.rendering(messages).changes
