"""Reads the headers of answers that are several messages, as gpt-oss and Muse Glimmer write them.

A header names the receiver and the channel of a message: these make it reasoning, content or a call. Knows the table of
`reasoning` and no formats of calls; called by `calls`.
"""

from __future__ import annotations

import re

from headrace.text.reasoning import Headers
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import IllFormed, Reader, Reading

_WORD = re.compile(r"[\w.\-/:+]+")
_BLANKS = re.compile(r"[ \t]+")
ROLE = "assistant"
MAX_HEADER = 512
"""The most characters at a prompt's end that may be a header which the answer continues."""


def begun(headers: Headers, prompt: str) -> str:
    """Return the header, perhaps a part of one, with which a prompt ends; "" if it ends with none."""
    at = prompt.rfind(headers.begins)
    tail = prompt[at:] if at >= 0 else ""
    head, body, _ = tail.partition(headers.body)
    return head + body if len(head) < MAX_HEADER and not any(end in tail for end in headers.ends) else ""


def read_header(headers: Headers, call: ToolParser) -> Reading[None]:
    """Read a header and, if it begins a call, the call. Raises `IllFormed`; a header that is cut is dropped."""
    text = call.text
    try:
        recipient, channel = yield from _header(headers, text)
    except IllFormed:
        if text.is_cut:
            text.at = len(text.text)
            call.skip()
            return
        raise
    name = _tool(headers, recipient, call)
    call.turn(_is_reasoning(headers, recipient, channel, call) and name is None)
    if name is not None and headers.calls:
        call.name(name)
        call.skip()
        yield from text.space()
        if (yield from text.peek()) == "" and call.is_limited:
            call.forget()
            return
        if not (yield from _ends(headers, text)):
            yield from call.arguments()
            yield from text.space()
            if not (yield from _ends(headers, text)):
                raise IllFormed
        call.done()
        return
    call.skip()


def _header(headers: Headers, text: Reader) -> Reading[tuple[str, str]]:
    """Read a header and return the receiver and the channel of its message."""
    recipient = channel = ""
    if (yield from text.take(headers.begins)) and not (yield from text.take(ROLE)):
        yield from text.word(_WORD)
    while True:
        yield from text.while_matches(_BLANKS)
        if (yield from text.take(headers.body)):
            return recipient, channel
        if headers.channel and (yield from text.take(headers.channel)):
            channel = yield from text.word(_WORD)
        elif (yield from text.take("to=")):
            recipient = yield from text.word(_WORD)
        else:
            # The form of the message's text; some models leave out the mark before it.
            if headers.constraint:
                yield from text.take(headers.constraint)
            elif not recipient:
                raise IllFormed
            if not channel:
                raise IllFormed
            yield from text.word(_WORD)


def _tool(headers: Headers, recipient: str, call: ToolParser) -> str | None:
    """Return the tool that receives a message; None if the message calls no tool that the answer may call."""
    if headers.calls and recipient.startswith(headers.calls) and call.schemas:
        return recipient.removeprefix(headers.calls)
    return recipient if recipient in call.schemas else None


def _is_reasoning(headers: Headers, recipient: str, channel: str, call: ToolParser) -> bool:
    if headers.channel:
        # The model's own tools, a browser and an interpreter, are a part of its reasoning.
        return channel == "analysis" or recipient not in ("", "user", "assistant")
    return recipient not in ("", "user") and not (call.schemas and recipient != "self")


def _ends(headers: Headers, text: Reader) -> Reading[bool]:
    """Return whether a message ends here, or the text does."""
    for end in (*headers.ends, *headers.marks):
        if (yield from text.comes(end)):
            return True
    return text.final and text.at == len(text.text)
