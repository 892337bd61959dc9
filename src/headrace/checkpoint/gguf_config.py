"""Turns the metadata of a GGUF file into a config.json, and its tensors' names into a model's names.

A file names its architecture, and its keys begin with that name. Each architecture becomes the config of a model that
headrace has, and the tensors get the names by which the model file takes them. A value that is missing, of another type
or out of range is a `CheckpointError` with the file's key. Reads no tensor but `rope_freqs`, and imports no torch.
Called by `engine.library.load` and `checkpoint.gguf_source`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.checkpoint import gguf_encoders, gguf_hybrid, gguf_latent
from headrace.checkpoint.gguf_families import DECODER, DECODER_ENDS, FAMILIES, PARTS, QWEN_MOE
from headrace.checkpoint.gguf_keys import (
    MAX_CONTEXT,
    Keys,
    Reading,
    decoder,
    layer_of,
    of_each_layer,
    vocabulary,
)
from headrace.checkpoint.gguf_parts import FLOATS, parts_of, small_floats
from headrace.gguf import GGUF
from headrace.models.config import MAX_LAYERS

logger = logging.getLogger(__name__)

GEMMA = DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA4 = GEMMA | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
GEMMA4_ENDS = DECODER_ENDS | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GEMMA4_EXPERTS = {"ffn_gate_up": "gate_up_proj", "ffn_down": "down_proj"}
MUSE = GEMMA | {"attn_gate": "self_attn.gate_proj"}
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_ENDS = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"}


def read(file: GGUF) -> Reading:
    """Read the file's config and the names of its tensors. Raises `CheckpointError` for an architecture without a model
    file, and for values out of range."""
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        bound = gguf_encoders.REFUSED.get(architecture or "", "one of " + ", ".join(ARCHITECTURES))
        raise file.fault("general.architecture", architecture, bound)
    kind = file.text("general.type")
    if kind not in (None, "model"):
        raise file.fault("general.type", kind, "model")
    reading = ARCHITECTURES[architecture](Keys(file, architecture))
    prefix = architecture + "."
    # The table has the size of the vocabulary; layers for multi-token prediction are left out.
    harmless = {prefix + "vocab_size", prefix + "nextn_predict_layers", prefix + "pooling_type"}
    if names := sorted(key for key in file.fields.keys() - file.read - harmless if key.startswith(prefix)):
        logger.info("%s: without effect on this model: %s", file.name, ", ".join(names))
    return reading


def choose_dtype(dtype: str, file: GGUF) -> str:
    """Return `dtype`, or for "auto" the dtype of most of the float matrices; float16 where all are quantised."""
    if dtype != "auto":
        return dtype
    kinds = Counter(info.type for info in file.tensors.values() if len(info.shape) > 1)
    floats = Counter({kind: num for kind, num in kinds.items() if kind in FLOATS})
    if not floats or (len(floats) < len(kinds) and "BF16" not in floats):
        return "float16"
    return FLOATS[floats.most_common(1)[0][0]]


def _llama(keys: Keys) -> Reading:
    """Read Llama, and also Mistral and Mixtral, which differ by a window and by experts."""
    values = decoder(keys, "llama")
    layer = dict(DECODER)
    experts = keys.optional("expert_count", 4096, 0) or 0
    if experts:
        values |= {"model_type": "mixtral", "num_local_experts": experts}
        values["num_experts_per_tok"] = keys.integer("expert_used_count", experts)
        layer["ffn_gate_inp"] = "block_sparse_moe.gate"
    window = keys.optional("attention.sliding_window", MAX_CONTEXT, 0)
    if window:
        values |= {"model_type": "mixtral" if experts else "mistral", "sliding_window": window}
    parts = parts_of(keys.file, layer, DECODER_ENDS, "model.layers", experts)
    values["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in parts
    values["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in parts
    turned = keys.optional("rope.dimension_count", values["head_dim"]) or values["head_dim"]
    return Reading(values, parts, turned)


def _qwen(keys: Keys) -> Reading:
    """Read Qwen's models; of models for images the text, since the tower is a separate file."""
    model_type = keys.prefix.removesuffix(".")
    model_type = {"qwen2vl": "qwen2_5_vl", "qwen3vl": "qwen3_vl"}.get(model_type, model_type)
    return Reading(decoder(keys, model_type), parts_of(keys.file, DECODER, DECODER_ENDS, "model.layers"))


