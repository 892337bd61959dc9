"""Answers that are several messages (gpt-oss, Muse Glimmer), and what holds for calls and marks in every format."""

from __future__ import annotations

import itertools

import pytest
from tests.support.reading import Read, read, splits

from headrace.text.outputs import Content, Reasoning
from headrace.text.reasoning import STYLES
from headrace.text.tools.answers import new_parser
from headrace.text.tools.formats import FORMATS
from headrace.text.tools.parser import AnswerForm, Bounds, ToolParser

OSS = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}}}}


def parser(
    tools: str, style: str | None = None, prompt: str = OSS, bounds: Bounds = Bounds(), special: tuple[str, ...] = ()
) -> ToolParser:
    ids = (f"id{number}" for number in itertools.count())
    marks = STYLES[style] if style else AnswerForm().style
    form = AnswerForm(FORMATS[tools], marks, frozenset(special), SCHEMAS)
    return new_parser(form, bounds, lambda: next(ids), prompt)


THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
HARMONY: list[tuple[str, str, Read]] = [
    (OSS, f"{THOUGHT}<|channel|>final<|message|>Hello!<|return|>", ("Hello!", "hm", [])),
    (OSS, f"{THOUGHT}{CALL}", ("", "hm", [("f", '{"a": 1}')])),
    # The receiver before the channel; the form without its mark; no form; no arguments.
    (OSS, ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "", [("f", '{"a": 1}')])),
    (OSS, "<|channel|>commentary to=functions.f<|message|><|call|>", ("", "", [("f", "{}")])),
    (OSS, '<|channel|>analysis to=functions.f<|message|>{"a": 1}<|call|>', ("", "", [("f", '{"a": 1}')])),
    # A preamble, and two calls.
    (
        OSS,
        f"{THOUGHT}<|channel|>commentary<|message|>First.<|end|><|start|>assistant{CALL}<|start|>assistant{CALL}",
        ("First.", "hm", [("f", '{"a": 1}')] * 2),
    ),
    (
        OSS,
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Then.<|return|>",
        ("First.\n\nThen.", "", []),
    ),
    # Its own tools.
    (
        OSS,
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|><|start|>assistant<|channel|>commentary "
        'to=browser.search<|message|>{"query": "x"}<|call|><|start|>assistant<|channel|>final<|message|>2',
        ("2", '1 + 1\n\n{"query": "x"}', []),
    ),
    # A prompt that ends in a header, in a message, or with no header; an answer without one.
    (f"{OSS}<|channel|>final<|message|>", "Hi<|return|>", ("Hi", "", [])),
    (f"{OSS}<|channel|>final<|message|>Hel", "lo<|return|>", ("lo", "", [])),
    ("", f"{THOUGHT}<|channel|>final<|message|>Hi", ("Hi", "hm", [])),
    (OSS, "Hi there", ("Hi there", "", [])),
    (OSS, "Hi", ("Hi", "", [])),
    (OSS, "", ("", "", [])),
    # Arguments that are none are text; a header that is cut is nothing.
    (OSS, "<|channel|>commentary to=functions.f<|message|>{oops<|call|>", ("{oops", "", [])),
    (OSS, f"{THOUGHT}<|channel|>commentary to=functio", ("", "hm", [])),
    (OSS, f"{THOUGHT}<|channel|>final", ("", "hm", [])),
]


@pytest.mark.parametrize(("prompt", "text", "expected"), HARMONY)
def test_messages_of_gpt_oss(prompt: str, text: str, expected: Read) -> None:
    for pieces in ([text], *splits(text)):
        assert read(parser("openai", "openai_gptoss", prompt), pieces, cut=True) == expected, pieces


def test_messages_of_muse_glimmer() -> None:
    block = (
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
    )
    block += "</atem:function_calls>"
    text = f" to=self<|message|>hm<|eom|>{OSS} to=user<|message|>Well.<|eom|>{OSS} to=f<|message|>{block}<|eot|>"
    for pieces in ([text], *splits(text, longest=40)):
        content = read(parser("muse_glimmer", "muse_glimmer"), pieces)
        assert content == ("Well.", "hm", [("f", '{"a": 1}')])


def test_a_call_that_a_limit_cuts_leaves_no_marks_under_a_grammar() -> None:
    """Neither its beginning as content, nor the arguments as if they were whole."""
    for tools, text in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 12}}\n</tool_call>'),
        ("openai", CALL),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"),
    ):
        for end in range(len(text)):
            bounds = Bounds(enforced=True, distinct=True)
            content, _, calls = read(parser(tools, bounds=bounds), [text[:end]], cut=True)
            assert content == "", text[:end]
            whole = [arguments for _, arguments in calls if arguments.endswith("}")]
            # Only a text with whole arguments gives whole ones.
            assert not whole or "1}" in text[:end] or "2}" in text[:end] or "12</arg_value>" in text[:end]
        # Control: without a grammar, what is no call is content.
        assert read(parser("hermes"), ["<tool_call>{"], cut=True)[0] == "<tool_call>{"


def test_a_call_made_twice_ends_an_answer_that_must_be_calls() -> None:
    one, other = (f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>' for number in (1, 2))
    for pieces in splits(one + other + one + other, longest=40):
        bounds = Bounds(enforced=True, distinct=True)
        result = parser("hermes", bounds=bounds)
        assert [arguments for _, arguments in read(result, pieces)[2]] == ['{"a": 1}', '{"a": 2}']
        assert result.ended
    # Control: where it need not be, both are made.
    assert len(read(parser("hermes"), [one + one])[2]) == 2


def test_special_tokens_are_never_content() -> None:
    special = ("<|tool_call|>", "<|/tool_call|>")
    result = parser("phi4_mini_json", special=special)
    assert read(result, ["hello", "wor<|/tool", "_call|>ld <|tool_call|>[oops"])[0] == "helloworld [oops"
    # Control: marks that are plain text are.
    assert "<|/tool_call|>" in read(parser("phi4_mini_json"), ["wor<|/tool_call|>ld"])[0]


def test_a_call_in_the_reasoning_is_one_of_a_tool_that_there_is() -> None:
    for name, calls in (("f", [("f", "{}")]), ("unknown", [])):
        text = f'<think>a <tool_call>{{"name": "{name}"}}</tool_call> b</think>c'
        content = read(parser("hermes", "qwen3", ""), [text])
        assert content[2] == calls
        assert content[0] == "c"
        # Under a grammar, those after the reasoning are the answer's.
        assert read(parser("hermes", "qwen3", "", Bounds(enforced=True)), [text])[2] == []


def test_texts_that_a_call_parts_have_a_gap() -> None:
    parts = parser("hermes", "qwen3", "").feed('a\n<tool_call>{"name": "f"}</tool_call>\n\nb', True)
    assert [part for part in parts if isinstance(part, Content)] == [Content("a"), Content("b", "\n\n")]
    thoughts = parser("hermes", "qwen3", "").feed("<think>a</think><think>b</think>c", True)
    assert [part for part in thoughts if isinstance(part, Reasoning)] == [Reasoning("a"), Reasoning("b", "\n\n")]
