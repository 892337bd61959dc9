"""Encoders as GGUF files that gguf-py wrote, under the names of llama.cpp's converter: the vectors are those of their
safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.models.test_encoders import GEMMA, open_llm, save, texts_of, vectors
from tests.support.harness import BACKENDS

from headrace import LLM
from headrace.protocol.errors import CheckpointError

import gguf  # isort: skip

ARCHITECTURES = {
    "bert": "BERT", "roberta": "BERT", "xlm-roberta": "BERT", "nomic_bert": "NOMIC_BERT",
}  # fmt: skip
LENGTHS = (1, 2, 40, 129, 300)
KINDS = {"F16": 1e-3, "Q8_0": 3e-2, "Q4_0": 4e-1}
"""How far vectors may be from those of the floats, as a share of the greatest number."""
Q = gguf.GGMLQuantizationType


def write(
    directory: Path,
    name: str,
    kind: str = "F32",
    pooling: int | None = 2,
    architecture: str = "",
    more: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write the checkpoint in `directory` as a GGUF file with matrices of `kind`."""
    config = json.loads((directory / "config.json").read_text())
    arch = gguf.MODEL_ARCH[ARCHITECTURES[name]]
    path = directory / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, architecture or gguf.MODEL_ARCH_NAMES[arch])
    table = gguf.get_tensor_name_map(arch, 9)
    # The converter cuts off RoBERTa's first rows, which are those of padding.
    first = config["pad_token_id"] + 1 if name.endswith("roberta") else 0
    writer.add_context_length(config["max_position_embeddings"] - first)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if name == "nomic_bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    more(writer)
    for key, tensor in load_file(directory / "model.safetensors").items():
        if "pooler" in key:
            continue
        weight = tensor.float().numpy()
        ours = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert ours is not None, key
        if ours == "position_embd.weight":
            weight = weight[first:]
        is_matrix = weight.ndim == 2 and ours not in ("position_embd.weight", "token_types.weight")
        form = Q[kind] if is_matrix else Q.F32
        writer.add_tensor(ours, gguf.quants.quantize(np.ascontiguousarray(weight), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def checkpoint(name: str, directory: Path) -> Path:
    """Write a random checkpoint whose widths are multiples of a block."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    save(name, directory, **sizes)
    return directory


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_floats_have_the_bits_of_safetensors(name: str, backend: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path)
    expected = open_llm(tmp_path, backend)
    actual = open_llm(write(tmp_path, name), backend)
    assert actual.core.info.max_model_len == expected.core.info.max_model_len
    assert (actual.core.info.pooling, actual.core.info.generates) == ("cls", False)
    for pooling in ("mean", "cls"):
        assert vectors(actual, texts_of(LENGTHS), pooling) == vectors(expected, texts_of(LENGTHS), pooling)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "nomic_bert"])
def test_blocks_are_near_the_floats(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path)
    expected = np.array(vectors(open_llm(tmp_path), texts_of(LENGTHS), "mean"))
    llm = open_llm(write(tmp_path, name, kind))
    actual = np.array(vectors(llm, texts_of(LENGTHS), "mean"))
    assert 1e-7 < np.abs(actual - expected).max() / np.abs(expected).max() < KINDS[kind]
    assert vectors(llm, texts_of((40,)), "mean") == vectors(llm, texts_of((40, 129, 300)), "mean")[:1]


@pytest.mark.parametrize(("number", "pooling"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_the_files_kind_of_pooling(number: int | None, pooling: str, tmp_path: Path) -> None:
    path = write(checkpoint("bert", tmp_path), "bert", pooling=number)
    assert open_llm(path).core.info.pooling == pooling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": 4}, "bert.pooling_type is 4; it must be from 0 to 3: a reranker's score"),
        ({"architecture": "jina-bert-v2"}, "general.architecture is 'jina-bert-v2'.*ALiBi"),
        ({"more": lambda writer: writer.add_tensor("cls.output.weight", np.zeros((1, 64), np.float32))}, "cls.output"),
    ],
)
def test_files_of_other_encoders_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(checkpoint("bert", tmp_path), "bert", **options)
    with pytest.raises(CheckpointError, match=message):
        open_llm(path)


def write_gemma(directory: Path, kind: str = "F32", *layers: Any) -> Path:
    """Write EmbeddingGemma as the converter does: one is added to the norms; `layers` lie behind the pooling."""
    config = json.loads((directory / "config.json").read_text())
    arch = gguf.MODEL_ARCH.GEMMA_EMBEDDING
    path = directory / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(1e6)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    table = gguf.get_tensor_name_map(arch, 9)
    for key, tensor in load_file(directory / "model.safetensors").items():
        weight = tensor.float().numpy() + (key.endswith("norm.weight"))
        form = Q[kind] if weight.ndim == 2 else Q.F32
        ours = table.get_name(f"model.{key}", try_suffixes=(".weight", ".bias"))
        assert ours is not None, key
        writer.add_tensor(ours, gguf.quants.quantize(weight.astype(np.float32), form), raw_dtype=form)
    for i, weight in enumerate(layers):
        writer.add_dense_features_dims(f"dense_{2 + i}", weight.shape[1], weight.shape[0])
        writer.add_tensor(f"dense_{2 + i}.weight", gguf.quants.quantize(weight, Q[kind]), raw_dtype=Q[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_embeddinggemma_with_its_layers_behind_the_pooling(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "query_pre_attn_scalar": 32}
    sizes |= {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    }
    save("gemma3_text", tmp_path, **GEMMA, **sizes)
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=shape).astype(np.float32) for shape in ((96, 64), (32, 96))]
    expected = np.array(vectors(open_llm(tmp_path), texts_of(LENGTHS), "mean"))
    expected = expected @ layers[0].T.astype(np.float64) @ layers[1].T.astype(np.float64)
    llm = open_llm(write_gemma(tmp_path, kind, *layers))
    assert (llm.core.info.pooling, llm.core.info.hidden_size, llm.core.info.generates) == ("mean", 32, False)
    actual = np.array(vectors(llm, texts_of(LENGTHS)))
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < 1e-6 if kind == "F32" else 1e-6 < error < 1e-1
    bare = open_llm(write_gemma(tmp_path))
    assert vectors(bare, texts_of(LENGTHS)) == vectors(open_llm(tmp_path), texts_of(LENGTHS))


def test_layers_behind_the_pooling_that_do_not_fit(tmp_path: Path) -> None:
    save("gemma3_text", tmp_path, **GEMMA)
    path = write_gemma(tmp_path, "F32", np.zeros((96, 48), np.float32), np.zeros((32, 95), np.float32))
    with pytest.raises(CheckpointError, match="shape of dense_3.weight is .*the first 96"):
        open_llm(path)


PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{letter}" for letter in ascii_lowercase + ".,!?"),
    *ascii_lowercase, "▁the", "▁cat", "▁sat", "▁mat", "ing", "▁on", "at", "▁dog", "▁wood",
]  # fmt: skip
TEXTS = ["The cat sat on the mat.", "a", "A dog, the wood! zing at home? Eating"]


def write_vocabulary(writer: Any) -> None:
    """The WordPiece vocabulary of BERT as llama.cpp's converter writes it now: the first token is the begin."""
    tokens = PIECES + [f"[unused{i}]" for i in range(199 - len(PIECES))]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token[0] == "[" else 1 for token in tokens])
    writer.add_token_type_count(2)
    writer.add_unk_token_id(1)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)


