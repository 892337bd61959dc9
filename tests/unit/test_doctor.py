"""`headrace doctor`: every section is there, a broken part is told, and the table holds what the report holds."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from headrace import doctor


@pytest.fixture(scope="module")
def report() -> dict[str, doctor.Section]:
    return doctor.examine("no-such-model", probe_bytes=2**20)


def test_report_is_json_with_all_sections(report: dict[str, doctor.Section]) -> None:
    assert set(json.loads(json.dumps(report))) == {
        *("versions", "cpu", "memory", "torch", "backends", "model", "hub", "environment"),
    }
    assert report["cpu"]["cores_logical"] >= report["cpu"]["cores_allowed"] >= 1
    assert report["memory"]["total_bytes"] >= report["memory"]["available_bytes"] > 0
    assert report["memory"]["read_gb_per_s"] > 0
    assert "torch_ref" in report["backends"]["backends"]
    assert "llama" in report["backends"]["models"]


def test_a_missing_model_is_a_line_not_a_crash(report: dict[str, doctor.Section]) -> None:
    assert "no such directory" in report["model"]["problem"]


def test_the_model_s_size_is_read_from_the_header(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(60))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    found = doctor.model_state(str(tmp_path))
    assert found["num_parameters"] == 15
    assert found["context_length"] == 64
    assert "problem" not in found


@pytest.mark.parametrize("head", [b"", b"\x00" * 4, struct.pack("<Q", 2**60), struct.pack("<Q", 5) + b"{bad}"])
def test_a_broken_header_is_told(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(head)
    (tmp_path / "config.json").write_text("{}")
    assert doctor.model_state(str(tmp_path))["problem"]


def test_the_table_shows_every_value(report: dict[str, doctor.Section], capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show(report)
    printed = capsys.readouterr().out
    for section in report:
        assert section in printed
    assert report["versions"]["torch"] in printed


def test_values_are_shown_for_people() -> None:
    assert doctor.shown("total_bytes", 3 * 2**30) == "3.0 GiB"
    assert doctor.shown("weight_bytes", 2_600_000) == "2.6 MB"
    assert doctor.shown("num_parameters", 656000) == "656,000"
    assert doctor.shown("read_gb_per_s", 11.8) == "11.8 GB/s"
    assert doctor.shown("offline", False) == "no"
    assert doctor.shown("gpus", []) == "-"
    assert doctor.shown("features", ["a", "b"]) == "a, b"
