"""`bench.served` as a whole, on a tiny shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.laws import rules


@pytest.mark.slow
def test_a_round_and_a_long_prompt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.served", "tiny-gpt-oss", "--folder", str(tmp_path), "--rounds", "1"]
    done = subprocess.run([*command, "--context", "600"], capture_output=True, text=True, cwd=rules.ROOT, check=True)
    result = json.loads(done.stdout)
    figures = result["tok_s"]["headrace"]
    assert figures["start_s"] > 0
    assert figures["prefill"] > 0
    # Rates over the difference of two times, which noise can turn over for so small a model.
    assert {"decode", "eight"} <= figures.keys()
    assert len(result["second_starts_s"]) == 1
    assert result["one_sequence"]["tokens"] == 600
    assert result["one_sequence"]["mib_before"] > 10
