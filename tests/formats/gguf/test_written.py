"""A model that headrace wrote as a GGUF file: the bits of its safetensors as floats, near it as blocks, with its
tokenizer and template; gguf-py reads what headrace reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.gguf.test_models import CASES, kl, tiny
from tests.support.harness import BACKENDS, follow, load, random_ids, save_random
from tests.support.shallow import shallow

from headrace import gguf as reader
from headrace import hub, models
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.formats import gguf_blocks
from headrace.quantize import gguf_model, gguf_tokenizer, gguf_writer
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint
from headrace.quantize.gguf_writer import LEVELS, convert
from headrace.text.tokenizer import Tokenizer

PATH = Path(shallow())

# KL in nats a token of the built-in model's predictions, on its own text.
MOST_KL = {
    "F32": 1e-9, "F16": 1e-5, "BF16": 1e-5, "Q8_0": 5e-4, "Q6_K": 2e-3, "Q5_K_M": 6e-3, "Q5_K_S": 8e-3, "Q5_1": 8e-3,
    "Q5_0": 1e-2, "Q4_K_M": 3e-2, "Q4_K_S": 3e-2, "Q4_1": 3e-2, "Q4_0": 5e-2, "Q3_K_M": 1.5e-1, "Q3_K_S": 3e-1,
    "Q2_K": 8e-1,
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model_type", "changes"), [case for case in CASES if case[0] in gguf_model.ARCHITECTURES])
def test_floats_have_the_bits_of_safetensors(
    model_type: str, changes: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    config = tiny(model_type, changes)
    save_random(config, tmp_path)
    path = tmp_path / "model.gguf"
    convert(tmp_path, path, "F32")
    token_ids = random_ids(60, config["vocab_size"], 1)
    expected, actual = (follow(load(p, backend=backend, dtype="float32"), token_ids, [60]) for p in (tmp_path, path))
    assert expected.std() > 0.1
    if changes.get("rope_parameters", {}).get("rope_type") == "llama3":  # the file has factors of float32, not formulas
        assert torch.allclose(actual, expected, atol=1e-4)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_a_type_without_a_writer_leaves_no_file(model_type: str, tmp_path: Path) -> None:
    save_random(tiny(model_type, {}), tmp_path)
    with pytest.raises(CheckpointError, match=f"model_type is '{model_type}'; headrace writes GGUF files of llama"):
        convert(tmp_path, tmp_path / "model.gguf", "F32")
    assert not list(tmp_path.glob("*.gguf*"))


def test_every_type_is_written_or_refused_by_name() -> None:
    others = set(models.names()) - gguf_model.ARCHITECTURES.keys()
    assert len(others) == len(models.names()) - len(gguf_model.ARCHITECTURES)
    for model_type in others:
        with pytest.raises(CheckpointError, match=f"model_type is '{model_type}'; headrace writes GGUF files of llama"):
            gguf_model.metadata(ModelConfig(models.find(model_type).TINY))


def text_ids() -> list[int]:
    tokenizer = Tokenizer.load(PATH)
    return tokenizer.encode(
        "Once upon a time there was a little girl named Lily. She loved to play in the garden. " * 2
    )


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    ids = text_ids()
    return follow(load(PATH, backend="torch_ref", dtype="float32"), ids, [len(ids)])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_the_built_in_model(level: str, expected: torch.Tensor, tmp_path: Path) -> None:
    path, ids = tmp_path / f"{level}.gguf", text_ids()
    written = convert(PATH, path, level)
    assert written.num_bytes == path.stat().st_size
    exact = follow(load(path, backend="torch_ref", dtype="float32", quantization="none"), ids, [len(ids)])
    assert kl(expected, exact) <= MOST_KL[level]
    ours = follow(load(path, backend="cpu"), ids, [len(ids)])
    assert kl(expected, ours) <= MOST_KL[level] + 5e-3
    mine = reader.read(path)
    for tensor in gguf.GGUFReader(path).tensors:
        info = mine.tensors[tensor.name]
        assert written.kinds[tensor.name] == info.type == tensor.tensor_type.name
        assert tuple(int(size) for size in tensor.shape) == info.shape
        if info.type in gguf_blocks.TYPES:
            rows = np.frombuffer(mine.data, np.uint8, info.size, info.start).reshape(info.shape[1], -1)
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(gguf_blocks.decode(info.type, rows).dequantize(), theirs)


def test_bits_and_losses_are_in_order(expected: torch.Tensor, tmp_path: Path) -> None:
    ids, actual = text_ids(), {}
    for level in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"):
        path = tmp_path / f"{level}.gguf"
        bits = convert(PATH, path, level).bits
        exact = follow(load(path, backend="torch_ref", dtype="float32", quantization="none"), ids, [len(ids)])
        actual[level] = (bits, kl(expected, exact))
    assert [bits for bits, _ in actual.values()] == sorted(bits for bits, _ in actual.values()), actual
    assert [loss for _, loss in actual.values()] == sorted((loss for _, loss in actual.values()), reverse=True), actual


def test_tokenizer_template_and_ends_come_along(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    convert(PATH, path, "Q8_0")
    original, back = Tokenizer.load(PATH), Tokenizer.load(path)
    for text in ("Hello <|end|> world", "<|user|>Tell me.<|end|><|assistant|>", "  x\n\n\ty 1234", "naïve 東京 🙂", ""):
        assert back.encode(text) == original.encode(text)
        assert back.decode(original.encode(text)) == original.decode(original.encode(text))
    assert back.chat_templates == original.chat_templates
    assert back.special_tokens == original.special_tokens
    assert set(hub.eos_token_ids(path)) == set(hub.eos_token_ids(PATH))


@pytest.mark.parametrize("name", ["TinyStories-656K", "derived/stories260K-hf"])
def test_real_models(shared_data: Path, name: str, tmp_path: Path) -> None:
    directory, path = shared_data / "models" / name, tmp_path / "model.gguf"
    token_ids = random_ids(100, 500, 3)
    expected = follow(load(directory, backend="torch_ref", dtype="float32"), token_ids, [100])
    for level, most in (("F32", 0.0), ("Q8_0", 1e-3), ("Q4_K_M", 0.5)):
        convert(directory, path, level)
        actual = follow(load(path, backend="torch_ref", dtype="float32", quantization="none"), token_ids, [100])
        assert kl(expected, actual) <= most


@pytest.mark.slow
def test_tokenizers_of_many_kinds_or_a_clear_refusal(shared_data: Path, tmp_path: Path) -> None:
    """Each of the real tokenizers is read back as it was, or refused by name of what GGUF can not say."""
    refusals, num_written = [], 0
    for path in sorted((shared_data / "tokenizers").iterdir()):
        try:
            num_written += path.is_dir() and bool(gguf_tokenizer.metadata(path, 0))
        except CheckpointError as error:
            refusals.append(f"{path.name}: {error}")
    assert all("GGUF" in refusal for refusal in refusals), refusals
    assert num_written >= 3, refusals


def test_control_rows_that_are_not_put_in_pairs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama", {})
    save_random(config, tmp_path)
    path = tmp_path / "model.gguf"
    planned = gguf_model.planned
    monkeypatch.setattr(gguf_model, "planned", lambda *a, **k: [plan._replace(turned=0) for plan in planned(*a, **k)])
    convert(tmp_path, path, "F32")
    token_ids = random_ids(60, config["vocab_size"], 1)
    expected, actual = (
        follow(load(p, backend="torch_ref", dtype="float32"), token_ids, [60]) for p in (tmp_path, path)
    )
    assert kl(expected, actual) > 1e-3


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("gemma2", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "rope_type"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ],
)
def test_models_that_gguf_has_no_words_for_are_refused(
    model_type: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = tiny(model_type, {}) | changes
    save_random(config, tmp_path)
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=named):
        convert(tmp_path, path, "F32")
    assert not list(tmp_path.glob("*.gguf*"))


def test_refusals_and_failures_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama", {})
    save_random(config, tmp_path)
    path = tmp_path / "model.gguf"
    with pytest.raises(RequestError, match="Q4_K_M"):
        convert(tmp_path, path, "Q4_K_XXL")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="self_attn.sinks"):
        convert(tmp_path, path, "F32")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="blk.1.ffn_up.weight"):
        convert(tmp_path, path, "Q8_0")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="quantised already"):
        convert(tmp_path, path, "F32")
    assert not list(tmp_path.glob("*.gguf*"))


def test_the_writer_reads_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file does not depend on how much is read at once."""
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    convert(Path(shallow(1)), whole, "Q4_K_M")
    monkeypatch.setattr(gguf_writer, "SLAB_WEIGHTS", 1024)
    convert(Path(shallow(1)), cut, "Q4_K_M")
    assert whole.read_bytes() == cut.read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("bits", "method"), [(4, "rtn"), (3, "rtn"), (8, "rtn"), (4, "gptq")])
