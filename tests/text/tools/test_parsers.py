"""The parsers of tool calls and of reasoning: what each format reads, whatever the pieces; what it does not lose."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reading import Read, parts, read, splits, thought_parser, tool_parser
from tests.text.tools.written import CALL, CASES, ILL_FORMED, LONG, SCHEMAS

from headrace.text.outputs import CallPart, Content, ContentParser, MessageParser
from headrace.text.reasoning import STYLES
from headrace.text.tools import formats
from headrace.text.tools.parser import HOLD, MAX_HELD
from headrace.text.tools.reader import SPACE, Reader


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_each_format_whatever_the_pieces(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for enforced in (False, True):
        assert read(tool_parser(form, SCHEMAS), [text]) == (content, "", calls)
        whole = read(tool_parser(form, SCHEMAS, enforced), [text])
        for pieces in splits(text):
            assert read(tool_parser(form, SCHEMAS, enforced), pieces) == whole, pieces
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("form", "text"), ILL_FORMED)
def test_S_06_an_ill_formed_call_is_content(form: str, text: str) -> None:
    # Reading by pieces shows what was said too early: it could not be taken back.
    assert len(text) <= HOLD
    for pieces in ([text], *splits(text)):
        assert read(tool_parser(form, SCHEMAS), pieces) == (text, "", []), pieces


def test_the_check_of_pieces_sees_a_parser_that_looks_at_them() -> None:
    class Hasty:
        """Takes a mark that was cut in two for content."""

        ended = False

        def __init__(self) -> None:
            self.inner = tool_parser("hermes")

        def feed(self, text: str, final: bool, cut: bool = False) -> list[Any]:
            return [Content(text)] if text and "<tool_call>" not in text else self.inner.feed(text, final)

    form, text, *_ = CASES[0]
    assert form == "hermes"
    assert any(read(Hasty(), pieces) != read(tool_parser(form), [text]) for pieces in splits(text))


def test_a_call_streams_name_first_then_arguments() -> None:
    arguments = json.dumps({"text": LONG})
    text = f'Hi <tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for enforced in (False, True):
        result = parts(tool_parser("hermes", enforced=enforced), text)
        calls = [part for part in result if isinstance(part, CallPart)]
        assert calls[0] == CallPart(0, "id0", "f", "")
        assert all(call.name is None and call.id == "id0" and call.index == 0 for call in calls[1:])
        assert "".join(call.arguments for call in calls) == arguments
        # Letter by letter, but for what was held back to see whether it is a call.
        assert len(calls) >= (len(arguments) if enforced else len(arguments) - HOLD)


def test_a_short_call_is_told_when_it_is_whole() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parser = tool_parser("hermes")
    assert not any(parser.feed(letter, False) for letter in text[:-1])
    assert [type(part) for part in parser.feed(text[-1], True)] == [CallPart, CallPart]


@pytest.mark.parametrize("cut", [HOLD + 40, HOLD + 60])
def test_a_long_call_that_breaks_off_has_no_whole_arguments(cut: int) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"text": "{LONG}", "b": oops}}}}</tool_call>'
    for written, content in ((text, "oops}}</tool_call>"), (text[:cut], "")):
        expected = read(tool_parser("hermes"), [written])
        assert expected[0] == content
        [(name, arguments)] = expected[2]
        assert name == "f"
        with pytest.raises(ValueError, match="delimiter|Unterminated|Expecting"):
            json.loads(arguments)
        assert written.startswith(f'<tool_call>{{"name": "f", "arguments": {arguments}')
        assert all(read(tool_parser("hermes"), pieces) == expected for pieces in splits(written))


def test_a_call_too_long_to_hold_is_content() -> None:
    text = "<tool_call>{" + '"x": 1, ' * (MAX_HELD // 8 + 600) + '"name": "f"}</tool_call>'
    whole = read(tool_parser("hermes"), [text])
    assert whole == (text, "", [])
    for size in (1000, 4096, 77_777):
        assert read(tool_parser("hermes"), [text[i : i + size] for i in range(0, len(text), size)]) == whole


def test_an_answer_of_one_call_ends_with_it() -> None:
    text = "".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in "fgh")
    for pieces in ([text], *splits(text)):
        parser = tool_parser("hermes", single=True)
        assert read(parser, pieces)[2] == [("f", "{}")]
        assert parser.ended


MESSAGES = {form for form, each in formats.FORMATS.items() if each.headers is not None}
"""Formats whose answers are messages with headers, which are never content."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", sorted(set(formats.FORMATS) - MESSAGES))
@given(data=st.data())
def test_no_text_is_lost_or_refused(form: str, data: st.DataObject) -> None:
    """Texts made of a format's own pieces: whatever is no call comes out as it went in, in whatever pieces."""
    texts = [text for name, text, *_ in CASES if name == form] + [text for name, text in ILL_FORMED if name == form]
    marks = [
        *formats.FORMATS[form].special_texts(),
        '{"name": "f"',
        "}",
        "{",
        "[",
        "]",
        '"',
        "\\",
        ",",
        "(",
        ")",
        "=",
        " ",
        "\n",
        "é",
    ]
    cut = st.sampled_from(texts).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda at: text[min(at) : max(at)]
        )
    )
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(marks), st.sampled_from(texts), cut, st.text(max_size=8))))
    text = "".join(pieces)
    whole = read(tool_parser(form, SCHEMAS), [text])
    assert read(tool_parser(form, SCHEMAS), pieces) == whole
    assert read(tool_parser(form, SCHEMAS), list(text)) == whole
    content, _, calls = whole
    # The mark of content, which functionary's answers have, is not content.
    mark = formats.FORMATS[form].content
    if not calls and not (mark and formats.FORMATS[form].marks[0] + mark in text):
        assert content == text
    assert told(text, content)


