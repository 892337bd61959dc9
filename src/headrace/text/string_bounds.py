"""Bounds the strings of a JSON schema that leaves their length open, as the maker of a small model may advise.

A small model may write one string until its tokens run out, and the document is cut. Called by `serve.call.service`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A schema with one of these stays as it is: below a negation a bound would allow more, not less.
_LOGIC = frozenset("not if oneOf contains propertyNames dependencies dependentSchemas dependentRequired".split())
_BOUNDED = frozenset("maxLength enum const pattern format $ref".split())
_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def bound_strings(schema: Any, max_length: int) -> Any:
    """Return a JSON schema whose strings have at most `max_length` characters where the schema gives no bound.

    A string with a pattern, a format or listed values needs no bound. The returned schema allows no value that `schema`
    refuses; a schema with negations is returned unchanged.
    """
    return schema if _has_logic(schema) else _bound(schema, max_length)


def _has_logic(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    return not _LOGIC.isdisjoint(schema) or any(map(_has_logic, _children(schema)))


def _children(schema: Mapping[str, Any]) -> list[Any]:
    children = [schema[key] for key in _ONE if key in schema]
    for key in _LISTS:
        children += schema[key] if isinstance(schema.get(key), list) else []
    for key in _NAMED:
        children += schema[key].values() if isinstance(schema.get(key), Mapping) else []
    return children


def _bound(schema: Any, max_length: int) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in _ONE:
        if isinstance(schema.get(key), Mapping):
            result[key] = _bound(schema[key], max_length)
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            result[key] = [_bound(each, max_length) for each in schema[key]]
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            result[key] = {name: _bound(each, max_length) for name, each in schema[key].items()}
    kinds = schema.get("type")
    if "string" in (kinds if isinstance(kinds, list) else [kinds]) and _BOUNDED.isdisjoint(schema):
        least = schema.get("minLength", 0)
        result["maxLength"] = max(max_length, least) if isinstance(least, int) else max_length
    return result
