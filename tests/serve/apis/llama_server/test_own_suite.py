"""`make test-llama-server` without the suite: how a test's end is held against the table, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.programs.llama_server import __main__ as program
from tests.programs.llama_server.__main__ import Difference, is_among, judge, read_table, unknown_entries
from tests.programs.llama_server.stand_in import MODELS, serve_arguments

TABLE = {
    "test_a.py::test_one": Difference("it is so here", "assert 1 == 2"),
    "test_a.py::test_two[x]": Difference("it is so here", "assert 3 == 4"),
}


def record(name: str, outcome: str = "failed", message: str = "") -> dict[str, Any]:
    return {"id": f"unit/test_a.py::{name}", "outcome": outcome, "message": message, "left_out": []}


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (record("test_three", "passed"), "passed"),
        (record("test_three", "skipped", "no IPv6"), "skipped"),
        (record("test_three", message="assert 1 == 2"), "failed"),
        (record("test_one", message="E assert 1 == 2"), "differs"),
        # An entry without brackets is that of all cases.
        (record("test_one[b]", message="assert 1 == 2"), "differs"),
        (record("test_two[x]", message="assert 3 == 4"), "differs"),
        (record("test_two[y]", message="assert 3 == 4"), "failed"),
        # Another failure than the one that the reason is of.
        (record("test_one", message="KeyError: 'x'"), "failed"),
        # The table may not rot.
        (record("test_one", "passed"), "stale"),
    ],
)
def test_a_test_passes_or_differs_as_the_table_says(ended: dict[str, Any], kind: str) -> None:
    assert judge(ended, TABLE).kind == kind


def test_an_entry_of_no_test_is_stale() -> None:
    outcomes = [judge(record("test_one[b]", message="assert 1 == 2"), TABLE)]
    assert unknown_entries(outcomes, TABLE, ["test_a.py"]) == ["test_a.py::test_two[x]"]
    assert unknown_entries(outcomes, TABLE, ["test_b.py"]) == []


def test_the_table_is_read_and_gives_reasons() -> None:
    differences, not_run = read_table(Path(program.__file__).with_name("differences.toml"))
    assert all(each.reason and each.failure for each in differences.values())
    assert all(not_run.values())
    assert not {name.partition("::")[0] for name in differences} & not_run.keys()


def test_a_command_line_of_llama_server_becomes_ours() -> None:
    model = str(Path("data") / next(iter(MODELS.values())))
    words = ["--hf-repo", next(iter(MODELS)), "--ctx-size", "512", "--parallel", "2", "--port", "1", "--no-slots"]
    arguments = serve_arguments(words, Path("data"))
    assert arguments == [model, "--ctx-size", "256", *words[4:]]
    shared = serve_arguments([*words, "--kv-unified"], Path("data"))
    assert shared[:3] == [model, "--ctx-size", "512"]
    with pytest.raises(SystemExit, match="no model other/model"):
        serve_arguments(["--hf-repo", "other/model"], Path("data"))


def test_a_flag_that_is_refused_is_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_arguments(["--control-vector", "x", "--port", "1"], Path("data")) == ["--port", "1"]
    assert capsys.readouterr().out == "stand-in: left out --control-vector x\n"


def test_the_table_names_a_test_by_its_file_itself_or_its_case() -> None:
    name = "test_a.py::test_one[x]"
    for entry in ("test_a.py", "test_a.py::test_one", name):
        assert is_among(name, [entry])
    for entry in ("test_b.py", "test_a.py::test_on", "test_a.py::test_one[y]", ""):
        assert not is_among(name, [entry])
