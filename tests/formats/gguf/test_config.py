"""A GGUF file's metadata as a config: errors name the file's own key; unknown settings are refused."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.formats.gguf.files import BOOL, F32, I32, STRING, U32, gguf_file, listed, scalar, tensor

from headrace import hub
from headrace.checkpoint import gguf_config
from headrace.checkpoint.gguf_keys import Reading
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError

KEYS: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.context_length": (U32, 128),
    "llama.embedding_length": (U32, 32),
    "llama.block_count": (U32, 2),
    "llama.feed_forward_length": (U32, 64),
    "llama.attention.head_count": (U32, 4),
    "llama.attention.head_count_kv": (U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (F32, 0.5),
}
TABLE = {"token_embd.weight": [32, 9]}


def read(
    changes: dict[str, Any] | None = None, shapes: dict[str, list[int]] | None = None, more: tuple[bytes, ...] = ()
) -> Reading:
    """A file with `KEYS` and `changes` (None leaves a key out), F32 tensors of `shapes`, all numbers 2."""
    keys = {name: value for name, value in (KEYS | (changes or {})).items() if value is not None}
    entries, data = [], b""
    for name, shape in (TABLE | (shapes or {})).items():
        entries.append(tensor(name, shape, 0, len(data)))
        count = 1
        for size in shape:
            count *= size
        data += struct.pack(f"<{count}f", *[2.0] * count)
        data += bytes(-len(data) % 32)
    fields = [scalar(name, kind, value) for name, (kind, value) in keys.items()]
    return gguf_config.read(GGUF(gguf_file([*fields, *more], entries, data), "m.gguf"))


def test_a_plain_llama() -> None:
    reading = read()
    values = reading.values
    assert values["model_type"] == "llama"
    assert values["tie_word_embeddings"] is True
    assert (values["vocab_size"], values["hidden_size"], values["head_dim"]) == (9, 32, 8)
    assert (values["num_attention_heads"], values["num_key_value_heads"]) == (4, 2)
    assert (values["rope_theta"], values["rope_scaling"], values["rms_norm_eps"]) == (10000.0, None, 0.5)
    assert (reading.turned, reading.norm_offset) == (8, 0.0)
    assert read(shapes={"output.weight": [32, 9]}).values["tie_word_embeddings"] is False


def test_keys_that_nothing_reads_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace"):
        read()
        read({"llama.vocab_size": (U32, 9), "llama.attention.clamp_kqv": (F32, 8.0), "general.invented": (U32, 1)})
    (record,) = caplog.records
    assert record.message == "m.gguf: without effect on this model: llama.attention.clamp_kqv"


def test_a_file_says_by_its_keys_which_model_it_is() -> None:
    window = read({"llama.attention.sliding_window": (U32, 16)}).values
    assert (window["model_type"], window["sliding_window"]) == ("mistral", 16)
    experts = {"llama.expert_count": (U32, 4), "llama.expert_used_count": (U32, 2)}
    mixture = read(experts, {"blk.0.ffn_up_exps.weight": [32, 64, 4], "blk.1.ffn_up.3.weight": [32, 64]})
    assert mixture.values["model_type"] == "mixtral"
    third = mixture.parts["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    assert (third.shape, third.first) == ((64, 32), 128)
    assert mixture.parts["model.layers.1.block_sparse_moe.experts.3.w3.weight"].shape == (64, 32)


def test_rope_by_keys_and_by_tensor() -> None:
    linear = {"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (F32, 4.0)}
    assert read(linear).values["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert read({"llama.rope.scale_linear": (F32, 2.0)}).values["rope_scaling"]["factor"] == 2.0
    by_tensor = read(shapes={"rope_freqs.weight": [4]})
    assert by_tensor.values["rope_scaling"]["short_factor"] == [2.0] * 4
    assert "rope_freqs.weight" not in by_tensor.parts
    part = read({"llama.rope.dimension_count": (U32, 4)})
    assert part.turned == int(8 * part.values["partial_rotary_factor"]) == 4


def test_one_number_for_each_layer_is_fine_if_all_are_the_same() -> None:
    key = "llama.attention.head_count_kv"
    assert read({key: None}, more=(listed(key, I32, [2, 2]),)).values["num_key_value_heads"] == 2
    with pytest.raises(CheckpointError, match="head_count_kv is .* the same for every layer"):
        read({key: None}, more=(listed(key, I32, [2, 1]),))
    with pytest.raises(CheckpointError, match="head_count_kv is -1; it must be from 1"):
        read({key: None}, more=(listed(key, I32, [-1, -1]),))


def of(
    architecture: str,
    changes: dict[str, Any],
    shapes: dict[str, list[int]] | None = None,
    more: tuple[bytes, ...] = (),
) -> Reading:
    """As `read`, of another architecture, whose keys are Llama's."""
    keys = {name: None for name in KEYS if name.startswith("llama.")}
    renamed = {name.replace("llama", architecture): value for name, value in KEYS.items() if name.startswith("llama.")}
    renamed |= {f"{architecture}.{name}": value for name, value in changes.items()}
    return read(keys | renamed | {"general.architecture": (STRING, architecture)}, shapes, more)


