"""What can not be made is refused before any work; what is not refused is made."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.harness import log_probabilities, save_random
from typer.testing import CliRunner

from headrace.cli import quantize as command
from headrace.cli.main import app
from headrace.models import find
from headrace.protocol.errors import CheckpointError, HeadraceError, RequestError
from headrace.quantize import driver, mixed, state
from headrace.quantize.base import Options, find_method, find_writer, method_names, writer_names
from headrace.quantize.gguf_writer import Source

TEXT = [[(7 * i * i + 3 * i + k) % 64 for i in range(24)] for k in range(2)]


def small(directory: Path, **changes: int) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"vocab_size": 64, "num_hidden_layers": 1, **sizes, **changes}
    return write_llama(directory, llama_tensors(config, torch.bfloat16), torch_dtype="bfloat16", **config)


def options_of(method: str) -> list[Options]:
    """As many as fit none, some and all."""
    options = [
        Options(method=method, bits=bits, group_size=size) for bits in (2, 3, 4, 5, 8) for size in (32, 64, -1, 0)
    ]
    turned = [dataclasses.replace(one, symmetric=symmetric) for one in options[::3] for symmetric in (True, False)]
    ordered = [dataclasses.replace(one, act_order="group") for one in options[:12:2]] if method == "gptq" else []
    return options + turned + ordered


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One whose sizes fit everything, one whose sizes fit little."""
    folder = tmp_path_factory.mktemp("models")
    return [small(folder / "even"), small(folder / "odd", hidden_size=40, intermediate_size=52, head_dim=12)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", method_names())
def test_every_method_in_every_format_is_refused_at_once_or_made(
    method: str, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.shards.os, "fsync", lambda descriptor: None)
    num_made = num_refused = 0
    for model, layout, options in itertools.product(models, writer_names(), options_of(method)):
        out = tmp_path / str(num_made)
        try:
            expected = find_method(method).verify(options)
            find_writer(layout).verify(expected)
            driver.verify_checkpoint(model, expected, layout)
        except (RequestError, CheckpointError):
            num_refused += 1
            continue
        if num_made % 4 == 0 or model == models[1]:  # enough, and the sizes that are most likely to break
            driver.quantise_checkpoint(model, out, expected, layout, TEXT)
        num_made += 1
    assert num_made > 0
    assert num_refused > num_made


@pytest.mark.parametrize(
    ("layout", "changes", "result"),
    [
        ("awq", {"intermediate_size": 100}, "eights of outputs"),
        ("gptq", {"intermediate_size": 100}, "whole words of 4 bits"),
        ("gguf", {"intermediate_size": 80}, "rows of 32s"),
        ("compressed-tensors", {"intermediate_size": 100, "hidden_size": 72}, "group_size 48"),
    ],
)
def test_sizes_are_looked_at_first(layout: str, changes: dict[str, int], result: str, tmp_path: Path) -> None:
    model = small(tmp_path / "model", **changes)
    options = Options(group_size=48 if "48" in result else -1)
    with pytest.raises(CheckpointError, match=result):
        driver.verify_checkpoint(model, find_method("rtn").verify(options), layout)


def test_nothing_is_asked_of_a_model_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration text costs most: no way to it before all is looked at."""
    monkeypatch.setattr(command, "calibration_text", lambda *_: pytest.fail("a text was asked for"))
    model = small(tmp_path / "model", intermediate_size=100)
    (tmp_path / "here").write_text("mine")
    wrong: list[tuple[list[str], str]] = [
        (["--method", "gptq", "--group-size", "20"], "no multiple of group_size 20"),
        (["--method", "awq", "--group-size", "-1"], "eights of outputs"),
        (["--method", "gptq", "--group-size", "-1", "--format", "gguf"], "rows of 32s"),
        (["--method", "smoothquant", "--format", "awq"], "format"),
        (["--method", "llm_int8", "--format", "gptq"], "format"),
    ]
    for arguments, result in wrong:
        done = CliRunner().invoke(app, ["quantize", str(model), str(tmp_path / "out"), *arguments])
        assert isinstance(done.exception, HeadraceError), arguments
        assert result in str(done.exception)
    done = CliRunner().invoke(app, ["quantize", str(model), str(tmp_path / "here" / "out"), "--method", "gptq"])
    assert isinstance(done.exception, HeadraceError)
    mixture = ["quantize", str(model), str(tmp_path / "out.gguf"), "--method", "mixed", "--bits", "1.5"]
    done = CliRunner().invoke(app, mixture)
    assert isinstance(done.exception, RequestError)
    assert "at least" in str(done.exception)


@pytest.mark.parametrize("method", method_names())
def test_the_default_group_follows_the_widths(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 is the largest power of two in 96 and 160. A group that the user chose is refused with those that fit."""
    monkeypatch.setattr(command, "calibration_text", lambda *_: TEXT)
    monkeypatch.setattr(driver.shards.os, "fsync", lambda descriptor: None)
    model = small(tmp_path / "model", hidden_size=96, intermediate_size=160)
    arguments = ["quantize", str(model), str(tmp_path / "out"), "--method", method]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    default = command.DEFAULTS.get(method, command.Default())
    groups = json.loads((tmp_path / "out" / driver.REPORT).read_text())["groups"]
    inputs = {name: 160 if "down_proj" in name else 96 for name in groups}
    assert len(groups) == 7
    assert groups == (inputs if default.group_size == -1 else dict.fromkeys(groups, 32))
    listed = "96 and 160" if default.group_size == -1 else "32"
    assert f"7 layers quantised in groups of {listed}" in " ".join(done.stderr.split())
    if default.group_size == 128:
        with pytest.raises(CheckpointError, match="no multiple of group_size 128; group_size may be 32, 16, 8, -1 "):
            CliRunner().invoke(
                app,
                [*arguments[:2], str(tmp_path / "asked"), *arguments[3:], "--group-size", "128"],
                catch_exceptions=False,
            )


def test_a_default_group_that_no_power_of_two_can_follow(tmp_path: Path) -> None:
    model = small(tmp_path / "model", intermediate_size=100)
    options = find_method("rtn").verify(Options(follows_widths=True))
    with pytest.raises(CheckpointError, match="no multiple of group_size 128; group_size may be -1 "):
        driver.verify_checkpoint(model, options, "compressed-tensors")


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = find_method("rtn").verify(Options(group_size=32))
    needed = driver.verify_checkpoint(small(tmp_path / "model"), options, "gptq")
    result = driver.quantise_checkpoint(tmp_path / "model", tmp_path / "made", options, "gptq")
    assert 0.7 * result.num_bytes < needed < result.num_bytes
    usage = driver.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(driver.shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(RequestError, match=f"place for {needed} bytes"):
        state.verify_out(tmp_path / "out", needed)
    monkeypatch.setattr(driver.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    state.verify_out(tmp_path / "out", needed)


def gpt2(directory: Path) -> Path:
    save_random(dict(find("gpt2").TINY) | {"n_embd": 64}, directory)
    return directory


GPT2 = [("gptq", "gptq", {}), ("rtn", "gptq", {"group_size": -1}), ("rtn", "gguf", {}), ("nf4", "bitsandbytes", {})]


@pytest.mark.parametrize(("method", "layout", "changes"), GPT2)
def test_layers_stored_the_other_way_round(tmp_path: Path, method: str, layout: str, changes: dict[str, Any]) -> None:
    """GPT-2's: codes lie [out, in], as those readers that know such layers have them."""
    model, out = gpt2(tmp_path / "gpt2"), tmp_path / "out"
    bits = 4 if method == "nf4" else 8
    options = Options(method=method, **({"bits": bits, "group_size": 32} | changes))
    report = driver.quantise_checkpoint(model, out, options, layout, TEXT)
    assert set(report.errors) >= {f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")}
    pairs = zip(log_probabilities(out, TEXT[0]), log_probabilities(model, TEXT[0]), strict=True)
    far = max(abs(a - b) for a, b in pairs)
    assert 0 < far < (0.1 if bits == 8 else 1.0)  # of weights that are not turned, some 3


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq", "fp8"])
def test_layouts_without_such_layers_are_refused(tmp_path: Path, layout: str) -> None:
    method, bits = ("fp8", 8) if layout == "fp8" else ("rtn", 4)
    options = Options(method=method, bits=bits, group_size=-1)
    with pytest.raises(CheckpointError, match=r"stored \[in, out\]"):
        driver.quantise_checkpoint(gpt2(tmp_path / "gpt2"), tmp_path / "out", options, layout)


def test_experts_that_may_lie_either_way_are_refused(tmp_path: Path) -> None:
    save_random(find("qwen3_vl_moe").TINY, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"may be stored \[in, out\]: such experts are not quantised"):
        driver.verify_checkpoint(tmp_path / "model", find_method("rtn").verify(Options(group_size=-1)), "gptq")


def test_the_least_budget_of_a_mixture(tmp_path: Path) -> None:
    source = Source(small(tmp_path / "model"))
    least = mixed.least_bits(source)
    mixed.verify(source, least)
    with pytest.raises(RequestError, match=f"at least {least:.2f}"):
        mixed.verify(source, least - 0.01)


@pytest.mark.parametrize(
    ("method", "bits", "layout"),
    [("awq", 3, "compressed-tensors"), ("awq", 4, "awq"), ("gptq", 3, "gptq")],
)
def test_a_method_has_a_format_for_its_bits(method: str, bits: int, layout: str, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"token_ids": piece}) for piece in TEXT))
    flags = ["--method", method, "--bits", str(bits), "--group-size", "32", "--calibration", str(text)]
    done = CliRunner().invoke(app, ["quantize", str(small(tmp_path / "plain")), str(tmp_path / "out"), *flags])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == layout


def test_a_format_that_does_not_hold_the_bits_names_those_that_do(tmp_path: Path) -> None:
    flags = ["--method", "awq", "--bits", "3", "--format", "awq"]
    done = CliRunner().invoke(app, ["quantize", "builtin", str(tmp_path / "out"), *flags])
    assert isinstance(done.exception, RequestError)
    assert "compressed-tensors or gptq for awq, 3 bits" in str(done.exception)
