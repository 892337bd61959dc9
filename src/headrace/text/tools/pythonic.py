"""`[name(key=value, ...), ...]`, a list of Python calls, as the answer: Llama 3.2, Llama 4 (there between
`<|python_start|>` and `<|python_end|>`), and others. Values are Python literals and are told as JSON.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any

from headrace.text.tools.form import Part, Wanted, const, either, json_of, optional, properties, sequence
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import MAX_DEPTH, IllFormed, Reader, Reading
from headrace.text.tools.written import is_json, json_text

openers = ("<|python_start|>",)
starts = ("[",)
other_marks = ("<|python_end|>",)

MAX_LITERAL = 2**16
"""Characters of one argument."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_KEY = re.compile(r"\w+")
_PLAIN = re.compile(r"[^\"'\[\](){},\\#]+")


def read(call: ToolParser) -> Reading[None]:
    text = call.text
    tagged = yield from text.take("<|python_start|>")
    yield from text.space()
    yield from text.expect("[")
    yield from text.space()
    while True:
        yield from keyword_call(call)
        call.done()
        if not (yield from text.comma("]")):
            break
    if tagged:
        yield from text.space()
        if not (yield from text.take("<|python_end|>")):
            call.back()


def keyword_call(call: ToolParser, suffix: str = "") -> Reading[str]:
    """Read `name(key=value, ...)`, the name with `suffix`; `done` is the caller's."""
    text = call.text
    name = yield from text.word(_NAME)
    if not name.endswith(suffix):
        raise IllFormed
    call.name(name.removesuffix(suffix))
    yield from text.expect("(")
    yield from text.space()
    if (yield from text.take(")")):
        return name
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
    return name


def _literal(text: Reader) -> Reading[str]:
    """Read a Python literal; it as JSON."""
    start = text.position
    with text.kept():
        yield from _extent(text)
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


def _extent(text: Reader) -> Reading[None]:
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
            yield from _string(text, letter)
            continue
        text.at += 1
        if letter in "([{":
            open_brackets.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter in ")]}" and open_brackets.pop() != letter:
            raise IllFormed


def _string(text: Reader, quote: str) -> Reading[None]:
    quotes = quote * 3 if (yield from text.comes(quote * 3)) else quote
    text.at += len(quotes)
    plain = _PLAIN_IN[quote]
    while not (yield from text.take(quotes)):
        if not (yield from text.while_matches(plain)):
            letter = yield from text.peek()
            if not letter:
                raise IllFormed
            if letter == "\\" and len((yield from text.peek(2))) < 2:
                raise IllFormed
            text.at += 2 if letter == "\\" else 1


_PLAIN_IN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}


def form(wanted: Wanted) -> Part:
    calls = [
        sequence(const(f"{name}("), *_arguments_form(schema), const(")")) for name, schema in wanted.schemas.items()
    ]
    return sequence(const("["), wanted.several(calls, ", "), const("]"))


def _arguments_form(schema: Mapping[str, Any]) -> list[Part]:
    """The required arguments, then the others, in the schema's order; their values as JSON, which `read` takes too."""
    named = properties(schema)
    parts = [sequence(const(f"{name}="), json_of(one)) for name, one, _ in named]
    required = [part for part, (_, _, needed) in zip(parts, named, strict=True) if needed]
    others = [part for part, (_, _, needed) in zip(parts, named, strict=True) if not needed]
    comma = const(", ")

    def more(parts: list[Part]) -> list[Part]:
        return [optional(sequence(comma, part)) for part in parts]

    if required:
        first, *rest = required
        return [first, *(sequence(comma, part) for part in rest), *more(others)]
    starts = [sequence(part, *more(others[place + 1 :])) for place, part in enumerate(others)]
    return [optional(either(starts))] if starts else []