MIXTURE = {
    "expert_count": (U32, 4),
    "expert_used_count": (U32, 2),
    "expert_feed_forward_length": (U32, 16),
    "expert_shared_count": (U32, 1),
    "leading_dense_block_count": (U32, 0),
}


def test_a_family_takes_its_keys_and_leaves_out_layers_that_predict_more_tokens() -> None:
    shapes = {f"blk.{i}.attn_q.weight": [32, 32] for i in range(2)} | {"blk.1.nextn.eh_proj.weight": [64, 32]}
    shapes |= {"blk.0.exp_probs_b.bias": [4], "blk.0.attn_q.bias": [32], "blk.0.ffn_up_exps.weight": [32, 16, 4]}
    reading = of("glm4moe", MIXTURE | {"nextn_predict_layers": (U32, 1)}, shapes)
    values = reading.values
    assert (values["num_hidden_layers"], values["n_routed_experts"], values["num_experts_per_tok"]) == (1, 4, 2)
    assert (values["attention_bias"], values["use_qk_norm"]) == (True, False)
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in reading.parts
    assert reading.parts["model.layers.0.mlp.experts.3.up_proj.weight"].first == 48
    assert not [name for name in reading.parts if ".1." in name and ".experts." not in name]
    with pytest.raises(CheckpointError, match="glm4moe.nextn_predict_layers is 2; it must be from 0 to 1"):
        of("glm4moe", MIXTURE | {"nextn_predict_layers": (U32, 2)})


@pytest.mark.parametrize(("num_experts", "has_norms"), [(16, True), (128, False)])
def test_the_larger_llama_4_has_no_norms_of_heads(num_experts: int, has_norms: bool) -> None:
    changes = MIXTURE | {"expert_count": (U32, num_experts), "interleave_moe_layer_step": (U32, 1)}
    assert of("llama4", changes).values["use_qk_norm"] == has_norms


def test_a_family_names_the_key_that_is_missing() -> None:
    for key in MIXTURE:
        with pytest.raises(CheckpointError, match=f"glm4moe.{key} is None"):
            of("glm4moe", {name: value for name, value in MIXTURE.items() if name != key})


