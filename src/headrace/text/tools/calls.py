"""Reads calls by the table of `formats`: one reader for the layout, and one for each form of name and arguments.

A reader either reads a whole call and passes it to the `ToolParser`, or raises `IllFormed`. Knows no grammars; called
by `answers`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from headrace.text.tools.arguments import TEXT, Argument, is_json
from headrace.text.tools.formats import NAMESPACE, Body, Layout, ToolFormat
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import MAX_DEPTH, IllFormed, Reader, Reading
from headrace.text.tools.tree import ITEM, Tree, read_tree

_NUMBERED = re.compile(rf"(?:{re.escape(NAMESPACE)})?(?P<name>.+?)(?P<number>:[0-9]+)?")
_ID = re.compile(r"[^\s\[\]{}\"]+")

MAX_LITERAL = 2**16
"""Characters of one argument that is a Python literal."""

_PYTHON_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_BARE = re.compile(r"[^\s\[\]{}:,\"<>]+")
_PYTHON_KEY = re.compile(r"\w+")
_PLAIN = re.compile(r"[^\"'\[\](){},\\#]+")
_PLAIN_IN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}


def read_calls(tool_format: ToolFormat, call: ToolParser) -> Reading[None]:
    """Read one call or one list of calls, from its opening on."""
    text = call.text
    opening, closing = (mark.strip() for mark in tool_format.marks)
    for mark in (opening, *tool_format.others):
        if marked := (yield from text.take(mark)):
            break
    if marked and tool_format.content and (yield from text.take(tool_format.content)):
        call.skip()
        return
    yield from text.space()
    for layout in tool_format.layouts:
        if (yield from text.comes_spaced(layout.begins)):
            break
    if layout.brackets:
        yield from text.expect("[")
        yield from text.space()
    while True:
        yield from _READERS[layout.body](layout, call)
        if layout.marks == "around each" and marked and closing:
            yield from text.space()
            # Some models leave the mark out where the answer ends too, and a limit of tokens may cut it.
            if not (yield from text.closes(closing)):
                raise IllFormed
        call.done()
        if layout.marks == "around each":
            return
        if layout.brackets:
            if (yield from text.comma("]")):
                continue
            # Some models leave the mark out: the bracket still belongs to the list.
            call.forget()
            if marked and closing:
                yield from text.space()
                if not (yield from text.closes(closing)):
                    call.back()
            return
        yield from text.space()
        if layout.marks == "around all":
            if (yield from text.closes(closing)):
                return
        elif layout.separator and (yield from text.take(layout.separator.strip())):
            yield from text.space()
        else:
            call.back()
            return


def _read_json(layout: Layout, call: ToolParser) -> Reading[None]:
    """Read `{"name": ..., "arguments": {...}}`, keys in any order; other keys are skipped, an id too."""
    text = call.text
    yield from text.expect(layout.name[0])
    yield from text.space()
    yield from text.expect("{")
    yield from text.space()
    while True:
        key = yield from text.key()
        yield from text.colon()
        if key == layout.name_key:
            call.name((yield from text.key()))
        elif key in ("arguments", "parameters"):
            yield from call.arguments()
        else:
            yield from text.json_value(1)
        if not (yield from text.comma("}")):
            break
    yield from text.space()
    yield from text.expect(layout.end)


def _read_keyed(layout: Layout, call: ToolParser) -> Reading[None]:
    text = call.text
    yield from text.expect("{")
    yield from text.space()
    call.name((yield from text.key()))
    yield from text.colon()
    yield from call.arguments()
    yield from text.space()
    yield from text.expect("}")


def _read_name(layout: Layout, call: ToolParser) -> Reading[str]:
    text, (before, after) = call.text, layout.name
    yield from text.expect(before.removesuffix(NAMESPACE))
    if layout.name_pattern is None:
        name = (yield from text.until(after.strip())).strip()
    else:
        name = yield from text.word(layout.name_pattern)
    if layout.is_numbered and (match := _NUMBERED.fullmatch(name)):
        call.name(match["name"], name if match["number"] else None)
        return match["name"]
    call.name(name)
    return name


def _read_named(layout: Layout, call: ToolParser) -> Reading[None]:
    text = call.text
    yield from _read_name(layout, call)
    if layout.id_mark and (yield from text.take(layout.id_mark)):
        yield from text.word(_ID)
    # A text whose special tokens were removed lacks the mark.
    yield from text.take(layout.name[1])
    yield from text.space()
    yield from call.arguments()
    if layout.end:
        yield from text.space()
        yield from text.expect(layout.end)


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
    # Less than two letters may begin another argument.
    while not (yield from text.closes(layout.end.strip(), least=2)):
        yield from text.expect(layout.key[0])
        key = (yield from text.until(layout.key[1].strip())).strip()
        if key in keys:
            raise IllFormed
        is_string = (yield from _says_string(layout, text)) if layout.says_type[0] else None
        before = layout.value[0]
        if before.strip():
            yield from text.space()
            yield from text.expect(before)
        else:
            yield from text.take(before)
        call.write(f"{', ' if keys else '{'}{json_text(key)}: ")
        keys.add(key)
        yield from _read_value(layout, call, name, key, is_string)
        yield from text.space()
    if keys:
        call.write("}")


def _says_string(layout: Layout, text: Reader) -> Reading[bool | None]:
    """Read the text that marks a value as a string or not; None: the text is missing, as some models leave it out."""
    before, after = layout.says_type
    yield from text.space()
    if not (yield from text.take(before.strip())):
        yield from text.expect(after.lstrip('"'))
        return None
    value = yield from text.expect("true", "false")
    yield from text.expect(after)
    return value == "true"


def _read_value(layout: Layout, call: ToolParser, name: str, key: str, is_string: bool | None = None) -> Reading[None]:
    """Read a bare value and the text after it, and write the value as JSON of the type in the tool's schema.
    `is_string`: whether the model marks it as a string; None: no mark."""
    text, closing = call.text, layout.value[1].strip()
    # White space before the tag that belongs to the tag.
    margin = layout.value[1].removesuffix(closing)
    argument = Argument(call.schemas.get(name, {}), key)
    is_bare = not call.enforced or argument.bare(closing) is not None
    if not is_bare:
        # A grammar ensures that the value is JSON, which may contain the tag too.
        start = text.position
        with text.kept():
            yield from text.json_value()
            call.write(text.since(start))
        yield from text.take(margin)
        yield from text.expect(closing)
    elif is_string or (is_string is None and (argument.takes_any_text or (call.enforced and argument.types == TEXT))):
        yield from _read_string(call, closing, margin)
    else:
        # Only the whole text decides the type of the value.
        value = (yield from text.until(closing)).removesuffix(margin)
        says_json = is_string is False and is_json(value.strip())
        call.write(value.strip() if says_json else argument.value(value))


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


def _read_xml(layout: Layout, call: ToolParser) -> Reading[None]:
    text = call.text
    name = yield from _read_name(layout, call)
    members: dict[str, Tree] = {}
    yield from text.space()
    while not (yield from text.closes(layout.end.strip(), least=len(layout.tag) + 2)):
        key, value = yield from read_tree(text, layout.tag)
        if key in members:
            raise IllFormed
        members[key] = value
        yield from text.space()
    parameters = call.schemas.get(name, {})
    call.write(json_text({key: _typed(value, parameters, key) for key, value in members.items()}))


def _typed(value: Tree, parameters: Mapping[str, Any], key: str) -> Any:
    """Return the value of a member, whose texts are bare, in the type of its object's schema."""
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    argument = Argument(parameters, key)
    schema = argument.schema if isinstance(argument.schema, dict) else {}
    if isinstance(value, dict):
        return {name: _typed(inner, {**shared, **schema}, name) for name, inner in value.items()}
    if isinstance(value, list):
        items = {**shared, "properties": {ITEM: schema.get("items", True)}}
        return [_typed(inner, items, ITEM) for inner in value]
    return json.loads(argument.value(value))


