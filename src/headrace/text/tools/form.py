"""The form of an answer that must be calls, in the words of `headrace.grammar.tags`: pieces that the formats share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.text.tools.parser import Schemas

Part = dict[str, Any]


class Wanted(NamedTuple):
    """Which calls an answer must be: of tools with these `schemas`, and one only if `single`. `template` is the model's
    chat template. `token_ids`: those of a format's marks that are special tokens."""

    schemas: Schemas
    single: bool
    template: str
    token_ids: Mapping[str, int]

    def text(self, text: str) -> Part:
        """`text`, with the special tokens that are in it."""
        parts: list[Part] = []
        for piece in re.split("|".join(f"({re.escape(mark)})" for mark in self.token_ids) or r"(?!)", text):
            if piece in self.token_ids:
                parts.append({"type": "token", "token_id": self.token_ids[piece]})
            elif piece:
                parts.append({"type": "const_string", "value": piece})
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}

    def several(self, calls: Sequence[Part], separator: str) -> Part:
        """One of `calls`, or more of them if that is allowed."""
        if self.single or separator:
            return {
                "type": "tags_with_separator",
                "tags": list(calls),
                "separator": separator,
                "at_least_one": True,
                "stop_after_first": self.single,
            }
        return {"type": "tags_with_separator", "tags": list(calls), "at_least_one": True}


def sequence(*parts: Part) -> Part:
    return {"type": "sequence", "elements": list(parts)}


def either(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Part) -> Part:
    return {"type": "optional", "content": part}


def const(text: str) -> Part:
    return {"type": "const_string", "value": text}


def json_of(schema: Any) -> Part:
    return {"type": "json_schema", "json_schema": schema}


def json_call(name: str, schema: Mapping[str, Any], arguments: str = "arguments") -> Part:
    """`{"name": ..., "arguments": ...}`."""
    return sequence(const(f'{{"name": "{name}", "{arguments}": '), json_of(schema), const("}"))


def properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether required) of each parameter; the schemas can be read without the one they come from."""
    inner = schema.get("properties")
    required = schema.get("required")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (name, {**shared, **one} if isinstance(one, dict) else one, isinstance(required, list) and name in required)
        for name, one in (inner.items() if isinstance(inner, dict) else ())
    ]
