"""Makes histories that the chat APIs allow, of every shape that a client can send. Each text in them is a word of its
own, so that a rendered prompt shows which of them the template wrote, and in which order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from headrace.text.bounded import BoundedProcess
from headrace.text.traits import Traits

Message = dict[str, Any]

SCHEMA: Message = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: list[Message] = [
    {"name": "weather", "description": "Tells of a place", "parameters": SCHEMA},
    {"name": "weather", "parameters": SCHEMA},
    {"name": "weather", "description": "Tells of a place"},
    {"name": "weather", "description": "Tells of a place", "parameters": {}},
    {"name": "weather", "description": "Tells of a place", "parameters": {"type": "object"}},
    {"name": "weather", "description": "Tells of a place", "parameters": {"type": "object", "properties": {}}},
    {"name": "weather", "description": None, "parameters": None, "strict": True},
    {"name": "weather"},
    {"name": "weather", "description": "", "parameters": SCHEMA | {"additionalProperties": False}},
]
PROPERTIES: list[Message] = [
    {"city": {}},
    {"city": {"description": "Its name"}},
    {"city": {"type": ["string", "null"]}},
    {"city": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}},
    {"city": {"type": "array"}},
    {"city": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}}}}},
    {"city": {"type": "object", "additionalProperties": {"type": "string"}}},
    {"city": {"enum": ["a", 1, None]}},
    {"city": {"const": 3}},
    {"city": {"$ref": "#/$defs/City"}},
    {"city": {"type": "string", "enum": ["a", "b"], "default": "a"}},
    {"city": {"type": "number", "minimum": 0.5}},
    {"city": {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"x": {"type": "string"}}}]}},
]
FUNCTIONS += [
    {"name": "weather", "description": "Tells of a place", "parameters": {"type": "object", "properties": properties}
     | ({"$defs": {"City": {"type": "string"}}} if "$ref" in properties["city"] else {})}
    for properties in PROPERTIES
]  # fmt: skip
IDS = ("call_{n:024x}", "abcdef{n:03d}", "toolu_01{n:022d}", "functions.weather:{n}", "{n}", "fc-{n}")


class History(NamedTuple):
    """A legal history. `words`: the texts that a template should write, in their order, by kind."""

    messages: list[Message]
    tools: list[Message] | None
    words: list[tuple[str, str]]


class _Writer:
    """Draws one history. `shape` draws the shape of it, as random numbers do."""

    def __init__(self, shape: random.Random) -> None:
        self.shape = shape
        self.words: list[tuple[str, str]] = []
        self.messages: list[Message] = []
        self.ids = shape.choice(IDS)
        self.names = shape.random() < 0.4
        self.num = 0

    def word(self, kind: str) -> str:
        word = f"{kind}{len(self.words)}q"
        self.words.append((kind, word))
        return word

    def text(self, kind: str) -> Any:
        draw = self.shape.random()
        if draw < 0.7:
            return self.word(kind)
        return [{"type": "text", "text": self.word(kind)} for _ in range(1 if draw < 0.85 else 2)]

    def say(self, role: str, **fields: Any) -> None:
        self.messages.append({"role": role, **fields})

    def answer(self) -> None:
        """Add a turn of the model's without calls."""
        fields: Message = {}
        draw = self.shape.random()
        if self.shape.random() < 0.3:
            fields["reasoning_content"] = self.word("thought")
        if draw < 0.75:
            fields["content"] = self.text("answer")
        elif draw < 0.9:
            fields["content"] = ""
        elif draw < 0.95:
            fields["content"] = None
        self.say("assistant", **fields)

    def calls(self) -> None:
        """Add a turn of the model's with calls, and their results."""
        fields: Message = {}
        if self.shape.random() < 0.3:
            fields["reasoning_content"] = self.word("thought")
        draw = self.shape.random()
        if draw < 0.35:
            fields["content"] = self.text("preamble")
        elif draw < 0.9:
            fields["content"] = self.shape.choice([None, ""])
        calls = [self._call() for _ in range(self.shape.choice([1, 1, 1, 2, 2, 3]))]
        self.say("assistant", **fields, tool_calls=calls)
        order = list(calls)
        if self.shape.random() < 0.15:
            order.reverse()
        for call in order:
            name = {"name": "weather"} if self.names else {}
            draw = self.shape.random()
            content = "" if draw < 0.05 else self.text("result")
            self.say("tool", tool_call_id=call["id"], **name, content=content)

    def _call(self) -> Message:
        self.num += 1
        draw = self.shape.random()
        arguments: Any = {"city": self.word("argument")} if draw < 0.9 else {}
        if draw < 0.95:
            arguments = json.dumps(arguments)
        elif draw < 0.98:
            arguments = ""
        call_id = self.ids.format(n=self.num)
        return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def history(seed: int, with_tools: bool) -> History:
    """Return the history of a seed."""
    shape = random.Random(f"{seed} {with_tools}")
    writer = _Writer(shape)
    chance = shape.random
    if chance() < 0.5:
        writer.say(shape.choice(["system", "system", "system", "developer"]), content=writer.text("system"))
    if chance() < 0.08:
        writer.answer()
    for _ in range(shape.choice([1, 1, 2, 2, 3, 4])):
        if chance() < 0.93:
            writer.say("user", content=writer.text("user"))
        if chance() < 0.12:
            writer.say("user", content=writer.text("user"))
        if chance() < 0.08:
            writer.say("system", content=writer.text("system"))
        draw = chance()
        if with_tools and draw < 0.6:
            for _ in range(shape.choice([1, 1, 1, 2])):
                writer.calls()
            if chance() < 0.6:
                writer.answer()
        elif draw < 0.95:
            writer.answer()
    if chance() < 0.5 or not writer.messages:
        writer.say("user", content=writer.text("user"))
    tools = None
    if with_tools and chance() < 0.93:
        tools = [{"type": "function", "function": dict(shape.choice(FUNCTIONS))}]
        # It is never called: where its name stands, the tools stand.
        tools.append({"type": "function", "function": {"name": "clock", "description": "The time"}})
    return History(writer.messages, tools, writer.words)


def histories(count: int, first: int = 0) -> Iterator[History]:
    """Yield histories without and with tools, in turn."""
    for seed in range(first, first + count):
        yield history(seed, seed % 3 != 0)


def change_traits(monkeypatch: pytest.MonkeyPatch, changed: Callable[[Traits], Traits]) -> None:
    """Have templates that are made from now on take what is found out about them with a change."""
    run = BoundedProcess.run

    def answer(self: BoundedProcess, job: object, reply_type: type[Any]) -> Any:
        reply = run(self, job, reply_type)
        if getattr(job, "finds_traits", False):
            reply.traits = changed(reply.traits)
        return reply

    monkeypatch.setattr(BoundedProcess, "run", answer)