def told(text: str, content: str) -> bool:
    """Whether the letters of `content` stand in `text`, in their order."""
    letters = iter(text)
    return all(letter in letters for letter in content if not letter.isspace())


ANYWHERE = sorted({form for form, *_ in CASES} - MESSAGES - {"llama3_json", "pythonic", "functionary_v32", "glm4"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ANYWHERE)
@given(data=st.data())
def test_every_character_is_told_or_belongs_to_a_call(form: str, data: st.DataObject) -> None:
    """Good calls, broken ones and other text in a row: good ones become calls, all else but space comes out."""
    good = [(text, content, calls) for name, text, content, calls in CASES if name == form and text[-1] in ">]\n"]
    # One whose string or value has no end would take the next row for its own.
    broken = [(text, text, []) for name, text in ILL_FORMED if name == form and text[-1] in ">]"]
    other = st.text(st.characters(blacklist_characters="<[{§", codec="utf-8")).map(lambda text: (text, text, []))
    kinds = [st.sampled_from(rows) for rows in (good, broken) if rows]
    rows = data.draw(st.lists(st.one_of(*kinds, other), max_size=8))
    text = "§".join(row[0] for row in rows)
    content, _, calls = read(tool_parser(form, SCHEMAS), [text])
    assert "".join(content.split()) == "".join("§".join(row[1] for row in rows).split())
    assert calls == [call for row in rows for call in row[2]]


GROWING = [
    ("hermes", '<tool_call>{"x": "', "y"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "y"),
    ("hermes", "", "<tool_call>"),
    ("hermes", "", " "),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "1, "),
    ("hermes", '<tool_call>{"arguments": {', '"a": 1, '),
    ("llama3_json", "", '{"'),
    ("pythonic", "[f(", "a="),
    ("pythonic", "[f(a='", "\\\\"),
    ("qwen3_coder", "<function=", "f"),
    ("qwen3_coder", "<function=f><parameter=s>", "</para"),
    ("deepseek_v3", CALL, "<｜tool▁s"),
    ("glm45", "<tool_call>f<arg_key>", "</arg_"),
    ("mistral", "[TOOL_CALLS]", "n"),
]


