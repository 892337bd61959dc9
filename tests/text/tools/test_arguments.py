"""The type of a bare argument: the schema decides, as `jsonschema` reads it, in whatever pieces the text comes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reading import parts, read, splits, tool_parser

from headrace.grammar import evaluate
from headrace.grammar.backtracking import num_letters
from headrace.text.outputs import CallPart
from headrace.text.tools import arguments
from headrace.text.tools.arguments import Argument
from headrace.text.tools.parser import HOLD

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
DEFS = {
    "Unit": {"enum": ["metres", "feet"]},
    "Zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    "Box": {"type": "object", "properties": {"id": {"$ref": "#/$defs/Zip"}}, "required": ["id"]},
}

# (schema of the parameter, text, JSON)
CASES: list[tuple[Any, str, str]] = [
    ({"type": "string"}, "10115", '"10115"'),
    (OPTIONAL, "10115", '"10115"'),
    (OPTIONAL, "null", '"null"'),
    ({"type": ["string", "null"]}, "true", '"true"'),
    ({"type": ["integer", "null"]}, "10115", "10115"),
    ({"type": ["integer", "null"]}, "null", "null"),
    ({"type": ["integer", "null"]}, "None", "null"),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "boolean"}, "true", "true"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", '"12"'),
    ({"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}, "12", "12"),
    ({"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}, "auto", '"auto"'),
    ({"oneOf": [{"type": "integer"}, {"const": "12"}]}, "12", '"12"'),
    ({"enum": [1, 2, "3"]}, "1", "1"),
    ({"enum": [1, 2, "3"]}, "3", '"3"'),
    ({"enum": [1, 2, 3]}, "3", "3"),
    ({"const": 5}, "5", "5"),
    ({"const": "5"}, "5", '"5"'),
    ({"$ref": "#/$defs/Unit"}, "feet", '"feet"'),
    ({"$ref": "#/$defs/Unit", "description": "d", "default": "feet"}, '"feet"', '"feet"'),
    ({"$ref": "#/$defs/Zip"}, "10115", '"10115"'),
    ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "integer"}]}, "10115", '"10115"'),
    ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "integer"}]}, "101", "101"),
    ({"allOf": [{"$ref": "#/$defs/Zip"}]}, "10115", '"10115"'),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "7", "7"),
    ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", "[1, 2]"),
    ({"type": "array", "items": {"$ref": "#/$defs/Box"}}, '[{"id": "10115"}]', '[{"id": "10115"}]'),
    ({"anyOf": [{"$ref": "#/$defs/Box"}, {"enum": ["x"]}]}, '{"id": "10115"}', '{"id": "10115"}'),
    # It meets nothing: a type that the schema allows.
    ({"type": "string", "maxLength": 3}, "10115", '"10115"'),
    ({"type": "integer", "maximum": 3}, "10115", "10115"),
    ({"type": "integer"}, "ten", '"ten"'),
    # Nothing says of which type it is.
    ({}, "10115", "10115"),
    (True, '{"a": 1}', '{"a": 1}'),
    ({"description": "d"}, "10 apples", '"10 apples"'),
    ({"$ref": "#/$defs/None"}, "1", "1"),
    ({"$ref": "#"}, "x", '"x"'),
    ({"type": 5}, "1", "1"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "integer"}, "9" * 400, "9" * 400),
    # Whether it meets the pattern is not known: it takes too long.
    ({"type": "string", "pattern": "^(a|a)*$"}, "a" * 90 + "b", '"' + "a" * 90 + 'b"'),
    ({"anyOf": [{"type": "string", "pattern": "^(a*)*$"}, {"type": "integer"}]}, "1" * 90, '"' + "1" * 90 + '"'),
    ({"type": "string", "pattern": "("}, "1", '"1"'),
]


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "$defs": DEFS}


WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "muse_glimmer": (
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">{}</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>"
    ),
}


@pytest.mark.parametrize("form", sorted(WRITTEN))
@pytest.mark.parametrize(("schema", "text", "value"), CASES, ids=lambda case: str(case)[:60])
def test_the_schema_decides_in_every_format_of_bare_text(form: str, schema: Any, text: str, value: str) -> None:
    whole = WRITTEN[form].replace("{}", text)
    for pieces in ([whole], list(whole), [whole[place : place + 3] for place in range(0, len(whole), 3)]):
        assert read(tool_parser(form, {"f": tool(schema)}), pieces) == ("", "", [("f", f'{{"a": {value}}}')])


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"additionalProperties": {"type": "string"}}, '"1"'),
        ({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, '"1"'),
        ({"patternProperties": {"^b": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, "1"),
        ({"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"a": {"type": "string"}}}}}, '"1"'),
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "string"}}}]}, '"1"'),
        ({"oneOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "string"}}}]}, '"1"'),
        ({"anyOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}, "1"),
        ({"additionalProperties": False}, "1"),
        ({"properties": [], "allOf": 3}, "1"),
    ],
    ids=str,
)
def test_the_schema_of_a_parameter_is_found_where_it_may_stand(parameters: Any, value: str) -> None:
    assert Argument(parameters, "a").value("1") == value


scalars = st.sampled_from(["", "a", "ab", "1", "12", "true", "null", "[1]", '{"k": 1}', 1, 12, 1.5, True, None])
TEXTS = [
    "",
    "a",
    "ab",
    "abc",
    "1",
    "12",
    "1.0",
    "1.5",
    "true",
    "null",
    "[]",
    "[1]",
    '["a"]',
    '"a"',
    '{"k": 1}',
    '{"k": "a"}',
]
leaves = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"]).map(lambda x: {"type": x}),
    st.lists(st.sampled_from(["string", "integer", "null", "array"]), min_size=1, max_size=2, unique=True).map(
        lambda x: {"type": x}
    ),
    st.lists(scalars, min_size=1, max_size=3).map(lambda x: {"enum": x}),
    scalars.map(lambda x: {"const": x}),
    st.sampled_from([{"type": "string", "pattern": "^[a1]+$"}, {"type": "string", "maxLength": 2}, {"minLength": 2}]),
    st.sampled_from([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}, {"type": "integer", "minimum": 2}]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=3)).map(
            lambda parts: {parts[0]: parts[1]}
        ),
        inner.map(lambda inner_schema: {"not": inner_schema}),
        inner.map(lambda inner_schema: {"type": "array", "items": inner_schema}),
        inner.map(lambda inner_schema: {"type": "object", "properties": {"k": inner_schema}, "required": ["k"]}),
        st.tuples(inner, inner, inner).map(lambda parts: {"if": parts[0], "then": parts[1], "else": parts[2]}),
    ),
    max_leaves=6,
)


def expected(parameters: dict[str, Any], text: str) -> str | None:
    """What the rule says, as `jsonschema` reads the schema; None where no candidate meets it."""
    judge = jsonschema.Draft202012Validator(parameters)
    if judge.is_valid({"a": text}):
        return json.dumps(text)
    if arguments.is_json(text) and judge.is_valid({"a": json.loads(text)}):
        return text
    return None


@pytest.mark.sampled(3)
@given(schema=trees, x=leaves, y=trees, text=st.sampled_from(TEXTS))
def test_the_rule_agrees_with_jsonschema(schema: Any, x: Any, y: Any, text: str) -> None:
    # "y" may refer to "x", and to itself only through the value.
    y = json.loads(json.dumps(y).replace("#/$defs/y", "#/$defs/x"))
    x = {"type": "string"} if "$ref" in x else x
    parameters = {"properties": {"a": schema}, "$defs": {"x": x, "y": y}}
    argument, right = Argument(parameters, "a"), expected(parameters, text)
    if argument.types is not None and right is not None:
        assert argument.value(text) == right
    if argument.takes_any_text:
        # What is sent before the end is known is what the end says.
        assert right == json.dumps(text)
    judge = jsonschema.Draft202012Validator(parameters)
    if argument.types is not None:
        for value in ["a", 1, 1.5, True, None, [1], {"k": 1}]:
            name = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
            if judge.is_valid({"a": value}):
                assert name.get(type(value), "null") in argument.types | (
                    {"integer"} if "number" in argument.types else set()
                )


def test_the_check_sees_a_rule_that_looks_at_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = tool({"anyOf": [{"type": "string"}, {"type": "integer"}]})
    monkeypatch.setattr(Argument, "value", lambda self, text: text if arguments.is_json(text) else json.dumps(text))
    assert Argument(parameters, "a").value("12") != expected(parameters, "12")


@pytest.mark.parametrize("schema", [{"type": "string"}, OPTIONAL])
def test_a_text_is_sent_as_it_comes_where_it_can_be_nothing_else(schema: Any) -> None:
    text = WRITTEN["qwen3_coder"].replace("{}", "1" * (2 * HOLD))
    result = parts(tool_parser("qwen3_coder", {"f": tool(schema)}), text)
    pieces = [part.arguments for part in result if isinstance(part, CallPart) and part.arguments]
    assert len(pieces) > HOLD
    assert json.loads("".join(pieces)) == {"a": "1" * (2 * HOLD)}


def test_a_value_waits_while_its_type_is_open() -> None:
    schema = tool({"anyOf": [{"type": "string", "maxLength": HOLD}, {"type": "integer"}]})
    text = WRITTEN["qwen3_coder"].replace("{}", "1" * (2 * HOLD))
    for pieces in splits(text, longest=40):
        result = parts(tool_parser("qwen3_coder", {"f": schema}), pieces)
        messages = [part.arguments for part in result if isinstance(part, CallPart) and part.arguments]
        assert "".join(messages) == f'{{"a": {"1" * (2 * HOLD)}}}'
        assert all('"1' not in piece for piece in messages)


@pytest.mark.parametrize(
    ("pattern", "text", "many"),
    [
        ("^[0-9]{5}$", "10115" * 20, False),
        ("^[a-z]+@[a-z]+$", "a" * 100, False),
        ("^(a|a)*$", "a" * 40, True),
        ("^(a*)*$", "a" * 40, True),
        ("^(a?){60}$", "a" * 40, True),
        ("a*a*a*a*a*b", "a" * 200, True),
        ("(?=(a+)+$)b", "a" * 40, True),
        ("x" * 2000, "x", True),
    ],
)
def test_the_work_of_a_pattern_is_known_before_it_runs(pattern: str, text: str, many: bool) -> None:
    assert (num_letters(pattern, len(text), evaluate.MAX_LETTERS) > evaluate.MAX_LETTERS) is many
    if many:
        with pytest.raises(evaluate.UndecidedError):
            evaluate.holds({"pattern": pattern}, text, lambda pointer: True)
    else:
        assert evaluate.holds({"pattern": pattern}, text, lambda pointer: True) == bool(re.search(pattern, text))


def test_a_strangers_schema_takes_no_more_than_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    doubling = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {"type": "null"}}
    steps = 0
    spend = evaluate._Evaluation._spend

    def counted(self: Any, num: int) -> None:
        nonlocal steps
        steps += 1
        spend(self, num)

    monkeypatch.setattr(evaluate._Evaluation, "_spend", counted)
    parameters = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": doubling}
    assert Argument(parameters, "a").value("null") == "null"
    circle = {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}, {"type": "string"}]}}}
    assert Argument(circle, "a").value("x") == '"x"'
    with pytest.raises(evaluate.UndecidedError):
        evaluate.holds({"items": {"enum": list(range(1000))}}, list(range(1000)), lambda pointer: True)
    assert 0 < steps < 3 * evaluate.MAX_STEPS
