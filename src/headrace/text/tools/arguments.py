"""The value of an argument that a model writes as bare text: by the tool's schema, a text or the JSON in its place.

The look of the text decides nothing. The candidates are the text itself, the JSON value that it spells, and the
constant of Python's that it spells; the first that meets the schema is the value. Knows no formats of calls; called by
`calls`, which reads arguments, and by `call_grammar`, which writes their grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace.grammar.evaluate import BESIDE_REFERENCES, UndecidedError, holds
from headrace.grammar.logic import UnsupportedError, resolve

TEXT = frozenset({"string"})
MAX_DEPTH = 32
MAX_REFERENCES = 500
"""The most references that are followed for one argument; each may lead to several others."""
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_NOTES = (BESIDE_REFERENCES - {"$ref"}) | {"nullable", "deprecated", "readOnly", "writeOnly", "contentEncoding"}
_HELD = frozenset("type enum const minLength maxLength".split())
"""Keywords that the grammar of a bare text enforces."""
_TYPES: tuple[tuple[type, str], ...] = (
    (str, "string"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


class Argument:
    """The parameter `key` of a tool whose parameters have the schema `parameters`.

    `schema`: its schema, with references resolved. `types`: the JSON types that it may have; None: the schema leaves
    them open. `takes_any_text`: whether every text is a value, so that a text is never read as JSON.
    """

    def __init__(self, parameters: Mapping[str, Any], key: str) -> None:
        self._root = parameters
        self._num_references = 0
        self.types: frozenset[str] | None = None
        self._texts: bool | None = None
        self.schema: Any = True
        try:
            self.schema = self._flat(self._parameter(parameters, key, 0))
            self.types = self._types(self.schema, 0)
            self._texts = self._takes_texts(self.schema, 0)
        except (UndecidedError, UnsupportedError, TypeError, AttributeError):
            # An invalid or circular schema has no effect.
            pass
        self.takes_any_text = self.types is not None and self._texts is True

    def value(self, text: str) -> str:
        """Return the JSON of the argument that a model wrote as `text`. Where the schema gives no type, a text that can
        be read as JSON is JSON."""
        bare = text.strip()
        constant = _CONSTANTS.get(bare) if self.types is not None else None
        is_value = is_json(bare)
        if self.types is None:
            return bare if is_value else _quoted(text)
        if self._meets(text):
            return _quoted(text)
        for candidate in ([bare] if is_value else []) + ([constant] if constant else []):
            if self._meets(json.loads(candidate)):
                return candidate
        # No candidate meets the schema; the value gets at least a type that the schema allows.
        return bare if is_value and self._texts is False else _quoted(text)

    def bare(self, closing: str) -> Mapping[str, Any] | None:
        """Return the schema to which a grammar holds the argument, which stands bare before `closing`; None if it
        stands there as JSON, with quotes around texts."""
        keys = frozenset(self.schema) if isinstance(self.schema, dict) else frozenset()
        if self.takes_any_text or keys <= _NOTES:
            return {}
        if self.types != TEXT or not keys <= _NOTES | _HELD:
            return None
        schema: dict[str, Any] = self.schema
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            fits = isinstance(values, list) and all(isinstance(each, str) and closing not in each for each in values)
            return {"enum": values} if fits and values else None
        bounds: dict[str, Any] = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
        return bounds if all(type(bound) is int and bound >= 0 for bound in bounds.values()) else None

    def _seek(self, pointer: str) -> Any:
        self._num_references += 1
        if self._num_references > MAX_REFERENCES:
            raise UndecidedError("too many references")
        return resolve(self._root, pointer, "")  # type: ignore[arg-type]

    def _meets(self, value: Any) -> bool:
        """Return whether the schema allows `value`; where that is undecided, whether it allows the type."""
        self._num_references = 0
        try:
            return holds(self.schema, value, self._seek)
        except (UndecidedError, UnsupportedError):
            name = next(name for kind, name in _TYPES if isinstance(value, kind))
            return self.types is None or not self.types.isdisjoint({name, "number" if name == "integer" else name})

    def _parameter(self, schema: Any, key: str, depth: int) -> Any:
        """Return the schema of the property `key` of objects with this schema; True if the schema leaves it open."""
        if not isinstance(schema, Mapping):
            return True
        if depth > MAX_DEPTH:
            raise UndecidedError("nested too deeply")
        parts = [self._parameter(self._seek(schema["$ref"]), key, depth + 1)] if "$ref" in schema else []
        if key in schema.get("properties", {}):
            parts.append(schema["properties"][key])
        else:
            parts += [
                inner for pattern, inner in schema.get("patternProperties", {}).items() if _is_named(pattern, key)
            ]
            parts += [] if parts else [schema.get("additionalProperties", True)]
        parts += [self._parameter(inner, key, depth + 1) for inner in schema.get("allOf", ())]
        for keyword in ("anyOf", "oneOf"):
            ways = [self._parameter(part, key, depth + 1) for part in schema.get(keyword, ())]
            if ways := [part for part in ways if not isinstance(part, bool)]:
                parts.append({"anyOf": ways})
        parts = [part for part in parts if not isinstance(part, bool)]
        return ({"allOf": parts} if len(parts) > 1 else parts[0]) if parts else True

    def _flat(self, schema: Any) -> Any:
        """Return the schema behind references and one-element lists, where they have only annotations as siblings."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or len(keys := schema.keys() - _NOTES) != 1:
                return schema
            (key,) = keys
            if key == "$ref":
                schema = self._seek(schema[key])
            elif key in ("allOf", "anyOf", "oneOf") and isinstance(schema[key], list) and len(schema[key]) == 1:
                schema = schema[key][0]
            else:
                return schema
        raise UndecidedError("references in a circle")

    def _types(self, schema: Any, depth: int) -> frozenset[str] | None:
        """Return JSON types that include all that a schema allows; None if it leaves them open."""
        if not isinstance(schema, dict):
            return None
        if depth > MAX_DEPTH:
            raise UndecidedError("nested too deeply")
        each: list[frozenset[str] | None] = []
        if "$ref" in schema:
            each.append(self._types(self._seek(schema["$ref"]), depth + 1))
        if "type" in schema:
            each.append(frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"]))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            each.append(frozenset(next(name for kind, name in _TYPES if isinstance(one, kind)) for one in values))
        each += [self._types(part, depth + 1) for part in schema.get("allOf", ())]
        for key in ("anyOf", "oneOf"):
            ways = [self._types(part, depth + 1) for part in schema.get(key, ())]
            if ways and None not in ways:
                each.append(frozenset().union(*(way for way in ways if way is not None)))
        named = [types for types in each if types is not None]
        return frozenset.intersection(*map(_with_integers, named)) if named else None

    def _takes_texts(self, schema: Any, depth: int) -> bool | None:
        """Return whether a schema allows every text (True), no text (False), or some, as far as is known (None)."""
        if isinstance(schema, bool):
            return schema
        if depth > MAX_DEPTH:
            raise UndecidedError("nested too deeply")
        each: list[bool | None] = []
        for key, operand in schema.items():
            each.append(
                self._keyword_takes_texts(key, operand, schema, lambda part: self._takes_texts(part, depth + 1))
            )
        return _all(each)

    def _keyword_takes_texts(
        self, key: str, operand: Any, schema: dict[str, Any], inner: Callable[[Any], bool | None]
    ) -> bool | None:
        match key:
            case "$ref":
                return inner(self._seek(operand))
            case "type":
                return "string" in ([operand] if isinstance(operand, str) else operand)
            case "enum":
                return None if any(isinstance(each, str) for each in operand) else False
            case "const":
                return None if isinstance(operand, str) else False
            case "allOf":
                return _all([inner(part) for part in operand])
            case "anyOf":
                return _not(_all([_not(inner(part)) for part in operand]))
            case "oneOf":
                ways = [inner(part) for part in operand]
                if None in ways:
                    return False if ways.count(True) > 1 else None
                return ways.count(True) == 1
            case "not":
                return _not(inner(operand))
            case "if":
                then, other = inner(schema.get("then", True)), inner(schema.get("else", True))
                condition = inner(operand)
                return (then if then == other else None) if condition is None else then if condition else other
            case "minLength":
                return True if operand == 0 else None
            case "maxLength" | "pattern" | "format" | "$dynamicRef" | "$recursiveRef":
                # A format is enforced by a grammar, where there is one.
                return None
        return True


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _all(each: list[bool | None]) -> bool | None:
    return False if False in each else None if None in each else True


def _not(known: bool | None) -> bool | None:
    return None if known is None else not known


def _is_named(pattern: Any, key: str) -> bool:
    return holds({"pattern": pattern}, key, lambda pointer: True)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Return whether a text is one JSON value, strictly: NaN and Infinity are not."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