def work_per_letter(monkeypatch: pytest.MonkeyPatch, form: str, start: str, grows: str, thinks: bool) -> list[float]:
    """Letters that a parser copies or has before it, for each letter that comes: of a short text and of a long one."""
    work = Counter[str]()
    push, since = Reader.push, Reader.since

    def counted_push(self: Reader, text: str, final: bool, keep: int) -> None:
        push(self, text, final, keep)
        work["letters"] += len(self.text)

    def counted_since(self: Reader, position: int) -> str:
        work["letters"] += self.position - position
        return since(self, position)

    monkeypatch.setattr(Reader, "push", counted_push)
    monkeypatch.setattr(Reader, "since", counted_since)
    each = []
    for size in (2_000, 20_000):
        text = start + grows * (size // len(grows))
        work.clear()
        read(tool_parser(form, SCHEMAS, style="qwen3" if thinks else None, prompt="<think>"), text)
        each.append(work["letters"] / len(text))
    return each


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "start", "grows"), GROWING)
@pytest.mark.parametrize("thinks", [False, True])
def test_S_10_the_work_grows_as_the_text(
    form: str, start: str, grows: str, thinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = work_per_letter(monkeypatch, form, start, grows, thinks)
    assert long < 1.2 * short + 1


def test_S_10_the_check_sees_a_reader_that_hoards(monkeypatch: pytest.MonkeyPatch) -> None:
    def hoarding(self: Reader, text: str, final: bool, keep: int) -> None:
        self.text, self.final = self.text + text, final

    monkeypatch.setattr(Reader, "push", hoarding)
    short, long = work_per_letter(monkeypatch, "hermes", GROWING[0][1], "y", False)
    assert long > 5 * short


# Reasoning.

THOUGHTS: list[tuple[str, bool, str, Read]] = [
    ("qwen3", False, "<think>\nhm\n</think>\n\nAnswer\n", ("Answer\n", "hm", [])),
    ("qwen3", True, "hm\n</think>\n\nAnswer", ("Answer", "hm", [])),
    ("qwen3", True, "<think>a</think>b", ("b", "a", [])),
    ("qwen3", False, "  just text </think>", ("  just text </think>", "", [])),
    ("qwen3", False, "<think>\n\n</think>\n\nhi", ("hi", "", [])),
    ("qwen3", False, "<thin", ("<thin", "", [])),
    # It ended by itself, and nothing else came: the reasoning is the answer too.
    ("qwen3", True, "never ends </thin", ("never ends </thin", "never ends </thin", [])),
    ("qwen3", True, "a</think>\n<think>b</think>c", ("c", "a\n\nb", [])),
    ("qwen3", True, "a</think><think>b", ("b", "a\n\nb", [])),
    ("qwen3", True, "a</think>Say <think>b</think>", ("Say <think>b</think>", "a", [])),
    ("seed_oss", False, "<seed:think>a</seed:think>b", ("b", "a", [])),
    ("minimax_m3", False, "<mm:think>a</mm:think>b", ("b", "a", [])),
    ("hy_v3", True, "a</think:opensource>b", ("b", "a", [])),
    ("apertus", False, "<|inner_prefix|>a<|inner_suffix|>b", ("b", "a", [])),
    ("ernie45", True, "a\n</think>\n\n<response>\nb\n</response>\n", ("b", "a", [])),
    ("hunyuan_a13b", False, "<think>\na\n</think>\n<answer>\nb\n</answer>", ("b", "a", [])),
    ("qwen3", True, "a </think> b </think> c", ("b </think> c", "a", [])),
    ("deepseek_r1", True, "x</think>y", ("y", "x", [])),
    ("mistral", False, "[THINK]x[/THINK]y", ("y", "x", [])),
    ("granite", False, "Here's my thought process: a\n\nHere is my response: b", ("b", "a", [])),
    ("gemma4", False, "<|channel>thought\na<channel|>b", ("b", "a", [])),
    (
        "command_r7b",
        False,
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b <c<|END_RESPONSE|>",
        ("b <c", "a", []),
    ),
    ("command_r7b", False, "<|START_RESPONSE|>b", ("b", "", [])),
    (
        "qwen3",
        True,
        'I call <tool_call>{"name": "x"}</tool_call>\n</think>\n<tool_call>{"name": "f"}</tool_call>',
        ("", 'I call <tool_call>{"name": "x"}</tool_call>', [("f", "{}")]),
    ),
]


@pytest.mark.parametrize(("style", "inside", "text", "expected"), THOUGHTS)
def test_each_style_whatever_the_pieces(style: str, inside: bool, text: str, expected: Read) -> None:
    for pieces in ([text], *splits(text)):
        assert read(thought_parser(style, inside, "hermes"), pieces) == expected, pieces


@pytest.mark.sampled(2)
@pytest.mark.parametrize("style", sorted(name for name, style in STYLES.items() if style.headers is None))
@given(data=st.data())
def test_reasoning_loses_nothing_but_its_marks_and_space(style: str, data: st.DataObject) -> None:
    marks = [*STYLES[style].openings, *STYLES[style].closings]
    pieces = data.draw(st.lists(st.one_of(st.sampled_from([*marks, "\n", " "]), st.text(max_size=5))))
    text, inside = "".join(pieces), data.draw(st.booleans())
    content, reasoning, _ = read(thought_parser(style, inside), pieces, cut=True)
    for cut in ([text], list(text)):
        assert read(thought_parser(style, inside), cut, cut=True) == (content, reasoning, [])
    if not inside and not text.lstrip(SPACE).startswith(STYLES[style].openings):
        assert (content, reasoning) == (text, "")

    def letters(text: str) -> Counter[str]:
        plain = re.sub("|".join(map(re.escape, marks)), "", text)
        return Counter(letter for letter in plain if not letter.isspace())

    # A second reasoning without an end is the content too, where there is no other.
    assert letters(text) in (letters(reasoning + content), letters(reasoning))
    assert letters(text) == letters(reasoning + content) or reasoning.rstrip(SPACE).endswith(content)


def test_parsers_are_message_parsers() -> None:
    result: list[MessageParser] = [
        ContentParser(),
        tool_parser("hermes"),
        thought_parser("qwen3", True),
    ]
    assert not any(parser.ended for parser in result)
