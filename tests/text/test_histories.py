"""Laws of conversations: every template takes every history that the APIs allow, with all that is in it; a history that
it takes as it is, is not changed; and every change is reported.

`tests.support.histories` makes the histories, and the shared data has the templates (136 that differ).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import histories
from tests.support.histories import History
from tests.support.tokenizers import data
from tests.text.test_chat_templates import SPECIAL
from tests.text.test_chat_templates import sources as other_sources

from headrace.protocol.errors import RequestError
from headrace.text import sandbox, templates
from headrace.text.histories.calls import short_id
from headrace.text.histories.changes import CHANGES, PLAIN, SMALL, changed
from headrace.text.histories.conversation import Conversation
from headrace.text.messages import ChatMessage, read_messages
from headrace.text.templates import ChatTemplate
from headrace.text.tools.choice import ToolUse
from headrace.text.traits import TOOL, Traits

Message = dict[str, Any]
NUM_PARTS = 10
NUM_HISTORIES = 100
PARTS = {"system", "user", "answer", "argument", "result", "tools"}
"""What no prompt may lack. Text beside calls and reasoning are left out by many templates, as their makers want it."""
LOST: dict[str, tuple[set[str], str]] = {
    "mistral-instruct-v0.3": ({"system"}, "it writes the system message only where the last message is the user's"),
    "mistral-large-instruct": ({"system"}, "the same"),
    "mixtral-8x22B-instruct-v0.1": ({"system"}, "the same"),
    "deepseek-v3": ({"tools"}, "it writes tools only before the user's last message"),
    "mistral/v2.jinja": ({"argument", "result"}, "it writes the last calls only, as the model was trained"),
}
"""By template, what it leaves out by its own design, and how."""


def all_sources() -> dict[str, str]:
    """Every template of the shared data that no other is equal to, by name."""
    families = json.loads(data("templates/families.json").read_text())
    named = {name: family["chat_template"] for name, family in families.items()} | other_sources()
    return {name: source for source, name in {source: name for name, source in reversed(named.items())}.items()}


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL)


def tools_of(history: History) -> list[Message] | None:
    return ToolUse.of(history.tools, None, True).tools if history.tools else None


def missing(history: History, text: str) -> set[str]:
    """The kinds of texts of a history that a prompt lacks."""
    kinds = {kind for kind, word in history.words if word not in text}
    num_calls = sum(len(message.get("tool_calls", [])) for message in history.messages)
    if text.count("weather") < num_calls + bool(history.tools and "clock" in text):
        kinds.add("argument")
    return kinds | ({"tools"} if history.tools and "clock" not in text else set())


def as_it_is(source: str, traits: Traits, history: History) -> str | None:
    """What a template writes for a history in which nothing is changed; None if it refuses it, or if it must be
    changed: it writes ids in place of names."""
    named = [call for message in history.messages for call in message.get("tool_calls", [])]
    if "ids with names" in traits.loses and any("weather" not in call["id"] for call in named):
        return None
    chat = [message.template_form(traits) for message in read_messages(history.messages)]
    variables = {"messages": chat, "tools": tools_of(history), "add_generation_prompt": True, "documents": None}
    result = sandbox.render(sandbox.RenderJob(source, variables | SPECIAL))
    return result.text if result.error is None else None


def check(named: Sequence[tuple[str, str]], count: int) -> Counter[str]:
    """Render histories through templates. Raises AssertionError for one that is refused, that lacks something, that is
    changed without need, or without a word."""
    counts: Counter[str] = Counter()
    for name, source in named:
        template = template_of(source)
        for seed, history in enumerate(histories.histories(count)):
            where = f"{name}, history {seed}"
            try:
                got = template.rendering(history.messages, tools=tools_of(history))
            except RequestError as error:
                raise AssertionError(f"{where}: {error}") from error
            lost = missing(history, got.text) & PARTS
            assert lost <= LOST.get(name, (set(), ""))[0], f"{where}: {lost} is missing in {got.text!r}"
            plain = as_it_is(source, template.traits(bool(history.tools)), history)
            if plain is not None and not missing(history, plain) & PARTS:
                assert got.text == plain, f"{where} is taken as it is, and was changed: {got.changes}"
                counts["as it is"] += 1
            elif plain is not None and got.text == plain:
                counts["left out by design"] += 1
            else:
                counts["refused as it is" if plain is None else "incomplete as it is"] += 1
                silent = {name for name, (_, field, _) in CHANGES.items() if not field}
                traits = template.traits(bool(history.tools))
                says_so = bool(got.changes) or bool(silent.intersection(traits.loses + traits.refuses))
                assert says_so, f"{where}: nothing is told of a change"
    return counts


@pytest.mark.sampled(5)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_template_takes_every_legal_history(part: int, shared_data: Path) -> None:
    named = list(all_sources().items())[part::NUM_PARTS]
    counts = check(named, NUM_HISTORIES)
    print(f"{len(named)} templates, {NUM_HISTORIES} histories each: {dict(counts)}")
    assert sum(counts.values()) == len(named) * NUM_HISTORIES
    assert counts["as it is"] > counts.total() // 5
    assert counts["refused as it is"] > 50
    assert counts["left out by design"] < 200


LLAMA = "llama-3.1-instruct"


def source_of(name: str) -> str:
    source: str = json.loads(data("templates/families.json").read_text())[name]["chat_template"]
    return source


def test_control_a_template_whose_needs_are_not_known_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    check([(LLAMA, source_of(LLAMA))], 30)
    monkeypatch.setattr(templates, "changed", lambda inputs, names: (inputs, []))
    with pytest.raises(AssertionError, match="single tool-calls"):
        check([(LLAMA, source_of(LLAMA))], 30)


def test_control_a_change_without_need_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "changed", lambda inputs, names: changed(inputs, [*names, "joined turns"]))
    with pytest.raises(AssertionError, match="taken as it is, and was changed"):
        check([(LLAMA, source_of(LLAMA))], 30)


def test_control_a_change_that_is_not_told_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "changed", lambda inputs, names: (changed(inputs, names)[0], []))
    with pytest.raises(AssertionError, match="nothing is told"):
        check([(LLAMA, source_of(LLAMA))], 30)


def test_control_a_loss_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gpt-oss"
    histories.change_traits(monkeypatch, lambda traits: msgspec.structs.replace(traits, loses=()))
    with pytest.raises(AssertionError, match="is missing in"):
        check([(name, source_of(name))], 60)


TABLE: tuple[set[str], ...] = (
    {"plain tools"},
    {"plain calls"},
    {"one system", "one system of several"},
    {"no system", "no first system"},
    {"one system text"},
    {"user first", "user before calls"},
    {"joined turns"},
    {"answered results"},
    {"no empty answers"},
    {"plain results without calls"},
    {"one call a turn"},
    {"text before calls"},
    {"no text beside calls"},
    {"text in the reasoning"},
    {"short ids"},
    {"ids with names"},
    {"named results"},
    {"whole tools", "described parameters"},
    {"plain schemas"},
)
"""The rows of the table of docs/howto-tools.md."""


def documented(page: str) -> tuple[int, list[int]]:
    """The counts in the table: of templates, and of those that each row concerns."""
    head = re.search(r"\| of (\d+) templates \|\n\|[-|]+\n((?:\|.*\n)+)", page)
    assert head is not None
    return int(head[1]), [int(row.split("|")[3]) for row in head[2].splitlines()]


def test_every_need_has_a_change_and_the_table_counts_them(shared_data: Path) -> None:
    needs = []
    for source in all_sources().values():
        traits = template_of(source).traits()
        needs.append({*traits.loses, *traits.refuses})
    known = set().union(*needs)
    assert known <= CHANGES.keys()
    # The others are tried where a template refuses all the same.
    assert CHANGES.keys() - known <= {"one text", "plain results"}
    assert {*SMALL, *PLAIN} <= CHANGES.keys()
    names = {name for name in known if CHANGES[name][1]} | {"one system text"}
    assert set().union(*TABLE) == names
    page = (Path(__file__).parents[2] / "docs" / "howto-tools.md").read_text()
    counts = [sum(bool(row & each) for each in needs) for row in TABLE]
    assert documented(page) == (len(needs), counts)
    with pytest.raises(AssertionError):
        assert documented(page.replace("| 85 |", "| 84 |")) == (len(needs), counts)


def test_the_needs_of_known_templates() -> None:
    llama, oss = (template_of(source_of(name)).traits() for name in (LLAMA, "gpt-oss"))
    assert "one call a turn" in llama.refuses
    assert "one call a turn" in oss.loses
    assert {"text in the reasoning", "whole tools"} <= {*oss.refuses}
    mistral = template_of(source_of("mistral-large-instruct")).traits()
    assert {"short ids", "joined turns", "answered results", "user first"} <= {*mistral.refuses}
    gemma = template_of(source_of("gemma-3-it")).traits()
    assert {"plain tools", "plain calls", "one system text"} <= {*gemma.loses}
    # The one template writes the id in place of the name, the other takes no such id.
    kimi = template_of(source_of("Kimi-K2.5")).traits()
    assert "functions.find_place:0" in kimi.call
    assert "ids with names" in kimi.loses
    assert '"id": "123456789"' in mistral.call
    assert "ids with names" not in mistral.loses
    qwen = template_of(source_of("qwen3")).traits()
    assert (qwen.loses, qwen.refuses) == ((), ())


# Each change by itself.


def conversation(messages: list[Message], tools: list[Message] | None = None, **traits: Any) -> Conversation:
    return Conversation(read_messages(messages), tools, Traits(**traits))


def dumped(inputs: Conversation) -> list[Message]:
    traits = msgspec.structs.replace(inputs.traits, takes_null=True)
    return [message.template_form(traits) for message in inputs.messages]


def call(call_id: str, city: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def result(call_id: str, text: str, **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text, **more}


USER, MORE = {"role": "user", "content": "ask"}, {"role": "user", "content": "more"}
TWO = {"role": "assistant", "content": "I look.", "tool_calls": [call("a", "Bern"), call("b", "Rome")]}


def apply(name: str, messages: list[Message], tools: list[Message] | None = None) -> Any:
    after, output = changed(conversation(messages, tools), [name])
    assert bool(output) == bool(CHANGES[name][1])
    again, none = changed(after, [name])
    assert (again, none) == (after, []), "what is changed needs no change"
    return dumped(after) if tools is None else after


def test_one_call_a_turn_keeps_each_call_with_its_result() -> None:
    got = apply("one call a turn", [USER, TWO, result("b", "warm"), result("a", "cold"), MORE])
    calls = [[c["id"] for c in message.get("tool_calls", [])] or message["content"] for message in got]
    assert calls == ["ask", ["a"], "cold", ["b"], "warm", "more"]
    assert [message["content"] for message in got if "tool_calls" in message] == ["I look.", None]


def test_ids_are_mapped_stably_and_results_with_them() -> None:
    turns = [{"role": "assistant", "tool_calls": [call("call_1", "Bern"), call("abcdef123", "Rome")]}]
    turns += [result("call_1", "cold"), result("abcdef123", "warm")]
    first = apply("short ids", [USER, *turns])
    again = apply("short ids", [MORE, USER, *turns])
    ids = [each["id"] for each in first[1]["tool_calls"]]
    assert ids == [each["id"] for each in again[2]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in first[2:]]
    assert ids[1] == "abcdef123"
    assert len({short_id(f"call_{number}") for number in range(1000)}) == 1000
    assert all(short_id(text).isalnum() and len(short_id(text)) == 9 for text in ("", "x", "functions.f:0", "é" * 9))


def test_a_call_without_an_id_and_its_result_get_the_same_one() -> None:
    calls = [{"function": {"name": "weather", "arguments": {}}}] * 2
    messages = [USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "cold"}]
    got = apply("short ids", [*messages, {"role": "tool", "content": "warm"}])
    ids = [each["id"] for each in got[1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in got[2:]]
    assert len({*ids}) == 2


def test_a_result_gets_the_name_of_its_call() -> None:
    other = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": {}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call("a", "Bern")]}, result("a", "cold"), MORE]
    # Ollama's clients count from 0 in each turn.
    got = apply("named results", [*messages, {"role": "assistant", "tool_calls": [other]}, result("a", "noon")])
    assert [message["name"] for message in got if message["role"] == "tool"] == ["weather", "clock"]
    assert apply("named results", [result("z", "cold")])[0]["name"] == "unknown"


def test_turns_of_one_role_are_joined_and_calls_are_not() -> None:
    answer = {"role": "assistant", "content": "so"}
    got = apply("joined turns", [USER, MORE, answer, {**answer, "content": [{"type": "text", "text": "then"}]}, USER])
    assert [message["content"] for message in got] == ["ask\n\nmore", "so\n\nthen", "ask"]
    assert changed(conversation([USER, answer, TWO]), ["joined turns"])[1] == []


def test_text_beside_reasoning_and_calls() -> None:
    messages = [USER, {**TWO, "reasoning_content": "Hm."}]
    got = apply("text in the reasoning", messages)
    assert (got[1]["content"], got[1]["reasoning_content"], got[1]["thinking"]) == (
        None,
        "Hm.\n\nI look.",
        "Hm.\n\nI look.",
    )
    got = apply("text before calls", messages)
    assert [message["content"] for message in got] == ["ask", "I look.", None]
    assert apply("no text beside calls", messages)[1]["content"] is None


def test_tools_and_calls_as_plain_text() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    after = apply("plain tools", [USER], [tool])
    assert after.tools is None
    assert [message.role for message in after.messages] == ["system", "user"]
    assert '{"name": "weather", "parameters": {"type": "object"}}' in str(after.messages[0].content)
    again = changed(
        conversation([{"role": "developer", "content": "Be brief."}, USER], [tool], shows_developer=False),
        ["plain tools"],
    )[0]
    assert [message.role for message in again.messages] == ["developer", "user"]
    got = apply("plain calls", [USER, TWO, result("a", "cold"), result("b", "warm"), MORE])
    assert [message["role"] for message in got] == ["user", "assistant", "user", "user"]
    assert got[1]["content"] == (
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    assert got[2]["content"] == "<tool_response>\ncold\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"


def test_schemas_become_simple() -> None:
    place = {"type": "object", "properties": {"x": {"type": ["null", "number"]}}}
    properties = {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Place"}]},
        "c": {"enum": [1, 2]},
        "d": {},
        "e": {"type": "array"},
        "f": {"$ref": "#/$defs/Loop"},
    }
    definitions = {"Place": place, "Loop": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Loop"}}}}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    after = apply("plain schemas", [USER], [{"type": "function", "function": {"name": "f", "parameters": schema}}])
    parameters = after.tools[0]["function"]["parameters"]
    kinds = {name: inner["type"] for name, inner in parameters["properties"].items()}
    assert kinds == {"a": "string", "b": "object", "c": "integer", "d": "string", "e": "array", "f": "object"}
    assert parameters["properties"]["b"]["properties"] == {"x": {"type": "number"}}
    assert "$" not in json.dumps(parameters)


def test_the_other_changes() -> None:
    system, empty = {"role": "system", "content": "brief"}, {"role": "assistant", "content": ""}
    assert [message["content"] for message in apply("no system", [system, USER, {**system, "content": "kind"}])] == [
        "brief\n\nask",
        "kind",
    ]
    assert [message["role"] for message in apply("user first", [system, TWO])] == ["system", "user", "assistant"]
    assert [message["role"] for message in apply("user first", [system])] == ["system", "user"]
    assert [message["role"] for message in apply("no empty answers", [USER, empty, MORE])] == ["user", "user"]
    assert [message["role"] for message in apply("answered results", [USER, TWO, result("a", "cold"), MORE])] == [
        "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    got = apply("plain results without calls", [result("z", "cold"), USER, TWO, result("a", "warm")])
    assert [message["role"] for message in got] == ["user", "user", "assistant", "tool"]
    continued = Conversation([ChatMessage(role="assistant", content="")], None, Traits(), continues=True)
    assert changed(continued, ["no empty answers"])[0] == continued


def test_what_a_template_writes_for_a_call_is_the_example_of_one(shared_data: Path) -> None:
    """Those that write calls and have no place for tools show the model their own form of a call."""
    with_example = 0
    for name, source in all_sources().items():
        traits = template_of(source).traits()
        if traits.shows_tools or not traits.call:
            continue
        text = template_of(source).render([{"role": "user", "content": "ask"}], tools=[TOOL])
        assert "find_place<｜tool▁sep｜>" in text or "find_place\n```json" in text, name
        assert "<｜Assistant｜><｜tool" not in text, name
        with_example += 1
    assert with_example >= 5


def test_a_template_that_takes_nothing_says_why() -> None:
    with pytest.raises(RequestError, match="it says: never"):
        template_of("{{ raise_exception('never') }}").render([USER])