def test_factors_of_a_long_context_are_read_from_tensors() -> None:
    original = {"rope.scaling.original_context_length": (U32, 64)}
    shapes = {f"rope_factors_{part}.weight": [4] for part in ("long", "short")}
    scaling = of("phi3", original, shapes).values["rope_scaling"]
    assert (scaling["rope_type"], scaling["original_max_position_embeddings"]) == ("longrope", 64)
    assert scaling["long_factor"] == scaling["short_factor"] == [2.0] * 4
    with pytest.raises(CheckpointError, match="phi3.rope.scaling.original_context_length is None"):
        of("phi3", {}, shapes)
    with pytest.raises(CheckpointError, match="rope_factors_long.weight is"):
        of("phi3", original, shapes | {"rope_factors_long.weight": [3]})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"general.architecture": None}, "general.architecture is None; it must be one of llama, "),
    "another architecture": ({"general.architecture": (STRING, "mamba")}, "general.architecture is 'mamba'"),
    "a projector": ({"general.type": (STRING, "mmproj")}, "general.type is 'mmproj'"),
    "no layers": ({"llama.block_count": None}, "llama.block_count is None"),
    "S-27 block_count": ({"llama.block_count": (U32, 2**32 - 1)}, "llama.block_count is 4294967295"),
    "S-27 no heads": ({"llama.attention.head_count": (U32, 0)}, "llama.attention.head_count is 0"),
    "heads wider than the model": ({"llama.attention.head_count": (U32, 64)}, "head_count is 64"),
    "a word for a number": ({"llama.context_length": (STRING, "128")}, "llama.context_length is 'a string'"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is None"),
    "not a number": ({"llama.rope.freq_base": (F32, float("nan"))}, "llama.rope.freq_base is nan"),
    "values of another size": ({"llama.attention.value_length": (U32, 4)}, "value_length is 4; it must be 8"),
    "an unknown rope": (
        {"llama.rope.scaling.type": (STRING, "spiral"), "llama.rope.scaling.factor": (F32, 4.0)},
        "rope.scaling.type is 'spiral'",
    ),
    "more experts used than there are": (
        {"llama.expert_count": (U32, 2), "llama.expert_used_count": (U32, 3)},
        "expert_used_count is 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_S_27_values_that_make_no_model_are_refused_by_name(case: str) -> None:
    changes, output = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        read(changes)
    assert f"m.gguf: {output}" in str(caught.value) or output in str(caught.value)


def test_S_27_tensors_that_make_no_model_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"token_embd.weight is \(32, 9, 1\)"):
        read(shapes={"token_embd.weight": [32, 9, 1]})
    with pytest.raises(CheckpointError, match="rope_freqs.weight is"):
        read(shapes={"rope_freqs.weight": [5]})
    experts = {"llama.expert_count": (U32, 4), "llama.expert_used_count": (U32, 2)}
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight is \(32, 64\)"):
        read(experts, {"blk.0.ffn_up_exps.weight": [32, 64]})
    with pytest.raises(CheckpointError, match=r"two tensors are model.layers.0.block_sparse_moe.experts.1.w3"):
        read(experts, {"blk.0.ffn_up_exps.weight": [32, 64, 4], "blk.0.ffn_up.1.weight": [32, 64]})
    assert "blk.0.unheard_of.weight" in read(shapes={"blk.0.unheard_of.weight": [4]}).parts


def test_S_27_experts_that_cost_more_than_their_bytes_are_refused() -> None:
    keys = {"llama.expert_count": (U32, 4096), "llama.expert_used_count": (U32, 2)}
    shapes = {f"blk.{i}.ffn_{part}_exps.weight": [1, 1, 4096] for i in range(11) for part in ("up", "gate", "down")}
    with pytest.raises(CheckpointError, match="each expert's counted is 'above 131072'"):
        read(keys, shapes)


def test_dtypes() -> None:
    def dtype(*kinds: tuple[str, int]) -> str:
        sizes = {0: 4, 1: 2, 30: 2, 8: 34}
        entries, at = [], 0
        for name, kind in kinds:
            entries.append(tensor(name, [32, 2], kind, at))
            at += -(-64 * sizes[kind] // 32) * 32 if kind != 8 else 96
        return gguf_config.choose_dtype("auto", GGUF(gguf_file([], entries, bytes(at))))

    assert dtype(("a", 0), ("b", 0)) == "float32"
    assert dtype(("a", 30), ("b", 30)) == "bfloat16"
    assert dtype(("a", 8)) == dtype(("a", 0), ("b", 8)) == "float16"
    assert dtype(("a", 30), ("b", 8)) == "bfloat16"
    assert gguf_config.choose_dtype("float32", GGUF(gguf_file())) == "float32"


def test_ends_of_text_and_of_turns() -> None:
    tokens = ["a", "</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"]

    def ends(*more: bytes, kinds: tuple[int, ...] = (1, 3, 3, 3, 1)) -> list[int]:
        fields = [listed("tokenizer.ggml.tokens", STRING, tokens), listed("tokenizer.ggml.token_type", I32, kinds)]
        return hub.gguf_ends(GGUF(gguf_file([*fields, *more])))

    assert ends(scalar("tokenizer.ggml.eos_token_id", U32, 1)) == [1, 2, 3]
    assert ends(scalar("tokenizer.ggml.eot_token_id", U32, 4), kinds=(1, 1, 1, 1, 1)) == [4]
    assert hub.gguf_ends(GGUF(gguf_file())) == []
    with pytest.raises(CheckpointError, match="eos_token_id is 5; it must be from 0 to 4"):
        ends(scalar("tokenizer.ggml.eos_token_id", U32, 5))
    with pytest.raises(CheckpointError, match="eos_token_id is 'a bool'"):
        ends(scalar("tokenizer.ggml.eos_token_id", BOOL, 1))


def test_norms_that_are_no_factor_of_the_queries_are_refused() -> None:
    """All numbers are 2: the queries' may be, the keys' must be 1."""
    pattern = listed("muse-glimmer.attention.sliding_window_pattern", BOOL, [True, False])
    keys = {"attention.sliding_window": (U32, 16), "logit_scale": (F32, 0.5), "final_logit_softcapping": (F32, 20.0)}
    norms = {f"blk.0.attn_{part}_norm.weight": [8] for part in "qk"}
    with pytest.raises(CheckpointError, match="weights of attn_q_norm and attn_k_norm"):
        of("muse-glimmer", keys, norms, (pattern,))
    with pytest.raises(CheckpointError, match="a flag for each of 2 layers"):
        of("muse-glimmer", keys, norms)


def test_the_page_names_every_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto-gguf.md").read_text(encoding="utf-8")
    assert [name for name in gguf_config.ARCHITECTURES if f"`{name}`" not in page] == []