def test_texts_of_a_file(tmp_path: Path) -> None:
    llm = LLM(str(write(checkpoint("bert", tmp_path), "bert", more=write_vocabulary)), dtype="float32")
    tokens = ["[CLS]", "▁the", "▁cat", "▁sat", "▁on", "▁mat", "s", "[SEP]"]
    [output] = llm.embed("The CÀT sat on mats", use_tqdm=False)
    assert output.prompt_token_ids == [PIECES.index(token) for token in tokens]


@pytest.mark.parametrize("pooling", [1, 2])
@pytest.mark.parametrize("name", ["bert", "nomic_bert"])
def test_vectors_are_those_of_llama_cpp(name: str, pooling: int, tmp_path: Path) -> None:
    theirs = pytest.importorskip("xllamacpp")
    path = write(checkpoint(name, tmp_path), name, pooling=pooling, more=write_vocabulary)
    options = theirs.CommonParams()
    options.model.path, options.embedding, options.warmup = str(path), True, False
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    reply = theirs.Server(options).handle_embeddings({"input": TEXTS})
    right = [row["embedding"] for row in reply["data"]]
    llm = LLM(str(path), dtype="float32")
    ours = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    # It computes GELU by a formula for tanh, in float16.
    np.testing.assert_allclose(ours, right, atol=1e-3)
