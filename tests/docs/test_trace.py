"""The page of the traced request names every file that a chat request passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_traced_request_names_every_file() -> None:
    command = [sys.executable, "-m", "tests.programs.trace_request"]
    trace = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert trace.returncode == 0, trace.stderr
    files = trace.stdout.split()
    # The control: a trace that saw one side alone would be short, or lack one of these.
    assert len(files) > 40
    assert {"serve/routing.py", "core/scheduler.py", "runner/runner.py", "text/outputs.py"} <= set(files)
    page = (ROOT / "docs" / "architecture" / "trace.md").read_text(encoding="utf-8")
    assert [file for file in files if f"`{file}`" not in page] == []
