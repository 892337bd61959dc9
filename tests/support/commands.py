"""The `headrace` command in this process, as the console script runs it."""

from __future__ import annotations

import io
import sys
from typing import Any, NamedTuple

import pytest

from headrace.cli.main import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, stdin: str = ""
) -> Done:
    """Its exit status and what it prints, 80 columns wide."""
    monkeypatch.setattr(sys, "argv", ["headrace", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    monkeypatch.setenv("COLUMNS", "80")
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    printed = capsys.readouterr()
    return Done(int(code), printed.out, printed.err)
