"""`headrace bench throughput`: memory beside speed, and several models and forms side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run_command
from tests.support.shallow import shallow

from headrace.cli.bench.compare import Turn, forms_of, measure_comparison, print_comparison
from headrace.cli.bench.offline import form_of, peak_resident
from headrace.cli.bench.plans import ThroughputPlan
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.step import EngineInfo

SMALL = ("--num-prompts", "2", "--input-len", "4", "--output-len", "4")


def test_a_run_has_its_memory_beside_its_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_command(monkeypatch, capsys, "bench", "throughput", shallow(), *SMALL, "--json")
    assert code == 0
    result = json.loads(out)
    stored = sum(path.stat().st_size for path in Path(shallow()).glob("*.safetensors"))
    # What a step reads: the file without its header, and the tied table once.
    assert result["form"] == result["dtype"] == "bfloat16"
    assert 0.9 * stored < result["weight_bytes"] <= stored
    assert result["weight_bytes"] < result["resident_bytes"] <= result["peak_resident_bytes"]
    assert result["kv_cache_bytes"] > 0
    code, out, _ = run_command(monkeypatch, capsys, "bench", "throughput", shallow(), *SMALL, "-q", "int8")
    assert "Peak resident memory (MB):" in out
    [line] = [line for line in out.splitlines() if line.startswith("Weights in memory (MB):")]
    assert float(line.split()[-1]) < 0.7e-6 * result["weight_bytes"]


@pytest.mark.parametrize(
    ("config", "info", "form"),
    [
        ({"quantization": "int8"}, "int8", "int8"),
        ({"quantization": "none"}, "", "bfloat16"),
        ({}, "", "AWQ-4bit"),
    ],
)
def test_a_form_is_named_as_it_is_stored_or_made(tmp_path: Path, config: dict[str, Any], info: str, form: str) -> None:
    values = json.loads((Path(shallow()) / "config.json").read_text())
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(values | stored))
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    numbers: dict[str, Any] = dict.fromkeys(("max_model_len", "vocab_size", "block_size", "num_blocks"), 1)
    numbers |= {"max_num_seqs": 1, "max_num_batched_tokens": 1, "eos_token_ids": []}
    engine = EngineInfo(model="x", dtype="bfloat16", quantization=info, **numbers)
    assert form_of(EngineConfig(model=str(tmp_path), **config), engine) == form


def test_the_peak_is_read_where_the_system_has_it(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmPeak:\t  900 kB\nVmHWM:\t  123 kB\nVmRSS:\t   7 kB\n")
    assert peak_resident(tmp_path / "status") == 123 * 1024
    assert peak_resident(tmp_path / "nothing") is None


def scripted(speeds: dict[str, list[float]], order: list[str]) -> Any:
    """A turn that takes no time: the speeds of each model, in the order of its turns."""

    def run(turn: Turn) -> dict[str, Any]:
        name = turn.config.model
        order.append(name)
        return {"form": "int4", "dtype": "bfloat16", "backend": "cpu", "weight_bytes": 10**6 * len(name),
                "resident_bytes": 5, "peak_resident_bytes": 10**8 + len(order), "median_ttft_ms": 1.0,
                "median_tpot_ms": 2.0, "output_throughput": speeds[name].pop(0)}  # fmt: skip

    return run


def test_rounds_are_interleaved_and_ratios_are_of_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    """The machine is half as fast in the second round: medians of speeds alone would compare different rounds."""
    order: list[str] = []
    speeds = {"a": [100.0, 50.0, 100.0], "bb": [200.0, 100.0, 190.0]}
    configs = [EngineConfig(model="a"), EngineConfig(model="bb", quantization="int4")]
    plan = ThroughputPlan(rounds=3, json=True)
    result = measure_comparison(plan, configs, {}, scripted(speeds, order))
    assert order == ["a", "bb", "bb", "a", "a", "bb"]
    first, second = result["rows"]
    assert (first["ratio"], second["ratios"], second["ratio"]) == (1.0, [2.0, 2.0, 1.9], 2.0)
    assert (first["output_throughput"], second["output_throughput"]) == (100.0, 190.0)
    assert second["peak_resident_bytes"] == 10**8 + 6
    print_comparison(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["model", "form", "weights"]
    assert lines[2].split() == [
        "bb",
        "int4",
        "2.00",
        "MB",
        "100.00",
        "MB",
        "190.0",
        "2.00",
        "1.90",
        "2.00",
        "1.0",
        "2.0",
    ]


def test_the_command_compares_forms_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (shallow(), "--forms", "stored,int4", "--rounds", "1", *SMALL, "--json")
    code, out, _ = run_command(monkeypatch, capsys, "bench", "throughput", *words)
    assert code == 0
    plain, small = json.loads(out)["rows"]
    assert (plain["form"], small["form"], plain["ratio"]) == ("bfloat16", "int4", 1.0)
    assert small["weight_bytes"] < 0.5 * plain["weight_bytes"]
    assert small["ratio"] == small["output_throughput"] / plain["output_throughput"]
    # This process has imported more than an engine needs.
    assert 0 < plain["peak_resident_bytes"] < (peak_resident() or 0)


def test_what_can_not_be_compared_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert forms_of("stored, int8") == [None, "int8"]
    with pytest.raises(RequestError, match="--forms: 'int5' is not allowed; it must be of stored, int4"):
        forms_of("int8,int5")
    plan = ThroughputPlan(rounds=1, json=True)
    with pytest.raises(HeadraceError, match=f"{tmp_path} in the stored form: .*config.json"):
        measure_comparison(plan, [EngineConfig(model=str(tmp_path))], {})
    code, _, err = run_command(monkeypatch, capsys, "bench", "throughput", "builtin", "x", "--model", "y")
    assert code == 2
    assert "MODEL is given as --model already" in err
