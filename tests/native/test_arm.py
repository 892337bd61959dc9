"""`make native-test-arm`: what it says where it can not run, and that it looks at what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.programs import arm

COMPARED = (
    "add           120 runs compared; scalar neon_dot\nlinear_i4     200 runs compared; scalar neon_dot neon_i8mm\n"
)


def fuzzed(*isas: str) -> str:
    planted = {"one-too-many": True, "scratch": False}
    return json.dumps({"isas": isas, "shapes": 450, "runs": 1000, "failures": 0, "planted_noticed": planted})


def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert arm.main() == 1
    assert capsys.readouterr().err == (
        "native-test-arm needs g++-aarch64-linux-gnu and qemu-user-static: "
        "apt install g++-aarch64-linux-gnu qemu-user-static\n"
    )
    emulator = tmp_path / "qemu-aarch64"
    emulator.write_text("")
    emulator.chmod(0o755)
    assert arm.missing() == ["g++-aarch64-linux-gnu"]


def test_the_counts_are_summed() -> None:
    line = arm.verdict("max", COMPARED, fuzzed("scalar", "neon_dot", "neon_i8mm"))
    assert "2 operators, 320 runs" in line
    assert line.endswith("noticed: one-too-many")


@pytest.mark.parametrize(
    ("cpu", "compared", "isas"),
    [
        ("max", COMPARED, ["scalar", "neon_dot"]),  # a table is missing
        ("neoverse-n1", COMPARED, ["scalar", "neon_dot", "neon_i8mm"]),  # a table that it can not have
        ("max", COMPARED.replace("neon_i8mm", ""), ["scalar", "neon_dot", "neon_i8mm"]),  # it was not compared
        (
            "max",
            COMPARED.replace("scalar neon_dot\n", "scalar\n"),
            ["scalar", "neon_dot", "neon_i8mm"],
        ),  # scalar serves
        ("max", "", ["scalar", "neon_dot", "neon_i8mm"]),  # nothing was
    ],
)
def test_other_tables_are_a_failure(cpu: str, compared: str, isas: list[str]) -> None:
    with pytest.raises(SystemExit, match=cpu):
        arm.verdict(cpu, compared, fuzzed(*isas))
