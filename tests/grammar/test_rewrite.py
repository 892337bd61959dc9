"""Schemas that llguidance does not take as they are: rewritten, they take the same documents, or fewer and say so."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from tests.grammar.rig import judge

from headrace.grammar import evaluate, rewrite, schemas, witness

EXACT: list[tuple[Any, list[Any], list[Any]]] = [
    ({"not": {"type": "string"}}, [1, None, [], {}, True], ["a"]),
    ({"not": {"type": ["object", "array"]}}, ["a", 1], [{}, []]),
    ({"not": {"enum": ["ab", "a", 3, None]}}, ["b", "abc", "", 2, 3.5, True, [1]], ["ab", "a", 3, None]),
    ({"not": {"const": True}}, [False, 1, "true"], [True]),
    ({"not": {"minimum": 3}}, [2, 2.9, -1], [3, 4, "a"]),
    ({"not": {"exclusiveMaximum": 3}}, [3, 4], [2]),
    ({"type": "string", "not": {"maxLength": 2}}, ["abc"], ["ab", ""]),
    ({"not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 2}, 3]),
    ({"not": {"properties": {"a": {"type": "string"}}}}, [{"a": 1}], [{"a": "x"}, {}, 3]),
    ({"not": {"not": {"type": "null"}}}, [None], [1]),
    ({"not": {"anyOf": [{"type": "null"}, {"type": "string"}]}}, [1, []], [None, "a"]),
    ({"not": {"allOf": [{"type": "number"}, {"minimum": 2}]}}, [1, "a"], [2, 3]),
    ({"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["v"]}, "type": "object",
      "properties": {"k": {"type": "integer"}, "v": {"type": "integer"}}, "additionalProperties": False},
     [{"k": 1, "v": 2}, {"k": 2}, {}], [{"k": 1}]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
     [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": {"required": ["b"]}}},
     [{}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{}, {"xa": 1}], [{"a": 1}]),
    ({"type": "array", "contains": {"type": "null"}, "maxItems": 3}, [[None], [1, None], [1, 2, None]], [[], [1]]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}], "enum": [1, 2, 2.5, 1.5]}, [1, 2.5], [2, 1.5]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {}, "b": {}}},
     [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"type": "integer", "minimum": 0, "maximum": 30, "not": {"multipleOf": 7}}, [1, 8, 30], [0, 7, 28, 31]),
    ({"$defs": {"n": {"not": {"$ref": "#/$defs/s"}}, "s": {"type": "string"}}, "$ref": "#/$defs/n"}, [1], ["a"]),
    ({"type": "object", "required": ["a"], "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}, {"b": 1, "c": 2}]),
    ({"not": {"items": {"type": "string"}, "maxItems": 2}}, [[1], ["a", 1], ["a", "b", "c"]], [["a"], [], "x"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), EXACT, ids=lambda x: json.dumps(x)[:60])
def test_means_the_same(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    result = judge(schema, valid=valid, invalid=invalid)
    assert (result.refused, result.wrong, result.invalid) == ("", [], [])
    assert result.documents


NARROWER: list[tuple[Any, list[Any], list[Any]]] = [
    ({"not": {"type": "integer"}}, ["a", None], [1]),
    ({"type": "string", "not": {"pattern": "^ab"}}, ["xb", ""], ["ab", "abc"]),
    ({"not": {"patternProperties": {"^a": {"type": "null"}}}}, [], [{"a": None}, {}]),
    ({"type": "object", "not": {"additionalProperties": False, "properties": {"a": {}}}}, [], [{"a": 1}, {}]),
    ({"not": {"propertyNames": {"pattern": "^a"}}}, [], [{"a": 1}, {}]),
    ({"type": "number", "not": {"multipleOf": 3}}, [1, 2, 0.5], [3, 0, 9]),
    ({"type": "array", "contains": {"const": 1}}, [[1], [2, 1]], [[2], []]),
    ({"not": {"const": {"a": 1}}}, [1, "a"], [{"a": 1}]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), NARROWER, ids=lambda x: json.dumps(x)[:60])
def test_means_less_and_says_so(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    result = judge(schema, valid=valid, invalid=invalid)
    assert (result.refused, result.wrong, result.invalid) == ("", [], [])
    assert result.warnings


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"uniqueItems": True}}, "uniqueItems"),
        ({"not": {"contains": {}, "minContains": 2}}, "minContains"),
        ({"not": {"$ref": "http://elsewhere/x"}}, "elsewhere"),
        ({"not": {"format": "date"}}, "format"),
        ({"not": {}}, "no answer"),
        # A property that is written twice is one.
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "required": ["a"], "minProperties": 3}, "minProperties"),
        ({"not": {"minLength": "x"}}, "none that it may have"),
    ],
)
def test_what_has_no_other_words_is_refused(schema: Any, word: str) -> None:
    assert word in judge(schema).refused


def test_a_schema_that_needs_no_rewriting_is_left_alone() -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}
    assert schemas.plain_schema(schema).schema == schema


def random_schema(dice: random.Random, depth: int) -> Any:
    """A small schema of the keywords whose logic is rewritten."""
    leaves: list[Any] = [
        {"type": "string", "maxLength": 3}, {"type": "integer", "minimum": -5, "maximum": 9}, {"enum": ["a", 1, None]},
        {"type": "boolean"}, {"const": "b"}, {"minimum": 3}, {"required": ["q"]},
        {"type": "object", "properties": {"p": {"type": "null"}}, "required": ["p"]},
        {"type": "array", "maxItems": 2, "items": {"enum": [1, "a"]}},
    ]  # fmt: skip
    if not depth or dice.random() < 0.2:
        return dice.choice(leaves)
    part = lambda: random_schema(dice, depth - 1)  # noqa: E731
    kind = dice.choice(["not", "allOf", "anyOf", "oneOf", "if", "properties"])
    match kind:
        case "not":
            return {"not": part()}
        case "if":
            return {"if": part(), "then": part(), "else": part()}
        case "properties":
            return {"type": "object", "properties": {"p": part(), "q": part()}, "required": dice.choice([[], ["p"]])}
    return {kind: [part(), part()]}


def test_random_logic_is_never_wider_than_the_schema() -> None:
    dice = random.Random(4)
    num_taken = num_documents = 0
    for _ in range(120):
        schema = random_schema(dice, 3)
        result = judge(schema, documents=2)
        num_taken += not result.refused
        num_documents += result.documents
        assert result.invalid == [], schema
    assert num_taken > 60
    assert num_documents > 80


def test_control_a_negation_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite.Rewriter, "deny", lambda self, schema, path: True)
    result = judge({"type": "boolean", "not": {"const": True}}, invalid=[True], documents=20)
    assert result.wrong
    assert result.invalid


def test_values_are_counted_as_jsonschema_counts_them() -> None:
    dice = random.Random(5)
    values = ["a", "b", 1, 1.0, 3, 2.5, None, True, [], [1], [1, "a"], {}, {"p": None}, {"p": 1, "q": 2}]
    for _ in range(300):
        schema = random_schema(dice, 3)
        judge_of = jsonschema.Draft202012Validator(schema)
        for value in values:
            assert evaluate.holds(schema, value, lambda pointer: True) == judge_of.is_valid(value), (schema, value)


@pytest.mark.parametrize("pattern", ["^ab", "a[0-9]+", "^.{1,3}$", "^(a|bc)x*$", "[^a]b", "^\\w\\d$", "x{2,}"])
def test_examples_and_counterexamples_of_regexes(pattern: str) -> None:
    import re

    result = witness.example(pattern)
    assert result is not None
    assert re.search(pattern, result)
    samples = ["", "a", "b", "ab", "ba", "a1", "xx", "x", "abcd", "1", "bcx", "cab"]
    for other in witness.others(pattern):
        assert not [text for text in samples if re.search(other, text) and re.search(pattern, text)]
