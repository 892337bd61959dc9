"""Tensors that a load leaves out with a line of the log, and those that it refuses; whole numbers of a config.json."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.checkpoint.test_loader import build, refused
from tests.support.checkpoints import llama_tensors, write_llama


def test_tensors_without_effect_are_left_out_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = (
        "model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached", "model.layers.0.self_attn.rotary_emb.sin_cached",
        "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "model.embeddings.position_ids",
        "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.attn.v_scale",
        "model.layers.0.mlp.up_proj.input_scale",
    )  # fmt: skip
    strays = dict.fromkeys(names, torch.ones(4)) | {"model.layers.0.mlp.nothing": torch.zeros(0, 7)}
    build(write_llama(tmp_path / "a", llama_tensors() | {name: tensor.clone() for name, tensor in strays.items()}))
    (line,) = [record.getMessage() for record in caplog.records if "without effect and left out" in record.getMessage()]
    assert line.startswith(f"{len(strays)} tensors of the checkpoint")
    # Negative controls: names that only look like them, of a weight or of its scale.
    for i, name in enumerate(("self_attn.k_norm.weight", "mlp.up_proj.weight_scale", "self_attn.attn_bias")):
        path = write_llama(tmp_path / str(i), llama_tensors() | {f"model.layers.0.{name}": torch.ones(4)})
        refused(path, f"1 tensors of the checkpoint have no place in the model: model.layers.0.{name}")


@pytest.mark.parametrize("stated", [{}, {"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 1}])
def test_layers_for_multi_token_prediction_are_left_out_whatever_the_config_says(
    stated: dict[str, int], tmp_path: Path
) -> None:
    tensors = llama_tensors()
    more = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    markers = {"model.layers.2.eh_proj.weight": torch.ones(4, 8), "model.layers.2.enorm.weight": torch.ones(4)}
    build(write_llama(tmp_path / "a", tensors | more | markers, **stated))
    # Negative controls: one more layer of the usual kind, and parts of such a layer in a layer of the model.
    refused(write_llama(tmp_path / "b", tensors | more, **stated), "have no place in the model: model.layers.2.")
    moved = {name.replace("layers.2.", "layers.1."): tensor for name, tensor in markers.items()}
    refused(write_llama(tmp_path / "c", tensors | moved, **stated), "2 tensors of the checkpoint have no place")


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128.0}
    path = write_llama(tmp_path / "a", rope_parameters=rope, num_hidden_layers=2.0)
    assert build(path, num_gpu_blocks_override=32)[1].max_model_len == 512
    refused(write_llama(tmp_path / "b", rope_parameters=rope | {"original_max_position_embeddings": 128.5}), "128.5")
