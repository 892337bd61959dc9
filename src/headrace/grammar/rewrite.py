"""JSON Schema's logic rewritten into keywords that llguidance supports: `not`, `if`, `dependencies`, `propertyNames`,
`contains`, and a `oneOf` whose branches overlap.

A negation is pushed inward by the laws of logic until it meets a keyword that has an opposite (`minimum` has one,
`multipleOf` has none that llguidance supports). A keyword without one is refused by name. The result allows the same
values as the schema, or fewer where a warning says so, never more. Called by `schemas`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.grammar import evaluate, witness
from headrace.grammar.logic import (
    Schema,
    UnsupportedError,
    at_place,
    both,
    dependencies,
    either,
    found_in,
    other_than,
    resolve,
    with_property,
)

TYPES = ("null", "boolean", "number", "string", "array", "object")
# Annotations, which do not restrict an answer.
NOTES = frozenset(
    "$schema $id id $comment title description default examples example deprecated readOnly writeOnly $anchor "
    "contentMediaType contentEncoding contentSchema $defs definitions $vocabulary x-guidance".split()
)
HARD = frozenset("not if then else dependencies dependentRequired dependentSchemas contains propertyNames".split())
LOGIC = frozenset("not if oneOf allOf anyOf uniqueItems contains".split())
OPPOSITES = {"minimum": "maximum", "maximum": "minimum"}
MEASURED = {"Length": "string", "Items": "array"}
"""The types that minLength, maxLength, minItems and maxItems measure."""
MAX_PLACES = 4
"""In an unbounded array, the required item is placed among so many first ones."""
MAX_NODES = 5000
MAX_NUMBER = 24
"""Numbers that are not multiples of another are sought up to this distance from zero."""


class Rewriter:
    """The rewriting of one schema. `definitions` are schemas for references to others, affirmed or negated."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.definitions: dict[str, Schema] = {}
        self.warnings: list[str] = []
        self._named: dict[tuple[str, str], str] = {}
        self._num_nodes = 0

    def whole(self) -> Schema:
        """Return the root, rewritten. Raises `UnsupportedError`."""
        schema = self.affirm(self.root, "#")
        if self.definitions and isinstance(schema, dict):
            schema = schema | {"$defs": self.definitions}
        return schema

    def affirm(self, schema: Any, path: str) -> Schema:
        """Return a schema that means `schema`."""
        self._count(path)
        if not isinstance(schema, dict):
            return bool(schema)
        if path != "#" and isinstance(schema.get("$id"), str):
            raise UnsupportedError(f'"$id" at {path}')
        if (values := self._enumerated(schema, path)) is not None:
            return values
        skipped = HARD | {"$defs", "definitions"}
        result = {key: self._inner(key, value, f"{path}/{key}") for key, value in schema.items() if key not in skipped}
        further: list[Schema] = []
        if "not" in schema:
            further.append(self.deny(schema["not"], f"{path}/not"))
        if "if" in schema:
            further.append(self._condition(schema, path, False))
        for name, needed in dependencies(schema):
            at = f"{path}/dependencies"
            then = (
                {"required": [name, *needed]}
                if isinstance(needed, list)
                else both([{"required": [name]}, self.affirm(needed, at)])
            )
            further.append(either([{"properties": {name: False}}, then]))
        if "contains" in schema:
            further.append(self._contains(schema, path))
        if "propertyNames" in schema:
            further.append(self._names(schema["propertyNames"], f"{path}/propertyNames"))
        if "oneOf" in schema:
            result["oneOf"] = result["oneOf"] if isinstance(result["oneOf"], list) else []
            apart = self._one_of(schema["oneOf"], f"{path}/oneOf")
            if apart is not None:
                del result["oneOf"]
                further.append(apart)
        further = [each for each in further if each is not True]
        if False in further:
            return False
        if further:
            result["allOf"] = [*result.get("allOf", ()), *further]
        return result

    def _enumerated(self, schema: dict[str, Any], path: str) -> Schema | None:
        """Return an `enum` in place of a schema whose logic is about a finite number of values; None for any other."""
        if not LOGIC.intersection(schema):
            return None
        seek = lambda pointer: resolve(self.root, pointer, path)  # noqa: E731
        try:
            values: Sequence[Any] | None = evaluate.values_of(schema, seek)
            if values is None and (values := evaluate.integers_of(schema)) is not None and schema["type"] == "number":
                self._narrow(path, "numbers with a fraction are left out")
            if values is None or len(values) > evaluate.MAX_VALUES:
                return None
            matches: list[Any] = []
            for value in values:
                if evaluate.holds(schema, value, seek) and json.dumps(value) not in map(json.dumps, matches):
                    matches.append(value)
        except evaluate.UndecidedError:
            return None
        return {"enum": matches} if matches else False

    def deny(self, schema: Any, path: str) -> Schema:
        """Return a schema that means that `schema` does not hold."""
        self._count(path)
        if not isinstance(schema, dict):
            return not schema
        # Older drafts ignore keywords next to a reference, newer ones do not: to break the reference is right in both.
        keys = ["$ref"] if "$ref" in schema else [key for key in schema if key not in NOTES]
        return self._any_of((functools.partial(self._deny_keyword, key, schema, f"{path}/{key}") for key in keys), path)

    def _any_of(self, ways_to_write: Iterable[Callable[[], Schema]], path: str) -> Schema:
        """Return a schema of all values that one of the schemas allows; unsupported schemas are left out, with a
        warning. Raises `UnsupportedError` if nothing remains."""
        ways: list[Schema] = []
        errors: list[UnsupportedError] = []
        for write in ways_to_write:
            try:
                ways.append(write())
            except UnsupportedError as error:
                errors.append(error)
        schema = either(ways)
        if errors and schema is False:
            raise errors[0]
        for unsupported in errors:
            # It is enough that the answer breaks one keyword; it never breaks this one.
            self._narrow(path, f"answers that differ by {unsupported} are left out")
        return schema

    # -- negated keywords

    def _deny_keyword(self, key: str, schema: dict[str, Any], path: str) -> Schema:
        value = schema[key]
        match key:
            case "type":
                return self._other_types([value] if isinstance(value, str) else value, path)
            case "const":
                return self._none_of([value], path)
            case "enum":
                return self._none_of(value, path)
            case "minimum" | "maximum":
                opposite = OPPOSITES[key]
                is_exclusive = schema.get(f"exclusive{key.capitalize()}") is True
                return {"type": "number", opposite if is_exclusive else f"exclusive{opposite.capitalize()}": value}
            case "exclusiveMinimum" | "exclusiveMaximum":
                if isinstance(value, bool):
                    return False
                return {"type": "number", "maximum" if key == "exclusiveMinimum" else "minimum": value}
            case "minLength" | "minItems":
                return {"type": MEASURED[key[3:]], f"max{key[3:]}": value - 1} if value > 0 else False
            case "maxLength" | "maxItems":
                return {"type": MEASURED[key[3:]], f"min{key[3:]}": value + 1}
            case "required":
                return either([{"type": "object", "properties": {name: False}} for name in value])
            case "properties":

                def wrong(name: str) -> Schema:
                    return with_property(name, self.deny(value[name], f"{path}/{name}"))

                return self._any_of((functools.partial(wrong, name) for name in value), path)
            case "not":
                return self.affirm(value, path)
            case "allOf":
                return self._any_of(
                    (functools.partial(self.deny, each, f"{path}/{i}") for i, each in enumerate(value)), path
                )
            case "anyOf" | "oneOf":
                none = both([self.deny(each, f"{path}/{i}") for i, each in enumerate(value)])
                if key == "anyOf":
                    return none
                yes = [self.affirm(each, f"{path}/{i}") for i, each in enumerate(value)]
                pairs = [both([yes[i], yes[j]]) for i in range(len(yes)) for j in range(i)]
                return either([none, *pairs])
            case "$ref":
                return self._reference("not", value, path)
            case "if":
                return self._condition(schema, path, True)
            case "then" | "else":
                return False
            case "contains":
                if schema.get("minContains", 1) != 1 or "maxContains" in schema:
                    raise UnsupportedError(f'"minContains" at {path}')
                return {"type": "array", "items": self.deny(value, path)}
            case "minContains" | "maxContains":
                return False
            case "items" | "additionalItems":
                return self._deny_items(key, schema, path)
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                ways: list[Schema] = []
                for name, needed in dependencies({key: value}):
                    lacks = (
                        either([{"properties": {other: False}} for other in needed])
                        if isinstance(needed, list)
                        else self.deny(needed, path)
                    )
                    ways.append(both([{"type": "object", "required": [name]}, lacks]))
                return either(ways)
            case "uniqueItems" if value is False:
                return False
            case "multipleOf" if value > 0:
                self._narrow(path, f"numbers are sought from -{MAX_NUMBER} to {MAX_NUMBER} only")
                numbers: list[Schema] = [{"enum": [x for x in range(-MAX_NUMBER, MAX_NUMBER + 1) if x % value]}]
                # No number between 0 and `value` is a multiple of it.
                numbers.append({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": value})
                return either(numbers)
            case "pattern":
                texts = [{"type": "string", "pattern": each} for each in witness.others(value)]
                if texts:
                    self._narrow(path, "some texts without it are left out")
                    return either(texts)
            case "additionalProperties":
                names = [*schema.get("properties", ()), *schema.get("patternProperties", ())]
                return self._with_property(self._fresh(schema, names), self.deny(value, path), path)
            case "patternProperties":
                ways = []
                for pattern, inner in value.items():
                    example = witness.example(pattern)
                    if example is not None and (denied := self.deny(inner, f"{path}/{pattern}")) is not False:
                        ways.append(self._with_property(example, denied, path))
                if ways or all(inner in (True, {}) for inner in value.values()):
                    return either(ways)
            case "propertyNames":
                pattern = self._pattern_of(self.deny(value, path), path)
                example = "other" if pattern is None else witness.example(pattern)
                if example is not None and pattern != "":
                    return self._with_property(example, True, path)
        raise UnsupportedError(f'a negated "{key}" at {path}')

    def _with_property(self, name: str, value: Schema, path: str) -> Schema:
        if value is not False:
            self._narrow(path, f"the property that differs is always {name!r}")
        return with_property(name, value)

    def _fresh(self, schema: dict[str, Any], names: Sequence[str]) -> str:
        """Return a property name that no keyword of the schema restricts."""
        patterns = list(schema.get("patternProperties", ()))
        for name in ("other", "more", "x", "0", "_", "Z9", "~"):
            if name not in names and not any(found_in(pattern, name) for pattern in patterns):
                return name
        raise UnsupportedError('a negated "additionalProperties"')

    def _other_types(self, types: Sequence[str], path: str) -> Schema:
        others = [name for name in TYPES if name not in types]
        if "integer" in types and "number" not in types:
            others = [name for name in others if name != "number"]
            self._narrow(path, "numbers with a fraction are left out")
        return {"type": others} if others else False

    def _none_of(self, values: Sequence[Any], path: str) -> Schema:
        """Return a schema of all values but `values`."""
        kinds: dict[str, type] = {"array": list, "object": dict}
        whole = [name for name, kind in kinds.items() if not any(isinstance(each, kind) for each in values)]
        if len(whole) < 2:
            self._narrow(path, "arrays or objects are left out")
        ways: list[Schema] = [{"type": whole}] if whole else []
        if None not in values:
            ways.append({"type": "null"})
        bools = [value for value in (True, False) if not any(each is value for each in values)]
        if bools:
            ways.append({"enum": bools})
        numbers = sorted({each for each in values if isinstance(each, int | float) and not isinstance(each, bool)})
        for low, high in itertools.pairwise([None, *numbers, None]):
            borders = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            ways.append({"type": "number"} | {name: edge for name, edge in borders.items() if edge is not None})
        texts = [each for each in values if isinstance(each, str)]
        ways.append({"type": "string", "pattern": f"^({other_than(texts)})$"} if texts else {"type": "string"})
        return either(ways)

    def _reference(self, turn: str, pointer: Any, path: str) -> dict[str, Any]:
        """Return a reference to the target of `pointer` ("yes"), or to its opposite ("not")."""
        if not isinstance(pointer, str):
            raise UnsupportedError(f'"$ref" at {path}')
        name = self._named.get((turn, pointer))
        if name is None:
            name = self._named[turn, pointer] = f"{turn}-{len(self._named)}"
            target = resolve(self.root, pointer, path)
            self.definitions[name] = self.affirm(target, pointer) if turn == "yes" else self.deny(target, pointer)
        return {"$ref": f"#/$defs/{name}"}

    def _deny_items(self, key: str, schema: dict[str, Any], path: str) -> Schema:
        items = schema.get("items")
        if key == "items" and isinstance(items, list):
            return either([at_place(self.deny(each, f"{path}/{i}"), i) for i, each in enumerate(items)])
        if key == "additionalItems" and not isinstance(items, list):
            return False
        first = len(items if isinstance(items, list) else schema.get("prefixItems", ()))
        return self._somewhere(self.deny(schema[key], path), first, schema.get("maxItems"), path)

    # -- keywords that llguidance does not support

    def _condition(self, schema: dict[str, Any], path: str, negated: bool) -> Schema:
        turn = self.deny if negated else self.affirm
        then, other = turn(schema.get("then", True), f"{path}/then"), turn(schema.get("else", True), f"{path}/else")
        holds = self.affirm(schema["if"], f"{path}/if") if then is not False else False
        fails = self.deny(schema["if"], f"{path}/if") if other is not False else False
        return either([both([holds, then]), both([fails, other])])

    def _contains(self, schema: dict[str, Any], path: str) -> Schema:
        item = self.affirm(schema["contains"], f"{path}/contains")
        least = schema.get("minContains", 1)
        if least == 0 and "maxContains" not in schema:
            return True
        if least != 1 or "maxContains" in schema:
            raise UnsupportedError(f'"minContains" or "maxContains" at {path}')
        arrays = self._somewhere(item, 0, schema.get("maxItems"), f"{path}/contains")
        return either([{"type": [name for name in TYPES if name != "array"]}, arrays])

    def _somewhere(self, item: Schema, first: int, most: Any, path: str) -> Schema:
        """Return the schema of arrays with `item` among their items from place `first` on."""
        if item is False:
            return False
        last = first + MAX_PLACES
        if isinstance(most, int) and most <= last:
            last = most
        else:
            self._narrow(path, f"the item is sought among the first {last}")
        return either([at_place(item, place) for place in range(first, last)])

    def _names(self, names: Any, path: str) -> Schema:
        pattern = self._pattern_of(self.affirm(names, path), path)
        if pattern is None:
            return True
        closed = {"patternProperties": {pattern: True}, "additionalProperties": False}
        return closed if pattern else {"maxProperties": 0}

    def _pattern_of(self, schema: Schema, path: str) -> str | None:
        """Return a regex of the strings that meet `schema`; None for all, "" for none."""
        if isinstance(schema, bool):
            return None if schema else ""
        keywords = {key: value for key, value in schema.items() if key not in NOTES}
        types = keywords.pop("type", "string")
        if "string" not in ([types] if isinstance(types, str) else types):
            return ""
        if not keywords:
            return None
        if set(keywords) == {"pattern"}:
            return str(keywords["pattern"])
        if set(keywords) <= {"enum", "const"} and len(keywords) == 1:
            values = keywords.get("enum", [keywords.get("const")])
            return "^(" + "|".join(re.escape(each) for each in values if isinstance(each, str)) + ")$"
        if set(keywords) <= {"minLength", "maxLength"}:
            return f"^(.|\\n){{{keywords.get('minLength', 0)},{keywords.get('maxLength', '')}}}$"
        if set(keywords) == {"anyOf"}:
            patterns = [self._pattern_of(each, path) for each in keywords["anyOf"]]
            if None in patterns:
                return None
            return "|".join(f"({each})" for each in patterns if each)
        raise UnsupportedError(f'"propertyNames" at {path}')

    def _one_of(self, branches: Any, path: str) -> Schema | None:
        """Return the branches, each without the others; None where llguidance is to handle them."""
        if not isinstance(branches, list) or len(branches) < 2:
            return None
        ways = []
        try:
            for i, each in enumerate(branches):
                others = [self.deny(other, f"{path}/{j}") for j, other in enumerate(branches) if j != i]
                ways.append(both([self.affirm(each, f"{path}/{i}"), *others]))
        except UnsupportedError:
            return None
        return either(ways)

    # -- the rest

    def _inner(self, key: str, value: Any, path: str) -> Any:
        if key == "$ref":
            return self._reference("yes", value, path)["$ref"]
        if key in ("additionalProperties", "items", "additionalItems", "unevaluatedProperties") and isinstance(
            value, dict
        ):
            return self.affirm(value, path)
        if key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            return [self.affirm(each, f"{path}/{i}") for i, each in enumerate(value)]
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            return {name: self.affirm(each, f"{path}/{name}") for name, each in value.items()}
        return value

    def _narrow(self, path: str, why: str) -> None:
        warning = f"{path}: {why}, though the schema allows them" if "left out" in why else f"{path}: {why}"
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _count(self, path: str) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise UnsupportedError(f"logic that takes more than {MAX_NODES} schemas to write down, at {path}")


def is_plain(schema: Schema) -> bool:
    """Whether the text of `schema` has no keyword that is rewritten."""
    text = json.dumps(schema)
    return not any(f'"{key}"' in text for key in HARD | LOGIC)
