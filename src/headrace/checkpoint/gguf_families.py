"""The keys and tensor names in GGUF files of families other than Llama's and Qwen's, and their names in headrace.

One entry for each architecture of llama.cpp, by its name. Data alone; `checkpoint.gguf_config` reads files by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
# The norm before the MLP, in files that name it after the attention before it.
LATE_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
LLAMA = ATTENTION | PRE_NORMS | GATED
DECODER = LLAMA | HEAD_NORMS
DECODER_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
QWEN_MOE = DECODER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
PARTS = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
MIXTRAL_PARTS = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
BIASES = {"attention_bias": "self_attn.q_proj.bias"}
WINDOW = {"sliding_window": "attention.sliding_window"}
NONE: Mapping[str, Any] = MappingProxyType({})
MIXTURE = {"moe_intermediate_size": "expert_feed_forward_length"}


class Family(NamedTuple):
    """One architecture. model_type: the headrace model that runs it.

    layer: maps the file's name of each tensor of a layer to the model's; a name with a kind ("x.bias") is mapped whole.
    pairs: rows of q and k lie in pairs that turn together. epsilon: the config's key; of a layer norm unless it is
    `rms_norm_eps`. integers, optional (integers) and reals (also optional): the file's key for each of the config's.
    rope: reals of the rope's settings. flags: true if a layer has a tensor whose name ends so. constants,
    rope_constants: values that the file lacks. expert_root and expert_parts: names of the experts' tensors;
    num_experts: the config's key for the number of experts. norm_offset: added to weights of norms in the file.
    """

    model_type: str
    layer: Mapping[str, str]
    pairs: bool = False
    epsilon: str = "rms_norm_eps"
    integers: Mapping[str, str] = NONE
    optional: Mapping[str, str] = NONE
    reals: Mapping[str, str] = NONE
    rope: Mapping[str, str] = NONE
    flags: Mapping[str, str] = NONE
    constants: Mapping[str, Any] = NONE
    rope_constants: Mapping[str, Any] = NONE
    expert_root: str = ""
    expert_parts: Mapping[str, str] = PARTS
    num_experts: str = ""
    norm_offset: float = 0.0


SUB_NORMS = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}

FAMILIES: dict[str, Family] = {
    "bitnet": Family("bitnet", LLAMA | SUB_NORMS, constants={"hidden_act": "silu"}),
    "bitnet-b1.58": Family("bitnet", LLAMA | SUB_NORMS, constants={"hidden_act": "relu2"}),
    "gpt-oss": Family(
        "gpt_oss",
        ATTENTION | LATE_NORMS | {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        integers=WINDOW
        | {"intermediate_size": "expert_feed_forward_length", "num_experts_per_tok": "expert_used_count"},
        # llama.cpp rounds the bounds of its ramp, the model does not.
        rope_constants={"truncate": False},
        expert_root="mlp.experts",
        num_experts="num_local_experts",
    ),
    "phi3": Family(
        "phi3",
        ATTENTION
        | PRE_NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        optional=WINDOW,
    ),
    "smollm3": Family("smollm3", LLAMA, pairs=True, flags=BIASES),
    "seed_oss": Family(
        "seed_oss",
        ATTENTION | LATE_NORMS | GATED,
        flags=BIASES | {"attention_out_bias": "self_attn.o_proj.bias", "mlp_bias": "mlp.gate_proj.bias"},
    ),
    "granite": Family(
        "granite",
        LLAMA,
        pairs=True,
        reals={
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        flags=BIASES | {"mlp_bias": "mlp.gate_proj.bias"},
    ),
    "mistral3": Family(
        "ministral3",
        LLAMA,
        pairs=True,
        optional=WINDOW,
        rope={
            "llama_4_scaling_beta": "attention.temperature_scale",
            "mscale": "rope.scaling.yarn_log_multiplier",
            "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        },
    ),
    "olmo2": Family("olmo2", ATTENTION | HEAD_NORMS | POST_NORMS | GATED, optional=WINDOW, flags=BIASES),
    "starcoder2": Family(
        "starcoder2",
        ATTENTION | PRE_NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon="norm_epsilon",
        flags={"use_bias": "self_attn.q_proj.bias"},
    ),
    "glm4": Family(
        "glm4",
        ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        pairs=True,
        flags=BIASES,
    ),
    "chatglm": Family(
        "glm",
        ATTENTION | PRE_NORMS | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        pairs=True,
        flags=BIASES,
    ),
    "hy_v3": Family(
        "hy_v3",
        LLAMA
        | HEAD_NORMS
        | {
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        integers=MIXTURE | {"num_experts_per_tok": "expert_used_count"},
        reals={"router_scaling_factor": "expert_weights_scale"},
        flags=BIASES,
        expert_root="mlp.experts",
        num_experts="num_experts",
    ),
    "glm4moe": Family(
        "glm4_moe",
        ATTENTION
        | HEAD_NORMS
        | LATE_NORMS
        | GATED
        | SHARED
        | {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        integers=MIXTURE
        | {
            "num_experts_per_tok": "expert_used_count",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        optional={"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
        reals={"routed_scaling_factor": "expert_weights_scale"},
        flags=BIASES | {"use_qk_norm": "self_attn.q_norm.weight"},
        expert_root="mlp.experts",
        num_experts="n_routed_experts",
    ),
    "cohere2": Family(
        "cohere2",
        ATTENTION | {"attn_norm": "input_layernorm"} | GATED,
        pairs=True,
        epsilon="layer_norm_eps",
        integers=WINDOW,
        reals={"logit_scale": "logit_scale"},
        flags=BIASES,
    ),
    "exaone4": Family(
        "exaone4",
        ATTENTION | HEAD_NORMS | POST_NORMS | GATED,
        optional=WINDOW,
        constants={"sliding_window": None},
    ),
    "ernie4_5": Family("ernie4_5", LLAMA, pairs=True, flags={"use_bias": "self_attn.q_proj.bias"}),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        LLAMA | SHARED | {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        pairs=True,
        integers=MIXTURE
        | {
            "moe_k": "expert_used_count",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        expert_root="mlp.experts",
        num_experts="moe_num_experts",
    ),
    "hunyuan-dense": Family(
        "hunyuan_v1_dense",
        LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        flags=BIASES,
    ),
    "hunyuan-moe": Family(
        "hunyuan_v1_moe",
        ATTENTION
        | PRE_NORMS
        | {
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        integers={"moe_topk": "expert_used_count", "intermediate_size": "expert_feed_forward_length"},
        flags=BIASES,
        expert_root="mlp.experts",
        num_experts="num_experts",
    ),
    "afmoe": Family(
        "afmoe",
        ATTENTION
        | HEAD_NORMS
        | GATED
        | SHARED
        | {
            "attn_norm": "input_layernorm",
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        integers=MIXTURE
        | WINDOW
        | {
            "num_experts_per_tok": "expert_used_count",
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
        },
        reals={"route_scale": "expert_weights_scale"},
        flags=BIASES,
        constants={"mup_enabled": True},
        expert_root="mlp.experts",
        num_experts="num_experts",
    ),
    "nemotron": Family(
        "nemotron",
        ATTENTION | PRE_NORMS | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        epsilon="norm_eps",
        flags=BIASES | {"mlp_bias": "mlp.up_proj.bias"},
        norm_offset=1.0,
    ),
    "llama4": Family(
        "llama4_text",
        ATTENTION
        | PRE_NORMS
        | {
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        pairs=True,
        integers={
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "num_experts_per_tok": "expert_used_count",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        flags=BIASES,
        expert_root="feed_forward.experts",
        num_experts="num_local_experts",
    ),
    "apertus": Family(
        "apertus",
        ATTENTION
        | HEAD_NORMS
        | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
        | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        flags=BIASES,
    ),
    "minimax-m2": Family(
        "minimax_m2",
        ATTENTION
        | HEAD_NORMS
        | PRE_NORMS
        | {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        integers={"intermediate_size": "expert_feed_forward_length", "num_experts_per_tok": "expert_used_count"},
        optional={"rotary_dim": "rope.dimension_count"},
        expert_root="block_sparse_moe.experts",
        expert_parts=MIXTRAL_PARTS,
        num_experts="num_local_experts",
    ),
}
