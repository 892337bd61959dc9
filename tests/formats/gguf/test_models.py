"""A model as a GGUF file that gguf-py wrote is the model of its safetensors: to the bit, whatever the types."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.gguf.models import convert, converted, gguf_name, random_blocks
from tests.support.harness import BACKENDS, follow, load, random_ids, save_random

from headrace import models
from headrace.checkpoint import gguf_source
from headrace.protocol.errors import CheckpointError

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.7, 2.9, 5.3], "original_max_position_embeddings": 512, "attention_factor": 1.25,
}  # fmt: skip
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40,
    "attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 20,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR}),
    ("mistral", {}),
    ("mixtral", {}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3_moe", {}),
    ("qwen2_moe", {"use_sliding_window": False}),
    ("qwen3_vl", {}),
    ("qwen2_5_vl", {}),
    ("gemma", {}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3_text", {"num_hidden_layers": 7}),
    ("gemma4_text", {}),
    ("gemma4_text", GEMMA4_EXPERTS),
    ("gpt2", {}),
    ("gpt_oss", {}),
    ("phi3", {"rope_parameters": LONGROPE}),
    (
        "smollm3",
        {"no_rope_layers": None, "layer_types": None, "use_sliding_window": False, "tie_word_embeddings": False},
    ),
    ("seed_oss", {}),
    ("granite", {}),
    ("ministral3", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("starcoder2", {"sliding_window": None}),
    ("glm4", {"attention_bias": True}),
    ("glm4_moe", {}),
    ("cohere2", {}),
    ("exaone4", {}),
    ("ernie4_5", {"use_bias": False}),
    ("ernie4_5_moe", {"moe_layer_end_index": -1}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "default", "rope_theta": 70000.0}}),
    ("hunyuan_v1_moe", {"moe_topk": 2}),
    ("afmoe", {}),
    ("nemotron", {}),
    ("minimax_m2", {}),
    ("llama4_text", {"no_rope_layers": None, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}),
    ("apertus", {"rope_parameters": LLAMA3}),
    ("glm", {"attention_bias": True}),
    ("hy_v3", {}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "is_old": True}),
    ("deepseek_v3", {}),
    ("glm4_moe_lite", {}),
    ("mistral4", {}),
    ("kimi_k2", {}),
    ("bitnet", {"hidden_act": "silu"}),
    ("muse_glimmer", {"text_config": models.find("muse_glimmer").TINY["text_config"] | {"post_norm_eps": 1e-8}}),
]
BIG = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
Choose = Callable[[str], str]


def tiny(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = models.find(model_type).TINY | changes
    if model_type == "gemma3_text":  # the file says nothing of the layers' kinds: the model's own rule holds
        config.pop("layer_types")
    return config


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_floats_have_the_bits_of_safetensors(
    model_type: str, changes: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    config = tiny(model_type, changes)
    save_random(config, tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf")
    token_ids = random_ids(60, config.get("text_config", config)["vocab_size"], 1)
    expected, actual = (follow(load(p, backend=backend, dtype="float32"), token_ids, [60]) for p in (tmp_path, path))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_are_the_weights_of_bitnet(kind: str, tmp_path: Path) -> None:
    form, sizes = gguf.GGMLQuantizationType[kind], {"hidden_size": 256, "intermediate_size": 512, "hidden_act": "silu"}
    save_random(tiny("bitnet", sizes | {"num_attention_heads": 4}), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name:  # factors that float16 holds, as the files of ternary models have them
            tensors[name] = (tensor / tensor.abs().mean()).round().clamp(-1, 1) * 0.0625
    save_file(tensors, tmp_path / "model.safetensors")

    def ternary(name: str, weight: Any) -> tuple[Any, Any]:
        return (weight, None) if "token_embd" in name else (gguf.quants.quantize(weight, form), form)

    path, token_ids = convert(tmp_path, tmp_path / "model.gguf", ternary), random_ids(40, 199, 1)
    expected, runner = (load(p, backend="cpu", dtype="float32") for p in (tmp_path, path))
    matrices = runner.program.model.ops.matrices
    assert {matrix.scheme.kind for matrix in matrices} == {"i2", "f"}
    assert {matrix.scheme.has_zero for matrix in matrices if matrix.scheme.kind == "i2"} == {kind == "TQ2_0"}
    actual, exact = follow(runner, token_ids, [40]), follow(expected, token_ids, [40])
    assert (actual - exact).abs().max() < 1e-4
    assert exact.std() > 0.1


def test_experts_of_mxfp4_have_the_numbers_of_their_blocks(tmp_path: Path) -> None:
    """A file of gpt-oss as it is released, beside safetensors of what gguf-py makes of its blocks."""
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    save_random(models.find("gpt_oss").TINY | {"hidden_size": 64, "intermediate_size": 32}, tmp_path)

    def form(name: str, weight: Any) -> Any:
        return (gguf.quants.quantize(weight, mxfp4), mxfp4) if ".experts." in name else (weight, None)

    path = convert(tmp_path, tmp_path / "model.gguf", form)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj") and ".experts." in name:
            blocks = gguf.quants.quantize(np.ascontiguousarray(tensor.transpose(1, 2).numpy()), mxfp4)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(blocks, mxfp4)).transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    token_ids = random_ids(40, 199, 1)
    expected, actual = (
        follow(load(p, backend="cpu", dtype="float32", activations=act), token_ids, [40])
        for p, act in ((tmp_path, "auto"), (path, "16bit"))
    )
    assert (actual - expected).abs().max() < 1e-4
    assert expected.std() > 0.3


def quantised(directory: Path, choose: Choose) -> Path:
    """A GGUF file of random blocks of the types that `choose` gives by name, and beside it safetensors of the same
    weights as gguf-py reads them. Returns the file."""
    blocks: dict[str, Any] = {}
    tensors = load_file(directory / "model.safetensors")
    config = BIG
    result = {}
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        theirs = gguf_name(name, "llama")
        if tensor.dim() < 2 or choose(theirs) == "F16":
            result[name] = tensor.half().float() if tensor.dim() > 1 else tensor
            continue
        raw, weight = random_blocks(choose(theirs), tuple(tensor.shape), seed=i)
        blocks[theirs] = (raw, gguf.GGMLQuantizationType[choose(theirs)])
        # The blocks are rows as the file has them; the safetensors have them as the model does.
        rows = converted(name, torch.arange(len(weight), dtype=torch.float32)[:, None], config)[:, 0].long()
        back = torch.empty_like(rows)
        back[torch.arange(len(rows))] = torch.argsort(rows)
        result[name] = torch.from_numpy(weight[back.numpy()].copy())
    save_file(result, directory / "model.safetensors")

    def form(name: str, weight: Any) -> tuple[Any, Any]:
        if name in blocks:
            raw, kind = blocks[name]
            read = gguf.quants.dequantize(raw, kind)
            assert np.array_equal(read, weight), "the two files have the same weights"
            return raw, kind
        return weight.astype(np.float16), gguf.GGMLQuantizationType.F16

    return convert(directory, directory / "model.gguf", form)


def q4_k_m(name: str) -> str:
    """The mixture that llama.cpp calls Q4_K_M: v, down and the head in 6 bits."""
    return "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.")) else "Q4_K"


MIXTURES: dict[str, Choose] = {
    "Q4_K_M": q4_k_m,
    "Q5_K_M": lambda name: q4_k_m(name).replace("Q4", "Q5"),
    "Q3_K+Q2_K": lambda name: "Q3_K" if "attn_q" in name or "ffn_up" in name else "Q2_K",
    "halves and blocks": lambda name: "F16" if "attn_k" in name or "token_embd" in name else "Q8_0",
    "IQ": lambda name: "IQ4_XS" if "attn" in name else "IQ3_S",
    "IQ4_NL": lambda name: "IQ4_NL",
    "IQ2": lambda name: "IQ2_XS" if "attn" in name else "IQ2_XXS",
    "IQ1": lambda name: "IQ1_M" if "attn" in name else "IQ1_S",
    "MXFP4": lambda name: "MXFP4",
    "TQ": lambda name: "TQ1_0" if "attn" in name else "TQ2_0",
    "TQ beside others": lambda name: "TQ1_0" if "attn_q" in name else "TQ2_0" if "_k" in name else "Q4_0",
}


def kl(expected: torch.Tensor, actual: torch.Tensor) -> float:
    p, q = expected.double().log_softmax(-1), actual.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_blocks_are_the_weights_that_gguf_py_reads(mixture: str, tmp_path: Path) -> None:
    save_random(BIG, tmp_path)
    path = quantised(tmp_path, MIXTURES[mixture])
    token_ids = random_ids(40, BIG["vocab_size"], 2)
    for backend in BACKENDS:
        expected = follow(load(tmp_path, backend=backend, dtype="float32"), token_ids, [40])
        exact = follow(load(path, backend=backend, dtype="float32", quantization="none"), token_ids, [40])
        assert torch.equal(exact, expected), backend
        assert expected.std() > 0.1
        ours = follow(load(path, backend=backend, dtype="float32"), token_ids, [40])
        assert math.isfinite(ours.abs().max())
        # cpu also quantises activations; torch_ref shows what the forms of the weights cost.
        assert kl(expected, ours) <= {"cpu": 1e-3, "torch_ref": 5e-6}[backend], backend


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split(": ")[1] for record in caplog.records if "run as" in record.getMessage()]


def test_matrices_that_are_one_for_the_model_keep_forms_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random(BIG, tmp_path)
    path = quantised(tmp_path, MIXTURES["Q4_K_M"])
    with caplog.at_level("INFO", logger="headrace"):
        runner = load(path, backend="cpu", dtype="float32")
    stacks = [matrix for matrix in runner.program.model.ops.matrices if hasattr(matrix, "parts")]
    assert [[part.scheme.dtype for part in stack.parts] for stack in stacks] == [["Q4_K", "Q6_K"]] * 2
    assert [line.split(",")[0] for line in told(caplog)] == [
        "4 of Q4_K run as Q4_K", "7 of Q6_K run as Q6_K", "1 of Q6_K run as Q6_K (table"
    ]  # fmt: skip
    matrices = load(tmp_path, backend="torch_ref", dtype="float32").program.model.ops.matrices
    exact = {matrix.name: matrix.dense() for matrix in matrices}
    for matrix in runner.program.model.ops.matrices:
        assert np.array_equal(matrix.dense(), exact[matrix.name].numpy()), matrix.name


def test_wider_forms_are_told_in_one_line_with_the_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bits(mixture: Choose) -> tuple[float, str]:
        """Bits of a weight of the layers' matrices in memory, and the line."""
        caplog.clear()
        save_random(BIG, tmp_path)
        matrices = load(quantised(tmp_path, mixture), backend="cpu").program.model.ops.matrices
        parts = [part for matrix in matrices for part in getattr(matrix, "parts", [matrix])]
        schemes = {part.scheme for part in parts if "layers" in part.name}
        lines = [record.getMessage() for record in caplog.records if "more bits here" in record.getMessage()]
        return max(scheme.bits_per_weight(256) for scheme in schemes), "".join(lines)

    # Six bits and more for IQ2; their own width for the others, ternary types among them.
    wide, line = bits(lambda name: "IQ2_XS" if "ffn" in name else "Q6_K")
    assert wide == 9
    stored, in_memory = (2 * 3 * 256 * 512 * each / 8 / 2**20 for each in (2.3125, 9))
    sizes = f"{stored:.1f} MiB stored, {in_memory:.1f} MiB in memory"
    assert line == f"model.gguf: IQ2_XS take more bits here than in the file: {sizes}"
    assert bits(lambda name: "Q6_K") == (6.5625, "")
    assert bits(lambda name: "TQ1_0" if "ffn" in name else "Q2_K")[0] == 2.625
    assert bits(lambda name: "TQ1_0" if "blk" in name else "Q2_K")[0] == 2.125
    assert bits(lambda name: "TQ2_0" if "blk" in name else "Q2_K")[0] == 2 + 20 / 128


