"""Schemas with finitely many answers: their candidate values, and which of these meet the schema.

Where a schema names its values (`enum`, `const`, a short range of integers), the logic around them is evaluated value
by value, and the result is an `enum`. Follows the core and validation vocabularies of JSON Schema (drafts 4 to
2020-12), without formats, which are annotations. Pure functions of plain JSON; called by `rewrite`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from fractions import Fraction
from typing import Any

MAX_VALUES = 1000
MAX_MATCHED = 16
"""Characters of a text that a pattern is matched with: some patterns take twice as long with each more."""
MAX_DEPTH = 32
_COUNTED: dict[str, type[Sized]] = {"Length": str, "Items": list, "Properties": dict}
_TYPES: dict[str, type] = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
BESIDE_REFERENCES = frozenset("$ref $schema $id $comment title description default examples $defs definitions".split())

Resolve = Callable[[str], Any]


class UndecidedError(ValueError):
    """A keyword that is not evaluated here."""


def values_of(schema: Any, resolve: Resolve, depth: int = 0) -> list[Any] | None:
    """Return all values that may meet a schema, maybe with some that do not; None for too many, or unknown ones."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if isinstance(schema.get("$ref"), str) and (values := values_of(resolve(schema["$ref"]), resolve, depth + 1)):
        return values
    for part in schema.get("allOf", ()):
        if (values := values_of(part, resolve, depth + 1)) is not None:
            return values
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [values_of(part, resolve, depth + 1) for part in schema[key]]
            if all(part is not None for part in parts):
                return [value for part in parts for value in part or ()]
    return None


def integers_of(schema: dict[str, Any]) -> range | None:
    """Return the integers between the bounds in the schema itself or its `allOf`, if they are few."""
    if schema.get("type") not in ("integer", "number"):
        return None
    lows, highs = [], []
    for part in (schema, *schema.get("allOf", ())):
        if isinstance(part, dict):
            lows += [part[key] for key in ("minimum", "exclusiveMinimum") if _is_number(part.get(key))]
            highs += [part[key] for key in ("maximum", "exclusiveMaximum") if _is_number(part.get(key))]
    if not lows or not highs or max(highs) - min(lows) > MAX_VALUES:
        return None
    return range(int(min(lows)) - 1, int(max(highs)) + 2)


def holds(schema: Any, value: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Whether `value` meets `schema`. Raises `UndecidedError`."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        raise UndecidedError("a schema that is nested too deeply, or is none")

    if "$ref" in schema and not BESIDE_REFERENCES.issuperset(schema):
        raise UndecidedError("what stands beside a reference, which drafts read differently")

    def inner(part: Any, what: Any) -> bool:
        return holds(part, what, resolve, depth + 1)

    return all(_keyword(key, operand, schema, value, inner, resolve) for key, operand in schema.items())


def _keyword(
    key: str, operand: Any, schema: dict[str, Any], value: Any, inner: Callable[[Any, Any], bool], resolve: Resolve
) -> bool:
    match key:
        case "$ref":
            return inner(resolve(operand), value)
        case "type":
            return any(_is(value, name) for name in ([operand] if isinstance(operand, str) else operand))
        case "enum":
            return any(_same(value, each) for each in operand)
        case "const":
            return _same(value, operand)
        case "allOf":
            return all(inner(part, value) for part in operand)
        case "anyOf":
            return any(inner(part, value) for part in operand)
        case "oneOf":
            return sum(inner(part, value) for part in operand) == 1
        case "not":
            return not inner(operand, value)
        case "if":
            return inner(schema.get("then" if inner(operand, value) else "else", True), value)
        case "unevaluatedItems" | "unevaluatedProperties" | "$dynamicRef" | "$recursiveRef":
            raise UndecidedError(key)
        case "minLength" | "minItems" | "minProperties":
            return not isinstance(value, _COUNTED[key[3:]]) or bool(len(value) >= operand)
        case "maxLength" | "maxItems" | "maxProperties":
            return not isinstance(value, _COUNTED[key[3:]]) or bool(len(value) <= operand)
        case "pattern":
            return not isinstance(value, str) or _matches(operand, value)
    if _is_number(value):
        return _of_number(key, operand, schema, Fraction(value))
    if isinstance(value, list):
        return _of_array(key, operand, schema, value, inner)
    if isinstance(value, dict):
        return _of_object(key, operand, schema, value, inner)
    return True


def _of_number(key: str, operand: Any, schema: dict[str, Any], value: Fraction) -> bool:
    if isinstance(operand, bool) or not isinstance(operand, int | float):
        return True
    match key:
        case "minimum":
            return value > Fraction(operand) if schema.get("exclusiveMinimum") is True else value >= Fraction(operand)
        case "maximum":
            return value < Fraction(operand) if schema.get("exclusiveMaximum") is True else value <= Fraction(operand)
        case "exclusiveMinimum":
            return value > Fraction(operand)
        case "exclusiveMaximum":
            return value < Fraction(operand)
        case "multipleOf":
            return (Fraction(str(float(value))) / Fraction(str(operand))).denominator == 1
    return True


def _matches(pattern: Any, text: str) -> bool:
    if len(text) > MAX_MATCHED:
        raise UndecidedError("a pattern and a long text")
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise UndecidedError(str(error)) from None


def _of_array(
    key: str, operand: Any, schema: dict[str, Any], value: list[Any], inner: Callable[[Any, Any], bool]
) -> bool:
    match key:
        case "uniqueItems":
            return not (operand and any(_same(a, b) for i, a in enumerate(value) for b in value[:i]))
        case "items" if not isinstance(operand, list):
            return all(inner(operand, each) for each in value[len(schema.get("prefixItems", ())) :])
        case "prefixItems" | "items":
            return all(inner(part, each) for part, each in zip(operand, value, strict=False))
        case "additionalItems" if isinstance(schema.get("items"), list):
            return all(inner(operand, each) for each in value[len(schema["items"]) :])
        case "contains":
            num = sum(inner(operand, each) for each in value)
            return bool(schema.get("minContains", 1) <= num <= schema.get("maxContains", num))
    return True


def _of_object(
    key: str, operand: Any, schema: dict[str, Any], value: dict[str, Any], inner: Callable[[Any, Any], bool]
) -> bool:
    match key:
        case "required":
            return not isinstance(operand, list) or all(name in value for name in operand)
        case "properties":
            return all(inner(part, value[name]) for name, part in operand.items() if name in value)
        case "patternProperties":
            return all(
                inner(part, value[name])
                for pattern, part in operand.items()
                for name in value
                if _matches(pattern, name)
            )
        case "additionalProperties":
            names, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
            others = [x for x in value if x not in names and not any(_matches(each, x) for each in patterns)]
            return all(inner(operand, value[name]) for name in others)
        case "propertyNames":
            return all(inner(operand, name) for name in value)
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return all(
                all(x in value for x in needed) if isinstance(needed, list) else inner(needed, value)
                for name, needed in operand.items()
                if name in value
            )
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is(value: Any, name: str) -> bool:
    if name in ("number", "integer"):
        return _is_number(value) and (name == "number" or float(value).is_integer())
    kind = _TYPES.get(str(name))
    if kind is None:
        raise UndecidedError(f"type {name}")
    return isinstance(value, kind)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)
