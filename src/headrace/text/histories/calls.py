"""Changes of calls, of the texts in the same turns, and of their results. Called by `changes`."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from headrace.text.histories.conversation import Conversation, each
from headrace.text.histories.plain import call_text, result_text
from headrace.text.messages import ChatMessage, PastCall, plain

_LETTERS = string.digits + string.ascii_letters
_ID_SIZE = 9


def plain_calls(conversation: Conversation) -> Conversation:
    """Write calls as the assistant's text, and their results as the user's."""
    messages: list[ChatMessage] = []
    for message in conversation.messages:
        if message.tool_calls:
            texts = [plain(message), *(call_text(call) for call in message.tool_calls)]
            message = replace(message, content="\n".join(text for text in texts if text), tool_calls=[])
        messages.append(message)
    return plain_results(conversation._replace(messages=messages))


def plain_results(conversation: Conversation) -> Conversation:
    """Make results the user's messages."""
    return _results_as_users(conversation, range(len(conversation.messages)))


def plain_stray_results(conversation: Conversation) -> Conversation:
    """Make results without a call the user's messages."""
    answered = _answered(conversation.messages)
    return _results_as_users(
        conversation, [place for place in range(len(conversation.messages)) if place not in answered]
    )


def _results_as_users(conversation: Conversation, places: Sequence[int]) -> Conversation:
    """Make results at these places the user's messages; neighbours become one."""
    messages: list[ChatMessage] = []
    last = -2
    for place, message in enumerate(conversation.messages):
        if message.role == "tool" and place in places:
            content = result_text(plain(message))
            if last == place - 1:
                content = f"{plain(messages.pop())}\n{content}"
            message, last = ChatMessage(role="user", content=content), place
        messages.append(message)
    return conversation._replace(messages=messages)


def named_results(conversation: Conversation) -> Conversation:
    """Add the names of their calls to results."""
    answered = _answered(conversation.messages)

    def apply(place: int, message: ChatMessage) -> ChatMessage:
        if message.role != "tool" or message.extra.get("name"):
            return message
        call = answered.get(place)
        name = call.form["function"]["name"] if call else "unknown"
        return replace(message, extra={**message.extra, "name": name})

    return each(conversation, apply)


def short_ids(conversation: Conversation) -> Conversation:
    """Replace ids of calls and results that are not nine letters or digits by ones that are."""

    def of_call(call: PastCall, number: int) -> str:
        # The id of a call without one comes from the call's number.
        return short_id(call.form.get("id") or f"call {number}")

    return _with_ids(conversation, of_call, short_id)


def ids_with_names(conversation: Conversation) -> Conversation:
    """Replace ids of calls and results that lack the name of the function by `functions.NAME:NUMBER`."""

    def of_call(call: PastCall, number: int) -> str:
        call_id, name = call.form.get("id") or "", call.form["function"]["name"]
        return call_id if name in call_id else f"functions.{name}:{number}"

    return _with_ids(conversation, of_call, lambda call_id: call_id)


def _with_ids(
    conversation: Conversation, of_call: Callable[[PastCall, int], str], of_stray: Callable[[str], str]
) -> Conversation:
    """Return the conversation with other ids for its calls, which are numbered, and for results without calls."""
    answered = _answered(conversation.messages)
    all_calls = [call for message in conversation.messages for call in message.tool_calls]
    ids = {id(call): of_call(call, number) for number, call in enumerate(all_calls)}

    def apply(place: int, message: ChatMessage) -> ChatMessage:
        new_calls = [call._replace(form={**call.form, "id": ids[id(call)]}) for call in message.tool_calls]
        extra = message.extra
        if message.role == "tool":
            call = answered.get(place)
            stray = extra.get("tool_call_id")
            new_id = ids[id(call)] if call else of_stray(stray if isinstance(stray, str) else f"result {place}")
            extra = {**extra, "tool_call_id": new_id}
        return replace(message, tool_calls=new_calls, extra=extra)

    return each(conversation, apply)


def short_id(call_id: str) -> str:
    """Return the id itself if it is nine letters or digits, else nine that depend on it alone."""
    if len(call_id) == _ID_SIZE and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest())
    letters = ""
    for _ in range(_ID_SIZE):
        number, digit = divmod(number, len(_LETTERS))
        letters += _LETTERS[digit]
    return letters


def null_beside_calls(conversation: Conversation) -> Conversation:
    """Replace an empty text in a turn with calls by None."""

    def apply(_: int, message: ChatMessage) -> ChatMessage:
        is_empty = bool(message.tool_calls) and not plain(message)
        return replace(message, content=UNSET) if is_empty else message

    return each(conversation, apply)


def text_before_calls(conversation: Conversation) -> Conversation:
    """Make the text of a turn with calls a turn before it."""
    messages: list[ChatMessage] = []
    for message in conversation.messages:
        if message.tool_calls and plain(message):
            messages.append(replace(message, tool_calls=[]))
            message = ChatMessage(role=message.role, tool_calls=message.tool_calls)
        messages.append(message)
    return conversation._replace(messages=messages)


def no_text_beside_calls(conversation: Conversation) -> Conversation:
    """Leave out the text of a turn with calls."""
    return each(conversation, lambda _, message: replace(message, content=UNSET) if message.tool_calls else message)


def text_in_reasoning(conversation: Conversation) -> Conversation:
    """Add the text of a turn with reasoning and calls to the reasoning."""

    def apply(_: int, message: ChatMessage) -> ChatMessage:
        text, thought = plain(message), message.reasoning
        if not (message.tool_calls and text and isinstance(thought, str) and thought):
            return message
        extra = {key: value for key, value in message.extra.items() if key not in ("reasoning", "thinking")}
        extra.pop("reasoning_content", None)
        return replace(message, content=UNSET, reasoning=f"{thought}\n\n{text}", extra=extra)

    return each(conversation, apply)


def one_call_a_turn(conversation: Conversation) -> Conversation:
    """Make each of several calls a turn, which its result follows."""
    messages: list[ChatMessage] = []
    rest = list(enumerate(conversation.messages))
    answered = _answered(conversation.messages)
    while rest:
        _, message = rest.pop(0)
        if len(message.tool_calls) < 2:
            messages.append(message)
            continue
        results: list[tuple[int, ChatMessage]] = []
        while rest and rest[0][1].role == "tool":
            results.append(rest.pop(0))
        for number, call in enumerate(message.tool_calls):
            first = message if number == 0 else ChatMessage(role=message.role)
            messages.append(replace(first, tool_calls=[call]))
            messages += [result for place, result in results if answered.get(place) is call]
        known = {id(call) for call in message.tool_calls}
        messages += [result for place, result in results if id(answered.get(place)) not in known]
    return conversation._replace(messages=messages)


def _answered(messages: Sequence[ChatMessage]) -> dict[int, PastCall]:
    """Return the call that each result answers, by the result's place: the last unanswered one with its id, or where
    the result has no id, the first unanswered one. A result without a call is left out."""
    waiting: list[PastCall] = []
    answered: dict[int, PastCall] = {}
    for place, message in enumerate(messages):
        waiting += message.tool_calls
        if message.role != "tool":
            continue
        call_id = message.extra.get("tool_call_id")
        fitting = [call for call in reversed(waiting) if call.form.get("id") == call_id] if call_id else waiting
        if fitting:
            answered[place] = fitting[0]
            waiting = [call for call in waiting if call is not fitting[0]]
    return answered
