"""Whole checkpoints: what is written is read back, served on native kernels, and the same after a broken run."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.harness import log_probabilities
from tests.support.shallow import shallow

from headrace.llm import LLM
from headrace.models import find
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.quantize import driver
from headrace.quantize.base import Fold, Layer, Options
from headrace.quantize.driver import quantise_checkpoint
from headrace.quantize.methods import gptq
from headrace.quantize.tracing import LazyMatrix, LazyWeights, TracingOps

LENGTH = 160


@functools.cache
@functools.cache
def words(first: int, count: int) -> list[list[int]]:
    """What the shallow model says to nothing, under seeds first ... first + count - 1."""
    llm = LLM(shallow(), skip_tokenizer_init=True, num_threads=1)
    try:
        sampling_params = [
            SamplingParams(temperature=1, max_tokens=LENGTH, seed=seed) for seed in range(first, first + count)
        ]
        outputs = llm.generate([{"prompt_token_ids": [0]}] * count, sampling_params, use_tqdm=False)
    finally:
        llm.close()
    return [[0, *output.outputs[0].token_ids] for output in outputs]


def loss(model: str | Path, texts: Sequence[list[int]]) -> float:
    """Mean negative log-likelihood in nats a token, as served."""
    llm = LLM(str(model), skip_tokenizer_init=True, num_threads=1)
    try:
        outputs = llm.generate(list(texts), SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    finally:
        llm.close()
    logprobs = [
        entry[token_id].logprob
        for output, ids in zip(outputs, texts, strict=True)
        for token_id, entry in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        if entry is not None
    ]
    return -math.fsum(logprobs) / len(logprobs)


def make(out: Path, method: str, layout: str, source: Path | None = None, **changes: Any) -> driver.Report:
    options = Options(method=method, **({"group_size": 64} | changes))
    return quantise_checkpoint(source or Path(shallow()), out, options, layout, words(0, 12))


def mean(errors: dict[str, float]) -> float:
    return sum(errors.values()) / len(errors)


@pytest.mark.slow
def test_gptq_and_awq_lose_less_than_rounding_at_four_bits(tmp_path: Path) -> None:
    texts = words(100, 24)
    errors, losses = {}, {}
    for method, layout in (("rtn", "compressed-tensors"), ("gptq", "gptq"), ("awq", "awq")):
        errors[method] = mean(make(tmp_path / method, method, layout, group_size=128, symmetric=False).errors)
        losses[method] = loss(tmp_path / method, texts)
    plain = loss(shallow(), texts)
    assert errors["gptq"] < 0.9 * errors["rtn"]
    assert errors["awq"] < 0.9 * errors["rtn"]
    assert plain < losses["gptq"] < losses["rtn"]
    assert plain < losses["awq"] < losses["rtn"]


LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("rtn", "compressed-tensors", {}),
    ("rtn", "compressed-tensors", {"bits": 3, "symmetric": False}),
    ("rtn", "compressed-tensors", {"bits": 2, "group_size": 32}),
    ("rtn", "compressed-tensors", {"bits": 8, "symmetric": False}),
    ("rtn", "compressed-tensors", {"bits": 8, "group_size": -1}),
    ("rtn", "compressed-tensors", {"bits": 8, "group_size": 0}),
    ("rtn", "compressed-tensors", {"bits": 8, "group_size": 0, "symmetric": False}),
    ("rtn", "gptq", {"bits": 8}),
    ("rtn", "gptq", {"bits": 2, "symmetric": False}),
    ("rtn", "awq", {}),
    ("gptq", "gptq", {"bits": 3}),
    ("gptq", "gptq", {"act_order": "group"}),
    ("gptq", "gptq", {"act_order": "group", "symmetric": False, "bits": 2}),
    ("gptq", "compressed-tensors", {"symmetric": False}),
    ("gptq", "gptq", {"group_size": -1}),
    ("awq", "compressed-tensors", {"symmetric": True}),
    ("smoothquant", "compressed-tensors", {"bits": 8, "group_size": -1}),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"vocab_size": 64, "num_hidden_layers": 2, **changes}
    tensors = llama_tensors(config, torch.bfloat16)
    return write_llama(tmp_path_factory.mktemp("small"), tensors, torch_dtype="bfloat16", **config)


TEXT = [[(7 * i * i + 3 * i + k) % 64 for i in range(40)] for k in range(6)]


@pytest.mark.parametrize(("method", "layout", "changes"), LAYOUTS)
def test_each_layout_is_read_back_and_served(
    tmp_path: Path, small: Path, method: str, layout: str, changes: dict[str, Any]
) -> None:
    """The driver itself compares what its reader gives with the method's codes, to the bit."""
    options = Options(method=method, **({"group_size": 32} | changes))
    report = quantise_checkpoint(small, tmp_path / "out", options, layout, TEXT)
    assert len(report.errors) == 14
    assert all(0 < error < 1 for error in report.errors.values())
    assert not (tmp_path / "out" / driver.STATE).exists()
    written = json.loads((tmp_path / "out" / driver.REPORT).read_text())
    assert (written["errors"], written["groups"]) == (report.errors, report.groups)
    llm = LLM(str(tmp_path / "out"), skip_tokenizer_init=True, num_threads=1)
    try:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    finally:
        llm.close()
    assert len(output.outputs[0].token_ids) == 4


