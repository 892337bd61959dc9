"""Reads GGUF files of models with states: gated delta rules, Mamba2 and short convolutions, with attention between.

One function for each family. The kind of a layer is read off its tensors or its number of heads in the file. Rates of
decay are as the model needs them, since converters have computed -exp(A_log) already. Called by
`checkpoint.gguf_config`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod

from headrace.checkpoint.gguf_families import ATTENTION, DECODER_ENDS, MIXTRAL_PARTS, PARTS, PRE_NORMS, QWEN_MOE
from headrace.checkpoint.gguf_keys import Keys, Reading, decoder, layer_of
from headrace.checkpoint.gguf_parts import Part, parts_of
from headrace.models.config import MAX_LAYERS

DELTA_RULES = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MAMBA = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt": "dt", "ssm_norm": "norm", "ssm_out": "out_proj"}
NO_KIND = {"ssm_a": "rates", "ssm_d": "D"}
"""Tensors of a mixer whose names in the file have no kind."""
NEMOTRON = {name: theirs.replace("self_attn", "mixer") for name, theirs in ATTENTION.items()} | {
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
NEMOTRON_ENDS = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
GRANITE = (
    ATTENTION
    | PRE_NORMS
    | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
    | {
        name + end: f"shared_mlp.{theirs}"
        for name, theirs in {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "output_linear"}.items()
        for end in ("", "_shexp")
    }
)
FALCON = ATTENTION | {
    "attn_norm": "input_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
LFM2 = ATTENTION | {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **{name: f"feed_forward.{theirs}" for name, theirs in MIXTRAL_PARTS.items()},
}


def _delta_rules(keys: Keys) -> Reading:
    """Read Qwen's models. Layers for multi-token prediction, which come last, are left out."""
    architecture, experts = keys.prefix.removesuffix("."), keys.optional("expert_count", 4096, 0) or 0
    # Where all layers are mixtures, a file has no other width.
    values = decoder(keys, DELTA_RULES[architecture], inner=0 if architecture == "qwen35moe" else None)
    heads, num_keys, size, head_dim, conv = _state_sizes(keys)
    values |= {"linear_num_key_heads": num_keys, "linear_num_value_heads": heads, "linear_conv_kernel_dim": conv}
    values |= {"linear_key_head_dim": size, "linear_value_head_dim": head_dim}
    values["linear_heads_tiled"] = architecture != "qwen3next" and num_keys != heads
    values["num_hidden_layers"] = num_layers = _without_drafts(keys, values["num_hidden_layers"])
    if experts:
        values |= {"num_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count", experts)}
        values["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
        values["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
        names = (f"blk.{i}.ffn_gate_inp.weight" for i in range(num_layers))
        values["mlp_only_layers"] = [i for i, name in enumerate(names) if name not in keys.file.tensors]
    of_expert = PARTS | {"ffn_gate_up": "gate_up_proj"}
    every = parts_of(keys.file, QWEN_MOE | DELTA, DECODER_ENDS, "model.layers", experts, "mlp.experts", of_expert)
    parts = _of_states(every, "model.layers", "linear_attn", num_layers)
    for name, part in parts.items():
        if name.endswith(".shared_expert_gate.weight") and len(part.shape) == 1:
            parts[name] = part._replace(shape=(1, *part.shape))  # the file leaves out a dimension of one
    states = [f"model.layers.{i}.linear_attn.rates" in parts for i in range(num_layers)]
    values["layer_types"] = ["linear_attention" if state else "full_attention" for state in states]
    return Reading(values, parts, norm_offset=1.0, reorders=True)


def _nemotron_h(keys: Keys) -> Reading:
    """Read Nemotron-H, where each layer is one part: Mamba2, attention, an MLP or a mixture."""
    file, num = keys.file, keys.integer("block_count", MAX_LAYERS)
    kv_heads, inner = (keys.of_some_layers(key, num)[1] for key in ("attention.head_count_kv", "feed_forward_length"))
    values = decoder(keys, "nemotron_h", "layer_norm_epsilon", inner=inner or 1, kv_heads=kv_heads)
    heads, groups, size, head_dim, conv = _state_sizes(keys)
    values |= {"mamba_num_heads": heads, "n_groups": groups, "ssm_state_size": size, "mamba_head_dim": head_dim}
    values |= {"conv_kernel": conv, "num_hidden_layers": _without_drafts(keys, num)}
    experts = keys.optional("expert_count", 4096, 0) or 0
    if experts:
        num_groups = keys.optional("expert_group_count") or 1
        values |= {
            "n_routed_experts": experts,
            "num_experts_per_tok": keys.integer("expert_used_count", experts),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
            "moe_latent_size": keys.optional("moe_latent_size"),
            "norm_topk_prob": bool(keys.flag("expert_weights_norm")),
            "routed_scaling_factor": keys.real("expert_weights_scale") or 1.0,
            "n_group": num_groups,
            # Without a number of chosen groups in the file, all take part.
            "topk_group": keys.optional("expert_group_used_count") or num_groups,
        }
    layer = NEMOTRON | _below("mixer", MAMBA)
    of_expert = {"ffn_up": "up_proj", "ffn_down": "down_proj"}
    every = parts_of(file, layer, NEMOTRON_ENDS, "backbone.layers", experts, "mixer.experts", of_expert)
    parts = _of_states(every, "backbone.layers", "mixer", values["num_hidden_layers"])
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    values["layers_block_type"] = [
        next((kind for name, kind in kinds.items() if f"blk.{i}.{name}.weight" in file.tensors), "mlp")
        for i in range(values["num_hidden_layers"])
    ]
    values["mlp_bias"] = _any_ends(parts, ".mixer.up_proj.bias")
    values["use_conv_bias"] = _any_ends(parts, ".conv1d.bias")
    return Reading(values, parts)


def _granite(keys: Keys) -> Reading:
    num = keys.integer("block_count", MAX_LAYERS)
    attends, kv_heads = keys.of_some_layers("attention.head_count_kv", num)
    values = decoder(keys, "granitemoehybrid", kv_heads=kv_heads)
    heads, groups, size, head_dim, conv = _state_sizes(keys)
    values |= {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": size, "mamba_d_head": head_dim}
    values |= {"mamba_d_conv": conv, "mamba_expand": heads * head_dim // values["hidden_size"]}
    values["layer_types"] = ["full_attention" if one else "linear_attention" for one in attends]
    # This key is false in files of models without a rope.
    values["position_embedding_type"] = "nope" if keys.flag("rope.scaling.finetuned") is False else "rope"
    for name, key in (
        ("embedding_multiplier", "embedding_scale"), ("attention_multiplier", "attention.scale"),
        ("residual_multiplier", "residual_scale"), ("logits_scaling", "logit_scale"),
    ):  # fmt: skip
        values[name] = keys.real(key) or 1.0
    values["num_local_experts"] = experts = keys.optional("expert_count", 4096, 0) or 0
    if experts:
        values["num_experts_per_tok"] = keys.integer("expert_used_count", experts)
    shared = keys.optional("expert_shared_feed_forward_length")
    values["shared_intermediate_size"] = shared or values["intermediate_size"]
    layer = GRANITE | _below("mamba", MAMBA)
    every = parts_of(keys.file, layer, DECODER_ENDS, "model.layers", experts, "block_sparse_moe.experts", PARTS)
    parts = _of_states(every, "model.layers", "mamba", num)
    values["mamba_conv_bias"] = _any_ends(parts, ".conv1d.bias")
    values["mamba_proj_bias"] = _any_ends(parts, ".mamba.in_proj.bias")
    values["attention_bias"] = _any_ends(parts, ".q_proj.bias")
    return Reading(values, parts, keys.optional("rope.dimension_count", values["head_dim"]) or values["head_dim"])


def _falcon_h1(keys: Keys) -> Reading:
    """Read Falcon-H1, whose constant factors are multiplied into the file's weights."""
    values = decoder(keys, "falcon_h1")
    heads, groups, size, head_dim, conv = _state_sizes(keys)
    values |= {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": size, "mamba_d_head": head_dim}
    values |= {"mamba_d_conv": conv, "mamba_d_ssm": heads * head_dim, "mamba_norm_before_gate": False}
    ends = DECODER_ENDS | {"output_norm": "model.final_layernorm"}
    every = parts_of(keys.file, FALCON | _below("mamba", MAMBA), ends, "model.layers")
    parts = _of_states(every, "model.layers", "mamba", values["num_hidden_layers"])
    for flag, end in (
        ("mamba_rms_norm", ".mamba.norm.weight"), ("mamba_conv_bias", ".conv1d.bias"),
        ("mamba_proj_bias", ".mamba.in_proj.bias"), ("projectors_bias", ".mamba.out_proj.bias"),
        ("attention_bias", ".q_proj.bias"), ("mlp_bias", ".up_proj.bias"),
    ):  # fmt: skip
        values[flag] = _any_ends(parts, end)
    return Reading(values, parts)


def _lfm2(keys: Keys) -> Reading:
    num = keys.integer("block_count", MAX_LAYERS)
    attends, kv_heads = keys.of_some_layers("attention.head_count_kv", num)
    has_experts = keys.prefix == "lfm2moe."
    values = decoder(keys, "lfm2_moe" if has_experts else "lfm2", kv_heads=kv_heads)
    values |= {"norm_eps": values.pop("rms_norm_eps"), "block_auto_adjust_ff_dim": False}
    values |= {"conv_L_cache": keys.integer("shortconv.l_cache")}
    values["layer_types"] = ["full_attention" if one else "conv" for one in attends]
    experts = keys.integer("expert_count", 4096) if has_experts else 0
    if experts:
        values |= {"num_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count", experts)}
        values["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
        values["num_dense_layers"] = keys.optional("leading_dense_block_count", low=0) or 0
        values["routed_scaling_factor"] = keys.real("expert_weights_scale") or 1.0
    ends = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
    every = parts_of(keys.file, LFM2, ends, "model.layers", experts, "feed_forward.experts", MIXTRAL_PARTS)
    parts = _of_states(every, "model.layers", "conv", num)
    values["conv_bias"] = _any_ends(parts, ".conv.conv.bias")
    values["use_expert_bias"] = _any_ends(parts, ".expert_bias")
    return Reading(values, parts)


ARCHITECTURES: dict[str, Callable[[Keys], Reading]] = {
    **dict.fromkeys(DELTA_RULES, _delta_rules),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    "granitehybrid": _granite,
    "falcon-h1": _falcon_h1,
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
}


def _state_sizes(keys: Keys) -> tuple[int, int, int, int, int]:
    """Return the number of heads of a state, of groups (or heads of keys), and the sizes of a key, of a head, and of
    the convolution's kernel."""
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        keys.refuse("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {heads}")
    groups, size = keys.integer("ssm.group_count"), keys.integer("ssm.state_size")
    return heads, groups, size, inner // heads, keys.integer("ssm.conv_kernel")


def _without_drafts(keys: Keys, num_layers: int) -> int:
    return num_layers - (keys.optional("nextn_predict_layers", num_layers - 1, 0) or 0)


def _below(mixer: str, layer: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{mixer}.{theirs}" for name, theirs in layer.items()}


def _any_ends(parts: Mapping[str, Part], end: str) -> bool:
    return any(name.endswith(end) for name in parts)


def _of_states(parts: Mapping[str, Part], root: str, mixer: str, num_layers: int) -> dict[str, Part]:
    """Return the parts of the first `num_layers` layers. Parts of a `mixer` with a state get the model's names and
    shapes: files leave out the kind in some names, and have a dimension of size one more or less."""
    named: dict[str, Part] = {}
    for name, part in parts.items():
        if layer_of(name) >= num_layers:
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(?:(ssm_a|ssm_d)|ffn_norm|shortconv\.(conv|in_proj|out_proj)\.(\w+))", name)
        if match is None:
            name = name.replace(f".{mixer}.dt.bias", f".{mixer}.dt_bias")
        elif match[2] is not None:
            name = f"{root}.{match[1]}.{mixer}.{NO_KIND[match[2]]}"
        elif match[3] is not None:
            name = f"{root}.{match[1]}.{mixer}.{match[3]}.{match[4]}"
        else:
            name = f"{root}.{match[1]}.pre_ff_layernorm.weight"
        if name.endswith((".conv1d.weight", ".conv.conv.weight")):
            part = part._replace(shape=(part.shape[0], 1, part.shape[-1]))
        elif name.endswith((".rates", ".D", f".{mixer}.norm.weight")):
            part = part._replace(shape=(prod(part.shape),))
        named[name] = part
    return named
