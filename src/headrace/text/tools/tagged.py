"""A bare value between tags: which JSON it is follows from the tool's schema."""

from __future__ import annotations

from typing import Any

from headrace.protocol.errors import RequestError
from headrace.text.tools.form import Part, const, either, sequence
from headrace.text.tools.parser import Schemas, ToolParser
from headrace.text.tools.reader import IllFormed, Reading
from headrace.text.tools.written import is_json, json_text

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def value(call: ToolParser, name: str, key: str, closing: str, last: str) -> Reading[None]:
    """Read to `closing` and past it, and write the value; `last`, if it comes right before, belongs to the tag."""
    text = call.text
    if is_text(call.schemas, name, key):
        yield from _text(call, closing, last)
        return
    if call.enforced:
        # It is JSON, in which the mark may stand too.
        start = text.position
        with text.kept():
            yield from text.json_value()
            call.write(text.since(start))
        yield from text.take(last)
        yield from text.expect(closing)
        return
    said = (yield from text.until(closing)).removesuffix(last)
    bare = said.strip()
    try:
        call.write(bare if bare not in _PYTHON and is_json(bare) else _PYTHON[bare])
    except KeyError:
        call.write(json_text(said))


def free_text(schema: Any, name: str, key: str, closing: str, mark: Part) -> Part:
    """The form of a bare string and of `mark`, which is `closing`: at the first one it ends, as where it is read.

    Raises `RequestError` for what bare text can not be held to.
    """
    schema = schema if isinstance(schema, dict) else {}
    for keyword in ("pattern", "format", "allOf", "anyOf", "oneOf", "not", "if"):
        if keyword in schema:
            field = f"tools[{name}].function.parameters.properties.{key}"
            bound = "left out, or tool_choice be auto: the model's format of calls writes bare text, not held to it"
            raise RequestError(f"{field}.{keyword}", schema[keyword], bound)
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(texts, list) and all(isinstance(one, str) and closing not in one for one in texts):
        return sequence(either([const(one) for one in texts]), mark)
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if low or high != "":
        # No mark begins in it, so that none can end it before its time.
        return sequence({"type": "regex", "pattern": f"[^<]{{{low},{high}}}"}, mark)
    return sequence({"type": "any_text"}, mark)


def is_text(schemas: Schemas, name: str, key: str) -> bool:
    """Whether a parameter is a string for sure, or nothing is known of it."""
    properties = schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    kinds = _kinds(schema)
    return kinds is None or kinds == {"string"}


def _kinds(schema: Any) -> set[str] | None:
    """The JSON types that a schema allows, as far as it says."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in kind}
    if isinstance(schema.get("enum"), list):
        return {"string" if isinstance(one, str) else "other" for one in schema["enum"]}
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            return set().union(*(_kinds(one) or {"string"} for one in schema[several]))
    return {"other"} if "$ref" in schema else None


def _text(call: ToolParser, closing: str, last: str) -> Reading[None]:
    text = call.text
    call.write('"')
    while True:
        found = text.text.find(closing, text.at)
        end = found if found >= 0 else len(text.text) if text.final else len(text.text) - len(closing + last) + 1
        piece = text.text[text.at : max(text.at, end)]
        if found >= 0:
            piece = piece.removesuffix(last)
        text.at = max(text.at, end)
        call.write(json_text(piece)[1:-1])
        if found >= 0:
            text.at += len(closing)
            call.write('"')
            return
        if text.final:
            raise IllFormed
        yield
