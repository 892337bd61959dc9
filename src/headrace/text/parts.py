"""What a chat answer is made of, and what takes its text apart: content, reasoning and tool calls, as they come.

A parser is fed the text of one answer in pieces, however it was cut, and says what each piece adds. Called by
`serve.call.answers` and read by every API's chat; `reasoning` and `tools` have the parsers. Knows no tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """More of what the model says to the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model says to itself."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """A part of a call. The first one of a call has its name; `arguments` of all of them together are the JSON text.

    `index` counts the calls of an answer from 0; `id` is the same in all parts of a call.
    """

    index: int
    id: str
    name: str | None
    arguments: str


Part = Content | Reasoning | ToolCall


class MessageParser(Protocol):
    """Takes one answer's text apart."""

    def feed(self, text: str, final: bool) -> list[Part]:
        """The parts that are certain now and were not before. `final`: the text ends here, so nothing is held back.

        Never raises for what a model wrote: what is no reasoning and no well-formed call is content.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is over, though the model might go on; what is fed then is passed over."""
        ...


class ContentParser:
    """All is content."""

    ended = False

    def feed(self, text: str, final: bool) -> list[Part]:
        return [Content(text)] if text else []


class Message:
    """The parts of an answer put together."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, str]] = []

    def add(self, part: Part) -> None:
        """Take in the next part; those of one call come one after the other."""
        if isinstance(part, Content):
            self.content += part.text
        elif isinstance(part, Reasoning):
            self.reasoning += part.text
        elif part.name is not None:
            self.calls.append({"id": part.id, "name": part.name, "arguments": part.arguments})
        else:
            self.calls[part.index]["arguments"] += part.arguments

    def fields(self) -> dict[str, Any]:
        """`content` (None if there is something else instead), `reasoning_content` (None if none), `tool_calls` in
        OpenAI's shape."""
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in self.calls
        ]
        content = self.content or (None if calls or self.reasoning else "")
        return {"content": content, "reasoning_content": self.reasoning or None, "tool_calls": calls}
