"""A sample of the Berkeley function-calling cases; `make test-bfcl` runs them all (see `bfcl`)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.programs import bfcl
from tests.support.reading import read, tool_parser

from headrace.text.outputs import CallPart
from headrace.text.tools import call_grammar, formats
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.parser import ToolParser
from headrace.text.tools.reader import Reader, Reading


@pytest.fixture(scope="module")
def cases(shared_data: Path) -> list[bfcl.Case]:
    return list(bfcl.cases(shared_data))


def test_rendered_written_and_parsed_is_what_was_meant(cases: list[bfcl.Case], shared_data: Path) -> None:
    counts: Counter[str] = Counter()
    for number, model in enumerate(bfcl.models(shared_data)):
        sample = cases[number::150]
        for case in sample:
            bfcl.check(model, case, counts, every_split=case is sample[0])
    assert counts["texts"] > 80
    assert counts["splits"] > 1000


def test_the_check_sees_an_altered_letter(
    cases: list[bfcl.Case], shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, write = bfcl.models(shared_data)[0], ToolParser.write
    bfcl.check(model, cases[0], Counter(), every_split=False)
    monkeypatch.setattr(ToolParser, "write", lambda self, text: write(self, text.replace("1", "2", 1)))
    with pytest.raises(AssertionError):
        bfcl.check(model, cases[0], Counter(), every_split=False)


def test_the_check_sees_a_reader_that_does_not_wait(
    cases: list[bfcl.Case], shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def comes(self: Reader, literal: str) -> Reading[bool]:
        return self.text.startswith(literal, self.at)
        yield

    monkeypatch.setattr(Reader, "comes", comes)
    model = bfcl.models(shared_data)[0]
    bfcl.check(model, cases[0], Counter(), every_split=False)
    with pytest.raises(AssertionError):
        bfcl.check(model, cases[0], Counter())


def test_calls_stream_as_they_are_written(cases: list[bfcl.Case]) -> None:
    """A grammar sees to the form: each letter of the arguments is passed on when it comes."""
    case = next(case for case in cases if len(case.calls) > 1)
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in case.calls
    )
    parser = tool_parser("hermes", enforced=True)
    output = [
        "".join(part.arguments for part in parser.feed(letter, False) if isinstance(part, CallPart)) for letter in text
    ]
    assert max(map(len, output)) == 1
    assert sum(map(len, output)) == sum(len(json.dumps(arguments)) for _, arguments in case.calls)


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_every_format_has_a_grammar_for_every_case(name: str, cases: list[bfcl.Case]) -> None:
    """The form of required calls is made of every case's schemas; that answers in it parse is `test_forms`' matter."""
    for case in cases[::40]:
        use = ToolUse.of(case.tools, "required", True)
        assert call_grammar.grammar(name, call_grammar.RequiredCalls(use.schemas, False, "", {}))["type"]


def test_irrelevant_questions_have_no_calls(shared_data: Path) -> None:
    lines = (shared_data / "prompts" / "bfcl" / "BFCL_v4_irrelevance.json").read_text(encoding="utf-8").splitlines()
    for line in lines[::20]:
        content = json.loads(line)["question"][0][0]["content"]
        for name in formats.FORMATS:
            assert read(tool_parser(name), [content]) == (content, "", [])
