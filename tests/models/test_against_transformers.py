"""Every model file against `transformers`, float32, random weights: prefill in odd chunks, then 24 decode steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import (
    BACKENDS,
    WITH_STATES,
    all_logits,
    chunk_sizes,
    follow,
    load,
    make_batch,
    random_ids,
    save_random,
    scattered_tables,
    stepped,
)

from headrace import models

TOLERANCE = 1e-4
NUM_PROMPT, NUM_DECODE = 150, 24
LENGTH = NUM_PROMPT + NUM_DECODE


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0} | values}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.7, 2.9, 5.3],
    "original_max_position_embeddings": 64, "factor": 8.0,
}  # fmt: skip
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("multi-query", "llama", {"num_key_value_heads": 1}),
    ("multi-head", "llama", {"num_key_value_heads": 6}),
    ("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("tied", "llama", {"tie_word_embeddings": True}),
    ("wide heads", "llama", {"head_dim": 26}),
    ("odd sizes", "llama", {"hidden_size": 51, "head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1,
                            "intermediate_size": 77}),
    ("gelu", "llama", {"hidden_act": "gelu"}),
    ("theta", "llama", rope(rope_type="default", rope_theta=500000.0)),
    ("linear", "llama", rope(rope_type="linear", factor=4.0)),
    ("llama3", "llama", rope(**LLAMA3)),
    ("yarn", "llama", rope(**YARN)),
    ("yarn with its options", "llama", rope(**YARN, beta_fast=16.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.5,
                                            truncate=False)),
    ("yarn with a given magnitude", "llama", rope(**YARN, attention_factor=0.9)),
    ("longrope, long", "llama", rope(**LONGROPE)),
    ("longrope, magnitude", "llama", rope(**LONGROPE, attention_factor=1.3)),
    ("no window", "mistral", {"sliding_window": None}),
    ("window of one", "mistral", {"sliding_window": 1}),
    ("window of a span", "mistral", {"sliding_window": 128}),
    ("windows off", "qwen2", {"use_sliding_window": False}),
    ("untied", "qwen2", {"tie_word_embeddings": False}),
    ("yarn", "qwen3", rope(**YARN)),
    ("biases", "qwen3", {"attention_bias": True}),
    ("windows", "qwen3", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
    ("no caps", "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("small caps", "gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("global rope scaled", "gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }}),
    ("scaled by layer", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("unscaled, relu, narrow", "gpt2", {"scale_attn_weights": False, "activation_function": "relu", "n_inner": 50}),
    ("one expert of three", "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    ("window", "mixtral", {"sliding_window": 40}),
    ("weights of all experts", "qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    ("each second layer", "qwen3_moe", {"decoder_sparse_step": 2, "num_experts_per_tok": 1}),
    ("weights of the chosen", "qwen2_moe", {"norm_topk_prob": True, "use_sliding_window": False}),
    ("longrope", "phi3", rope(**LONGROPE)),
    ("rope by default", "smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3, "layer_types": None,
                                    "use_sliding_window": False}),
    ("no biases", "seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("as Llama", "granite", {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}),
    ("GELU as the first releases say it", "gemma", {"hidden_act": "gelu"}),
    ("layers of their own cache", "gemma4_text", {"num_kv_shared_layers": 0, "num_key_value_heads": 2}),
    ("keys that are values", "gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("two caches of a type", "gemma4_text", {"num_kv_shared_layers": 1, "layer_types": [
        "full_attention", "full_attention", "sliding_attention", "full_attention"]}),
    ("no wide MLP, no cap", "gemma4_text", {"use_double_wide_mlp": False, "final_logit_softcapping": None}),
    ("one value head each", "qwen3_next", {"linear_num_value_heads": 2, "norm_topk_prob": False, "layer_types": None,
                                           "full_attention_interval": 2, "decoder_sparse_step": 2}),
    ("one expert", "gpt_oss", {"num_experts_per_tok": 1, "layer_types": None}),
    ("gelu behind the convolution too", "falcon_h1", {"hidden_act": "gelu"}),
    ("windows", "qwen3_moe", {"use_sliding_window": True, "sliding_window": 33}),
]  # fmt: skip
RARE_VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("no biases, no window", "starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
    ("window, no growth", "ministral3", {"sliding_window": 33, "rope_parameters": YARN | {
        "rope_theta": 10000.0, "llama_4_scaling_beta": 0.0,
    }}),
    ("no windows", "exaone4", {"layer_types": ["full_attention"] * 4, "sliding_window": None}),
    ("biases", "cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    ("no groups", "glm4_moe", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "use_qk_norm": False}),
    ("each second layer", "ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": -1,
                                           "moe_num_shared_experts": 0}),
    ("plain rope", "hunyuan_v1_dense", rope(rope_type="default") | {"attention_bias": True}),
    ("own layers", "hy_v3", {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True}),
    ("no embedding scale", "afmoe", {"mup_enabled": False, "attention_bias": True, "num_dense_layers": 0}),
    ("biases", "nemotron", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("as released", "llama4_text", {"no_rope_layers": None, "layer_types": ["full_attention"] * 4, "use_qk_norm": False,
                                    "attn_temperature_tuning": False, "moe_layers": [0], "attention_bias": True}),
    ("greedy, latent queries, halves", "deepseek_v2", {"q_lora_rank": 20, "topk_method": "greedy", "n_group": None,
                                                       "topk_group": None, "attention_bias": True} | rope(**YARN)),
    ("no latent queries, halves", "deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "n_group": 1,
                                                  "topk_group": 1, "norm_topk_prob": False, "attention_bias": True}),
    ("one group, all experts", "mistral4", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    ("own layers", "glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"], "attention_bias": True}),
    ("wide experts, biases", "nemotron_h", {"moe_latent_size": None, "use_bias": True, "n_group": 3, "topk_group": 2}),
    ("rope as given", "apertus", rope(**LLAMA3) | {"attention_bias": True}),
    ("relu behind the convolution too", "granitemoehybrid", {"hidden_act": "relu"}),
    ("gelu behind the convolution", "nemotron_h", {"mamba_hidden_act": "gelu"}),
    ("yarn, whose magnitude the norm takes away", "llama4_text", rope(**YARN)),
    ("windows by default", "smollm3", {"layer_types": None}),
]  # fmt: skip
CASES: list[Any] = [(name, {}) for name in models.names()] + [(name, changes) for _, name, changes in VARIANTS]
CASES += [pytest.param(name, changes, marks=pytest.mark.slow) for _, name, changes in RARE_VARIANTS]
IDS = models.names() + [f"{name}: {title}" for title, name, _ in VARIANTS + RARE_VARIANTS]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=IDS)
def test_logits_equal_transformers(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = models.find(model_type).TINY | changes
    theirs = save_random(config, tmp_path)
    token_ids = random_ids(LENGTH, config.get("text_config", config)["vocab_size"], 1)
    if model_type in WITH_STATES:
        expected = stepped(theirs, token_ids)
    else:
        with torch.inference_mode():
            expected = theirs(torch.tensor([token_ids])).logits[0]
    for backend in BACKENDS:
        runner = load(tmp_path, block_size=8, backend=backend)
        actual = follow(runner, token_ids, chunk_sizes(NUM_PROMPT, [13, 1, 64, 7]) + [1] * NUM_DECODE)
        assert (actual - expected).abs().max() <= TOLERANCE, backend
    assert expected.std() > 0.3  # lively enough for the comparison to mean something


def test_heads_whose_size_the_config_does_not_name(tmp_path: Path) -> None:
    """transformers takes hidden_size / num_attention_heads for this type, and 128 for Qwen3."""
    config = {key: value for key, value in models.find("qwen3_moe").TINY.items() if key != "head_dim"}
    theirs, token_ids = save_random(config, tmp_path), random_ids(LENGTH, config["vocab_size"], 1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    actual = follow(load(tmp_path, backend="cpu"), token_ids, [LENGTH])
    assert (actual - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "qwen3_next"])
def test_models_whose_layers_keep_states_alone(model_type: str, tmp_path: Path) -> None:
    """transformers has no cache for such a model, but computes a text at once."""
    config = models.find(model_type).TINY | {"layer_types": ["linear_attention"] * 3}
    theirs, token_ids = save_random(config, tmp_path), random_ids(LENGTH, config["vocab_size"], 1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids]), use_cache=False).logits[0]
    for backend in BACKENDS:
        actual = follow(load(tmp_path, backend=backend), token_ids, [LENGTH - NUM_DECODE] + [1] * NUM_DECODE)
        assert (actual - expected).abs().max() <= 1e-3, backend


def test_steps_of_mamba_are_bounded(tmp_path: Path) -> None:
    """As in transformers' form for prompts; its form for single tokens leaves the bounds out, so it is no reference."""
    config = models.find("granitemoehybrid").TINY | {"time_step_limit": [0.4, 0.8]}
    theirs, token_ids = save_random(config, tmp_path), random_ids(LENGTH, 199, 1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    for backend in BACKENDS:
        actual = follow(
            load(tmp_path, block_size=8, backend=backend), token_ids, [LENGTH - NUM_DECODE] + [1] * NUM_DECODE
        )
        assert (actual - expected).abs().max() <= 1e-3, backend


def test_dynamic_ntk_equals_transformers_token_by_token(tmp_path: Path, backend: str) -> None:
    """There transformers gives each position the base of the sequence up to it, which is our rule at any chunking."""
    config = models.find("llama").TINY | rope(rope_type="dynamic", factor=4.0) | {"max_position_embeddings": 60}
    theirs = save_random(config, tmp_path)
    token_ids = random_ids(100, config["vocab_size"], 2)
    outs = [stepped(theirs, token_ids)]
    result = follow(load(tmp_path, backend=backend), token_ids, [100])
    assert (result - torch.cat(outs)).abs().max() <= TOLERANCE


def test_longrope_takes_the_short_factors_if_the_context_is_short(tmp_path: Path, backend: str) -> None:
    config = models.find("llama").TINY | rope(**LONGROPE)
    theirs = save_random(config, tmp_path)
    token_ids = random_ids(60, config["vocab_size"], 3)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    short = follow(load(tmp_path, max_model_len=64, backend=backend), token_ids, [60])
    assert (short - expected).abs().max() <= TOLERANCE
    long = follow(load(tmp_path, backend=backend), token_ids, [60])
    assert (long - expected).abs().max() > 0.01


def test_older_layout_of_rope_settings_is_read_alike(tmp_path: Path, backend: str) -> None:
    """rope_theta and rope_scaling with "type", as transformers 4 wrote them."""
    import json

    config = models.find("llama").TINY | rope(**(YARN | {"rope_theta": 700.0}))
    save_random(config, tmp_path)
    token_ids = random_ids(40, config["vocab_size"], 4)
    new = follow(load(tmp_path, backend=backend), token_ids, [40])
    values = json.loads((tmp_path / "config.json").read_text())
    settings = values.pop("rope_parameters")
    values["rope_theta"] = settings.pop("rope_theta")
    values["rope_scaling"] = settings | {"type": settings.pop("rope_type")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert torch.equal(follow(load(tmp_path, backend=backend), token_ids, [40]), new)


def test_control_a_wrong_block_is_noticed(tmp_path: Path, backend: str) -> None:
    config = models.find("llama").TINY
    theirs = save_random(config, tmp_path)
    token_ids = random_ids(40, config["vocab_size"], 1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    runner = load(tmp_path, block_size=8, backend=backend)
    actual = follow(runner, token_ids, [40], seed=1)
    assert (actual - expected).abs().max() <= TOLERANCE
    (table,) = scattered_tables([40], 8, runner.program.num_blocks, seed=1)
    unused = next(block for block in range(runner.program.num_blocks) if block not in table)
    last = all_logits(runner, make_batch([(0, 39, token_ids[39:], [table[0], unused, *table[2:]])]))
    assert (last - expected[-1:]).abs().max() > 0.01


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.05)])
def test_half_precision_stays_near(dtype: str, tolerance: float, tmp_path: Path, backend: str) -> None:
    config = models.find("llama").TINY
    theirs = save_random(config, tmp_path)
    token_ids = random_ids(50, config["vocab_size"], 1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    runner = load(tmp_path, dtype=dtype, backend=backend)
    program: Any = runner.program
    stored = (
        program.cache.layers[0].dtype if backend == "cpu" else str(program.caches[0].keys.dtype).removeprefix("torch.")
    )
    assert stored == dtype
    actual = follow(runner, token_ids, [50])
    assert 0 < (actual - expected).abs().max() <= tolerance