def test_codes_of_a_method_are_kept(bits: int, method: str, tmp_path: Path) -> None:
    """As blocks they are the weights that GPTQ's own layout holds."""
    options = Options(method, bits, 64, symmetric=True)
    text = [random_ids(60, 2000, 5)]
    for layout in ("gptq", "gguf"):
        quantise_checkpoint(PATH, tmp_path / layout, options, layout, text)
    path = tmp_path / "gguf" / "gguf.gguf"
    assert hub.resolve(str(tmp_path / "gguf")) == path
    kinds = {info.type for name, info in reader.read(path).tensors.items() if ".attn_q.weight" in name}
    assert kinds == {"Q8_0" if bits == 8 else "Q4_0"}
    token_ids = random_ids(60, 2000, 6)
    expected, actual = (
        follow(load(p, backend="torch_ref", dtype="float32", **more), token_ids, [60])
        for p, more in ((tmp_path / "gptq", {}), (path, {"quantization": "none"}))
    )
    assert torch.allclose(actual, expected, atol=1e-4)


def test_codes_that_no_block_holds_are_refused(tmp_path: Path) -> None:
    for options in (Options("rtn", 4, 64, symmetric=False), Options("rtn", 4, 48), Options("nf4", 4, 64)):
        with pytest.raises(RequestError, match="gguf"):
            quantise_checkpoint(PATH, tmp_path / "out", options, "gguf")
    assert not (tmp_path / "out").exists()