def test_what_is_read_back_wrong_is_not_kept(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.quantize.writers import awq

    monkeypatch.setattr(awq, "packed", lambda codes, bits: torch.zeros(len(codes), codes.shape[1] // 8).int())
    with pytest.raises(CheckpointError, match="not read back"):
        quantise_checkpoint(small, tmp_path / "out", Options(group_size=32), "awq")
    assert json.loads((tmp_path / "out" / driver.STATE).read_text())["files"] == {}


class Killed(Exception):
    pass


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("method", "layout"), [("gptq", "gptq"), ("awq", "awq"), ("rtn", "compressed-tensors")])
@pytest.mark.parametrize("at", [1, 7, 8, 9, 14])
def test_a_broken_run_goes_on_to_the_same_bytes(tmp_path: Path, small: Path, method: str, layout: str, at: int) -> None:
    options = Options(method=method, group_size=32)
    quantise_checkpoint(small, tmp_path / "whole", options, layout, TEXT)
    seen = []

    def kill(done: int, total: int, name: str) -> None:
        seen.append(name)
        if len([name for name in seen if name]) == at:
            raise Killed

    with pytest.raises(Killed):
        quantise_checkpoint(small, tmp_path / "broken", options, layout, TEXT, progress=kill)
    names = sorted(path.name for path in (tmp_path / "broken").glob("*.safetensors"))
    again: list[str] = []
    quantise_checkpoint(
        small, tmp_path / "broken", options, layout, TEXT, progress=lambda done, total, name: again.append(name)
    )
    assert len([name for name in again if name]) == 14 - 7 * len(names)  # finished layers are not made again
    assert files_of(tmp_path / "broken") == files_of(tmp_path / "whole")


def test_each_layer_is_calibrated_on_the_quantised_layers_before_it(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first layer spoilt, the second's codes differ, because its inputs do."""
    options = Options(method="gptq", group_size=32, bits=4)
    quantise_checkpoint(small, tmp_path / "a", options, "compressed-tensors", TEXT)
    quantise = gptq.quantise
    monkeypatch.setattr(gptq, "quantise", lambda w, s, o, name: quantise(w.flip(0) if ".0." in name else w, s, o, name))
    quantise_checkpoint(small, tmp_path / "b", options, "compressed-tensors", TEXT)
    second = [load_file(tmp_path / run / driver.WHOLE) for run in ("a", "b")]
    name = "model.layers.1.mlp.down_proj.weight_packed"
    assert not torch.equal(second[0][name], second[1][name])


def test_rows_in_another_order_are_traced_in_the_models() -> None:
    ops, order = TracingOps(), np.array([2, 0, 3, 1])
    ops.weights = {"a": torch.randn(4, 3), "b": torch.randn(2, 3)}
    matrix: Any = LazyMatrix(3, 6, names=("a", "b"), num_outs=(4, 2), orders=(order, None))
    x = torch.randn(5, 3)
    expected = torch.cat([x @ ops.weights["a"][torch.from_numpy(order)].T, x @ ops.weights["b"].T], 1)
    assert torch.allclose(ops.linear(x, matrix), expected)
    matrix.orders = ()
    assert not torch.allclose(ops.linear(x, matrix), expected)


def test_plain_layers_stay_to_the_bit(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = LazyWeights.matrix

    def plain_down(weights: LazyWeights, linear: Linear) -> Any:
        return matrix(weights, linear._replace(plain=linear.names[0].endswith("down_proj")))

    monkeypatch.setattr(LazyWeights, "matrix", plain_down)
    quantise_checkpoint(small, tmp_path / "out", Options(group_size=32), "compressed-tensors")
    before = load_file(small / "model.safetensors")
    after = load_file(tmp_path / "out" / driver.WHOLE)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"):
        assert torch.equal(after[name], before[name])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in config["ignore"]
    LLM(str(tmp_path / "out"), skip_tokenizer_init=True, num_threads=1).close()


@pytest.mark.slow
def test_smoothquant_is_served_better_than_plain_int8(tmp_path: Path) -> None:
    """Outliers are planted: three channels of each norm are 128 times as large, their weights as much smaller."""
    source, spoilt = Path(shallow()), tmp_path / "spoilt"
    spoilt.mkdir()
    tensors = load_file(source / "model.safetensors")
    channels = [5, 100, 200]
    for i in range(4):
        for norm, after in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            tensors[f"model.layers.{i}.{norm}.weight"][channels] *= 128
            for name in after:
                tensors[f"model.layers.{i}.{name}.weight"][:, channels] /= 128
    from safetensors.torch import save_file

    save_file(tensors, spoilt / "model.safetensors")
    (spoilt / "config.json").write_text((source / "config.json").read_text())
    texts = words(100, 8)
    plain = loss(shallow(), texts)
    assert loss(spoilt, texts) == pytest.approx(plain, abs=1e-6)
    options: dict[str, Any] = {"source": spoilt, "bits": 8, "group_size": -1}
    make(tmp_path / "rtn", "rtn", "compressed-tensors", **options)
    make(tmp_path / "smooth", "smoothquant", "compressed-tensors", **options)
    naive, smooth = loss(tmp_path / "rtn", texts), loss(tmp_path / "smooth", texts)
    assert abs(smooth - plain) < 0.3 * abs(naive - plain)


def test_what_can_not_be_done_is_told(tmp_path: Path, small: Path) -> None:
    options = Options(group_size=32)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    for out in (tmp_path / "full", tmp_path / "full" / "letter.txt", small):
        with pytest.raises(RequestError) as error:
            quantise_checkpoint(small, out, options, "gptq")
        assert error.value.field == "out"
    with pytest.raises(RequestError, match="calibration"):
        quantise_checkpoint(small, tmp_path / "a", Options(method="gptq", group_size=32), "gptq")
    with pytest.raises(RequestError, match="below 64"):
        quantise_checkpoint(small, tmp_path / "a", options, "gptq", [[1, 64]])
    with pytest.raises(CheckpointError, match="no multiple of group_size 48"):
        quantise_checkpoint(small, tmp_path / "b", Options(group_size=48), "gptq")
    quantise_checkpoint(small, tmp_path / "done", options, "gptq")
    with pytest.raises(CheckpointError, match="quantised already"):
        quantise_checkpoint(tmp_path / "done", tmp_path / "c", options, "gptq")
    with pytest.raises(RequestError, match="out"):
        quantise_checkpoint(small, tmp_path / "done", options, "gptq")


def test_a_run_of_other_options_is_not_gone_on_with(tmp_path: Path, small: Path) -> None:
    def kill(done: int, total: int, name: str) -> None:
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        quantise_checkpoint(small, tmp_path / "out", Options(group_size=32), "gptq", progress=kill)
    with pytest.raises(RequestError, match="other options"):
        quantise_checkpoint(small, tmp_path / "out", Options(group_size=64), "gptq")
    (tmp_path / "out" / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not there"):
        quantise_checkpoint(small, tmp_path / "out", Options(group_size=32), "gptq")


def furthest(a: Path, b: Path) -> float:
    return max(abs(x - y) for x, y in zip(log_probabilities(a, TEXT[0]), log_probabilities(b, TEXT[0]), strict=True))


FAMILIES = ["qwen2", "qwen3", "gemma2", "gemma3_text", "mistral"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family(tmp_path: Path, model_type: str) -> None:
    """Biases, norms of heads, norms with an offset, norms after a layer."""
    from tests.support.harness import save_random

    source = tmp_path / "model"
    save_random(dict(find(model_type).TINY), source)
    plain = quantise_checkpoint(source, tmp_path / "rtn", Options(group_size=8), "compressed-tensors", TEXT)
    result = quantise_checkpoint(
        source, tmp_path / "gptq", Options(method="gptq", group_size=8), "compressed-tensors", TEXT
    )
    assert mean(result.errors) < mean(plain.errors)
    # In 8 bits little is lost, unless a scale is folded to the wrong place (the test below: over 0.3). How much depends
    # on the scales that were found, and those on the arithmetic of the processor: up to 0.17 was seen.
    options = Options(method="awq", bits=8, group_size=8)
    quantise_checkpoint(source, tmp_path / "awq", options, "compressed-tensors", TEXT)
    assert furthest(source, tmp_path / "awq") < 0.22


def test_layers_that_read_the_cache_of_others_are_rounded_but_not_calibrated(tmp_path: Path) -> None:
    from tests.support.harness import save_random

    save_random(dict(find("gemma4_text").TINY), tmp_path / "model")
    quantise_checkpoint(tmp_path / "model", tmp_path / "rtn", Options(group_size=4, bits=8), "compressed-tensors", None)
    assert furthest(tmp_path / "model", tmp_path / "rtn") < 0.25
    with pytest.raises(CheckpointError, match="read the cache of others"):
        quantise_checkpoint(
            tmp_path / "model", tmp_path / "gptq", Options(method="gptq", group_size=4), "compressed-tensors", TEXT
        )


def test_a_scale_that_is_folded_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.harness import save_random

    from headrace.quantize import fold as folding

    right = folding.apply

    def wrong(layer: Layer, fold: Fold, scales: torch.Tensor) -> None:
        before = fold.before in layer.norms
        right(layer, fold, scales if before else scales.roll(1))
        if not before:
            layer.weights[fold.before].mul_(scales.roll(1).unsqueeze(1)).div_(scales.unsqueeze(1))

    monkeypatch.setattr(folding, "apply", wrong)
    save_random(dict(find("qwen3").TINY), tmp_path / "model")
    options = Options(method="awq", bits=8, group_size=8)
    quantise_checkpoint(tmp_path / "model", tmp_path / "awq", options, "compressed-tensors", TEXT)
    assert furthest(tmp_path / "model", tmp_path / "awq") > 0.3
