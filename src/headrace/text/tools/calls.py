"""Reads calls by the table of `formats`: one reader for the layout, and one for each way to write name and arguments.

A reader either reads a call whole and gives it to the `ToolParser`, or raises `IllFormed`. `new_parser` puts table and
parser together. Knows no grammars; called by `serve.call.dialect`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from headrace.text.tools.formats import FORMATS, Body, Layout, ToolFormat
from headrace.text.tools.parser import Schemas, ToolParser
from headrace.text.tools.python_calls import is_json, json_text, keyword_call
from headrace.text.tools.reader import IllFormed, Reading

_ID = re.compile(r"[^\s\[\]{}\"]+")


def new_parser(
    name: str,
    schemas: Schemas,
    enforced: bool = False,
    new_id: Callable[[], str] | None = None,
    single: bool = False,
) -> ToolParser:
    """Return a parser of one answer in the format `name`. See `ToolParser` for the arguments."""
    tool_format = FORMATS[name]
    read = functools.partial(_read_calls, tool_format)
    return ToolParser(read, tool_format, schemas, new_id or tool_format.new_id, enforced, single)


def _read_calls(tool_format: ToolFormat, call: ToolParser) -> Reading[None]:
    """Read one call or one list of calls, from its opening on."""
    text = call.text
    opening, closing = (mark.strip() for mark in tool_format.marks)
    marked = yield from text.take(opening)
    yield from text.space()
    for layout in tool_format.layouts:
        if (yield from text.comes(layout.begins)):
            break
    if layout.brackets:
        yield from text.expect("[")
        yield from text.space()
    while True:
        yield from _READERS[layout.body](layout, call)
        if layout.marks == "around each" and marked and closing:
            yield from text.space()
            # Some models leave the mark out where the answer ends too.
            if (yield from text.peek()):
                yield from text.expect(closing)
        call.done()
        if layout.marks == "around each":
            return
        if layout.brackets:
            if (yield from text.comma("]")):
                continue
            if marked and closing:
                yield from text.space()
                if not (yield from text.take(closing)):
                    call.back()
            return
        yield from text.space()
        if layout.marks == "around all":
            if (yield from text.take(closing)) or not (yield from text.peek()):
                return
        elif layout.separator and (yield from text.take(layout.separator.strip())):
            yield from text.space()
        else:
            call.back()
            return


def _read_json(layout: Layout, call: ToolParser) -> Reading[None]:
    """Read `{"name": ..., "arguments": {...}}`, keys in any order; other keys are skipped."""
    text = call.text
    yield from text.expect("{")
    yield from text.space()
    while True:
        key = yield from text.key()
        yield from text.colon()
        if key == "name":
            call.name((yield from text.key()))
        elif key in ("arguments", "parameters"):
            yield from call.arguments()
        else:
            yield from text.json_value(1)
        if not (yield from text.comma("}")):
            return


def _read_name(layout: Layout, call: ToolParser) -> Reading[str]:
    text, (before, after) = call.text, layout.name
    yield from text.expect(before)
    if layout.name_pattern is None:
        name = (yield from text.until(after.strip())).strip()
    else:
        name = yield from text.word(layout.name_pattern)
    call.name(name)
    return name


def _read_named(layout: Layout, call: ToolParser) -> Reading[None]:
    text = call.text
    yield from _read_name(layout, call)
    if layout.id_mark and (yield from text.take(layout.id_mark)):
        yield from text.word(_ID)
    # Text without its special tokens lacks the mark.
    yield from text.take(layout.name[1])
    yield from text.space()
    yield from call.arguments()


def _read_fenced(layout: Layout, call: ToolParser) -> Reading[None]:
    text, (before, after) = call.text, layout.name
    yield from text.expect(before)
    name = yield from text.until(after)
    fenced = (yield from text.peek()) != "{"
    if fenced:
        if name.strip() != "function":
            raise IllFormed
        name = yield from text.until("\n")
        yield from text.expect("```json")
        yield from text.space()
    call.name(name.strip())
    yield from call.arguments()
    yield from text.space()
    if fenced:
        yield from text.expect("```")
        yield from text.space()
    yield from text.expect(layout.end)


def _read_tagged(layout: Layout, call: ToolParser) -> Reading[None]:
    text = call.text
    name = yield from _read_name(layout, call)
    keys: set[str] = set()
    yield from text.space()
    while not (yield from text.take(layout.end)):
        yield from text.expect(layout.key[0])
        key = (yield from text.until(layout.key[1].strip())).strip()
        if key in keys:
            raise IllFormed
        before = layout.value[0]
        if before.strip():
            yield from text.space()
            yield from text.expect(before)
        else:
            yield from text.take(before)
        call.write(f"{', ' if keys else '{'}{json_text(key)}: ")
        keys.add(key)
        yield from _read_value(layout, call, name, key)
        yield from text.space()
    if keys:
        call.write("}")


def _read_value(layout: Layout, call: ToolParser, name: str, key: str) -> Reading[None]:
    """Read a bare value and the text after it, and write the value as the JSON that the tool's schema makes of it."""
    text, closing = call.text, layout.value[1].strip()
    # White space before the tag that belongs to the tag.
    margin = layout.value[1].removesuffix(closing)
    if is_string(call.schemas, name, key):
        yield from _read_string(call, closing, margin)
    elif call.enforced:
        # The value is JSON, in which the tag may stand too.
        start = text.position
        with text.kept():
            yield from text.json_value()
            call.write(text.since(start))
        yield from text.take(margin)
        yield from text.expect(closing)
    else:
        value = (yield from text.until(closing)).removesuffix(margin)
        bare = value.strip()
        constant = {"True": "true", "False": "false", "None": "null"}.get(bare)
        call.write(constant or (bare if is_json(bare) else json_text(value)))


def _read_string(call: ToolParser, closing: str, margin: str) -> Reading[None]:
    text = call.text
    call.write('"')
    while True:
        place = text.text.find(closing, text.at)
        end = place if place >= 0 else len(text.text) if text.final else len(text.text) - len(closing + margin) + 1
        piece = text.text[text.at : max(text.at, end)]
        if place >= 0:
            piece = piece.removesuffix(margin)
        text.at = max(text.at, end)
        call.write(json_text(piece)[1:-1])
        if place >= 0:
            text.at += len(closing)
            call.write('"')
            return
        if text.final:
            raise IllFormed
        yield


def is_string(schemas: Schemas, name: str, key: str) -> bool:
    """Whether a parameter's schema allows strings only, or says nothing of its type."""
    properties = schemas.get(name, {}).get("properties")
    types = _types(properties.get(key) if isinstance(properties, dict) else None)
    return types is None or types == {"string"}


def _types(schema: Any) -> set[str] | None:
    """Return the JSON types that a schema allows, or None if it does not say."""
    if not isinstance(schema, dict):
        return None
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {str(one) for one in types}
    if isinstance(schema.get("enum"), list):
        return {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            return set().union(*(_types(option) or {"string"} for option in schema[keyword]))
    return {"other"} if "$ref" in schema else None


_READERS: dict[Body, Callable[[Layout, ToolParser], Reading[None]]] = {
    "json": _read_json,
    "named": _read_named,
    "fenced": _read_fenced,
    "tagged": _read_tagged,
    "python": lambda layout, call: keyword_call(call),
    "builtin": lambda layout, call: keyword_call(call, ".call"),
}
