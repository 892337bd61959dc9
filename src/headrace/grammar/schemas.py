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
# Keywords whose value is one schema, a list of them, or an object of them.
ONE = ("additionalProperties", "items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class PlainSchema(msgspec.Struct, frozen=True):
    """A schema that llguidance takes, and what of the original is not enforced."""

    schema: Schema
    warnings: list[str] = []


def plain_schema(schema: Any, closed: bool = False) -> PlainSchema:
    """Return `schema` in the form that llguidance takes, and what was left out of it, in words.

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
    result = dict(schema)
    for key, at, inner in children(schema):
        replacement = _plain(inner, f"{path}/{'/'.join(at)}", closed, warnings)
        if replacement is not inner:
            _put(result, schema, key, at, replacement)
    _check_count(result, path)
    form = result.get("format")
    if isinstance(form, str) and form not in FORMATS:
        # A format outside the standard's list is an annotation (section 7.2.3).
        del result["format"]
        warnings.append(f"format {form!r} at {path} is not enforced")
    if closed and "properties" in result and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result


def _check_count(schema: dict[str, Any], path: str) -> None:
    """llguidance counts a property that is written twice as two. Raises `UnsupportedError` where that would matter."""
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


def _put(result: dict[str, Any], schema: dict[str, Any], key: str, at: list[str], replacement: Any) -> None:
    if len(at) == 1:
        result[key] = replacement
        return
    if result[key] is schema[key]:
        result[key] = schema[key].copy()
    result[key][int(at[1]) if isinstance(result[key], list) else at[1]] = replacement


def children(schema: dict[str, Any]) -> Iterator[tuple[str, list[str], Any]]:
    """(keyword, path below this schema, schema) of the schemas directly inside `schema`."""
    for key in ONE:
        if isinstance(schema.get(key), dict | bool):
            yield key, [key], schema[key]
    for key in LISTS:
        if isinstance(schema.get(key), list):
            for place, inner in enumerate(schema[key]):
                yield key, [key, str(place)], inner
    for key in OBJECTS:
        if isinstance(schema.get(key), dict):
            for name, inner in schema[key].items():
                if isinstance(inner, dict | bool):
                    yield key, [key, name], inner


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
            if key in ("pattern",) and any(each.strip() in value for each in expressions if isinstance(value, str)):
                return f"{path}/{key}"
        stack += [(f"{path}/{'/'.join(_escaped(part) for part in at)}", inner) for _, at, inner in children(here)]
    return ""


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")
