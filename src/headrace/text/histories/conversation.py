"""A conversation as a template gets it, and the steps that changes share. Knows no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from headrace.text.messages import ChatMessage, plain
from headrace.text.traits import Traits


class Conversation(NamedTuple):
    """Messages and tools as a template gets them. `traits` are the template's; `example` is a call as it writes it.
    `continues`: the answer goes on with the last message."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None
    traits: Traits
    example: str = ""
    continues: bool = False


def each(conversation: Conversation, apply: Callable[[int, ChatMessage], ChatMessage]) -> Conversation:
    """Return the conversation with each message replaced by `apply(place, message)`."""
    return conversation._replace(
        messages=[apply(place, message) for place, message in enumerate(conversation.messages)]
    )


def joined(message: ChatMessage, other: ChatMessage) -> ChatMessage:
    """Return the first message with the text, and the reasoning, of the other added to it."""
    texts = [text for text in (plain(message), plain(other)) if text]
    thoughts = [thought for thought in (message.reasoning, other.reasoning) if isinstance(thought, str) and thought]
    return replace(message, content="\n\n".join(texts), reasoning="\n\n".join(thoughts) or None)


def is_system(message: ChatMessage, traits: Traits) -> bool:
    """Return whether a template with these traits gets the message as a system message."""
    return message.role == "system" or (message.role == "developer" and not traits.shows_developer)
