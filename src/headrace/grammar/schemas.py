"""JSON schemas for llguidance: keywords that it does not support are rewritten, where that is possible, into keywords
of the same meaning that it does; it refuses the others. `locate` finds the place that an error message is about.

Pure functions of plain JSON. Called by `compile`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import llguidance
import msgspec

from headrace.grammar import rewrite
from headrace.grammar.logic import Schema, UnsupportedError

# Draft 2020-12, "Validation", section 7.3: the formats that llguidance enforces.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# References whose target depends on how the schema was reached.
DYNAMIC = ("$dynamicRef", "$recursiveRef")
# Keywords whose value is one schema, a list of them, or an object of them.
ONE = ("additionalProperties", "items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class PlainSchema(msgspec.Struct, frozen=True):
    """A schema that llguidance takes, and the parts of the original that are not enforced."""

    schema: Schema
    warnings: list[str] = []


def plain_schema(schema: Any, closed: bool = False) -> PlainSchema:
    """Return `schema` in the form that llguidance takes, and a description of the parts that were left out.

    `closed`: objects have no other properties than those named, where the schema does not say. Raises
    `UnsupportedError` for logic that cannot be brought into that form.
    """
    warnings: list[str] = []
    plain = _plain(schema, "#", closed, warnings)
    if rewrite.is_plain(plain) or not _refused(plain):
        return PlainSchema(plain, warnings)
    rewriter = rewrite.Rewriter(plain)
    try:
        rewritten = rewriter.whole()
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError, ArithmeticError) as error:
        if isinstance(error, UnsupportedError):
            raise
        # Only a keyword whose value is of a wrong type leads here.
        raise UnsupportedError(f"a keyword whose value is none that it may have ({error})") from None
    return PlainSchema(rewritten, warnings + rewriter.warnings)


def _refused(schema: Schema) -> bool:
    """Whether llguidance does not take a schema as it is."""
    text = json.dumps(schema, ensure_ascii=False)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"lenient": False, "coerce_one_of": False})
    return llguidance.LLMatcher.validate_grammar_with_warnings(grammar)[0]


def _plain(schema: Any, path: str, closed: bool, warnings: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = {key: value.copy() if isinstance(value, list | dict) else value for key, value in schema.items()}
    for at, inner in children(schema):
        place = result if len(at) == 1 else result[at[0]]
        place[at[-1]] = _plain(inner, f"{path}/{'/'.join(map(str, at))}", closed, warnings)
    _check_count(result, path)
    form = result.get("format")
    if isinstance(form, str) and form not in FORMATS:
        # A format outside the standard's list is an annotation (section 7.2.3).
        del result["format"]
        warnings.append(f"format {form!r} at {path} is not enforced")
    for key in DYNAMIC:
        if result.pop(key, None) is not None:
            warnings.append(f"{key} at {path} is not enforced")
    if closed and "properties" in result and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result


def _check_count(schema: dict[str, Any], path: str) -> None:
    """Raise `UnsupportedError` where it matters that llguidance counts a property that is written twice as two."""
    least = schema.get("minProperties")
    if not isinstance(least, int) or (
        schema.get("additionalProperties") is False and not schema.get("patternProperties")
    ):
        return
    needed: set[str] = set()
    for part in (schema, *(schema.get("allOf") or ())):
        if isinstance(part, dict) and isinstance(part.get("required"), list):
            needed.update(name for name in part["required"] if isinstance(name, str))
    if least - len(needed) > 1:
        raise UnsupportedError(f'"minProperties" of {least} at {path}, more than one of them without a name')


def children(schema: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path below this schema, schema) of the schemas directly inside `schema`: a keyword, and the index or the
    name under it."""
    for key in ONE:
        if isinstance(schema.get(key), dict | bool):
            yield (key,), schema[key]
    for key in LISTS:
        if isinstance(schema.get(key), list):
            yield from (((key, place), inner) for place, inner in enumerate(schema[key]))
    for key in OBJECTS:
        if isinstance(schema.get(key), dict):
            members = schema[key].items()
            yield from (((key, name), inner) for name, inner in members if isinstance(inner, dict | bool))


def locate(schema: Schema, message: str) -> str:
    """Return the place in `schema` that an error message is about: a JSON pointer, or "" if none is found."""
    words = re.findall(r'"([^"\n]{1,200})"', message)
    for pattern in (r"Unknown format: (\S+)", r"Invalid type: (\S+)", r"Pointer '([^']*)'"):
        words += re.findall(pattern, message)
    if "oneOf" in message:
        words.append("oneOf")
    if "min/maxProperties" in message:
        words += ["minProperties", "maxProperties"]
    expressions = re.findall(r"regex parse error:\s*\n\s*(.+)", message)
    stack: list[tuple[str, Any]] = [("#", schema)]
    for path, here in stack:
        if not isinstance(here, dict):
            continue
        for word in words:
            if word in here and word != "properties":
                return f"{path}/{word}"
        for key, value in here.items():
            texts = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, str)]
            if key != "enum" and any(text in words or text.removeprefix("#") in words for text in texts):
                return f"{path}/{key}"
            if key == "pattern" and any(each.strip() in value for each in expressions if isinstance(value, str)):
                return f"{path}/{key}"
        stack += [(f"{path}/{'/'.join(_escaped(part) for part in at)}", inner) for at, inner in children(here)]
    return ""


def _escaped(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")
