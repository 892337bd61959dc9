"""What writers do otherwise than the usual: names of groups, zero points, places of experts, files of settings."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.formats.quantised.right import good, packed_config, read

from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.checkpoint.names import Place, places
from headrace.quant.base import Inputs, find_format, stated_activations


def test_a_symmetric_zero_point_that_is_stored_as_it_is() -> None:
    """Some writers of GPTQ's first layout do not take one off."""
    config, tensors = good()["gptq"]
    usual = torch.full((2, 4), 0x77777777, dtype=torch.int32)
    unshifted = torch.full((2, 4), 0x88888888 - 2**32, dtype=torch.int32)
    expected = read((config, tensors | {"l.qzeros": usual})).dequantize()
    assert torch.equal(read((config, tensors | {"l.qzeros": unshifted})).dequantize(), expected)
    other = read((config | {"sym": False}, tensors | {"l.qzeros": unshifted})).dequantize()
    assert not torch.equal(other, expected), "zero points of asymmetric codes mean what the layout says"


def test_a_target_is_the_kind_of_a_layer_or_its_last_part() -> None:
    config, tensors = good()["compressed-tensors"]
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    group = packed_config()["config_groups"]["group_0"]
    for targets in (["Linear"], ["l"], ["model.l"]):
        groups = {"group_0": group | {"targets": targets}}
        assert read((config | {"config_groups": groups}, named), "model.l").scales is not None
    table = {name.replace("l.", "model.embed_tokens.", 1): tensor for name, tensor in tensors.items()}
    groups = {"group_0": group | {"targets": ["Embedding"]}}
    assert read((config | {"config_groups": groups}, table), "model.embed_tokens").scales is not None


def test_a_blocks_size_follows_from_the_shapes() -> None:
    config, tensors = good()["modelopt-blocks"]
    assert read((config, tensors)).group == 32
    flat = tensors["l.weight_scale"].reshape(1, 4)
    assert torch.equal(
        read((config, tensors | {"l.weight_scale": flat})).dequantize(), read((config, tensors)).dequantize()
    )


def test_fbgemms_inputs_are_rounded_row_by_row() -> None:
    config, _ = good()["fbgemm"]
    assert stated_activations(config) == "fp8"
    assert read(good()["fbgemm"]).inputs == Inputs()
    assert find_format(config) is find_format({"quant_method": "fp8"})


def test_mlx_has_the_parts_of_all_experts_in_one_tensor() -> None:
    stem = "model.layers.0.mlp.switch_mlp.up_proj"
    shapes: dict[str, tuple[int, ...]] = {f"{stem}.{part}": (2, 8, 4) for part in ("weight", "scales", "biases")}
    by_name = places(shapes, shapes)
    assert by_name["model.layers.0.mlp.experts.1.up_proj.scales"] == Place(f"{stem}.scales", 1)
    assert len(by_name) == 6


def test_a_file_of_settings_is_part_of_a_packed_files_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    before = MappedCheckpoint(tmp_path).config()
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "desc_act": False}))
    assert MappedCheckpoint(tmp_path).config() != before
