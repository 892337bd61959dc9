"""`python -m bench.ranks`: a row for each number of rows, with the times of all, as JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from bench.ranks import chunks_of
from tests.support.shallow import shallow


@pytest.mark.parametrize(("rows", "chunks"), [(1, 1), (32, 32), (512, 8)])
def test_a_step_has_as_many_rows_as_it_should(rows: int, chunks: int) -> None:
    step, logits = chunks_of(rows, 128, 16)
    assert sum(map(len, step.token_ids)) == rows
    assert len(step.starts) == len(logits) == chunks
    assert logits[-1] == rows - 1
    assert len({block for table in step.tables for block in table}) == sum(map(len, step.tables))


@pytest.mark.slow
def test_it_prints_both_times_and_the_cost_of_a_gather() -> None:
    command = [sys.executable, "-m", "bench.ranks", shallow(1), "--rows", "1", "40", "--rounds", "1", "--repeats", "2"]
    done = subprocess.run(
        [*command, "--widths", "64", "--gather-repeats", "4"], capture_output=True, text=True, timeout=300, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("rows") for line in lines if line["bench"] == "ranks"] == [1, 40]
    for line in lines[:2]:
        assert line["speed_of_ranks"] > 0
        assert "whole_experts" not in line
        assert min(line["threads"]["least_ms"], line["ranks"]["least_ms"]) > 0
    memory, gloo = lines[2:]
    assert (memory["over"], gloo["over"]) == ("memory", "gloo")
    assert memory["median_us"] > 0


def test_of_a_mixture_it_measures_whole_experts_too() -> None:
    command = [sys.executable, "-m", "bench.ranks", "--mixture", "tiny", "--layers", "1", "--rows", "1", "40"]
    command += ["--rounds", "1", "--repeats", "2", "--widths"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["rows"] for line in lines] == [1, 40]
    for line in lines:
        assert line["model"] == "tiny"
        assert min(line[name]["least_ms"] for name in ("threads", "ranks", "whole_experts")) > 0
        assert min(line["speed_of_ranks"], line["speed_of_whole_experts"]) > 0


def test_a_pipeline_is_compared_too() -> None:
    command = [sys.executable, "-m", "bench.ranks", shallow(2), "--pipeline", "--rows", "1", "40", "--rounds", "1"]
    done = subprocess.run([*command, "--repeats", "2"], capture_output=True, text=True, timeout=300, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["rows"], line["pieces"]) for line in lines] == [(1, 1), (40, 2)]
    assert all(line["speed_of_ranks"] > 0 for line in lines)
