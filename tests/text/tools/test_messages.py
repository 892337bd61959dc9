"""Answers that are several messages (gpt-oss, Muse Glimmer), and what holds for calls and marks in every format."""

from __future__ import annotations

import itertools

import pytest
from tests.support.reading import Read, read, splits
from tests.support.speaking import Answer, says_first, speak

from headrace.text.outputs import Content, Reasoning
from headrace.text.reasoning import NO_STYLE, STYLES
from headrace.text.tools.answers import new_parser
from headrace.text.tools.arguments import is_json
from headrace.text.tools.formats import FORMATS, ToolFormat
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


@pytest.mark.parametrize("tools", sorted(FORMATS))
def test_a_call_that_a_limit_cuts_is_none_of_the_content(tools: str) -> None:
    """The model writes calls as it likes: what has begun as one comes neither as content nor as whole arguments."""
    tool_format = FORMATS[tools]
    style = "openai_gptoss" if tools == "openai" else "muse_glimmer" if tools == "muse_glimmer" else None
    content = "" if says_first(tool_format) else "I look."
    marks = STYLES[style] if style else NO_STYLE
    text = speak(Answer("", content, (("f", {"a": 12}), ("f", {"a": 34}))), tool_format, marks, OSS)
    whole = read(parser(tools, style), [text])[2]
    assert whole == [("f", '{"a": 12}'), ("f", '{"a": 34}')]
    for end in range(len(text)):
        said, _, calls = read(parser(tools, style), [text[:end]], cut=True)
        assert read(parser(tools, style), list(text[:end]), cut=True)[::2] == (said, calls)
        if calls or not content.startswith(said):
            # Before the first call, what is less than a mark may still be a word.
            rest = said.removeprefix(content).strip()
            assert not rest or (not calls and any(mark.startswith(rest) for mark in begins(tool_format))), text[:end]
        for (_, arguments), (_, full) in zip(calls, whole, strict=False):
            assert arguments == full or not is_json(arguments), text[:end]


def begins(tool_format: ToolFormat) -> list[str]:
    """What is no sign of a call yet: a part of a mark, or a beginning that other texts have too."""
    headers = tool_format.headers.special_texts() if tool_format.headers else ()
    marks = [mark for mark in (*tool_format.all_openers(), *headers) if mark]
    words = [f'{mark}[{{"name": "f' for mark in marks if mark.isalnum()]
    return [*(mark[:-1] for mark in marks), *words, '{"name": "f', "[", "f"]


def test_what_a_model_ends_itself_is_content() -> None:
    """Control: a call that is not well-formed, though no limit has cut it, is text."""
    for text in ("<tool_call>{", "<tool_call>oops"):
        assert read(parser("hermes"), [text])[0] == text
    # Nor is a text that only begins as a call does.
    for tools, text in (("llama3_json", '{"name": "Bo'), ("hermes", "<tool_call>oops"), ("firefunction", "functools")):
        assert read(parser(tools), [text], cut=True)[0] == text


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
