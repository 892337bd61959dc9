"""Strings of a schema get a bound where they have none, and no schema allows more than before."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace.text.string_bounds import bound_strings

TEXT = {"type": "string"}
BOUNDED = {"type": "string", "maxLength": 3}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (TEXT, BOUNDED),
        ({"type": ["string", "null"]}, {"type": ["string", "null"], "maxLength": 3}),
        ({"type": "string", "minLength": 9}, {"type": "string", "minLength": 9, "maxLength": 9}),
        ({"properties": {"a": TEXT}}, {"properties": {"a": BOUNDED}}),
        ({"type": "array", "items": TEXT}, {"type": "array", "items": BOUNDED}),
        ({"prefixItems": [TEXT], "items": False}, {"prefixItems": [BOUNDED], "items": False}),
        ({"anyOf": [TEXT, {"type": "null"}]}, {"anyOf": [BOUNDED, {"type": "null"}]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, {"$ref": "#/$defs/a", "$defs": {"a": BOUNDED}}),
        ({"additionalProperties": TEXT}, {"additionalProperties": BOUNDED}),
    ],
)
def test_strings_get_a_bound(schema: Any, expected: Any) -> None:
    assert bound_strings(schema, 3) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "integer"},
        {"type": "string", "maxLength": 900},
        {"type": "string", "enum": ["long text"]},
        {"const": "long text"},
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "format": "date"},
        {"properties": {"type": {"const": "string"}}},
    ],
)
def test_what_has_a_bound_of_its_own_stays(schema: Any) -> None:
    assert bound_strings(schema, 3) == schema


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"not": TEXT}, "longer"),
        ({"anyOf": [{"not": TEXT}, {"type": "null"}]}, "longer"),
        ({"oneOf": [TEXT, {"type": "string", "maxLength": 9}]}, "longer"),
        ({"if": TEXT, "then": False}, "longer"),
    ],
)
def test_a_negation_stays_for_a_bound_below_it_would_allow_more(schema: Any, value: Any) -> None:
    assert bound_strings(schema, 3) == schema
    # Control: with the bound below the negation the value that the schema refuses would pass.
    text = {"type": "string", "maxLength": 3}
    widened = {key: _put(inner, text) for key, inner in schema.items()}
    assert not Draft202012Validator(schema).is_valid(value)
    assert Draft202012Validator(widened).is_valid(value)


def _put(inner: Any, text: Any) -> Any:
    if inner == TEXT:
        return text
    if isinstance(inner, dict):
        return {key: _put(each, text) for key, each in inner.items()}
    return [_put(each, text) for each in inner] if isinstance(inner, list) else inner
