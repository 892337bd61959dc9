"""Refusals of a checkpoint say where it lies."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from tests.checkpoint.test_loader import refused
from tests.support.checkpoints import llama_tensors, write_llama


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_missing_tensor_is_named_with_the_files_that_were_searched(num_shards: int, tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    directory = write_llama(tmp_path, tensors, num_shards=num_shards)
    first = min(directory.glob("*.safetensors"))
    others = "" if num_shards == 1 else " and from the 2 files beside it"
    refused(directory, f"model.layers.1.mlp.up_proj.weight is missing from {first}{others}")


def test_control_a_refusal_that_does_not_say_where_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = llama_tensors() | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}
    directory = write_llama(tmp_path, tensors)
    monkeypatch.setattr("headrace.engine.library.load.naming", contextlib.nullcontext)
    with pytest.raises(AssertionError, match="no place"):
        refused(directory, "no place")
