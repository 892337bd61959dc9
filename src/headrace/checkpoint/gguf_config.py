"""Turns the metadata of a GGUF file into a config.json, and its tensors' names into those of a model.

A file names its architecture, and its keys begin with that name. Each architecture becomes the config of a model that
headrace has, and the tensors get the names by which the model file takes them. A value that is missing, of another type
or out of range is a `CheckpointError` with the file's key. Reads no tensor but `rope_freqs`, and imports no torch.
Called by `engine.load` and `checkpoint.gguf_source`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from headrace.checkpoint import gguf_latent, gguf_recurrent
from headrace.checkpoint.gguf_families import FAMILIES
from headrace.checkpoint.gguf_parts import FLOATS, Part, divisors, parts_of
from headrace.gguf import GGUF

MAX_LAYERS = 4096
MAX_CONTEXT = 2**27
MAX_SIZE = 2**24

DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DECODER_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_ENDS = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"}
QWEN_EXPERTS = {"ffn_gate": "gate_proj", "ffn_down": "down_proj", "ffn_up": "up_proj"}
QWEN_MOE = DECODER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


class Reading(NamedTuple):
    """values: a config.json. parts: the file's tensors by the model's names.

    turned: rows of each head of q and k that are stored in pairs, as ggml rotates them, or 0. norm_offset: a number
    that the file's weights of norms have more than the model's. reorders: whether rows that a model file asks for in
    another order lie in the checkpoint's; elsewhere the file's converter put them in the model's.
    """

    values: dict[str, Any]
    parts: dict[str, Part]
    turned: int = 0
    norm_offset: float = 0.0
    reorders: bool = False


class _Keys:
    """Metadata of one architecture; every getter names the whole key in what it raises."""

    def __init__(self, file: GGUF, architecture: str) -> None:
        self.file = file
        self.prefix = architecture + "."

    def integer(self, name: str, high: int = MAX_SIZE, low: int = 1) -> int:
        value = self.optional(name, high, low)
        if value is None:
            self.refuse(name, None, f"there, an integer from {low} to {high}")
        return value

    def optional(self, name: str, high: int = MAX_SIZE, low: int = 1) -> int | None:
        """An integer, or None. An array with one for each layer is accepted if all are the same."""
        field = self.file.fields.get(self.prefix + name)
        if field is None or not field.is_array:
            return self.file.integer(self.prefix + name, low, high)
        values = set(self.file.integers(self.prefix + name, MAX_LAYERS) or ())
        if len(values) != 1:
            self.refuse(name, sorted(values)[:8], "the same for every layer")
        value = int(values.pop())
        if not low <= value <= high:
            self.refuse(name, value, f"from {low} to {high}")
        return value

    def by_layer(self, name: str, num_layers: int) -> list[int]:
        """An integer for each layer, all the same where the file has but one."""
        field = self.file.fields.get(self.prefix + name)
        if field is None or not field.is_array:
            return [self.integer(name)] * num_layers
        values = list(self.file.integers(self.prefix + name, MAX_LAYERS) or ())
        if len(values) != num_layers or not all(1 <= value <= MAX_SIZE for value in values):
            self.refuse(name, values[:8], f"{num_layers} integers from 1 to {MAX_SIZE}")
        return values

    def real(self, name: str) -> float | None:
        return self.file.real(self.prefix + name)

    def flag(self, name: str) -> bool | None:
        return self.file.flag(self.prefix + name)

    def refuse(self, name: str, value: object, bound: str) -> NoReturn:
        raise self.file.fault(self.prefix + name, value, bound)


def read(file: GGUF) -> Reading:
    """Raises `CheckpointError` for an architecture that headrace has no model for, and for values out of range."""
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise file.fault("general.architecture", architecture, "one of " + ", ".join(ARCHITECTURES))
    kind = file.text("general.type")
    if kind not in (None, "model"):
        raise file.fault("general.type", kind, "model")
    if (file.integer("split.count") or 1) > 1:
        raise file.fault("split.count", file.integer("split.count"), "1: merge the parts first (llama-gguf-split)")
    return ARCHITECTURES[architecture](_Keys(file, architecture))


def choose_dtype(dtype: str, file: GGUF) -> str:
    """Return `dtype`, or for "auto" that of most of the float matrices; float16 where all are quantised."""
    if dtype != "auto":
        return dtype
    kinds = Counter(info.type for info in file.tensors.values() if len(info.shape) > 1)
    floats = Counter({kind: num for kind, num in kinds.items() if kind in FLOATS})
    if not floats or (len(floats) < len(kinds) and "BF16" not in floats):
        return "float16"
    return FLOATS[floats.most_common(1)[0][0]]


def _llama(keys: _Keys) -> Reading:
    """Also Mistral and Mixtral, which differ from Llama by a window and by experts."""
    values = _decoder(keys, "llama")
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


def _qwen(keys: _Keys) -> Reading:
    model_type = keys.prefix.removesuffix(".")
    return Reading(_decoder(keys, model_type), parts_of(keys.file, DECODER, DECODER_ENDS, "model.layers"))


def _qwen3_vl(keys: _Keys) -> Reading:
    """The text; the tower for images is a file of its own."""
    return Reading(_decoder(keys, "qwen3_vl"), parts_of(keys.file, DECODER, DECODER_ENDS, "model.layers"))


def _qwen_moe(keys: _Keys) -> Reading:
    has_shared = keys.prefix == "qwen2moe."
    values = _decoder(keys, "qwen2_moe" if has_shared else "qwen3_moe")
    experts = keys.integer("expert_count", 4096)
    values |= {"num_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count", experts)}
    values |= {"moe_intermediate_size": keys.integer("expert_feed_forward_length"), "norm_topk_prob": not has_shared}
    layers = range(values["num_hidden_layers"])
    values["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in keys.file.tensors]
    if has_shared:
        values["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    parts = parts_of(keys.file, QWEN_MOE, DECODER_ENDS, "model.layers", experts, "mlp.experts", QWEN_EXPERTS)
    # A router with one output has lost a dimension in the file.
    for name, part in parts.items():
        if name.endswith(".shared_expert_gate.weight") and len(part.shape) == 1:
            parts[name] = part._replace(shape=(1, *part.shape))
    return Reading(values, parts)


def _gemma1(keys: _Keys) -> Reading:
    values = _decoder(keys, "gemma")
    return Reading(values, parts_of(keys.file, DECODER, DECODER_ENDS, "model.layers"), norm_offset=1.0)


def _recurrent(keys: _Keys) -> Reading:
    """Qwen's models with gated delta rules. Layers for multi-token prediction, which come last, are left out."""
    architecture = keys.prefix.removesuffix(".")
    values = _decoder(keys, gguf_recurrent.MODELS[architecture])
    num_keys, num_values = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if inner % num_values:
        keys.refuse("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {num_values}")
    values |= {"linear_num_key_heads": num_keys, "linear_num_value_heads": num_values}
    values |= {"linear_key_head_dim": keys.integer("ssm.state_size"), "linear_value_head_dim": inner // num_values}
    values |= {"linear_conv_kernel_dim": keys.integer("ssm.conv_kernel")}
    values["linear_heads_tiled"] = architecture != "qwen3next" and num_keys != num_values
    values["num_hidden_layers"] -= keys.optional("nextn_predict_layers", values["num_hidden_layers"] - 1, 0) or 0
    num_layers, experts = values["num_hidden_layers"], keys.optional("expert_count", 4096, 0) or 0
    if experts:
        values |= {"num_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count", experts)}
        values["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
        values["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
        names = (f"blk.{i}.ffn_gate_inp.weight" for i in range(num_layers))
        values["mlp_only_layers"] = [i for i, name in enumerate(names) if name not in keys.file.tensors]
    of_expert = QWEN_EXPERTS | {"ffn_gate_up": "gate_up_proj"}
    every = parts_of(
        keys.file, QWEN_MOE | gguf_recurrent.LAYER, DECODER_ENDS, "model.layers", experts, "mlp.experts", of_expert
    )
    parts = {}
    for name, part in ((gguf_recurrent.renamed(name), part) for name, part in every.items()):
        layer = re.match(r"(?:model\.layers|blk)\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= num_layers:
            continue
        if name.endswith(".conv1d.weight"):  # the file leaves out a dimension of one, also of a router
            part = part._replace(shape=(part.shape[0], 1, part.shape[-1]))
        elif name.endswith(".shared_expert_gate.weight") and len(part.shape) == 1:
            part = part._replace(shape=(1, *part.shape))
        parts[name] = part
    states = [f"model.layers.{i}.linear_attn.rates" in parts for i in range(num_layers)]
    values["layer_types"] = ["linear_attention" if state else "full_attention" for state in states]
    return Reading(values, parts, norm_offset=1.0, reorders=True)


def _gemma2(keys: _Keys) -> Reading:
    values = _gemma(keys, "gemma2", big=46)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[name] = keys.real(name)
    return Reading(values, parts_of(keys.file, GEMMA, DECODER_ENDS, "model.layers"), norm_offset=1.0)


def _gemma3(keys: _Keys) -> Reading:
    values = _gemma(keys, "gemma3_text", big=62)
    values["final_logit_softcapping"] = keys.real("final_logit_softcapping")
    values["rope_local_base_freq"] = keys.real("rope.freq_base_swa") or 10000.0
    return Reading(values, parts_of(keys.file, GEMMA, DECODER_ENDS, "model.layers"), norm_offset=1.0)


def _gemma4(keys: _Keys) -> Reading:
    """Keys and values have sizes by layer; of layers with full attention the file has no rope settings but the base."""
    file, num = keys.file, keys.integer("block_count", MAX_LAYERS)
    slides = file.flags(keys.prefix + "attention.sliding_window_pattern", MAX_LAYERS)
    if slides is None or len(slides) != num:
        keys.refuse("attention.sliding_window_pattern", slides, f"a flag for each of {num} layers")
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
        **_vocabulary(keys),
    }
    if experts:
        values |= {"enable_moe_block": True, "num_experts": experts}
        values["top_k_experts"] = keys.integer("expert_used_count", experts)
        values["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    # Layers without values take the keys for them.
    first = num - values["num_kv_shared_layers"]
    values["attention_k_eq_v"] = any(f"model.layers.{i}.self_attn.v_proj.weight" not in parts for i in range(first))
    return Reading(values, parts)


def _gemma(keys: _Keys, model_type: str, big: int) -> dict[str, Any]:
    """`big`: layers of the one size (27B) whose scores are scaled by the width and not by the head."""
    values = _decoder(keys, model_type)
    by_width = values["num_hidden_layers"] == big
    scalar = values["hidden_size"] // values["num_attention_heads"] if by_width else values["head_dim"]
    values |= {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    values["sliding_window"] = keys.optional("attention.sliding_window", MAX_CONTEXT)
    return values


def _gpt2(keys: _Keys) -> Reading:
    values = {
        "model_type": "gpt2",
        "n_positions": keys.integer("context_length", MAX_CONTEXT),
        "n_embd": keys.integer("embedding_length"),
        "n_layer": keys.integer("block_count", MAX_LAYERS),
        "n_head": keys.integer("attention.head_count"),
        "n_inner": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
        **_vocabulary(keys),
    }
    return Reading(values, parts_of(keys.file, GPT2, GPT2_ENDS, "h"))


def _family(keys: _Keys) -> Reading:
    """A family of the table. Layers for multi-token prediction, which come last, are left out."""
    family = FAMILIES[keys.prefix.removesuffix(".")]
    values = _decoder(keys, family.model_type, family.epsilon) | dict(family.constants)
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
            values["use_qk_norm"] = experts != 128  # as llama.cpp tells Maverick, which has none, from Scout
    if family.model_type == "apertus":
        for name in ("alpha_p", "alpha_n", "beta"):
            values["xielu_" + name] = _of_each_layer(keys, "xielu." + name, values["num_hidden_layers"])
        values["rope_scaling"] = values["rope_scaling"] or {"rope_type": "default"}
    parts = parts_of(
        keys.file, family.layer, DECODER_ENDS, "model.layers", experts, family.expert_root, family.expert_parts
    )  # fmt: skip
    last = values["num_hidden_layers"]
    parts = {name: part for name, part in parts.items() if _layer_of(name) < last}
    for name, part in parts.items():
        if name.endswith("moe_statics.e_score_correction_bias"):  # the model has a dimension more
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


def _latent(keys: _Keys) -> Reading:
    latent = gguf_latent.config(keys)
    values = _decoder(keys, gguf_latent.model_type(keys), head_dim=latent["qk_rope_head_dim"]) | latent
    values |= {"num_key_value_heads": values["num_attention_heads"]}
    if values["rope_scaling"] is not None:
        values["rope_scaling"] |= gguf_latent.rope(keys)
    values["num_hidden_layers"] -= keys.optional("nextn_predict_layers", values["num_hidden_layers"] - 1, 0) or 0
    experts = values["n_routed_experts"]
    parts = parts_of(
        keys.file, gguf_latent.LAYER, DECODER_ENDS, "model.layers", experts, "mlp.experts", gguf_latent.OF_EXPERT
    )
    last = values["num_hidden_layers"]
    parts = {name: part for name, part in gguf_latent.by_head(parts).items() if _layer_of(name) < last}
    return Reading(values, parts, reorders=True)


def _of_each_layer(keys: _Keys, key: str, num_layers: int) -> list[float]:
    """Reals under a key without the architecture's name."""
    values = keys.file.reals(key, MAX_LAYERS)
    if values is None or len(values) != num_layers:
        raise keys.file.fault(key, None if values is None else f"{len(values)} numbers", f"{num_layers} numbers")
    return list(values)


def _layer_of(name: str) -> int:
    match = re.match(r"(?:model\.layers|blk)\.(\d+)\.", name)
    return int(match[1]) if match else -1


ARCHITECTURES: dict[str, Callable[[_Keys], Reading]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3vl": _qwen3_vl,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "gemma": _gemma1,
    **dict.fromkeys(gguf_recurrent.MODELS, _recurrent),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt2": _gpt2,
    **dict.fromkeys(gguf_latent.ARCHITECTURES, _latent),
    **dict.fromkeys(FAMILIES, _family),
}


def _decoder(keys: _Keys, model_type: str, epsilon_name: str = "rms_norm_eps", head_dim: int = 0) -> dict[str, Any]:
    """`head_dim`: where that is not the file's length of keys, which then need not be that of values."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    is_latent, head_dim = head_dim > 0, head_dim or keys.optional("attention.key_length") or hidden // heads
    if head_dim < 1:
        keys.refuse("attention.head_count", heads, f"at most embedding_length, {hidden}")
    if not is_latent and (keys.optional("attention.value_length") or head_dim) != head_dim:
        keys.refuse("attention.value_length", keys.optional("attention.value_length"), f"{head_dim}, as the keys'")
    epsilon_key = "attention.layer_norm_" + ("rms_epsilon" if epsilon_name == "rms_norm_eps" else "epsilon")
    epsilon = keys.real(epsilon_key)
    if epsilon is None:
        keys.refuse(epsilon_key, None, "there")
    turned = keys.optional("rope.dimension_count", head_dim) or head_dim
    return {
        "model_type": model_type,
        "max_position_embeddings": keys.integer("context_length", MAX_CONTEXT),
        "hidden_size": hidden,
        "intermediate_size": 0 if model_type in gguf_recurrent.NO_MLP else keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count", MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        epsilon_name: epsilon,
        # A quarter too much, which is cut off where the product with head_dim becomes an integer.
        "partial_rotary_factor": min((turned + 0.25) / head_dim, 1.0),
        "rope_theta": keys.real("rope.freq_base") or 10000.0,
        "rope_scaling": _rope(keys, turned),
        **_vocabulary(keys),
    }


def _vocabulary(keys: _Keys) -> dict[str, Any]:
    table = keys.file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise keys.file.fault("token_embd.weight", None if table is None else table.shape, "there, with 2 dimensions")
    tied = "output.weight" not in keys.file.tensors
    return {"vocab_size": table.shape[1], "tie_word_embeddings": tied}


def _rope(keys: _Keys, turned: int) -> dict[str, Any] | None:
    """`rope_scaling`: from the metadata, or from a tensor with a divisor for each frequency (Llama 3.1)."""
    same = divisors(keys.file, "rope_freqs.weight", turned)
    if same is not None:
        return {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
    short, long = (divisors(keys.file, f"rope_factors_{part}.weight", turned) for part in ("short", "long"))
    if short is not None and long is not None:
        values: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        values["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", MAX_CONTEXT)
        return values | {"attention_factor": keys.real("rope.scaling.attn_factor") or 1.0}
    kind = keys.file.text(keys.prefix + "rope.scaling.type")
    factor = keys.real("rope.scaling.factor") or keys.real("rope.scale_linear")
    if kind is None:
        kind = "none" if factor in (None, 1.0) else "linear"
    if kind == "none" or factor is None:
        return None
    if kind not in ("linear", "yarn"):
        keys.refuse("rope.scaling.type", kind, "none, linear or yarn")
    values = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        values["original_max_position_embeddings"] = keys.optional("rope.scaling.original_context_length", MAX_CONTEXT)
        for name in ("beta_fast", "beta_slow"):
            values[name] = keys.real("rope.scaling.yarn_" + name)
        attention = keys.real("rope.scaling.attn_factor")
        if attention is not None and factor > 1:
            values["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    return {name: value for name, value in values.items() if value is not None}
