"""Schemas with finitely many answers: their candidate values, and which of these meet the schema.

Where a schema names its values (`enum`, `const`, a short range of integers), the logic around them is evaluated value
by value, and the result is an `enum`. Follows the core and validation vocabularies of JSON Schema (drafts 4 to
2020-12), without formats, which are annotations. A schema is a stranger's: depth, steps and the work of its patterns
are bounded. Pure functions of plain JSON; called by `rewrite` and, for the arguments of calls, by `text.tools`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from fractions import Fraction
from typing import Any

from headrace.grammar.backtracking import num_letters

MAX_VALUES = 1000
MAX_DEPTH = 64
MAX_STEPS = 50_000
"""Keywords and members looked at for one value, together with the work of its patterns; a step takes a microsecond or
two."""
LETTERS_IN_A_STEP = 100
"""Letters that `re` compares in the time of one step."""
MAX_LETTERS = MAX_STEPS * LETTERS_IN_A_STEP
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


def holds(schema: Any, value: Any, resolve: Resolve) -> bool:
    """Whether `value` meets `schema`. `resolve` gives the target of a reference. Raises `UndecidedError` for a schema
    that is not evaluated here, is malformed, or takes too long."""
    try:
        return _Evaluation(resolve).holds(schema, value, 0)
    except UndecidedError:
        raise
    except (TypeError, AttributeError, KeyError, ValueError, ArithmeticError, RecursionError) as error:
        # Only a keyword whose value is of a wrong type leads here.
        raise UndecidedError(str(error)) from None


class _Evaluation:
    """Of one value; counts its steps."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._left = MAX_STEPS

    def holds(self, schema: Any, value: Any, depth: int) -> bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise UndecidedError("a schema that is nested too deeply, or is none")
        if "$ref" in schema and not BESIDE_REFERENCES.issuperset(schema):
            raise UndecidedError("what stands beside a reference, which drafts read differently")

        def inner(part: Any, what: Any) -> bool:
            return self.holds(part, what, depth + 1)

        return all(self._keyword(key, operand, schema, value, inner) for key, operand in schema.items())

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise UndecidedError("too many steps")

    def _matches(self, pattern: Any, text: str) -> bool:
        try:
            self._spend(1 + num_letters(pattern, len(text), MAX_LETTERS) // LETTERS_IN_A_STEP)
            return re.search(pattern, text) is not None
        except (re.error, RecursionError) as error:
            raise UndecidedError(str(error)) from None

    def _keyword(
        self, key: str, operand: Any, schema: dict[str, Any], value: Any, inner: Callable[[Any, Any], bool]
    ) -> bool:
        self._spend(1 + (len(operand) if isinstance(operand, list | dict) else 0))
        match key:
            case "$ref":
                return inner(self._resolve(operand), value)
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
                return not isinstance(value, str) or self._matches(operand, value)
        if _is_number(value):
            return _of_number(key, operand, schema, Fraction(value))
        if isinstance(value, list):
            self._spend(len(value) ** 2 // 2 if key == "uniqueItems" else 0)
            return _of_array(key, operand, schema, value, inner)
        if isinstance(value, dict):
            return self._of_object(key, operand, schema, value, inner)
        return True

    def _of_object(
        self, key: str, operand: Any, schema: dict[str, Any], value: dict[str, Any], inner: Callable[[Any, Any], bool]
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
                    if self._matches(pattern, name)
                )
            case "additionalProperties":
                names, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
                others = [x for x in value if x not in names and not any(self._matches(each, x) for each in patterns)]
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
            exact = value if value.denominator == 1 else Fraction(str(float(value)))
            return (exact / Fraction(str(operand))).denominator == 1
    return True


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is(value: Any, name: str) -> bool:
    if name in ("number", "integer"):
        return _is_number(value) and (name == "number" or isinstance(value, int) or value.is_integer())
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
