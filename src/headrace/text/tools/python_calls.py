"""Reads calls that are written in Python, `name(key=value, ...)`, and turns their values into JSON.

Values are literals, which are parsed and never run. Knows no formats; called by `calls`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import MAX_DEPTH, IllFormed, Reader, Reading

MAX_LITERAL = 2**16
"""Characters of one argument."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_KEY = re.compile(r"\w+")
_PLAIN = re.compile(r"[^\"'\[\](){},\\#]+")
_PLAIN_IN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}


def keyword_call(call: ToolParser, suffix: str = "") -> Reading[None]:
    """Read `name(key=value, ...)`, where the name ends with `suffix`, which is left out. Raises `IllFormed`."""
    text = call.text
    name = yield from text.word(_NAME)
    if not name.endswith(suffix):
        raise IllFormed
    call.name(name.removesuffix(suffix))
    yield from text.expect("(")
    yield from text.space()
    if (yield from text.take(")")):
        return
    keys: set[str] = set()
    while True:
        key = yield from text.word(_KEY)
        if key in keys:
            raise IllFormed
        yield from text.space()
        yield from text.expect("=")
        yield from text.space()
        value = yield from _literal(text)
        call.write(f"{', ' if keys else '{'}{json_text(key)}: {value}")
        keys.add(key)
        if not (yield from text.comma(")")):
            break
    call.write("}")


def _literal(text: Reader) -> Reading[str]:
    """Read a Python literal and return it as JSON."""
    start = text.position
    with text.kept():
        yield from _skip_literal(text)
        source = text.since(start).strip()
    if is_json(source):
        return source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(source)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise IllFormed from None
    return json_text(value)


def _skip_literal(text: Reader) -> Reading[None]:
    """Read to the comma or bracket that ends a literal."""
    start = text.position
    open_brackets: list[str] = []
    while True:
        yield from text.while_matches(_PLAIN)
        letter = yield from text.peek()
        if text.position - start > MAX_LITERAL or len(open_brackets) > MAX_DEPTH or not letter or letter in "\\#":
            raise IllFormed
        if not open_brackets and letter in ",)]}":
            return
        if letter in "\"'":
            yield from _skip_string(text, letter)
            continue
        text.at += 1
        if letter in "([{":
            open_brackets.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter in ")]}" and open_brackets.pop() != letter:
            raise IllFormed


def _skip_string(text: Reader, quote: str) -> Reading[None]:
    quotes = quote * 3 if (yield from text.comes(quote * 3)) else quote
    text.at += len(quotes)
    while not (yield from text.take(quotes)):
        if not (yield from text.while_matches(_PLAIN_IN[quote])):
            letter = yield from text.peek()
            if not letter:
                raise IllFormed
            if letter == "\\" and len((yield from text.peek(2))) < 2:
                raise IllFormed
            text.at += 2 if letter == "\\" else 1


def json_text(value: Any) -> str:
    """Return `value` as JSON. Raises `IllFormed` for what JSON has not: keys that are no strings, NaN, bytes..."""
    try:
        if not _is_plain(value):
            raise IllFormed
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        raise IllFormed from None
    return text


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, str | bool | int | float)


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, strictly: NaN and Infinity are none."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