def _qwen_moe(keys: Keys) -> Reading:
    has_shared = keys.prefix == "qwen2moe."
    values = decoder(keys, "qwen2_moe" if has_shared else "qwen3_moe")
    experts = keys.integer("expert_count", 4096)
    values |= {"num_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count", experts)}
    values |= {"moe_intermediate_size": keys.integer("expert_feed_forward_length"), "norm_topk_prob": not has_shared}
    layers = range(values["num_hidden_layers"])
    values["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in keys.file.tensors]
    if has_shared:
        values["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    parts = parts_of(keys.file, QWEN_MOE, DECODER_ENDS, "model.layers", experts, "mlp.experts", PARTS)
    # A router with one output has lost a dimension in the file.
    for name, part in parts.items():
        if name.endswith(".shared_expert_gate.weight") and len(part.shape) == 1:
            parts[name] = part._replace(shape=(1, *part.shape))
    return Reading(values, parts)


def _gemma1(keys: Keys) -> Reading:
    values = decoder(keys, "gemma")
    return Reading(values, parts_of(keys.file, DECODER, DECODER_ENDS, "model.layers"), norm_offset=1.0)


def _gemma2(keys: Keys) -> Reading:
    values = _gemma(keys, "gemma2", big=46)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[name] = keys.real(name)
    return Reading(values, parts_of(keys.file, GEMMA, DECODER_ENDS, "model.layers"), norm_offset=1.0)


def _gemma3(keys: Keys) -> Reading:
    values = _gemma(keys, "gemma3_text", big=62)
    values["final_logit_softcapping"] = keys.real("final_logit_softcapping")
    values["rope_local_base_freq"] = keys.real("rope.freq_base_swa") or 10000.0
    return Reading(values, parts_of(keys.file, GEMMA, DECODER_ENDS, "model.layers"), norm_offset=1.0)


def _gemma_embedding(keys: Keys) -> Reading:
    """Read EmbeddingGemma: Gemma 3 whose rows see both ways. The layers behind the pooling are not the model's."""
    reading = _gemma3(keys)
    reading.values["use_bidirectional_attention"] = True
    parts = {name: part for name, part in reading.parts.items() if name not in gguf_encoders.BEHIND}
    return reading._replace(parts=parts)


def _gemma4(keys: Keys) -> Reading:
    """Read Gemma 4. Sizes of keys and values differ by layer; for layers with full attention the file has no rope
    setting but the base."""
    file, num = keys.file, keys.integer("block_count", MAX_LAYERS)
    slides = keys.slides(num)
    inner, kv_heads = (keys.by_layer(name, num) for name in ("feed_forward_length", "attention.head_count_kv"))
    experts = keys.optional("expert_count", 4096, 0) or 0
    parts = parts_of(file, GEMMA4, GEMMA4_ENDS, "model.layers", experts, "experts", GEMMA4_EXPERTS)
    for name in [name for name in parts if name.endswith("ffn_down_exps.scale")]:
        parts[f"model.layers.{name.split('.')[1]}.router.per_expert_scale"] = parts.pop(name)
    values = {
        "model_type": "gemma4_text",
        "max_position_embeddings": keys.integer("context_length", MAX_CONTEXT),
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": min(inner),
        "use_double_wide_mlp": len(set(inner)) > 1,
        "num_hidden_layers": num,
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {str(i): {"num_key_value_heads": size} for i, size in enumerate(kv_heads)},
        "head_dim": keys.integer("attention.key_length_swa"),
        "global_head_dim": keys.integer("attention.key_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "full_attention": {"rope_theta": keys.real("rope.freq_base") or 1e6},
            "sliding_attention": {"rope_theta": keys.real("rope.freq_base_swa") or 10000.0},
        },
        "sliding_window": keys.integer("attention.sliding_window", MAX_CONTEXT),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "num_kv_shared_layers": keys.optional("attention.shared_kv_layers", num - 1, 0) or 0,
        "hidden_size_per_layer_input": keys.optional("embedding_length_per_layer_input", low=0) or 0,
        "final_logit_softcapping": keys.real("final_logit_softcapping"),
        **vocabulary(keys),
    }
    if experts:
        values |= {"enable_moe_block": True, "num_experts": experts}
        values["top_k_experts"] = keys.integer("expert_used_count", experts)
        values["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    # Layers without values take the keys as values.
    first = num - values["num_kv_shared_layers"]
    values["attention_k_eq_v"] = any(f"model.layers.{i}.self_attn.v_proj.weight" not in parts for i in range(first))
    return Reading(values, parts)


def _gemma(keys: Keys, model_type: str, big: int) -> dict[str, Any]:
    """Read Gemma 2 or 3. `big`: layers of the 27B model, whose scores are scaled by the width, not by the head."""
    values = decoder(keys, model_type)
    by_width = values["num_hidden_layers"] == big
    scalar = values["hidden_size"] // values["num_attention_heads"] if by_width else values["head_dim"]
    values |= {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    values["sliding_window"] = keys.optional("attention.sliding_window", MAX_CONTEXT)
    return values


def _muse_glimmer(keys: Keys) -> Reading:
    """Read Muse Glimmer. The file has the queries' factor as the weight of their norm; the model's norm has none."""
    values = decoder(keys, "muse_glimmer")
    num = values["num_hidden_layers"]
    slides = keys.slides(num)
    parts = parts_of(keys.file, MUSE, DECODER_ENDS, "model.layers")
    factors: dict[str, set[float]] = {"q": set(), "k": set()}
    for name in [name for name in parts if name.endswith((".q_norm.weight", ".k_norm.weight"))]:
        part = parts.pop(name)
        factors[name.removesuffix("_norm.weight")[-1]].update(small_floats(keys.file, part, name))
    if len(factors["q"]) != 1 or factors["k"] != {1.0}:
        raise keys.file.fault("weights of attn_q_norm and attn_k_norm", factors, "one number throughout, and 1")
    values |= {
        "qk_scale_factor": factors["q"].pop(),
        "sliding_window": keys.integer("attention.sliding_window", MAX_CONTEXT),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "layer_rope_theta": [values["rope_theta"] if one else 0 for one in slides],
        "output_multiplier": keys.real("logit_scale"),
        "final_logit_softcapping": keys.real("final_logit_softcapping"),
    }
    return Reading(values, parts, values["head_dim"], norm_offset=1.0, offset_ends="layernorm.weight")


def _gpt2(keys: Keys) -> Reading:
    values = {
        "model_type": "gpt2",
        "n_positions": keys.integer("context_length", MAX_CONTEXT),
        "n_embd": keys.integer("embedding_length"),
        "n_layer": keys.integer("block_count", MAX_LAYERS),
        "n_head": keys.integer("attention.head_count"),
        "n_inner": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
        **vocabulary(keys),
    }
    return Reading(values, parts_of(keys.file, GPT2, GPT2_ENDS, "h"))


def _family(keys: Keys) -> Reading:
    """Read a family of `FAMILIES`. Layers for multi-token prediction, which come last, are left out."""
    family = FAMILIES[keys.prefix.removesuffix(".")]
    values = decoder(keys, family.model_type, family.epsilon) | dict(family.constants)
    values |= {name: keys.integer(key, low=0) for name, key in family.integers.items()}
    optional: dict[str, float | None] = {name: keys.optional(key, low=0) for name, key in family.optional.items()}
    optional |= {name: keys.real(key) for name, key in family.reals.items()}
    values |= {name: value for name, value in optional.items() if value is not None}
    values["sliding_window"] = values.get("sliding_window") or None  # 0 is none
    values["num_hidden_layers"] -= keys.optional("nextn_predict_layers", values["num_hidden_layers"] - 1, 0) or 0
    if values["rope_scaling"] is not None:
        settings = {name: keys.real(key) for name, key in family.rope.items()}
        settings = {name: value for name, value in settings.items() if value is not None}
        values["rope_scaling"] |= settings | dict(family.rope_constants)
    slides = keys.file.flags(keys.prefix + "attention.sliding_window_pattern", MAX_LAYERS)
    if slides is not None and values["sliding_window"]:
        values["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
        values["model_type"] = {"olmo2": "olmo3"}.get(family.model_type, family.model_type)
    experts = 0
    if family.num_experts:
        experts = values[family.num_experts] = keys.integer("expert_count", 4096)
        if family.model_type == "llama4_text":
            values["use_qk_norm"] = experts != 128  # as llama.cpp distinguishes Maverick, which has none, from Scout
    if family.model_type == "apertus":
        for name in ("alpha_p", "alpha_n", "beta"):
            values["xielu_" + name] = of_each_layer(keys, "xielu." + name, values["num_hidden_layers"])
        values["rope_scaling"] = values["rope_scaling"] or {"rope_type": "default"}
    parts = parts_of(
        keys.file, family.layer, DECODER_ENDS, "model.layers", experts, family.expert_root, family.expert_parts
    )  # fmt: skip
    last = values["num_hidden_layers"]
    parts = {name: part for name, part in parts.items() if layer_of(name) < last}
    for name, part in parts.items():
        if name.endswith("moe_statics.e_score_correction_bias"):  # the model's tensor has one more dimension
            parts[name] = part._replace(shape=(1, part.shape[-1]))
    if family.model_type == "hy_v3":
        sparse = [f"model.layers.{i}.mlp.router.gate.weight" in parts for i in range(last)]
        values["mlp_layer_types"] = ["sparse" if one else "dense" for one in sparse]
        inner = keys.integer("expert_shared_feed_forward_length")
        values["num_shared_experts"] = inner // values["moe_intermediate_size"]
    for flag, end in family.flags.items():
        values[flag] = any(name.endswith("." + end) for name in parts)
    turned = keys.optional("rope.dimension_count", values["head_dim"]) or values["head_dim"]
    return Reading(values, parts, turned if family.pairs else 0, family.norm_offset)


def _latent(keys: Keys) -> Reading:
    latent = gguf_latent.config(keys)
    values = decoder(keys, gguf_latent.model_type(keys), head_dim=latent["qk_rope_head_dim"]) | latent
    values |= {"num_key_value_heads": values["num_attention_heads"]}
    if values["rope_scaling"] is not None:
        values["rope_scaling"] |= gguf_latent.rope(keys)
    values["num_hidden_layers"] -= keys.optional("nextn_predict_layers", values["num_hidden_layers"] - 1, 0) or 0
    experts = values["n_routed_experts"]
    parts = parts_of(
        keys.file, gguf_latent.LAYER, DECODER_ENDS, "model.layers", experts, "mlp.experts", gguf_latent.OF_EXPERT
    )
    last = values["num_hidden_layers"]
    parts = {name: part for name, part in gguf_latent.by_head(parts).items() if layer_of(name) < last}
    return Reading(values, parts, reorders=True)


ARCHITECTURES: dict[str, Callable[[Keys], Reading]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen2vl": _qwen,
    "qwen3vl": _qwen,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "gemma": _gemma1,
    **gguf_hybrid.ARCHITECTURES,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma-embedding": _gemma_embedding,
    "gemma4": _gemma4,
    "muse-glimmer": _muse_glimmer,
    "gpt2": _gpt2,
    **gguf_encoders.ARCHITECTURES,
    **dict.fromkeys(gguf_latent.ARCHITECTURES, _latent),
    **dict.fromkeys(FAMILIES, _family),
}
