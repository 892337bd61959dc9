"""What the loader reads, and what it refuses, with the reason in the message."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.checkpoints import CONFIG, llama_tensors, write_llama
from torch import Tensor

from headrace.backends import make_backend
from headrace.checkpoint.headers import SIZES
from headrace.checkpoint.mapped import VIEWS, MappedCheckpoint, MappedFile
from headrace.checkpoint.tensors import Checkpoint
from headrace.engine.library.load import build_runner, load_model
from headrace.models.config import ModelConfig
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, ModelNotFoundError, RequestError
from headrace.protocol.step import EngineInfo
from headrace.quant.arrays import type_name
from headrace.runner.runner import Runner


def build(directory: Path, **options: Any) -> tuple[Runner, EngineInfo]:
    return build_runner(EngineConfig(model=str(directory), **({"num_gpu_blocks_override": 16} | options)))


def load(directory: Path, **options: Any) -> Any:
    """The model on the reference backend, whose weights can be looked at."""
    config = EngineConfig(model=str(directory), **({"backend": "torch_ref"} | options))
    return load_model(config, directory, lambda done, total: None)[1]


def embedding(model: Any) -> Tensor:
    return model.embedding  # type: ignore[no-any-return]


def test_single_file_and_shards_give_the_same_model(tmp_path: Path) -> None:
    one = load(write_llama(tmp_path / "one"))
    two = load(write_llama(tmp_path / "two", num_shards=3))
    assert torch.equal(embedding(one), embedding(two))
    for a, b in zip(one.layers, two.layers, strict=True):
        assert torch.equal(a.attention.qkv.dense(), b.attention.qkv.dense())
        assert torch.equal(a.mlp.down.dense(), b.mlp.down.dense())


def test_projections_are_stacked_in_order(tmp_path: Path) -> None:
    model = load(write_llama(tmp_path))
    tensors = llama_tensors()
    expected = torch.cat([tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(model.layers[1].attention.qkv.dense(), expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("requests", ["auto", "float32", "bfloat16", "float16"])
def test_dtype_is_the_checkpoints_or_the_one_asked_for(stored: torch.dtype, requests: str, tmp_path: Path) -> None:
    directory = write_llama(tmp_path, llama_tensors(dtype=stored))
    expected = (
        (torch.float32 if stored == torch.float64 else stored) if requests == "auto" else getattr(torch, requests)
    )
    assert embedding(load(directory, dtype=requests)).dtype == expected
    info = build(directory, dtype=requests)[1]
    assert info.dtype == info.kv_cache_dtype == str(expected).removeprefix("torch.")


@pytest.mark.parametrize("stored_under", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_embeddings_under_either_name(stored_under: str, tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if stored_under not in (name, "both"):
            del tensors[name]
    model = load(write_llama(tmp_path, tensors, tie_word_embeddings=True))
    assert torch.equal(model.head.dense(), embedding(model))


def test_embeddings_that_are_said_to_be_tied_and_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fine-tune that moved them apart and left the flag. transformers takes both, as they are."""
    from transformers import AutoModelForCausalLM

    tensors = llama_tensors()
    directory = write_llama(tmp_path, tensors, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    model = load(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(model.head.dense(), theirs.lm_head.weight)
    assert torch.equal(embedding(model), theirs.model.embed_tokens.weight)
    assert "both are used" in caplog.text


def test_progress_is_told_and_ends_at_all(tmp_path: Path) -> None:
    output: list[tuple[int, int]] = []
    build_runner(
        EngineConfig(model=str(write_llama(tmp_path)), num_gpu_blocks_override=16), lambda *n: output.append(n)
    )
    assert output[-1] == (len(llama_tensors()), len(llama_tensors()))
    assert [done for done, _ in output] == sorted(done for done, _ in output)


def refused(directory: Path, *words: str, **options: Any) -> None:
    """Building fails with an error that has `words` and says where the model lies."""
    with pytest.raises((CheckpointError, ModelNotFoundError)) as caught:
        build(directory, **options)
    for word in (*words, str(directory)):
        assert word in str(caught.value), str(caught.value)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}
    refused(write_llama(tmp_path, tensors), "model.layers.1.self_attn.q_proj.bias", "no place")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_a_misshapen_tensor_is_named_with_both_shapes(name: str, tmp_path: Path) -> None:
    tensors = llama_tensors()
    shape = list(tensors[name].shape)
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    refused(write_llama(tmp_path, tensors), name, str([shape[0] + 1, *shape[1:]]), str(shape))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_without_a_format_are_refused(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors[name] = tensors[name].to(dtype)
    refused(write_llama(tmp_path, tensors), "plain floats")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("open('boom', 'w')",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "weights.pkl"])
def test_S_03_pickled_weights_are_refused_and_not_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    refused(tmp_path, name, "pickle")
    assert not (tmp_path / "boom").exists()


def plant_code(directory: Path) -> None:
    (directory / "modeling_evil.py").write_text("open('boom', 'w')")


def test_S_04_auto_map_of_a_known_model_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plant_code(tmp_path)
    build(write_llama(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}))
    assert not (tmp_path / "boom").exists()
    assert not any("modeling_evil" in name for name in sys.modules)


