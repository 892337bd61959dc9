"""Constraints of every kind become grammars that take what they should and nothing else, or are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.grammar.rig import accepts, campaign, matcher_of

from headrace.grammar.compile import compile_grammar, only_whitespace
from headrace.protocol.bounds import BOUNDS
from headrace.protocol.constraints import MAX_DEPTH, StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"json": PERSON},
            ['{"name": "Tom", "age": 3}', '{"name":"","age":0}'],
            ['{"name": "Tom"}', '{"name": 3}', "[]"],
        ),
        ({"json": json.dumps(PERSON)}, ['{"name": "Tom", "age": 3}'], ["{}"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", ""]),
        ({"regex": "[a-c]{2}[0-9]"}, ["ab1"], ["ab", "abc1", "xab1"]),
        ({"regex": "^ab$"}, ["ab"], ["^ab$", "abb"]),
        ({"choice": ["yes", "no", 'say "hi"\n']}, ["yes", "no", 'say "hi"\n'], ["ye", "yesno", ""]),
        ({"grammar": 'start: "a" (B | "c")\nB: /b+/'}, ["abbb", "ac"], ["a", "abc"]),
        ({"grammar": 'root ::= "a" ("b" | "c")*'}, ["a", "abcb"], ["b"]),
        ({"structural_tag": json.dumps(TAG)}, ["text", 'so <f=a>3</f> and <f=b>"x"</f>.'], ["<f=a>x</f>", "<f=c>"]),
    ],
)
def test_takes_its_answers_and_no_others(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    constraint = StructuredOutputs(**fields)
    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, ["#/properties/a/items/uniqueItems"]),
        ({"json": {"properties": {"a": {"type": "text"}}}}, ["text", "#/properties/a/type"]),
        ({"json": {"properties": {"a": {"$ref": "#/$defs/no"}}}}, ["/$defs/no", "#/properties/a/$ref"]),
        ({"json": {"properties": {"a": {"pattern": "(?=x)y"}}}}, ["look-around", "#/properties/a/pattern"]),
        ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, ["Unsatisfiable"]),
        ({"json": {"$ref": "#"}}, ["no answer"]),
        ({"regex": "["}, ["regex"]),
        ({"regex": "(a)\\1"}, ["backreference"]),
        ({"grammar": 'start: "a'}, ["lexer error"]),
        ({"grammar": "start: x"}, ["unknown name", "x"]),
        ({"grammar": "start: start"}, ["no answer"]),
        ({"structural_tag": "{}"}, ["structures"]),
        ({"structural_tag": json.dumps(TAG | {"triggers": ["<g="]})}, ["structures[0].begin"]),
        ({"structural_tag": json.dumps(TAG | {"more": 1})}, ["more"]),
    ],
)  # fmt: skip
def test_a_feature_that_is_not_supported_is_named_with_its_place(fields: dict[str, Any], words: list[str]) -> None:
    constraint = StructuredOutputs(**fields)
    with pytest.raises(RequestError) as refused:
        matcher_of(constraint)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_what_is_only_a_note_is_told_and_not_dropped_in_silence() -> None:
    schema = {"properties": {"p": {"type": "string", "format": "path"}, "d": {"type": "string", "format": "date"}}}
    grammar = compile_grammar(StructuredOutputs(json=schema))
    assert grammar.warnings == ["format 'path' at #/properties/p is not enforced"]
    assert not accepts(StructuredOutputs(json=schema), '{"d": "tomorrow"}')


def test_a_schema_can_not_loosen_its_own_grammar() -> None:
    loose = {"x-guidance": {"lenient": True, "coerce_one_of": True}, "type": "array", "uniqueItems": True}
    with pytest.raises(RequestError, match="uniqueItems"):
        matcher_of(StructuredOutputs(json=loose))
    tag = {"structures": [{"begin": "<f>", "schema": loose, "end": ""}], "triggers": ["<f>"]}
    with pytest.raises(RequestError, match="uniqueItems"):
        matcher_of(StructuredOutputs(structural_tag=json.dumps(tag)))


def test_whitespace_is_bounded() -> None:
    constraint = StructuredOutputs(json_object=True)
    pretty = json.dumps({"name": "Tom", "age": 3}, indent=4)
    assert accepts(constraint, pretty)
    assert accepts(constraint, pretty.replace("\n", "\r\n"))
    assert not accepts(constraint, '{"name":\n\n"Tom", "age": 3}')
    assert not accepts(constraint, '{"name":' + 9 * " " + '"Tom", "age": 3}')
    schema = StructuredOutputs(json=PERSON)
    assert accepts(schema, '{"name": "Tom","age": 3}')
    assert accepts(schema, '{"name":"Tom","age":3}')
    assert not accepts(schema, '{"name":  "Tom","age":3}')
    assert not accepts(schema, pretty)
    # The arguments of a forced tool call are such a part.
    part = StructuredOutputs(structural_tag=json.dumps({"format": {"type": "json_schema", "json_schema": PERSON}}))
    assert accepts(part, '{"name": "Tom","age": 3}')
    assert not accepts(part, pretty)
    compact = StructuredOutputs(json=PERSON, disable_any_whitespace=True)
    assert accepts(compact, '{"name":"Tom","age":3}')
    assert not accepts(compact, '{"name": "Tom","age":3}')
    structured_outputs = StructuredOutputs(json=PERSON, whitespace_pattern="[ \\n]{0,3}")
    assert accepts(structured_outputs, '{"name":\n\n "Tom", "age": 3}')
    assert not accepts(structured_outputs, '{"name":\n\n\n\n"Tom", "age": 3}')


def test_a_pattern_for_whitespace_matches_nothing_else() -> None:
    ll = campaign().ll
    assert only_whitespace(ll, "[ ]?")
    assert only_whitespace(ll, "\\r?\\n[ \\t]{0,40}|[ \\t]{1,8}")
    for pattern in (".*", "x", " /", "[^a]*", "(?=a)"):
        assert not only_whitespace(ll, pattern), pattern


def test_closed_objects() -> None:
    schema = {"properties": {"a": {"properties": {"b": {}}}}}
    open_one = StructuredOutputs(json=schema)
    closed = StructuredOutputs(json=schema, disable_additional_properties=True)
    assert accepts(open_one, '{"a": {"b": 1, "c": 2}}')
    assert not accepts(closed, '{"a": {"b": 1, "c": 2}}')
    assert accepts(closed, '{"a": {"b": 1}}')


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "3"}, "structured_outputs.json"),
        ({"json": {"a": float("inf")}}, "structured_outputs.json"),
        ({"json": {1: 2}}, "structured_outputs.json"),
        ({"json": '{"a":' * 100 + "1" + "}" * 100}, "structured_outputs.json"),
        ({"json": "[" * 60_000}, "structured_outputs.json"),
        ({"json": {"enum": ["x" * 70_000]}}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["x"] * 5000}, "structured_outputs.choice"),
        ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"jsn": {}}, "structured_outputs.jsn"),
    ],
)
def test_a_constraint_is_checked_when_it_is_made(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_the_deepest_schema_that_is_taken() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = {"x": deep}
    StructuredOutputs(json={"const": deep})
    with pytest.raises(RequestError, match="levels deep"):
        StructuredOutputs(json={"const": {"x": {"x": deep}}})


@pytest.mark.parametrize("keyword", ["$dynamicRef", "$recursiveRef"])
def test_references_that_depend_on_the_way_are_told(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: "#m"}, "b": {"type": "null"}}, "required": ["a"]}
    result = compile_grammar(StructuredOutputs(json=schema))
    assert result.warnings == [f"{keyword} at #/properties/a is not enforced"]
    assert accepts(StructuredOutputs(json=schema), '{"a": [1]}')
    assert not accepts(StructuredOutputs(json=schema), '{"a": 1, "b": 2}')


def test_as_many_choices_as_the_bound_allows() -> None:
    most = int(BOUNDS["choices"].high)
    texts = [f"{number:x}" for number in range(most - 1)] + ["Once upon a time"]
    constraint = StructuredOutputs(choice=texts)
    for text in (texts[0], texts[15], texts[-2], texts[-1]):
        assert accepts(constraint, text)
    assert not accepts(constraint, "fffff")
    assert not accepts(constraint, "Once")
    with pytest.raises(RequestError, match=r"structured_outputs.choice: 4097"):
        StructuredOutputs(choice=[*texts, "one too many"])


@pytest.mark.parametrize("texts", [["a", "ab", "abc"], ["a b", 'say "x"', "\\n\n", "é😀"], ["<eos>", "/x/"]])
def test_choices_are_texts(texts: list[str]) -> None:
    constraint = StructuredOutputs(choice=texts)
    assert all(accepts(constraint, text) for text in texts)
    assert not any(accepts(constraint, text + "b") for text in texts if text + "b" not in texts)
