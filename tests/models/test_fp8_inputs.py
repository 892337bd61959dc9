"""fp8 x fp8: inputs rounded to E4M3 as a checkpoint says, on the reference backend, against float64; and what the CPU
does instead."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tests.models.test_quantised import distance
from tests.support.harness import follow, load, save_random

from headrace.backends.torch_ref import TorchRef
from headrace.engine.library.load import build_runner
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import Inputs, QWeight, Stacked
from headrace.quant.fit import fit_of, fitted
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint

CONFIG = {
    "model_type": "llama", "vocab_size": 199, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
IDS = [(11 * i * i + 3 * i + 1) % 199 for i in range(40)]
E4M3 = torch.float8_e4m3fn
F64 = NDArray[np.float64]


def e4m3(x: F64) -> F64:
    """The nearest number of E4M3, ties to even, by its definition: 3 bits behind the first, exponents from -6 to 8."""
    sizes = np.abs(x)
    exponents = np.clip(np.floor(np.log2(np.maximum(sizes, 2.0**-20))), -6, 8)
    step = 2.0 ** (exponents - 3)
    return np.sign(x) * np.minimum(np.round(sizes / step) * step, 448)


def expected(x: F64, weight: F64, inputs: Inputs) -> F64:
    """The product in float64. x [R, K], weight [N, K]."""
    rounded = np.empty_like(x)
    for row in range(len(x)):
        group = inputs.group or x.shape[1]
        for first in range(0, x.shape[1], group):
            piece = x[row, first : first + group]
            scale = (
                np.float32(np.abs(piece).max()) / np.float32(448) if inputs.scale is None else np.float32(inputs.scale)
            )
            # The quotient is rounded to float32, as a GPU's is.
            codes = e4m3((piece.astype(np.float32) / scale).astype(np.float64)) if scale else piece * 0
            rounded[row, first : first + group] = codes * float(scale)
    result: F64 = rounded @ weight.T
    return result


def stacked(rng: np.random.Generator, each: list[Inputs | None], num_in: int) -> tuple[Stacked, F64]:
    """Layers of 24 outputs over the same inputs, and their weights."""
    layers = []
    for inputs in each:
        codes = torch.from_numpy(rng.normal(0, 60, (24, num_in)).astype(np.float32)).to(E4M3)
        bits: Any = codes.view(torch.uint8).numpy().view([("float8_e4m3fn", np.uint8)])
        scales = rng.uniform(1e-3, 1e-2, (24, 1)).astype(np.float32)
        layers.append(QWeight(bits, scales, group=num_in, bits=8, inputs=inputs))
    scheme = fit_of(layers, TorchRef.schemes).scheme
    assert scheme is not None
    fitted_layers = [dataclasses.replace(fitted(layer, scheme), inputs=layer.inputs) for layer in layers]
    return Stacked("a", fitted_layers, scheme), np.concatenate([layer.dequantize() for layer in layers]).astype(
        np.float64
    )


CASES: list[list[Inputs | None]] = [
    [None],
    [Inputs()],
    [Inputs(0.02)],
    [Inputs(1e-3)],  # much is beyond it
    [Inputs(group=128)],
    [Inputs(0.02), Inputs(0.05), Inputs(0.02)],
    [Inputs(0.02), None],
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("each", CASES, ids=str)
def test_products_are_those_of_float64(each: list[Inputs | None], dtype: str) -> None:
    rng = np.random.default_rng(len(each))
    source, weight = stacked(rng, each, 200)
    backend = TorchRef("cpu", dtype)
    matrix = backend.ops.matrix(source)
    backend.choose_activations(None, "fp8", 1)
    x = torch.from_numpy(rng.standard_t(3, (5, 200)).astype(np.float32))
    x[2] = 0
    wide = x.double().numpy()
    actual = backend.ops.linear(x, matrix).double().numpy()
    sizes = np.abs(wide) @ np.abs(weight).T + 1e-9
    places = [slice(24 * i, 24 * i + 24) for i in range(len(each))]
    for place, inputs in zip(places, each, strict=True):
        product = expected(wide, weight[place], inputs or Inputs())
        bound = 1e-6 if dtype == "float32" else 2.0**-8
        assert (np.abs(actual[:, place] - product) <= bound * sizes[:, place]).all()
        # Without rounding the products are others, so this can fail.
        assert (np.abs(actual[:, place] - wide @ weight[place].T) > 1e-4 * sizes[:, place]).any()
    assert not actual[2].any()


def test_rows_do_not_depend_on_their_company() -> None:
    rng = np.random.default_rng(0)
    source, _ = stacked(rng, [Inputs(), Inputs(group=128)], 256)
    backend = TorchRef("cpu", "float32")
    matrix = backend.ops.matrix(source)
    backend.choose_activations(None, "fp8", 1)
    x = torch.from_numpy(rng.normal(0, 1, (7, 256)).astype(np.float32))
    x[3] *= 1000
    together = backend.ops.linear(x, matrix)
    assert all(torch.equal(backend.ops.linear(x[i : i + 1], matrix)[0], together[i]) for i in range(7))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    save_random(CONFIG, directory)
    return directory


@pytest.fixture(scope="module")
def stored(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stored")
    quantise_checkpoint(plain, out, Options(method="fp8", group_size=-1, bits=8), "compressed-tensors")
    return out


def stating(source: Path, out: Path, args: dict[str, Any] | None, scale: float | None = None) -> Path:
    """The checkpoint with `input_activations`, and with `input_scale` beside every layer."""
    out.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = args
    (out / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    if scale is not None:
        layers = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
        tensors |= {f"{name}.input_scale": torch.tensor([scale]) for name in layers}
    save_file(tensors, out / "model.safetensors")
    return out


def logits(directory: Path, **options: Any) -> torch.Tensor:
    return follow(load(directory, **({"dtype": "float32", "backend": "torch_ref"} | options)), IDS, [len(IDS)])


TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
TENSOR = TOKEN | {"strategy": "tensor", "dynamic": False}


def test_what_a_checkpoint_says_is_what_is_computed(stored: Path, tmp_path: Path) -> None:
    dynamic = stating(stored, tmp_path / "dynamic", TOKEN)
    static = stating(stored, tmp_path / "static", TENSOR, 0.01)
    other = stating(stored, tmp_path / "other", TENSOR, 1e-3)
    wide = logits(stored)
    assert torch.equal(logits(dynamic), wide)  # auto: the weights' own loss
    of_rows = logits(dynamic, activations="fp8")
    assert torch.equal(logits(stored, activations="fp8"), of_rows)  # rows' own scales where nothing is said
    result = [of_rows, logits(static, activations="fp8"), logits(other, activations="fp8")]
    losses = [distance(each, wide) for each in result]
    assert 1e-3 < losses[0] < 0.2
    assert losses[0] < losses[2]  # what is beyond the largest code becomes it
    assert len({tuple(each.flatten().tolist()) for each in result}) == 3


def test_the_cpu_keeps_16_bits_and_says_so(stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dynamic = stating(stored, tmp_path / "dynamic", TOKEN)
    with caplog.at_level(logging.INFO):
        _, info = build_runner(EngineConfig(model=str(dynamic), backend="cpu", dtype="float32"))
    assert "rounds activations to 8-bit floats; here they stay in 16 bits" in caplog.text
    assert info.activations == "16bit"
    assert distance(logits(dynamic, backend="cpu"), logits(dynamic)) < 2e-5
    with pytest.raises(RequestError, match="round nothing to 8-bit floats"):
        build_runner(EngineConfig(model=str(dynamic), backend="cpu", activations="fp8"))


def test_weights_that_are_no_8_bit_floats_have_no_such_inputs(plain: Path) -> None:
    for options in ({}, {"quantization": "int8"}):
        config: dict[str, Any] = {"model": str(plain), "backend": "torch_ref", "activations": "fp8"} | options
        with pytest.raises(RequestError, match="auto or 16bit"):
            build_runner(EngineConfig(**config))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [("per-tensor", "expected static or dynamic"), (["static"], "expected static or dynamic")],
)
def test_an_unknown_scheme(plain: Path, tmp_path: Path, scheme: Any, message: str) -> None:
    result = tmp_path / "made"
    quantise_checkpoint(plain, result, Options(method="fp8", group_size=-1, bits=8), "fp8")
    config = json.loads((result / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = scheme
    (result / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        build_runner(EngineConfig(model=str(result)))
