"""`headrace plan`: figures that agree with each other, changes that make room, errors in the words of the flags."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.plan import configs
from tests.support.commands import run_command
from tests.support.shallow import NUM_LAYERS, shallow

from headrace import models
from headrace.engine.build import build_engine
from headrace.plan import hardware, words
from headrace.plan.counting import count
from headrace.plan.forms import Forms
from headrace.plan.planner import Planner, Subject, read
from headrace.plan.plans import Workload
from headrace.plan.steps import Roofline
from headrace.protocol.config import QUANTIZATIONS, EngineConfig


def planner(config: dict[str, Any], machine: str = "h100", **fields: Any) -> Planner:
    return Planner(Subject("x", config), hardware.find(machine), Workload(**fields))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(configs.LLAMA_3_8B))
    return str(tmp_path)


def test_the_largest_batch_and_context_just_fit() -> None:
    one = planner(configs.LLAMA_3_1_8B, context=4096, concurrency=7)
    plan = one.plan()
    assert plan.largest_batch * one.kv_bytes(4096) <= plan.free_bytes < (plan.largest_batch + 1) * one.kv_bytes(4096)
    assert plan.largest_context == 131_072
    tight = planner(configs.LLAMA_3_1_8B, "l4", context=4096)
    assert tight.kv_bytes(tight.largest_context) <= tight.free < tight.kv_bytes(tight.largest_context + 1)
    assert plan.needed_bytes * 0.9 == pytest.approx(plan.weight_bytes + plan.working_bytes + 7 * 131_072 * 4096)


def test_times_follow_bytes_and_operations() -> None:
    plan = planner(configs.LLAMA_3_8B, context=2048, concurrency=1, output_len=1024).plan()
    assert plan.speed is not None
    # One sequence reads the weights but for the table of embeddings, and what it has cached.
    read_bytes = 16_060_522_496 - 2 * 128256 * 4096 + 131_072 * (1024 + 512 + 1)
    assert plan.speed.tpot == pytest.approx(read_bytes / (0.8 * 3350e9) + 0.0005)
    macs = 6_979_321_856 * 1024 + 128256 * 4096 + 32 * 8192 * 1024 * 512
    assert plan.speed.ttft == pytest.approx(2 * macs / (0.6 * 989e12) + 0.0005)
    assert plan.speed.latency == pytest.approx(plan.speed.ttft + 1023 * plan.speed.tpot_mixed)
    assert plan.speed.requests_per_second == pytest.approx(1 / plan.speed.latency)


def test_a_mixture_reads_the_experts_that_some_row_chooses() -> None:
    counts = count(configs.MIXTRAL_8X7B, Forms("bfloat16"))
    step = Roofline(counts, hardware.find("h100"), "bfloat16")
    experts = sum(each.num_bytes * num for each, num in counts.mixtures)
    one, many = step.num_bytes([0], [1], 0), step.num_bytes([0] * 64, [1] * 64, 0)
    assert many - one == pytest.approx(experts * 0.75 + 63 * 131_072, rel=1e-6)


def test_a_window_bounds_what_is_read_and_computed() -> None:
    counts = count(configs.GEMMA_3_27B["text_config"], Forms("bfloat16"))
    step = Roofline(counts, hardware.find("h100"), "bfloat16")
    near, far = step.num_bytes([1024], [1], 0), step.num_bytes([2048], [1], 0)
    assert far - near == 10 * 8192 * 1024
    assert step.num_macs([2048], [1], 0) - step.num_macs([1024], [1], 0) == pytest.approx(10 * 8192 * 1024, rel=1e-3)


def test_a_step_reads_and_writes_the_states_of_its_sequences() -> None:
    counts = count(models.find("qwen3_5_text").TINY, Forms("bfloat16"))
    step = Roofline(counts, hardware.find("h100"), "bfloat16")
    one, two = step.num_bytes([0], [1], 0), step.num_bytes([0, 0], [1, 1], 0)
    # Two layers: three inputs of a convolution, and a matrix of each head.
    states = 2 * 4 * (3 * (2 * 2 * 20 + 6 * 12) + 6 * 20 * 12)
    assert two - one == 2 * states + counts.kv_token_bytes("bfloat16")


def test_a_layer_that_reads_the_cache_of_another_keeps_nothing_and_reads_as_much() -> None:
    tiny = models.find("gemma4_text").TINY
    each = count(tiny | {"num_kv_shared_layers": 0}, Forms("bfloat16")), count(tiny, Forms("bfloat16"))
    separate, shared = (Roofline(counts, hardware.find("h100"), "bfloat16") for counts in each)
    assert each[1].kv_token_bytes("bfloat16") < each[0].kv_token_bytes("bfloat16")
    read = [step.num_bytes([64], [1], 0) - step.num_bytes([32], [1], 0) for step in (separate, shared)]
    assert read[0] == read[1] > 0


def test_goodput_is_of_a_batch_that_keeps_the_goals() -> None:
    slo = {"ttft": 500.0, "tpot": 30.0}
    one = planner(configs.LLAMA_3_8B, context=4096, slo=slo)
    speed = one.plan().speed
    assert speed is not None
    assert speed.goodput_batch is not None
    assert 0 < speed.goodput_batch < one.largest_batch
    assert one.keeps(one.speed(speed.goodput_batch))
    assert not one.keeps(one.speed(speed.goodput_batch + 1))
    never = planner(configs.LLAMA_3_8B, context=4096, slo={"ttft": 0.001}).plan().speed
    assert never is not None
    assert (never.goodput, never.goodput_batch) == (0.0, 0)


@pytest.mark.parametrize(
    ("config", "machine", "fields", "flags"),
    [
        (configs.LLAMA_3_8B, "l4", {"context": 8192, "concurrency": 8},
         ["--concurrency 4", "--context", "--kv-cache-dtype int8", "--quantization int8", "--hardware a100"]),
        (configs.LLAMA_3_70B, "h100", {"concurrency": 4}, ["--quantization int4"]),
        (configs.LLAMA_3_70B, "a100", {"concurrency": 1, "quantization": "int8"}, ["--hardware h200"]),
    ],
)  # fmt: skip
def test_changes_make_room(config: dict[str, Any], machine: str, fields: dict[str, Any], flags: list[str]) -> None:
    plan = planner(config, machine, **fields).plan()
    assert not plan.fits
    assert len(plan.changes) == len(flags)
    for change, beginning in zip(plan.changes, flags, strict=True):
        assert change.flags.startswith(beginning)
        other, name = dict(fields), machine
        for flag, value in zip(*[iter(change.flags.split())] * 2, strict=True):
            if flag == "--hardware":
                name = value
            else:
                other[flag[2:].replace("-", "_")] = int(value) if value.isdigit() else value
        assert planner(config, name, **other).plan().fits, change.flags


@pytest.mark.parametrize(
    ("config", "quantization", "kind", "how"),
    [
        (configs.LLAMA_3_8B, None, "as stored", "headrace serve, without --quantization"),
        (configs.LLAMA_3_8B, "int4", "at load", "headrace serve --quantization int4"),
        (configs.LLAMA_3_8B, "int3", "as a checkpoint", "it has no --quantization int3"),
        (configs.LLAMA_3_8B, "int2", "as a checkpoint", "headrace quantize --bits 2 --asymmetric"),
        (configs.LLAMA_3_8B | {"quantization_config": {"quant_method": "awq"}}, "none", "at load", "none"),
        (configs.OPT_6_7B, "int3", "no", "a plan alone: headrace has no model file for opt"),
    ],
)
def test_a_plan_says_how_its_form_is_served(config: Any, quantization: str | None, kind: str, how: str) -> None:
    plan = planner(config, quantization=quantization, context=1024).plan()
    assert plan.served == kind
    assert how in plan.served_how
    [line] = [line for line in words.report_of(plan, {}).splitlines() if line.startswith("served  ")]
    assert kind in line
    assert how in line
    # What a plan calls a flag of the server is one, and the others are none.
    assert (quantization in QUANTIZATIONS) == (kind == "at load" and quantization != "none")


@pytest.mark.parametrize(("form", "bits", "symmetric"), [("int3", 3, True), ("int2", 2, False)])
def test_the_bytes_of_a_planned_checkpoint_are_those_that_an_engine_loads(
    form: str, bits: int, symmetric: bool, tmp_path: Path
) -> None:
    from headrace.quantize.base import Options
    from headrace.quantize.driver import quantise_checkpoint

    options = Options(method="rtn", bits=bits, symmetric=symmetric, follows_widths=True)
    quantise_checkpoint(Path(shallow()), tmp_path / "out", options, "compressed-tensors")
    counts = Planner(read(shallow()), hardware.find("l4"), Workload(quantization=form)).counts
    norms = 2 * (2 * NUM_LAYERS + 1) * 256  # an engine counts matrices
    with closing(build_engine(EngineConfig(model=str(tmp_path / "out")))) as core:
        assert counts.weight_bytes - norms == core.info.weight_bytes
    # The control: the next form is another size.
    other = Planner(read(shallow()), hardware.find("l4"), Workload(quantization="int4-g128")).counts
    assert other.weight_bytes != counts.weight_bytes


def test_forms_that_no_server_makes_are_not_suggested() -> None:
    """215 sequences of a 70B have room in int3 and not in int4, and int3 is not suggested."""
    need: dict[str, Any] = {"context": 1024, "concurrency": 215, "kv_cache_dtype": "int8"}
    plan = planner(configs.LLAMA_3_70B, "a100", **need).plan()
    fits = [planner(configs.LLAMA_3_70B, "a100", **need, quantization=name).plan().fits for name in ("int4", "int3")]
    assert (plan.fits, fits) == (False, [False, True])
    assert plan.changes == []
    # The control: fewer have room in int4, which is suggested.
    plan = planner(configs.LLAMA_3_70B, "a100", **need | {"concurrency": 150}).plan()
    assert [change.flags for change in plan.changes] == ["--quantization int4"]


def test_the_batch_has_the_cache_of_all_its_sequences() -> None:
    plan = planner(configs.LLAMA_3_8B, context=8000, concurrency=53).plan()
    assert plan.kv_batch_bytes == 53 * 8000 * 131_072 == 53 * plan.kv_sequence_bytes
    assert "a batch          55.57 GB               53 x 1.05 GB: " in words.report_of(plan, {})
    # Of layers with windows, what is kept.
    plan = planner(configs.GEMMA_3_27B, context=8000, concurrency=3).plan()
    assert plan.kv_batch_bytes == 3 * plan.kv_windowed_bytes < 3 * plan.kv_sequence_bytes


def test_a_gguf_file_has_the_bytes_of_its_tensors(shared_data: Path) -> None:
    path = shared_data / "models" / "derived" / "gguf" / "TinyStories-656K.Q5_0.gguf"
    one = Planner(read(str(path)), hardware.find("l4"), Workload())
    from headrace import gguf

    assert one.counts.forms == {"gguf": sum(info.size for info in gguf.read(path).tensors.values())}
    assert one.plan().fits


def test_the_command_prints_a_table(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--hardware", "h100", "--slo", "ttft:500,tpot:50", "--price", "2", "--context", "8k")
    code, out, _ = run_command(monkeypatch, capsys, "plan", folder, *words)
    assert code == 0
    for text in ("8,030,261,248", "16.06 GB", "131,072 bytes a token", "TTFT", "TPOT", "goodput", "$0."):
        assert text in out


def test_the_command_prints_json_and_fails_where_the_plan_does(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_command(
        monkeypatch, capsys, "plan", f"{folder}/config.json", "--hardware", "l4", "--concurrency", "64", "--json"
    )
    assert code == 1
    plan = json.loads(out)
    assert (plan["parameters"], plan["fits"], plan["speed"]) == (8_030_261_248, False, None)
    assert plan["changes"]
    code, out, _ = run_command(monkeypatch, capsys, "plan", folder, "--hardware", "l4", "--concurrency", "64")
    assert "It does not fit: l4 has no room for 64 sequences of 4,096 tokens." in out


def test_a_machine_may_be_a_file(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "big.json"
    path.write_text(json.dumps({"memory": 1e12, "bandwidth": 8e12, "flops": 2e15}))
    code, out, _ = run_command(monkeypatch, capsys, "plan", folder, "--hardware", str(path))
    assert code == 0
    assert "big " in out
    path.write_text(json.dumps({"memory": 1e12, "bandwidth": 0, "flops": 2e15}))
    code, _, err = run_command(monkeypatch, capsys, "plan", folder, "--hardware", str(path))
    assert (code, "bandwidth must be above 0" in err) == (2, True)


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(monkeypatch, capsys, "plan", "builtin", "--json")
    machine = json.loads(out)["machine"]
    assert code == 0
    assert machine["name"] == "this machine"
    assert min(machine["memory"], machine["bandwidth"], machine["flops"]) > 1e8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hardware", "h300"), "--hardware: 'h300' is not allowed; it must be one of h100"),
        (("--context", "9000"), "--context: 9000 is not allowed; it must be at most 8192, the model's own"),
        (("--context", "0"), "--context: 0"),
        (("--output-len", "5000"), "--output-len: 5000 is not allowed; it must be from 1 to 4095"),
        (("--concurrency", "0"), "--concurrency: 0"),
        (("--quantization", "int5"), "--quantization: 'int5'"),
        (("--kv-cache-dtype", "int5"), "--kv-cache-dtype: 'int5'"),
        (("--dtype", "int5"), "--dtype: 'int5'"),
        (("--slo", "ttft"), "--slo: 'ttft'"),
    ],
)
def test_errors_are_in_the_words_of_the_flags(
    folder: str, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, _, err = run_command(
        monkeypatch, capsys, "plan", folder, *(() if "--hardware" in words else ("--hardware", "h100")), *words
    )
    assert code == 2
    assert message in err


def test_an_unknown_model_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    code, _, err = run_command(monkeypatch, capsys, "plan", str(tmp_path), "--hardware", "h100")
    assert code == 1
    assert "the planner knows no model_type 'mamba9'" in err
