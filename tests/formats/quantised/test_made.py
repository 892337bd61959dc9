"""Checkpoints that `headrace quantize` made, in the hands of the ecosystem's readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.formats.quantised import formats
from tests.formats.quantised.formats import CONFIG, TOKEN_IDS
from tests.models.test_quantised import distance
from tests.support.harness import follow, load, save_random
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from headrace.backends.torch_ref.tensors import tensor
from headrace.quantize.base import Options, find_writer
from headrace.quantize.driver import _File, quantise_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

TEXT = [[(5 * i * i + 7 * i + k) % 199 for i in range(50)] for k in range(4)]
ROUNDED = 4e-3
"""transformers multiplies in the type of the scales, float16; minimums are rounded to it here."""

COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("rtn", {}),
    "int4-asym": ("awq", {"symmetric": False}),
    "int4-act-order": ("gptq", {}),
    "int4-act-order-asym": ("gptq", {"symmetric": False}),
    "int4-channel": ("gptq", {"group_size": -1}),
    "int3": ("rtn", {"bits": 3}),
    "int8-group": ("rtn", {"bits": 8}),
    "int8-asym": ("rtn", {"bits": 8, "symmetric": False}),
    "w8a8": ("smoothquant", {"bits": 8, "group_size": -1}),
    "w8a8-tensor": ("rtn", {"bits": 8, "group_size": 0}),
}


def made(tmp_path: Path, method: str, layout: str, **changes: Any) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The directory, its tensors, and its quantization_config."""
    save_random(CONFIG, tmp_path / "plain")
    options = Options(method=method, **({"group_size": 64} | changes))
    out = tmp_path / "out"
    quantise_checkpoint(tmp_path / "plain", out, options, layout, TEXT)
    tensors: dict[str, Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= load_file(path)
    return out, tensors, json.loads((out / "config.json").read_text())["quantization_config"]


def own_weight(out: Path, layout: str, name: str, config: dict[str, Any]) -> Tensor:
    number = int(name.split(".layers.")[1].split(".")[0])
    file = _File(out / f"model-{number + 1:05}-of-00003.safetensors")
    return tensor(find_writer(layout).read(file, name, config).dequantize())


NAMES = [f"model.layers.{i}.{part}_proj" for i in range(2) for part in ("self_attn.k", "self_attn.o", "mlp.down")]


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_decompresses_to_the_same_weights(tmp_path: Path, case: str) -> None:
    formats.need("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    method, changes = COMPRESSED[case]
    out, tensors, config = made(tmp_path, method, "compressed-tensors", **changes)
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    reader = BaseCompressor.get_value_from_registry(config["format"])
    for name in NAMES:
        state = {key.removeprefix(f"{name}."): part for key, part in tensors.items() if key.startswith(f"{name}.")}
        state["weight_scale"] = state["weight_scale"].float()
        result = reader.decompress(state, scheme)["weight"].float()
        torch.testing.assert_close(result, own_weight(out, "compressed-tensors", name, config), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["int4", "int4-asym", "int4-act-order"])
def test_transformers_loads_the_directory(tmp_path: Path, case: str) -> None:
    formats.need("compressed_tensors")
    method, changes = COMPRESSED[case]
    out, _, _ = made(tmp_path, method, "compressed-tensors", **changes)
    loading = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=loading)
    expected = formats.logits_of(model.eval())
    actual = follow(load(out, backend="torch_ref", dtype="float32"), TOKEN_IDS, [len(TOKEN_IDS)])
    assert distance(actual, expected) < ROUNDED


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("changes", [{}, {"symmetric": False}, {"group_size": -1}])
def test_auto_round_unpacks_gptq_to_the_same_weights(tmp_path: Path, bits: int, changes: dict[str, Any]) -> None:
    shells = {"auto_round.utils": {"get_packing_device": lambda device=None: "cpu"}}
    reader = formats.part_of("auto_round", "auto_round_extension.torch.qlinear_torch_zp", **shells)
    out, tensors, config = made(tmp_path, "gptq", "gptq", bits=bits, **changes)
    for name in NAMES:
        ours = own_weight(out, "gptq", name, config)
        layer = reader.QuantLinear(bits, config["group_size"], ours.shape[1], ours.shape[0], False)
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            setattr(layer, part, tensors[f"{name}.{part}"])
        layer.scales = layer.scales.float()
        with torch.inference_mode():
            result = layer(torch.eye(ours.shape[1])).float().reshape(ours.shape[1], ours.shape[0]).t()
        torch.testing.assert_close(result, ours, rtol=1e-6, atol=1e-7)


def test_autoawq_unpacks_awq_to_the_same_weights(tmp_path: Path) -> None:
    formats.need("accelerate")
    shells: dict[str, dict[str, Any]] = {
        "awq.utils": {},
        "awq.utils.utils": {"get_best_device": lambda: "cpu"},
        "awq.modules": {},
        "awq.modules.linear": {},
        "awq.modules.triton": {},
    }
    reader = formats.part_of("awq", "awq.modules.linear.gemm", **shells)
    out, tensors, config = made(tmp_path, "awq", "awq")
    for name in NAMES:
        parts = [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")]
        result = reader.dequantize_gemm(parts[0], parts[1], parts[2].float(), 4, 64).t()
        torch.testing.assert_close(result, own_weight(out, "awq", name, config), rtol=1e-6, atol=1e-7)
