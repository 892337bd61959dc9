"""A bare value between tags: which JSON it is follows from the tool's schema."""

from __future__ import annotations

from typing import Any

from headrace.server.tools.parser import Schemas, ToolParser
from headrace.server.tools.reader import IllFormed, Reading
from headrace.server.tools.written import is_json, json_text

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def value(call: ToolParser, name: str, key: str, closing: str, last: str) -> Reading[None]:
    """Read to `closing` and past it, and write the value; `last`, if it comes right before, belongs to the tag."""
    text = call.text
    if is_text(call.schemas, name, key):
        yield from _text(call, closing, last)
        return
    said = (yield from text.until(closing)).removesuffix(last)
    bare = said.strip()
    try:
        call.write(bare if bare not in _PYTHON and is_json(bare) else _PYTHON[bare])
    except KeyError:
        call.write(json_text(said))


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
