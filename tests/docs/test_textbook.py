"""docs/textbook.md: one command a subject, whose output is what is quoted. `test_pages` runs the commands."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, SHELLS, blocks, commands
from tests.support.commands import run_command

PAGE = DOCS / "textbook.md"
SUBJECTS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
LABS = ("lengths", "paging", "prefix", "batching", "sampling", "speculation")


def title(subject: str) -> str:
    return subject.partition("\n")[0]


def quoted(subject: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words of a subject's command, and the lines that it prints."""
    parts = blocks(PAGE.name, subject)
    [command] = [block for block in parts if block.language in SHELLS]
    output = [line for block in parts if not block.language for line in block.text.splitlines()]
    for words in commands(command.text):
        yield words, output


def test_every_subject_has_a_command_and_they_are_numbered() -> None:
    assert [title(subject).partition(".")[0] for subject in SUBJECTS] == [str(i + 1) for i in range(len(SUBJECTS))]
    assert all(words[0] == "headrace" for subject in SUBJECTS for words, _ in quoted(subject))
    # The last one needs a trace, whose figures are those of docs/howto-plan.md.
    assert all(output for subject in SUBJECTS[:-1] for _, output in quoted(subject))


@pytest.mark.parametrize("subject", [each for each in SUBJECTS if "\nheadrace lab " in each], ids=title)
def test_the_lines_of_a_lab_are_on_its_page(subject: str) -> None:
    for words, output in quoted(subject):
        page = (DOCS / "labs" / f"lab-{words[2]}.md").read_text(encoding="utf-8").splitlines()
        assert [line for line in output if line not in page] == []
        assert words[2] in LABS


@pytest.mark.parametrize("subject", [each for each in SUBJECTS if "\nheadrace plan " in each], ids=title)
def test_the_lines_of_a_plan_are_printed(
    subject: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, output in quoted(subject):
        code, out, _ = run_command(monkeypatch, capsys, *words[1:])
        assert code == 0
        assert [line for line in output if line not in out.splitlines()] == []
        # The control: with another batch other lines are printed.
        _, other, _ = run_command(monkeypatch, capsys, *words[1:], "--concurrency", "3", "--quantization", "int8")
        assert [line for line in output if line not in other.splitlines()]


def test_decoding_by_hand_is_of_the_numbers_that_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [(words, output)] = quoted(SUBJECTS[0])
    code, out, _ = run_command(monkeypatch, capsys, *words[1:])
    assert code == 0
    rows = [
        [(each["token"], each["logprob"]) for each in place["top_logprobs"]] for place in json.loads(out)["logprobs"]
    ]
    for line, row in zip(output, rows, strict=True):
        cells = shlex.split(line)
        assert cells[::2] == [token for token, _ in row]
        assert [float(cell) for cell in cells[1::2]] == pytest.approx([value for _, value in row], abs=2e-3)
    shares = [[math.exp(value) for _, value in row] for row in rows]
    # Top-p 0.9 keeps two of the first row and one of the second; ", there" is the best beam.
    assert shares[0][0] < 0.9 <= shares[0][0] + shares[0][1]
    assert shares[1][0] >= 0.9
    assert [round(share, 3) for share in (*shares[0][:2], shares[1][0])] == [0.748, 0.247, 0.913]
    assert round(rows[0][0][1] + rows[1][0][1], 3) == -0.381
    assert "-0.381" in SUBJECTS[0]


def test_the_page_is_linked() -> None:
    assert "(textbook.md)" in (DOCS / "index.md").read_text(encoding="utf-8")
    assert "(../textbook.md)" in (DOCS / "labs" / "README.md").read_text(encoding="utf-8")
    assert Path(PAGE).is_file()
