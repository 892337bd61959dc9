"""Mixture models on the cuda backend, by the kernels' twins: their logits, and the memory of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.harness import load, random_ids, save_random, scattered_tables

from headrace import models
from headrace.backends.cuda.kernels.experts import Stack
from headrace.backends.cuda.kernels.linear_8bit import EightBits
from headrace.backends.cuda.kernels.linear_codes import PackedCodes
from headrace.backends.cuda.matrix import CudaMatrix
from headrace.backends.cuda.stacks import Stacks, stack_of
from headrace.backends.step import Chunks
from headrace.plan.counting import count
from headrace.plan.forms import Forms
from headrace.quant.schemes import Scheme

ON_CPU: dict[str, Any] = {"backend": "cuda", "device": "cpu"}
WIDE = models.find("qwen3_moe").TINY | {"hidden_size": 256, "moe_intermediate_size": 256}


def logits(directory: Path, **how: Any) -> Any:
    program: Any = load(directory, block_size=8, max_num_batched_tokens=64, **how).program
    tokens = [random_ids(length, program.vocab_size, 1 + i) for i, length in enumerate([9, 5])]
    chunks = Chunks([0, 0], tokens, scattered_tables([9, 5], 8, program.num_blocks, 1))
    return program.forward(chunks, [8, 13])[1].fetch().copy()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "ernie4_5_moe", "glm4_moe", "hy_v3"])
def test_logits_are_those_of_the_reference(model_type: str, tmp_path: Path) -> None:
    save_random(models.find(model_type).TINY, tmp_path)
    mine, reference = (logits(tmp_path, dtype="float32", **how) for how in (ON_CPU, {"backend": "torch_ref"}))
    assert np.abs(mine - reference).max() < 1e-5 * np.abs(reference).max()


@pytest.mark.parametrize("quantization", ["int4-g64-asym", "mxfp4", "int8", "fp8-g128"])
def test_codes_of_experts_stay_codes_and_the_plan_knows_it(quantization: str, tmp_path: Path) -> None:
    save_random(WIDE, tmp_path)
    program: Any = load(tmp_path, dtype="bfloat16", quantization=quantization, block_size=8, **ON_CPU).program
    mixtures = [node.fields["mixture"] for node in program.tape.nodes if node.op == "experts"]
    stacks = [stack for mixture in mixtures for stack in (mixture.gate_up, mixture.down)]
    assert all(isinstance(stack.data, PackedCodes | EightBits) for stack in stacks)
    experts = [layer.mlp.layer for layer in program.model.layers if hasattr(layer.mlp, "layer")]
    matrices = [m for layer in experts for part in (layer.gate_up, layer.down) for m in part]
    joined = {stack.codes.untyped_storage().data_ptr() for stack in stacks}
    assert {m.data.codes.untyped_storage().data_ptr() for m in matrices} == joined, "experts are held twice"
    counts = count(WIDE, Forms("bfloat16", quantization))
    planned = sum(mixture.num_bytes * num for mixture, num in counts.mixtures)
    assert sum(m.num_bytes for m in matrices) == pytest.approx(planned, rel=0.03)


def expert(name: str, data: Any, num_out: int) -> CudaMatrix:
    return CudaMatrix(name, Scheme("f", dtype="float32"), data, 16, num_out, None, num_out)


def test_experts_are_joined_when_another_layer_begins() -> None:
    stacks, names = Stacks(torch.float32), [f"a.experts.{e}.w{i}" for i in (1, 2) for e in range(3)]
    parts = [expert(name, torch.full((4, 16), float(i)), 4) for i, name in enumerate(names)]
    for part in parts:
        stacks.add(part)
    first, second = parts[:3], parts[3:]
    assert all(part.place is not None for part in first)
    assert all(part.place is None for part in second)
    stacks.add(expert("a.o_proj", torch.zeros(4, 16), 4))
    stack = stack_of(second, torch.float32)
    assert isinstance(stack, Stack)
    assert second[0].place is not None
    assert stack is second[0].place[0]
    assert torch.equal(stack.codes[::4, 0], torch.tensor([3.0, 4.0, 5.0]))
    assert stack_of(second[::-1], torch.float32).codes[::4, 0].tolist() == [5.0, 4.0, 3.0]


def test_experts_of_different_forms_become_plain() -> None:
    eight = EightBits(torch.ones(4, 16).to(torch.float8_e4m3fn), torch.full((4, 1), 0.5))
    parts = [expert("a.experts.0.w", torch.ones(4, 16, dtype=torch.bfloat16), 4), expert("a.experts.1.w", eight, 4)]
    data = stack_of(parts, torch.bfloat16).data
    assert isinstance(data, torch.Tensor)
    assert data.dtype == torch.bfloat16
    assert data[::4, 0].tolist() == [1.0, 0.5]