def _read_python(layout: Layout, call: ToolParser) -> Reading[None]:
    """Read `name(key=value, ...)`; the values are Python literals, which are parsed and never run."""
    text, suffix = call.text, layout.name[1]
    name = yield from text.word(_PYTHON_NAME)
    if not name.endswith(suffix):
        raise IllFormed
    call.name(name.removesuffix(suffix))
    yield from text.expect("(")
    yield from text.space()
    if (yield from text.take(")")):
        return
    keys: set[str] = set()
    while True:
        key = yield from text.word(_PYTHON_KEY)
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


def _read_bare(layout: Layout, call: ToolParser) -> Reading[None]:
    """Read `call:name{key:value, ...}`. Plain JSON is read too."""
    text, quote = call.text, layout.value[0]
    yield from _read_name(layout, call)
    yield from text.space()
    yield from text.expect("{")
    yield from text.space()
    keys: set[str] = set()
    while not (yield from text.take("}")):
        key = yield from _bare_key(text, quote, keys)
        value = yield from _bare_value(text, quote)
        call.write(f"{', ' if len(keys) > 1 else '{'}{key}: {value}")
        if not (yield from text.comma("}")):
            break
    if keys:
        call.write("}")


def _bare_key(text: Reader, quote: str, keys: set[str]) -> Reading[str]:
    """Read a key and the colon after it, return it as JSON and add it to `keys`. Raises `IllFormed` if it is there."""
    yield from text.space()
    if (yield from text.take(quote)):
        key = yield from text.until(quote)
    elif (yield from text.comes('"')):
        key = yield from text.key()
    else:
        key = yield from text.word(_BARE)
    if key in keys:
        raise IllFormed
    keys.add(key)
    yield from text.colon()
    return json_text(key)


def _bare_value(text: Reader, quote: str, depth: int = 0) -> Reading[str]:
    """Read a value and return it as JSON; a word that is not JSON is a string."""
    if depth > MAX_DEPTH:
        raise IllFormed
    yield from text.space()
    if (yield from text.take(quote)):
        return json_text((yield from text.until(quote)))
    if (yield from text.comes('"')):
        return json_text((yield from text.key()))
    members: list[str] = []
    keys: set[str] = set()
    for opening, closing in ("{}", "[]"):
        if not (yield from text.take(opening)):
            continue
        yield from text.space()
        while not (yield from text.take(closing)):
            key = f"{(yield from _bare_key(text, quote, keys))}: " if opening == "{" else ""
            members.append(key + (yield from _bare_value(text, quote, depth + 1)))
            if not (yield from text.comma(closing)):
                break
        return f"{opening}{', '.join(members)}{closing}"
    word = yield from text.word(_BARE)
    return word if is_json(word) else json_text(word)


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
            try:
                value = ast.literal_eval(source)
            except SyntaxError:
                # The templates of LFM2.5 write line breaks in strings as they are.
                value = ast.literal_eval(source.replace("\n", "\\n"))
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
    """Return `value` as JSON. Raises `IllFormed` for values that JSON lacks: keys that are no strings, NaN, bytes..."""
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


_READERS: dict[Body, Callable[[Layout, ToolParser], Reading[None]]] = {
    "json": _read_json,
    "keyed": _read_keyed,
    "named": _read_named,
    "fenced": _read_fenced,
    "tagged": _read_tagged,
    "xml": _read_xml,
    "python": _read_python,
    "bare": _read_bare,
}
