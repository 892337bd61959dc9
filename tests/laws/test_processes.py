"""What benches, campaigns and tests start ends with them: each process of theirs is started by `bench.tied.tied`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.laws import rules

NOT_TIED = {
    "bench/compare/workers.py": "the seconds from its start are what is measured, and it ends after a token",
    "tests/bench/test_compare_processes.py": "parents that are killed",
    "tests/bench/test_gpu.py": "a child that the bench must end",
    "tests/clients/scripts/open_webui_python.py": "it runs in an environment without this repository",
    "tests/e2e/test_run_batch.py": "it is killed in the test, and ends by itself",
    "tests/engine/test_client.py": "a server that is killed",
}
FOLDERS = ("bench", "tests")


def untied(source: str) -> Iterator[int]:
    """Lines that start a process of which the command is not `tied(...)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and rules.dotted(node.func).rpartition(".")[2] == "Popen":
            command = node.args[0] if node.args else None
            if not (isinstance(command, ast.Call) and rules.dotted(command.func) == "tied"):
                yield node.lineno


def test_every_process_is_tied_to_what_starts_it() -> None:
    lines = {
        path.relative_to(rules.ROOT).as_posix(): list(untied(path.read_text(encoding="utf-8")))
        for folder in FOLDERS
        for path in sorted((rules.ROOT / folder).rglob("*.py"))
    }
    broken = {name: numbers for name, numbers in lines.items() if numbers and name not in NOT_TIED}
    assert not broken, f"start them with bench.tied.tied: {broken}"
    assert {name for name in NOT_TIED if lines.get(name)} == NOT_TIED.keys(), "each exception is needed"


def test_a_process_that_is_not_tied_is_noticed() -> None:
    assert list(untied("import subprocess\nsubprocess.Popen(['headrace', 'serve'])\n")) == [2]
    assert not list(untied("import subprocess\nsubprocess.Popen(tied(['headrace', 'serve']), cwd=x)\n"))
