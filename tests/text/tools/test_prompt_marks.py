"""Answers whose first mark is the end of the prompt."""

from __future__ import annotations

import pytest
from tests.support.reading import tool_parser

from headrace.text.outputs import MessageBuilder


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    ("prompt", "answer", "content", "expected"),
    [
        ("<a>>>>", "all\nHello", "Hello", []),
        ("<a>>>>", 'f\n{"a": 1}>>>g\n{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ("<a>>>>", "Hello", "Hello", []),
        ("<a>>>>", 'f\n{"a": ', 'f\n{"a": ', []),
        ("<a>", "all\nHello", "all\nHello", []),
    ],
)
def test_K17_the_prompt_may_end_with_the_first_mark(
    step: int, prompt: str, answer: str, content: str, expected: list[tuple[str, str]]
) -> None:
    message, parser = MessageBuilder(), tool_parser("functionary_v32", prompt=prompt)
    for start in range(0, len(answer), step):
        for part in parser.feed(answer[start : start + step], start + step >= len(answer)):
            message.add(part)
    assert (message.content or "") == content
    assert [(call["name"], call["arguments"]) for call in message.calls] == expected