def test_S_04_an_unknown_model_with_code_is_refused(tmp_path: Path) -> None:
    plant_code(tmp_path)
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    refused(write_llama(tmp_path, model_type="evil", auto_map=auto_map), "'evil'", "llama", "never runs")
    assert not any("modeling_evil" in name for name in sys.modules)


@pytest.mark.parametrize(
    "model_type", ["decoder", "config", "rope", "../llama", "llama.py", "os", "", None, 3, ["llama"]]
)
def test_S_04_model_type_names_a_model_file_or_nothing(model_type: Any, tmp_path: Path) -> None:
    refused(write_llama(tmp_path, model_type=model_type), "not supported")


@pytest.mark.parametrize("method", ["quip", "packing", "fit", "base", "rtn", "schemes", "../none", "None"])
def test_a_quantised_checkpoint_is_refused_naming_the_method(method: str, tmp_path: Path) -> None:
    refused(write_llama(tmp_path, quantization_config={"quant_method": method}), method, "not supported")


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", "..", 7]
)
def test_S_28_an_index_names_files_of_the_directory_only(file: Any, tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "model", num_shards=2)
    save_file(llama_tensors(), tmp_path / "outside.safetensors")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": file}}))
    refused(directory, "model.norm.weight", "beside the index")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_S_28_a_broken_index_is_refused(content: str, tmp_path: Path) -> None:
    directory = write_llama(tmp_path, num_shards=2)
    (directory / "model.safetensors.index.json").write_text(content)
    refused(directory, "model.safetensors.index.json")


