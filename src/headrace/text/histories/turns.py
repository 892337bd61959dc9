"""Changes of system messages, and of the order and the form of turns. Called by `changes`."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.text.histories.conversation import Conversation, each, is_system, joined
from headrace.text.messages import ChatMessage, plain


def one_system(conversation: Conversation) -> Conversation:
    """Make all system messages but the first the user's. Neighbours of one role are joined: most templates that refuse
    later system messages require the roles to alternate."""
    merged: list[ChatMessage] = []
    is_moved = False
    for message in conversation.messages:
        is_one = is_system(message, conversation.traits)
        joins = bool(merged) and (is_one or (is_moved and message.role == "user"))
        if joins and (merged[-1].role == "user" or (is_one and is_system(merged[-1], conversation.traits))):
            merged[-1] = joined(merged[-1], message)
        elif is_one and merged:
            merged.append(ChatMessage(role="user", content=message.content))
        else:
            merged.append(message)
        is_moved = is_one and merged[-1].role == "user"
    return conversation._replace(messages=merged)


def one_of_several(conversation: Conversation) -> Conversation:
    """Apply `one_system` where there are several system messages."""
    num_systems = sum(is_system(message, conversation.traits) for message in conversation.messages)
    return one_system(conversation) if num_systems > 1 else conversation


def no_first_system(conversation: Conversation) -> Conversation:
    """Make system messages before all others the user's."""
    num = next(
        (i for i, message in enumerate(conversation.messages) if not is_system(message, conversation.traits)), None
    )
    moved = no_system(conversation._replace(messages=conversation.messages[: None if num is None else num + 1]))
    return conversation._replace(
        messages=moved.messages + conversation.messages[len(conversation.messages) if num is None else num + 1 :]
    )


def no_system(conversation: Conversation) -> Conversation:
    """Make all system messages the user's."""
    messages: list[ChatMessage] = []
    for message in conversation.messages:
        is_moved = bool(messages) and messages[-1].role == "system" and message.role == "user"
        if is_system(message, conversation.traits):
            message = ChatMessage(role="system", content=message.content)
        if is_moved or (messages and messages[-1].role == message.role == "system"):
            message = replace(joined(messages.pop(), message), role=message.role)
        messages.append(message)
    return conversation._replace(
        messages=[replace(message, role="user") if message.role == "system" else message for message in messages]
    )


def user_first(conversation: Conversation) -> Conversation:
    """Put an empty message of the user's first."""
    messages = list(conversation.messages)
    place = 0
    while place < len(messages) and messages[place].role in ("system", "developer"):
        place += 1
    if place == len(messages) or messages[place].role != "user":
        messages.insert(place, ChatMessage(role="user", content=""))
    return conversation._replace(messages=messages)


def user_before_calls(conversation: Conversation) -> Conversation:
    """Apply `user_first` where the first message has calls."""
    first = next((message for message in conversation.messages if not is_system(message, conversation.traits)), None)
    return user_first(conversation) if first is not None and first.tool_calls else conversation


def no_empty_answers(conversation: Conversation) -> Conversation:
    """Leave out turns of the assistant's without text and calls."""
    last = conversation.messages[-1] if conversation.continues else None
    return conversation._replace(
        messages=[
            message
            for message in conversation.messages
            if message is last or message.role != "assistant" or message.tool_calls or plain(message)
        ]
    )


def joined_turns(conversation: Conversation) -> Conversation:
    """Join neighbours of one role."""
    messages: list[ChatMessage] = []
    for message in conversation.messages:
        last = messages[-1] if messages else None
        if (
            last is None
            or last.role != message.role
            or message.role not in ("user", "assistant")
            or last.tool_calls
            or message.tool_calls
        ):
            messages.append(message)
        else:
            messages[-1] = joined(last, message)
    return conversation._replace(messages=messages)


def answered_results(conversation: Conversation) -> Conversation:
    """Put an empty answer between results and the user's message."""
    messages: list[ChatMessage] = []
    for message in conversation.messages:
        if message.role == "user" and messages and (messages[-1].role == "tool" or messages[-1].tool_calls):
            messages.append(ChatMessage(role="assistant", content=""))
        messages.append(message)
    return conversation._replace(messages=messages)


def one_text(conversation: Conversation) -> Conversation:
    """Join lists of texts into one text."""
    return each(
        conversation,
        lambda _, message: replace(message, content=plain(message)) if isinstance(message.content, list) else message,
    )


def one_system_text(conversation: Conversation) -> Conversation:
    """Join lists of texts into one text in system messages."""
    systems = [message for message in conversation.messages if is_system(message, conversation.traits)]
    return each(
        conversation, lambda _, message: replace(message, content=plain(message)) if message in systems else message
    )
