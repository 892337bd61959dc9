"""The parts of a chat answer, content, reasoning and tool calls, and the protocol of the parsers that split it.

A parser gets the text of one answer in pieces, cut anywhere, and returns the parts that each piece adds. Called by
`serve.call.call`, and its parts are read by every API for chats; `reasoning` and `tools` have the parsers. Knows no
tokens.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """More of the text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of the reasoning before the answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """A part of a call. The first part of a call has its name; the `arguments` of all parts together are JSON text.

    `index` counts the calls of an answer from 0; `id` is the same in all parts of a call.
    """

    index: int
    id: str
    name: str | None
    arguments: str


MessagePart = Content | Reasoning | ToolCall


class MessageParser(Protocol):
    """Splits the text of one answer into parts."""

    def feed(self, text: str, final: bool) -> list[MessagePart]:
        """Return the parts that are certain now and were not before. `final`: the text ends here, so nothing is held
        back.

        Never raises for a model's text: all that is neither reasoning nor a well-formed call is content.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is over, though the model might go on; further text is ignored."""
        ...


class ContentParser:
    """Returns all text as content."""

    ended = False

    def feed(self, text: str, final: bool) -> list[MessagePart]:
        return [Content(text)] if text else []


class MessageBuilder:
    """Puts the parts of an answer together."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, str]] = []

    def add(self, part: MessagePart) -> None:
        """Add the next part; those of one call come one after the other."""
        if isinstance(part, Content):
            self.content += part.text
        elif isinstance(part, Reasoning):
            self.reasoning += part.text
        elif part.name is not None:
            self.calls.append({"id": part.id, "name": part.name, "arguments": part.arguments})
        else:
            self.calls[part.index]["arguments"] += part.arguments
