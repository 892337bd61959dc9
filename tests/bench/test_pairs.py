"""`bench.pairs`: whose turn it is, which samples count, and what the table says of them. No process is measured."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.pairs import Bench, Side
from rich.console import Console

from bench import pairs

SIDES = (Side("this", "python", Path("/new")), Side("against", "python", Path("/old")))
NAMES = {"startup": "startup help", "decode": "decode"}


class Machine:
    """Speeds by side, and what others take of the CPU in the samples of a side, one after another."""

    def __init__(self, foreign: dict[str, list[float]]) -> None:
        self.foreign = foreign
        self.turns: list[tuple[str, str]] = []

    def measure(self, work: str, side: Side) -> dict[str, Any]:
        self.turns.append((work, side.name))
        shares = self.foreign.get(side.name, [])
        share = shares.pop(0) if shares else 0.0
        speed = (3.0 if side.name == "this" else 2.0) * (1 - share)
        return {"values": {NAMES[work]: speed if work == "decode" else 6.0 / speed}, "foreign": share}


def taken(machine: Machine, works: list[str], num_rounds: int) -> list[Any]:
    return pairs.take_turns(works, SIDES, num_rounds, machine.measure, lambda line: None)


def test_sides_take_turns_and_change_places() -> None:
    machine = Machine({})
    lines = pairs.pairs(taken(machine, ["decode", "startup"], 2), SIDES)
    assert machine.turns == [
        ("decode", "this"), ("decode", "against"), ("startup", "this"), ("startup", "against"),
        ("decode", "against"), ("decode", "this"), ("startup", "against"), ("startup", "this"),
    ]  # fmt: skip
    assert [(line.work, line.this, line.against) for line in lines] == [("decode", 3, 2), ("startup help", 2, 3)]
    assert [line.ratios for line in lines] == [(1.5, 1.5), (1.5, 1.5)], "faster is above 1, in ms as in tok/s"


@pytest.mark.parametrize("side", ["this", "against"])
def test_a_disturbed_sample_is_measured_again_and_is_in_no_figure(side: str) -> None:
    samples = taken(Machine({side: [0.5, 0.5, 0.0, 0.5, 0.5, 0.5]}), ["decode"], 3)
    [line] = pairs.pairs(samples, SIDES)
    assert line.ratios == (1.5, 1.5), "the second round has no pair"
    assert line.num_disturbed == ((5, 0) if side == "this" else (0, 5))
    assert (line.this, line.against) == (3.0, 2.0)
    for sample in samples:  # the control: if disturbed samples counted, the second round would have another ratio
        sample["foreign"] = 0.0
    [line] = pairs.pairs(samples, SIDES)
    assert line.ratios == (1.5, 0.75 if side == "this" else 3.0, 1.5)


def test_without_an_undisturbed_sample_there_is_no_figure() -> None:
    [line] = pairs.pairs(taken(Machine({"against": [0.5] * 3}), ["decode"], 1), SIDES)
    assert (line.this, line.against, line.ratio, line.num_disturbed) == (3.0, None, None, (0, 3))
    out = io.StringIO()
    Console(file=out, width=160).print(pairs.table([line], SIDES))
    [row] = [text for text in out.getvalue().splitlines() if "decode" in text]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["decode", "3 tok/s", "disturbed", "–", "", "0 + 3"]


def test_a_sample_of_the_engine_is_a_median(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, values = [0.0], iter([5.0, 9.0, 1.0, 4.0])

    class Worker:
        def ask(self, seconds: float, **command: Any) -> dict[str, Any]:
            now[0] += 0.4
            return {"value": next(values)}

    monkeypatch.setattr(pairs.time, "perf_counter", lambda: now[0])
    bench = Bench(tmp_path, "builtin", 2048, "none", tmp_path / "log", 0.0)
    assert bench._median(Worker(), "decode") == 5.0, "1.2 seconds are three runs"  # type: ignore[arg-type]


def test_the_other_interpreter_needs_a_checkout(tmp_path: Path) -> None:
    assert pairs.side_of("this", sys.executable).root == Path(pairs.ROOT)
    python = tmp_path / "python"
    for script, message in (("exit 3", "can not import headrace"), (f"echo {tmp_path}", "which is no checkout")):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        with pytest.raises(SystemExit, match=message):
            pairs.side_of("against", str(python))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dinner"], "'dinner' is none of"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--model", "x"], "'x' is none of"),
    ],
)
def test_bad_arguments(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pairs", "--against", "python", *words])
    with pytest.raises(SystemExit, match=message):
        pairs.main()
