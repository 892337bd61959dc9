"""Forms that several formats share: a call as a JSON object, a list of them, and values as JSON text."""

from __future__ import annotations

import json
from typing import Any

from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import IllFormed, Reading

ARGUMENTS = ("arguments", "parameters")


def json_call(call: ToolParser) -> Reading[None]:
    """Read `{"name": ..., "arguments": {...}}`, keys in any order and others passed over; `done` is the caller's."""
    text = call.text
    yield from text.expect("{")
    yield from text.space()
    while True:
        key = yield from text.key()
        yield from text.colon()
        if key == "name":
            call.name((yield from text.key()))
        elif key in ARGUMENTS:
            yield from call.arguments()
        else:
            yield from text.json_value(1)
        if not (yield from text.comma("}")):
            return


def json_calls(call: ToolParser) -> Reading[None]:
    """Read a JSON list of calls."""
    text = call.text
    yield from text.expect("[")
    yield from text.space()
    while True:
        yield from json_call(call)
        call.done()
        if not (yield from text.comma("]")):
            return


def json_text(value: Any) -> str:
    """`value` as JSON. Raises `IllFormed` for what JSON has not: keys that are no strings, NaN, bytes and the like."""
    try:
        if not _plain(value):
            raise IllFormed
        said = json.dumps(value, ensure_ascii=False, allow_nan=False)
        said.encode()
    except (TypeError, ValueError, RecursionError):
        raise IllFormed from None
    return said


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_plain(inner) for inner in value)
    return value is None or isinstance(value, str | bool | int | float)


def is_json(said: str) -> bool:
    """Whether a text is one JSON value, strictly."""
    try:
        json.loads(said, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