def test_packed_once_a_file_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(BIG, tmp_path)
    path = quantised(tmp_path, MIXTURES["Q4_K_M"])
    token_ids = random_ids(40, BIG["vocab_size"], 2)

    def logits(**options: Any) -> torch.Tensor:
        return follow(load(path, backend="cpu", **options), token_ids, [40])

    expected = logits()
    assert torch.equal(logits(save_packed=True), expected)
    (packed,) = tmp_path.glob("headrace-gguf-model-float16-*.packed")
    whole = packed.read_bytes()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the file is read anew")

    with monkeypatch.context() as patched:
        patched.setattr(gguf_source.GGUFWeights, "__init__", refuse)
        assert torch.equal(logits(), expected)
        with pytest.raises(AssertionError, match="anew"):  # Negative controls: other weights, another file.
            logits(quantization="none")
        path.touch()
        with pytest.raises(AssertionError, match="anew"):
            logits()
    assert torch.equal(logits(save_packed=True), expected)
    (again,) = tmp_path.glob("headrace-gguf-model-float16-*.packed")
    assert again != packed
    assert len(again.read_bytes()) == len(whole)


def test_a_table_that_is_converted_is_packed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(BIG, tmp_path)
    path = quantised(tmp_path, lambda name: "Q8_0")
    token_ids = random_ids(40, BIG["vocab_size"], 2)

    def logits(**options: Any) -> torch.Tensor:
        return follow(load(path, backend="cpu", **options), token_ids, [40])

    expected = logits(save_packed=True)
    converted: list[str] = []
    floats = gguf_source.GGUFFormat.floats
    monkeypatch.setattr(
        gguf_source.GGUFFormat, "floats", lambda self, name, shape: converted.append(name) or floats(self, name, shape)
    )
    assert torch.equal(logits(), expected)
    assert converted == []
    (packed,) = tmp_path.glob("*.packed")
    packed.unlink()
    assert torch.equal(logits(), expected)
    assert converted == ["model.embed_tokens.weight"]


def test_control_rows_left_in_pairs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama", {})
    save_random(config, tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf")
    token_ids = random_ids(20, config["vocab_size"], 1)
    right = follow(load(path, dtype="float32"), token_ids, [20])
    monkeypatch.setattr(gguf_source.GGUFFormat, "_order", lambda self, name, num_rows: None)
    assert not torch.allclose(follow(load(path, dtype="float32"), token_ids, [20]), right, atol=1e-2)


def test_a_tensor_without_a_place_is_told(tmp_path: Path) -> None:
    save_random(tiny("llama", {}), tmp_path)

    def more(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(6, np.float32))

    path = convert(tmp_path, tmp_path / "model.gguf", fields=more)
    with pytest.raises(CheckpointError, match="no place in the model: blk.0.attn_sinks.weight"):
        load(path)


def test_tensors_without_effect_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_random(tiny("llama", {}), tmp_path)

    def more(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_rot_embd.weight", np.zeros(6, np.float32))
        writer.add_tensor("blk.0.nothing.weight", np.zeros((0, 32), np.float32))

    load(convert(tmp_path, tmp_path / "model.gguf", fields=more))
    assert "2 tensors of model.gguf are without effect and left out: blk.0.attn_rot_embd.weight, blk.0." in caplog.text
