"""Calls that must be: what the grammar of a format lets through, the format's parser reads, and it obeys the schemas.

A vocabulary of bytes (and of special tokens) is walked at random under the grammar.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from tests.support.reading import read, splits, thought_parser, tool_parser

from headrace.grammar.compile import build_matcher, compile_grammar
from headrace.grammar.vocabulary import Vocabulary, make_tokenizer
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.serve.call.dialect import Dialect
from headrace.text.reasoning import STYLES
from headrace.text.tools import formats
from headrace.text.tools.choice import ToolUse

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "[THINK]", "[/THINK]"]
TOKENS = [bytes([i]) for i in range(256)] + [text.encode() for text in SPECIAL] + [b"<eos>"]
EOS = len(TOKENS) - 1
IDS = {text: 256 + i for i, text in enumerate(SPECIAL)}
TOKENIZER = make_tokenizer(Vocabulary(TOKENS, [*IDS.values(), EOS], [EOS]))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 50},
        "unit": {"$ref": "#/$defs/unit"},
        "exact": {"type": "boolean"},
        "where": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["count", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"type": "string", "enum": ["metres", "feet"]}},
}
TEXT = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 12}}, "required": ["text"]}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("measure", SCHEMA), ("say.it", TEXT), ("maybe", OPTIONAL), ("nothing", None))
]
TEMPLATES = {"mistral": "[ARGS]", "deepseek_v3": "```json"}


ENDS = {
    "glm45": b"</arg_value>\n",
    "qwen3_coder": b"\n</parameter>\n",
    "muse_glimmer": b"</atem:parameter>\n",
    "gemma4": b'<|"|>',
    "minimax_m2": b"</parameter>\n",
    "minimax_m3": b"]<]minimax[>[</text>",
    "seed_oss": b"</parameter>\n",
    "deepseek_v32": "</｜DSML｜parameter>\n".encode(),
    "deepseek_v4": "</｜DSML｜parameter>\n".encode(),
    "hy_v3": b"</arg_value:opensource>\n",
    "hy_v3_plain": b"</arg_value>\n",
}
"""Of free text, in which nearly all is allowed, so that its end would not come by chance."""


OPENS = "<|start|>assistant"
"""The end of a prompt, for answers that are messages."""


def walk(constraint: StructuredOutputs, seed: int, end: bytes = b"", enough: int = 3000) -> str:
    """A text that follows the constraint to its end; ASCII rather than other bytes, and `end` rather soon."""
    draw = random.Random(seed)
    matcher = build_matcher(TOKENIZER, compile_grammar(constraint), constraint)
    reply: list[int] = []
    while len(reply) < enough:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(TOKENS)) if mask[i // 8] >> (i % 8) & 1]
        assert allowed, bytes(i for i in reply if i < 256)
        tail = bytes(i for i in reply[-20:] if i < 256)
        likely = [i for i in allowed if i < 256 and chr(i) in 'abc019 ."\\{}[](),:<\n'] or allowed
        overlap = max((n for n in range(len(end)) if tail.endswith(end[:n])), default=0)
        if end and len(allowed) > 100 and end[overlap] in allowed and draw.random() < (0.95 if overlap else 0.2):
            likely = [end[overlap]]
        if EOS in allowed and draw.random() < 0.6:
            break
        token = draw.choice(likely if draw.random() < 0.9 else allowed)
        if token == EOS:
            break
        assert matcher.consume_token(token)
        reply.append(token)
    else:
        raise AssertionError("the grammar lets the answer run on")
    return b"".join(TOKENS[i] for i in reply).decode()


def held(name: str, use: ToolUse, template: str = "", token_ids: Mapping[str, int] | None = None) -> StructuredOutputs:
    result, enforced = Dialect(name, template=template, token_ids=token_ids or {}).constraint(use, "", None)
    assert enforced
    assert result is not None
    return result


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", sorted(formats.FORMATS))
@pytest.mark.parametrize("other", [False, True], ids=["", "other template"])
def test_what_the_grammar_lets_through_is_calls(name: str, other: bool) -> None:
    for choice, parallel in (("required", True), ("required", False), ("measure", True)):
        named = {"type": "function", "function": {"name": choice}}
        # A message to a tool is the last of an answer.
        is_message = formats.FORMATS[name].headers is not None
        use = ToolUse.of(TOOLS, choice if choice == "required" else named, parallel and not is_message)
        marks = formats.FORMATS[name].special_texts()
        constraint = held(
            name, use, TEMPLATES.get(name, "") if other else "", {m: i for m, i in IDS.items() if m in marks}
        )
        most = 0
        for seed in range(8):
            text = walk(constraint, seed, ENDS.get(name, b""))
            content, _, calls = read(tool_parser(name, use.schemas, enforced=True, prompt=OPENS), [text])
            assert content.strip() == "", text
            assert calls, text
            for tool, arguments in calls:
                jsonschema.validate(json.loads(arguments), dict(use.schemas[tool]) | {"additionalProperties": False})
            most = max(most, len(calls))
            assert len(calls) == 1 or use.parallel
            if seed < 2:
                for pieces in splits(text, longest=60):
                    assert read(tool_parser(name, use.schemas, enforced=True, prompt=OPENS), pieces)[2] == calls
        assert most > 1 or not use.parallel


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
def test_bare_text_is_held_to_what_it_can_be(name: str) -> None:
    def form(**schema: Any) -> StructuredOutputs:
        properties = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
        return held(
            name,
            ToolUse.of([{"type": "function", "function": {"name": "f", "parameters": properties}}], "required", True),
        )

    for seed in range(5):
        for constraint, fits in ((form(enum=["x", "y z"]), {"x", "y z"}), (form(const="w"), {"w"})):
            [(_, arguments)] = read(
                tool_parser(name), [walk(constraint, seed).split("</tool_call>")[0] + "</tool_call>"]
            )[2]
            assert json.loads(arguments)["a"] in fits
    # What bare text can not be held to stands there as JSON, with quotes, and is read so.
    patterned = {"type": "string", "pattern": '^"?b{1,3}$'}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": patterned}, "required": ["a"]}}
    use = ToolUse.of([{"type": "function", "function": tool}], "required", False)
    for seed in range(5):
        text = walk(held(name, use), seed)
        [(_, arguments)] = read(tool_parser(name, use.schemas, enforced=True), [text])[2]
        jsonschema.validate(json.loads(arguments), tool["parameters"])


def test_the_walk_sees_a_grammar_of_another_format() -> None:
    use = ToolUse.of(TOOLS, "required", True)
    text = walk(held("hermes", use), 1)
    assert read(tool_parser("mistral", use.schemas, enforced=True), [text])[2] == []


@pytest.mark.parametrize("style", sorted(name for name, style in STYLES.items() if style.headers is None))
def test_reasoning_comes_before_whatever_form(style: str) -> None:
    opening, closing = STYLES[style].openings[0], STYLES[style].closings[0]
    special = {mark: IDS[mark] for mark in (opening, closing) if mark in IDS}
    dialect = Dialect("hermes", style, token_ids=special)
    none = ToolUse.of(None, None, True)
    form = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    closed = StructuredOutputs(json=form.json, disable_additional_properties=True)
    for prompt, inside in ((f"x{opening}\n", True), (f"x{opening}\n\n{closing}\n\n", False)):
        constraint, enforced = dialect.constraint(none, prompt, closed)
        assert constraint is not None
        assert not enforced
        assert (constraint.prefix is None) == (not inside)
        for written, allowed in ((f'hm{closing}\n\n{{"a": true}}', inside), ('{"a": true}', not inside)):
            assert follows(constraint, written, special) == allowed
            if allowed:
                content, reasoning, _ = read(thought_parser(style, inside), [written])
                assert (json.loads(content), reasoning) == ({"a": True}, "hm" if inside else "")
    undecided, _ = dialect.constraint(none, "x", closed)
    assert undecided is not None
    if not STYLES[style].begins_inside:
        assert follows(undecided, '{"a": true}', special)
        assert follows(undecided, f'{opening}hm{closing}{{"a": true}}', special)
    assert not follows(undecided, f'{opening}hm{closing}"a"', special)


@pytest.mark.parametrize("style", sorted(name for name, style in STYLES.items() if style.headers is not None))
def test_a_form_holds_for_the_last_of_several_messages(style: str) -> None:
    marks = STYLES[style]
    none = ToolUse.of(None, None, True)
    form = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    constraint, _ = Dialect(None, style).constraint(none, OPENS, form)
    assert constraint is not None
    thought, answer = f"{marks.openings[0]}hm{marks.closings[0]}{OPENS}", f'{marks.before_content}{{"a": true}}'
    for written in (answer, thought + answer):
        assert follows(constraint, written, {})
        content, reasoning, _ = read(thought_parser(style, False, prompt=OPENS), [written])
        assert (json.loads(content), reasoning) == ({"a": True}, "hm" if written != answer else "")
    assert not follows(constraint, thought + '{"a": true}', {})
    assert not follows(constraint, f"{marks.before_content}1", {})


def follows(constraint: StructuredOutputs, text: str, special: Mapping[str, int]) -> bool:
    """Whether `text` is a whole answer under the constraint."""
    matcher = build_matcher(TOKENIZER, compile_grammar(constraint), constraint)
    while text:
        mark = next((mark for mark in special if text.startswith(mark)), None)
        head = mark or text[0]
        if not all(matcher.consume_token(i) for i in ([special[mark]] if mark else head.encode())):
            return False
        text = text[len(head) :]
    return bool(matcher.is_accepting())


def test_tools_and_a_json_form_are_calls_or_json() -> None:
    use = ToolUse.of(TOOLS, "auto", True)
    structured_outputs = StructuredOutputs(
        json={"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    )
    constraint, enforced = Dialect("hermes").constraint(use, "", structured_outputs)
    assert constraint is not None
    assert enforced
    assert follows(constraint, '{"a": null}', {})
    assert follows(constraint, '<tool_call>\n{"name": "say.it", "arguments": {"text": "x"}}\n</tool_call>', {})
    assert not follows(constraint, '{"a": 1}', {})
    assert not follows(constraint, "plain", {})


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (3, "format.type"),
        ({"type": "magic"}, "format.type"),
        ({"type": "const_string", "value": "x", "more": 1}, "format.more"),
        ({"type": "const_string"}, "format"),
        ({"type": "sequence", "elements": []}, "format"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "json_schema", "json_schema": {}}]},
            "format",
        ),
        ({"type": "or", "elements": [{"type": "tag", "begin": 1}]}, "format.elements[0]"),
    ],
)
def test_a_format_that_is_none_is_refused_naming_the_place(part: Any, field: str) -> None:
    tag = json.dumps({"type": "structural_tag", "format": part})
    with pytest.raises(RequestError) as caught:
        compile_grammar(StructuredOutputs(structural_tag=tag))
    assert caught.value.field == f"structured_outputs.structural_tag.{field}"


CUSTOM = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: ("go" | "\\"" /[0-9]\\n/)'}}
CUSTOMS = [{"type": "custom", "custom": {"name": "patch", "format": CUSTOM}}, *TOOLS]
TAGGED = {name for name, each in formats.FORMATS.items() if each.layouts[0].body in ("tagged", "xml", "bare")}


@pytest.mark.parametrize("name", sorted(set(formats.FORMATS) - TAGGED))
def test_the_text_of_a_custom_tool_follows_its_grammar(name: str) -> None:
    use = ToolUse.of(CUSTOMS, {"type": "custom", "custom": {"name": "patch"}}, True)
    marks = formats.FORMATS[name].special_texts()
    constraint = held(name, use, token_ids={m: i for m, i in IDS.items() if m in marks})
    inputs = set()
    for seed in range(8):
        parser = tool_parser(name, use.schemas, enforced=True, prompt=OPENS)
        (call,) = read(parser, [walk(constraint, seed)])[2]
        inputs.add(json.loads(call[1])["input"])
    assert all(re.fullmatch(r'go|"[0-9]\n', text) for text in inputs)
    assert len(inputs) > 1


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_bare_text_can_not_be_held_to_a_grammar(name: str) -> None:
    with pytest.raises(RequestError, match="bare text"):
        Dialect(name).constraint(ToolUse.of(CUSTOMS, "required", True), "", None)
    # Where the model may choose, it is not held to it, and the caller is warned.
    assert Dialect(name).constraint(ToolUse.of(CUSTOMS, "auto", True), "", None) == (None, False)


def test_calls_within_free_text_are_held_to_grammars_alone() -> None:
    constraint = held("hermes", ToolUse.of(CUSTOMS, "auto", True))

    def takes(text: str) -> bool:
        matcher = build_matcher(TOKENIZER, compile_grammar(constraint), constraint)
        return all(matcher.consume_token(letter) for letter in text.encode()) and bool(matcher.is_accepting())

    def call(tool: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'

    assert takes("No <tool> is called.")
    assert takes("I see. " + call("patch", '{"input": "\\"7\\n"}') + "\n" + call("measure", '{"x": [1]}') + " Done.")
    assert not takes(call("patch", '{"input": "stop"}'))
    assert not takes(call("patch", "{}"))
    assert not takes(call("unknown", "{}"))
    # Control: without a grammar nothing is held.
    assert Dialect("hermes").constraint(ToolUse.of(TOOLS, "auto", True), "", None) == (None, False)