def test_S_28_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    directory = write_llama(tmp_path, num_shards=2)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"made.up": "model-00000.safetensors"}}))
    refused(directory, "made.up", "model-00000.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map | {"made.up": "model-00009.safetensors"}}))
    refused(directory, "model-00009.safetensors", "missing")


def test_two_files_without_an_index_must_not_overlap(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    build(directory)
    save_file({"model.norm.weight": torch.ones(32)}, directory / "b.safetensors")
    refused(directory, "model.norm.weight", "a.safetensors", "b.safetensors")


def header(entries: dict[str, Any], body: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
BOMBS = {
    "empty": b"",
    "short": b"\x01\x00",
    "header longer than the file": header({"a": F32}, bytes(16), 2**40),
    "header of 2^63": header({"a": F32}, bytes(16), 2**63),
    "offsets beyond the file": header({"a": F32 | {"data_offsets": [0, 2**40], "shape": [2**38]}}, bytes(16)),
    "offsets that overlap": header({"a": F32, "b": F32}, bytes(16)),
    "offsets backwards": header({"a": F32 | {"data_offsets": [16, 0]}}, bytes(16)),
    "shape that overflows": header({"a": F32 | {"shape": [2**62, 2**62]}}, bytes(16)),
    "shape and size at odds": header({"a": F32 | {"shape": [5]}}, bytes(16)),
    "unknown dtype": header({"a": F32 | {"dtype": "F7"}}, bytes(16)),
    "a name twice": struct.pack("<Q", 130)
    + (
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, '
        b'"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    ).ljust(130)
    + bytes(16),
    "bytes behind the last tensor": header({"a": F32}, bytes(17)),
    "sizes that are not whole": header({"a": F32 | {"shape": [4.0]}}, bytes(16)),
    "a size that is a truth": header({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, bytes(1)),
    "more than a tensor has": header({"a": F32 | {"more": 1}}, bytes(16)),
    "metadata that are not texts": header({"__metadata__": {"a": 1}, "a": F32}, bytes(16)),
    "not JSON": struct.pack("<Q", 4) + b"{{{{",
    "holes": header({"a": F32 | {"data_offsets": [16, 32]}}, bytes(32)),
}


def test_the_header_that_the_bombs_are_made_of_is_sound(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header({"a": F32}, bytes(16)))
    assert MappedFile(tmp_path / "model.safetensors").array("a").tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_S_28_the_reader_refuses_it_by_itself(bomb: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointError, match="model.safetensors is not a readable"):
        MappedFile(tmp_path / "model.safetensors")


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_S_28_a_broken_safetensors_file_is_refused(bomb: bytes, tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    (directory / "model.safetensors").write_bytes(bomb)
    refused(directory, "model.safetensors")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_S_28_any_damage_is_refused_or_harmless(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Flip bytes of the header: either it is still a checkpoint of the right names and shapes, or a clear error."""
    directory = write_llama(tmp_path_factory.mktemp("damaged"))
    content = bytearray((directory / "model.safetensors").read_bytes())
    size = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    (directory / "model.safetensors").write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with contextlib.suppress(CheckpointError):
        build(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": -1}, ["hidden_size", "-1"]),
        ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ({"num_hidden_layers": 2**40}, ["num_hidden_layers"]),
        ({"num_hidden_layers": 2**31 - 1}, ["num_hidden_layers", "from 1 to 4096"]),
        ({"num_hidden_layers": 4096}, ["model.layers.2", "missing"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads"]),
        ({"rms_norm_eps": "nan"}, ["rms_norm_eps"]),
        ({"rms_norm_eps": 1e300}, ["rms_norm_eps", "1e+300", "1e+30"]),
        ({"rope_theta": 10**400}, ["config.json", "128 digits"]),
        ({"rope_theta": 10**100}, ["rope_theta", "1e+30"]),
        ({"hidden_size": "x" * 10**6}, ["hidden_size", "'xxx", "expected an integer from 1"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2, "long_factor": [1.0] * 4,
                           "short_factor": [0] * 4}}, ["short_factor", "positive numbers"]),
        ({"torch_dtype": '__import__("os")'}, ["config.json", "torch_dtype", "__import__", "bfloat16"]),
        ({"dtype": 3}, ["config.json", "dtype is 3", "bfloat16"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}},
         ["config.json", "group_size is 0", "-1"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 99, "group_size": 128}},
         ["config.json", "bits is 99", "2 to 8"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 99, "group_size": -5}},
         ["config.json", "group_size is -5", "-1"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 99, "group_size": 128}},
         ["config.json", "bits is 99", "expected 4"]),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
         ["config.json", "weight_block_size", "[0, 128]"]),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 99}}}}}, ["num_bits is 99", "2 to 8"]),
        ({"eos_token_id": list(range(100_000))}, ["config.json", "eos_token_id", "100000", "256"]),
        ({"hidden_act": "evil"}, ["hidden_act", "evil", "silu"]),
        ({"vocab_size": 51}, ["embed_tokens", "[50, 32]", "[51, 32]"]),
        ({"rope_scaling": {"type": "evil"}}, ["rope_type", "evil", "yarn"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor"]),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
         ["factor", "list of 4"]),
        ({"rope_scaling": 7}, ["rope_scaling"]),
        ({"max_position_embeddings": 2**31 - 1}, ["rope table", "max_model_len"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings"]),
        ({"max_position_embeddings": 1}, ["context of 1"]),
        ({"quantization_config": [1]}, ["quantization_config", "[1]", "object"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2"]),
        ({"partial_rotary_factor": 0.4}, ["rope turns", "3 of 8"]),
    ],
)  # fmt: skip
def test_S_28_a_config_that_makes_no_sense_is_refused(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    if "layer_types" in changes:
        changes = changes | {"model_type": "mistral"}
    refused(write_llama(tmp_path, **changes), *words)


def test_S_28_control_settings_that_make_sense_beside_plain_weights_are_read(tmp_path: Path) -> None:
    for number, changes in enumerate(
        [
            {"torch_dtype": "float32", "dtype": "torch.bfloat16", "eos_token_id": list(range(50))},
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}},
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        ]
    ):
        build(write_llama(tmp_path / str(number), **changes))


def test_S_05_refusals_survive_python_O(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["model.norm.weight"] = torch.ones(33)
    directory = write_llama(tmp_path, tensors)
    code = (
        "from headrace.protocol.config import EngineConfig; from headrace.engine.library.load import build_runner; "
        f"build_runner(EngineConfig(model={str(directory)!r}))"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "CheckpointError: model.norm.weight has shape [33]" in done.stderr


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", "missing")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "no *.safetensors")


# ---------------------------------------------------------------------------------------- mapped files


def test_headers_and_arrays_agree_about_the_types() -> None:
    assert {name: kind.itemsize for name, kind in VIEWS.items()} == SIZES


def test_mapped_arrays_are_what_safetensors_wrote(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
              torch.uint8, torch.float8_e4m3fn]  # fmt: skip
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"empty": torch.zeros(3, 0), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    file = MappedFile(tmp_path / "model.safetensors")
    assert file.metadata == {"format": "pt"}
    assert set(checkpoint.names) == tensors.keys()
    for name, tensor in tensors.items():
        array = file.array(name)
        assert type_name(array) == type_name(tensor)
        assert array.shape == tensor.shape
        assert array.dtype == VIEWS[file.entries[name].dtype]
        assert array.tobytes() == tensor.flatten().view(torch.uint8).numpy().tobytes()
        assert not array.size or not array.flags.writeable
    assert checkpoint.array("scalar") == 2.5
    checkpoint.release()
    assert np.array_equal(checkpoint.array("torch.float32"), tensors["torch.float32"].numpy())


def test_a_tensor_that_does_not_begin_at_its_own_size(tmp_path: Path) -> None:
    values = struct.pack("<4f", 1, 2, 3, 4)
    entries = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": F32 | {"data_offsets": [1, 17]}}
    (tmp_path / "model.safetensors").write_bytes(header(entries, b"\7" + values))
    array = MappedCheckpoint(tmp_path).array("b")
    assert array.tolist() == [1, 2, 3, 4]
    assert array.ctypes.data % array.itemsize == 0


@pytest.mark.parametrize(
    "module", ["headrace.checkpoint.mapped", "headrace.checkpoint.packed", "headrace.quant.schemes"]
)
def test_what_maps_weights_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0


# ---------------------------------------------------------------------------------------- sizes


def test_max_model_len_is_bounded_by_the_model(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    assert build(directory)[1].max_model_len == 128
    assert build(directory, max_model_len=40)[1].max_model_len == 40
    with pytest.raises(RequestError, match=r"max_model_len: 129 .* at most 128"):
        build(directory, max_model_len=129)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}, 128),
    ],
)  # fmt: skip
def test_max_model_len_counts_rope_scaling(rope: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert build(write_llama(tmp_path, rope_scaling=rope), num_gpu_blocks_override=64)[1].max_model_len == expected


def test_kv_cache_sizes(tmp_path: Path) -> None:
    directory = write_llama(tmp_path)
    block_bytes = 2 * 2 * 16 * 2 * 8 * 4  # keys and values, layers, positions, kv heads, head size, float32
    assert build(directory, num_gpu_blocks_override=9)[1].num_blocks == 9
    inputs = build(directory, num_gpu_blocks_override=None, kv_cache_memory_bytes=block_bytes * 11 + 5)
    assert inputs[1].num_blocks == 11
    # Measured: what max_num_seqs sequences fill is far less than the memory.
    assert build(directory, num_gpu_blocks_override=None, max_num_seqs=3)[1].num_blocks == 3 * 8
    assert build(directory, num_gpu_blocks_override=None, max_num_seqs=3, dtype="bfloat16")[1].num_blocks == 3 * 8


def test_kv_cache_too_small_for_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = type(make_backend("auto", "cpu", "float32"))
    directory = write_llama(tmp_path)
    with pytest.raises(RequestError, match=r"num_gpu_blocks_override: 7 .* at least 8"):
        build(directory, num_gpu_blocks_override=7)
    with pytest.raises(RequestError, match=r"kv_cache_memory_bytes: 32767 .* at least 32768"):
        build(directory, num_gpu_blocks_override=None, kv_cache_memory_bytes=32767)
    monkeypatch.setattr(backend, "available_memory", lambda self: 4 * 4096 * 3)
    with pytest.raises(RequestError, match=r"max_model_len: 128 .* at most 48"):
        build(directory, num_gpu_blocks_override=None)  # under 1024 tokens nobody is asked to live with
    assert build(directory, num_gpu_blocks_override=None, max_model_len=48)[1].num_blocks == 3


def test_a_context_that_nobody_asked_for_is_narrowed_to_the_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Models of 128k positions must start on a machine whose memory holds fewer, and say so."""
    from headrace.engine.build import build_engine

    backend = type(make_backend("auto", "cpu", "float32"))
    directory = write_llama(tmp_path, max_position_embeddings=131072)
    monkeypatch.setattr(backend, "available_memory", lambda self: 4 * 4096 * 100)
    core = build_engine(EngineConfig(model=str(directory)))
    assert (core.info.num_blocks, core.info.max_model_len) == (100, 1601)
    assert "the context is 1600 tokens" in caplog.text
    core.close()
    with pytest.raises(RequestError, match=r"max_model_len: 131072 .* at most 1600"):
        build(directory, num_gpu_blocks_override=None, max_model_len=131072)


def test_gemma_3_states_its_stretched_length() -> None:
    values = {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert ModelConfig({"model_type": "gemma3_text", **values}).max_positions() == 131072
    assert ModelConfig({"model_type": "llama", **values}).max_positions() == 8 * 131072
