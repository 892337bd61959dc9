"""The files of mixtures of experts with random codes: gguf-py knows what is in them, and headrace answers from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
from bench.mixture_files import SHAPES, Shape, active_bytes, fields_of, tensors_of, write

import headrace
from headrace.backends.native import native
from headrace.protocol.errors import CheckpointError

TINY = [name for name in SHAPES if name.startswith("tiny")]
# Billions of weights, and of those that a token goes through without the table.
WEIGHTS = {
    "qwen3-30b-a3b": (30.5, 3.0), "gpt-oss-20b": (20.9, 3.6), "qwen3.6-35b-a3b": (34.7, 2.9),
    "gemma-4-26b-a4b": (25.2, 3.8),
}  # fmt: skip


def billions(shape: Shape) -> tuple[float, float]:
    every, active = 0, 0
    tensors = tensors_of(shape)
    for tensor in tensors:
        num = math.prod(tensor.shape)
        every += num
        active += num * shape.active // shape.experts if "_exps" in tensor.name else num
    if tensors[-1].name == "output.weight":
        active -= shape.vocab * shape.hidden
    return every / 1e9, active / 1e9


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_shape_has_the_weights_of_its_model(name: str) -> None:
    assert billions(SHAPES[name]) == pytest.approx(WEIGHTS[name], rel=0.02)


def test_control_another_number_of_layers_is_noticed() -> None:
    shape = SHAPES["qwen3.6-35b-a3b"]
    assert billions(shape._replace(layers=38)) != pytest.approx(WEIGHTS["qwen3.6-35b-a3b"], rel=0.02)


def test_a_token_reads_its_experts_and_the_head() -> None:
    shape = SHAPES["tiny-gemma-4"]  # whose table is its head
    assert active_bytes(shape._replace(vocab=2048)) - active_bytes(shape) == 1024 * 64 // 32 * 34
    experts = active_bytes(shape._replace(active=3)) - active_bytes(shape)
    assert experts == shape.layers * (3 * shape.inner * shape.hidden // 32 * 18 + 4)


@pytest.mark.parametrize("shape_name", TINY)
def test_names_are_those_of_gguf_py(shape_name: str) -> None:
    shape = SHAPES[shape_name]
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == shape.architecture)
    known = {gguf.TENSOR_NAMES[tensor].format(bid="N") for tensor in gguf.MODEL_TENSORS[arch]}
    for tensor in tensors_of(shape):
        name = ".".join("N" if part.isdigit() else part for part in tensor.name.split("."))
        assert name in known or name.rpartition(".")[0] in known, tensor.name


@pytest.mark.skipif(native()[0] is None, reason="no native core")
@pytest.mark.parametrize("name", TINY)
def test_a_file_answers_the_same_each_time(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(SHAPES[name], path)
    read = gguf.GGUFReader(path)
    assert {tensor.name for tensor in read.tensors} == {tensor.name for tensor in tensors_of(SHAPES[name])}
    answers: list[list[int]] = []
    for prompts in ([[5, 6, 7]], [[5, 6, 7], [1] * 40]):
        llm = headrace.LLM(str(path), skip_tokenizer_init=True, max_model_len=128, num_gpu_blocks_override=64)
        params = headrace.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
        answers.append(list(llm.generate(inputs, params, use_tqdm=False)[0].outputs[0].token_ids))
        assert len(set(answers[-1])) > 4, "an answer from weights, not one token"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", TINY)
def test_control_a_key_less_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    lost = f"{SHAPES[name].architecture}.expert_used_count"
    monkeypatch.setattr(
        "bench.mixture_files.fields_of",
        lambda shape: {key: value for key, value in fields_of(shape).items() if key != lost},
    )
    write(SHAPES[name], path)
    with pytest.raises(CheckpointError, match="expert_used_count"):
        headrace.LLM(str(path), skip_tokenizer_init=True, max_model_len=128)
