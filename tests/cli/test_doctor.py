"""`headrace doctor`: every section is there, a broken part is named, and the table holds what the report holds."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import backends, doctor
from headrace.backends import native
from headrace.cli import forms
from headrace.cli.main import app


@pytest.fixture(scope="module")
def report() -> dict[str, doctor.Section]:
    return doctor.examine("no-such-model", probe_bytes=2**20)


def test_report_is_json_with_all_sections(report: dict[str, doctor.Section]) -> None:
    assert set(json.loads(json.dumps(report))) == {
        *("versions", "cpu", "memory", "native", "torch", "triton", "backends", "model", "hub", "environment"),
    }
    assert report["cpu"]["cores_logical"] >= report["cpu"]["cores_allowed"] >= 1
    assert report["memory"]["total_bytes"] >= report["memory"]["available_bytes"] > 0
    assert report["memory"]["read_gb_per_s"] > 0
    assert "torch_ref" in report["backends"]["backends"]
    assert report["backends"]["default"] == backends.choose_backend("auto", "auto")[0]
    assert "llama" in report["backends"]["models"]


# What Linux says of a Neoverse V1 and of a Cortex-A53, shortened.
NEOVERSE_V1 = """processor\t: 0
Features\t: fp asimd evtstrm aes fphp asimdhp jscvt asimddp sve asimdfhm svei8mm svebf16 i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd40
"""
CORTEX_A53 = NEOVERSE_V1.replace("asimddp sve asimdfhm svei8mm svebf16 i8mm bf16", "").replace("0xd40", "0xd03")


@pytest.mark.parametrize(
    ("text", "part", "features"),
    [
        (NEOVERSE_V1, "0xd40", ["asimd", "asimddp", "i8mm", "bf16", "sve", "svei8mm"]),
        (NEOVERSE_V1.replace("svei8mm svebf16 i8mm bf16", "sve2"), "0xd40", ["asimd", "asimddp", "sve", "sve2"]),
        (CORTEX_A53, "0xd03", ["asimd"]),
    ],
)  # fmt: skip
def test_an_arm_processor_is_told_by_its_numbers(tmp_path: Path, text: str, part: str, features: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    section = doctor.cpu(tmp_path / "cpuinfo")
    assert section["name"] == f"implementer 0x41, part {part}"
    assert section["features"] == features


def test_nodes_of_memory_and_huge_pages_come_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.fleet.engines.local.nodes_of", lambda cpus: [[0, 1, 2, 3], [4, 5]])
    section = doctor.cpu()
    assert section["cores_allowed"] == 6
    assert section["memory_nodes"].startswith("2: 4 processors from 0, 2 processors from 4; ")
    assert "--data-parallel-size auto" in section["memory_nodes"]
    path = tmp_path / "enabled"
    advice = []
    for text in ("always [madvise] never", "[always] madvise never", "always madvise [never]"):
        path.write_text(text)
        advice.append(doctor.huge_pages(path))
    assert advice[:2] == ["madvise: the weights lie on them", "always: the weights lie on them"]
    assert advice[2] == f"never: the weights lie on small pages; as root: echo madvise > {path}"
    assert doctor.huge_pages(tmp_path / "none") == "not told by this system"


def test_a_missing_model_is_a_line_not_a_crash(report: dict[str, doctor.Section]) -> None:
    assert "no such directory" in report["model"]["problem"]


def test_the_model_s_size_is_read_from_the_header(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(60))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    result = doctor.model_state(str(tmp_path))
    assert result["num_parameters"] == 15
    assert result["context_length"] == 64
    assert "problem" not in result


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
    assert doctor.formatted("total_bytes", 3 * 2**30) == "3.0 GiB"
    assert doctor.formatted("weight_bytes", 2_600_000) == "2.6 MB"
    assert doctor.formatted("num_parameters", 656000) == "656,000"
    assert doctor.formatted("read_gb_per_s", 11.8) == "11.8 GB/s"
    assert doctor.formatted("offline", False) == "no"
    assert doctor.formatted("gpus", []) == "-"
    assert doctor.formatted("features", ["a", "b"]) == "a, b"


def test_who_serves_each_operator_is_listed(report: dict[str, doctor.Section]) -> None:
    module, reason = native.native()
    if module is None:
        assert reason in report["native"]["problem"]
        return
    result = report["native"]
    assert result["isas"] == module.isas()
    assert result["threads"] >= 1
    listed = {op: isa for isa in module.isas() for op in result.get(f"served_by_{isa}", [])}
    assert listed == module.served()


def test_without_the_native_kernels_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace._native", None)
    monkeypatch.delattr("headrace._native", raising=False)
    native.native.cache_clear()
    try:
        assert "install a C++17 compiler" in doctor.native_state()["problem"]
        with pytest.raises(native.NativeMissingError):
            doctor.limits()
    finally:
        monkeypatch.undo()
        native.native.cache_clear()


def test_an_unknown_isa_is_a_line_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.native()[0] is None:
        pytest.skip("no native core")
    monkeypatch.setenv("HEADRACE_ISA", "sse9")
    native.native.cache_clear()
    try:
        assert "sse9" in doctor.native_state()["problem"]
    finally:
        native.native.cache_clear()


def test_the_limits_are_measured_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    module = native.native()[0]
    if module is None:
        pytest.skip("no native core")
    rows = doctor.limits(seconds=0.01, most_bytes=2**24)
    # Those that only multiply have no loads of their own.
    assert {row["isa"] for row in rows if row["what"] == "read"} == set(module.isas()) - {
        "avx_vnni",
        "amx_int8",
        "neon_i8mm",
    }
    assert {row["threads"] for row in rows} == {1, module.num_threads()}
    assert all(row["least"] <= row["rate"] <= row["most"] for row in rows)
    assert all(max(row["most"] for row in rows if row["what"] == what) > 0 for what in {row["what"] for row in rows})
    doctor.show_limits(rows)
    printed = capsys.readouterr().out
    for word in ("read", "GB/s", "scalar"):
        assert word in printed


ROWS = [
    {"quantization": "", "activations": "16bit", "chosen": "16bit", "decode_tokens_per_s": 143.0, "mean_kl": 0.0,
     "top1_flip_rate": 0.0, "recommended": False},
    {"quantization": "int8", "activations": "int8", "chosen": "int8", "decode_tokens_per_s": 233.04, "mean_kl": 0.00151,
     "top1_flip_rate": 0.034, "recommended": True},
]  # fmt: skip


def test_forms_are_a_table_with_advice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    forms.show(ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith(("as stored", "int8"))] == [
        ["as", "stored", "16bit", "16bit", "143.0", "0.00", "0.0%"],
        ["int8", "int8", "int8", "233.0", "1.51", "3.4%"],
    ]
    assert "tok/s" in lines[0]
    assert "recommended: --quantization int8 --activations int8" in lines
    assert max(map(len, lines)) <= 80


def test_forms_of_the_builtin_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest that loses little is recommended, and nothing that loses more."""
    monkeypatch.setattr(forms, "MADE", (forms.Form("", "auto"), forms.Form("int8", "int8"), forms.Form("int4", "int8")))
    speeds = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr(forms, "decode_speed", lambda llm, num_tokens: next(speeds))
    monkeypatch.setattr(forms, "MAX_KL", 0.01)
    steps: list[tuple[int, int]] = []
    rows = forms.measure("builtin", lambda done, total, label="", /: steps.append((done, total)))
    assert [row["recommended"] for row in rows] == [False, True, False]
    assert [row["chosen"] for row in rows] == ["bfloat16", "int8", "int8"]
    assert rows[0]["mean_kl"] == 0 < rows[1]["mean_kl"] < 0.01 < rows[2]["mean_kl"]
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_model_whose_forms_can_not_be_measured_is_named() -> None:
    result = CliRunner().invoke(app, ["doctor", "no-such-model", "--forms", "--json"])
    assert "no such directory" in json.loads(result.output)["forms"]["problem"]
