"""Answers in the dialects of published chat templates: found, spoken, and read in whatever pieces they come."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.reading import Read, parts, read
from tests.support.speaking import Answer, says_first, speak

from headrace.protocol.errors import RequestError
from headrace.serve.call.dialect import FALLBACK, Dialect
from headrace.text.outputs import Content, MessageParser
from headrace.text.reasoning import NO_STYLE, STYLES
from headrace.text.templates import ChatTemplate
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.formats import FORMATS

SHARDS = 12
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"}},
            },
        },
    }
    for name in ("find_place", "look")
]
CALLS = (
    ("find_place", {"place": 'Ys "the" drowned, {x}: [y] & é\n(2)', "count": 7}),
    ("look", {"deep": True, "place": "10115"}),
)
ANSWER = Answer("I think.\nThen < I look.", "Let me see: 1 < 2.", CALLS)
SPECIAL = re.compile(r"<\||｜>|\[/?[A-Z_]+\]|\]<\]|<SPECIAL|<seed:")


def templates(data: Path) -> list[tuple[str, str]]:
    """The distinct templates of the data, by the name of the first model that has each."""
    families = json.loads((data / "templates" / "families.json").read_text(encoding="utf-8"))
    distinct: dict[str, str] = {}
    for name, each in families.items():
        distinct.setdefault(each["chat_template"], name)
    folder = data / "templates"
    for path in sorted([*folder.glob("llama.cpp/*.jinja"), *folder.glob("mistral/*"), *folder.glob("ollama/*jinja*")]):
        distinct.setdefault(path.read_text(encoding="utf-8"), f"{path.parent.name}/{path.name}")
    return [(name, source) for source, name in distinct.items()]


def cuts(text: str) -> Iterator[list[str]]:
    """The text letter by letter, in pieces of three letters, and in steps of several tokens of different lengths."""
    yield list(text)
    yield [text[at : at + 3] for at in range(0, len(text), 3)]
    tokens = re.findall(r"<\|[^|]*\|>|\s?\w+|\s+|.", text, re.DOTALL)
    for step in (2, 5):
        yield ["".join(tokens[at : at + step]) for at in range(0, len(tokens), step)]


def faults(make: Any, text: str, expected: Read | None) -> list[str]:
    """What differs between the readings of a text."""
    whole = read(make(), [text])
    wrong = [f"{whole} is not {expected}"] if expected is not None and whole != expected else []
    return wrong + [f"cut otherwise: {other}" for pieces in cuts(text) if (other := read(make(), pieces)) != whole]


def check(source: str, counts: Counter[str]) -> list[str]:
    """Speak in the dialect of a template, and say what is not read as it was meant."""
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    result = Dialect.of(template)
    tools, style = FORMATS[result.tools or FALLBACK], STYLES[result.reasoning] if result.reasoning else NO_STYLE
    marks = {*tools.special_texts(), *style.special_texts()}
    dialect = result._replace(token_ids={mark: 7 for mark in marks if SPECIAL.search(mark)})
    use = ToolUse.of(TOOLS, "auto", True)
    try:
        prompt = template.render([{"role": "user", "content": "Where?"}], tools=TOOLS)
    except RequestError:
        counts["no prompt for a first question"] += 1
        return []
    counts["with calls" if result.tools else "base, in the fallback's format"] += 1
    counts["with reasoning"] += result.reasoning is not None
    is_closed = bool(style.closings) and prompt.rstrip().endswith(style.closings)
    wrong = []
    for number, content in itertools.product((0, 1, 2), ("", ANSWER.content)):
        if number and content and says_first(tools):
            continue
        answer = ANSWER._replace(content=content, calls=CALLS[:number])
        if not style.openings or is_closed:
            answer = answer._replace(reasoning="")
        if not content and not number:
            continue
        text = speak(answer, tools, style, prompt, source)
        calls = [(name, json.dumps(values, ensure_ascii=False)) for name, values in answer.calls]
        make = dialect.parsers(use, prompt, False)
        wrong += [f"{result[:2]} {text!r}: {fault}" for fault in faults(make, text, (content, answer.reasoning, calls))]
        counts["answers"] += 1
        counts["readings"] += 5
    return wrong


@pytest.mark.sampled(SHARDS)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_an_answer_in_the_dialect_of_a_template(shard: int, shared_data: Path) -> None:
    counts: Counter[str] = Counter()
    wrong = [
        f"{name}: {fault}" for name, source in templates(shared_data)[shard::SHARDS] for fault in check(source, counts)
    ]
    print(dict(counts))
    assert not wrong, "\n".join(wrong)
    assert counts["answers"]


def test_control_a_parser_that_looks_at_the_pieces_is_noticed() -> None:
    class Hasty:
        ended = False

        def feed(self, text: str, final: bool, cut: bool = False) -> list[Any]:
            return [Content(text.strip())]

    hasty: MessageParser = Hasty()
    assert parts(hasty, ["a"])
    assert faults(Hasty, "a b c", None)
    assert faults(Hasty, "abc", ("b", "", []))
    assert not faults(Hasty, "abc", ("abc", "", []))


def own_words(name: str, source: str, counts: Counter[str]) -> list[str]:
    """Have a template write a turn with calls, and say what its dialect does not read of it."""
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    dialect = Dialect.of(template)
    if dialect.tools is None or not template.traits().call:
        counts["templates that write no calls"] += 1
        return []
    wrong = []
    traits = template.traits()
    # Such a template's second call is a turn of its own.
    for number in (1,) if "one call a turn" in traits.loses + traits.refuses else (1, 2):
        calls = [
            {"id": call_id, "type": "function", "function": {"name": tool, "arguments": values}}
            for call_id, (tool, values) in zip(IDS.get(dialect.tools, ("abcdefgh0", "abcdefgh1")), CALLS, strict=True)
        ][:number]
        user = {"role": "user", "content": "Where?"}
        turn = {"role": "assistant", "content": None, "reasoning_content": ANSWER.reasoning, "tool_calls": calls}
        try:
            prompt = template.render([user], tools=TOOLS)
            whole = template.render([user, turn], tools=TOOLS, add_generation_prompt=False)
        except RequestError:
            counts["turns that a template refuses"] += 1
            continue
        if not whole.startswith(prompt):
            counts["turns that do not go on after the prompt"] += 1
            continue
        make = dialect.parsers(ToolUse.of(TOOLS, "auto", True), prompt, False)
        content = read(make(), [whole.removeprefix(prompt)])
        counts["turns read"] += 1
        if [(tool, json.loads(arguments)) for tool, arguments in content[2]] != list(CALLS[:number]):
            wrong.append(f"{name}: {whole.removeprefix(prompt)!r} is read as {content}")
        wrong += [f"{name}: {fault}" for fault in faults(make, whole.removeprefix(prompt), None)]
    return wrong


IDS = {"kimi_k2": ("functions.find_place:0", "functions.look:1")}


@pytest.mark.sampled(SHARDS)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_what_a_template_writes_for_calls_is_read(shard: int, shared_data: Path) -> None:
    counts: Counter[str] = Counter()
    chosen = templates(shared_data)[shard::SHARDS]
    wrong = [fault for name, source in chosen for fault in own_words(name, source, counts)]
    print(dict(counts))
    assert not wrong, "\n".join(wrong)
    assert sum(counts.values()) >= len(chosen)
