"""The metadata and the tensors of a GGUF file for a model: the inverse of `checkpoint.gguf_config`.

`metadata` turns a config.json into the keys of an architecture; `planned` maps the tensors of the checkpoint to the
tensors of the file, with the changes of their rows and numbers. A model that the format cannot express is refused.
Reads no tensors. Called by `quantize.gguf_writer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace import models
from headrace.checkpoint.gguf_config import GEMMA, GPT2, GPT2_ENDS
from headrace.checkpoint.gguf_families import DECODER, DECODER_ENDS, PARTS
from headrace.checkpoint.gguf_parts import EXPERTS
from headrace.checkpoint.strays import HARMLESS
from headrace.models.config import ModelConfig
from headrace.models.decoder import ACTIVATIONS
from headrace.models.rope import frequencies_of
from headrace.protocol.errors import CheckpointError
from headrace.quantize.gguf_file import Value

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2",
}  # fmt: skip
"""GGUF's name of each model_type."""
MIXTURES = {"mixtral": ("block_sparse_moe", EXPERTS), "qwen3_moe": ("mlp", PARTS)}
"""The beginnings of the names of routers and experts, and GGUF's names of an expert's parts with theirs."""
WINDOWED = ("mistral", "mixtral", "gemma2", "gemma3_text")


class Planned(NamedTuple):
    """A tensor of the file: `sources` of the checkpoint, stacked along their first dimension.

    turned: rows of each head that are stored in pairs (0: none). transposed: the sources are [in, out]. offset: is
    added to the numbers.
    """

    name: str
    sources: tuple[str, ...]
    turned: int = 0
    transposed: bool = False
    offset: float = 0.0


class Metadata(NamedTuple):
    """fields: metadata. factors: the divisor of each frequency of rope (the tensor rope_freqs), or None."""

    architecture: str
    fields: dict[str, Value]
    head_dim: int
    turned: int
    tied: bool
    factors: NDArray[np.float32] | None = None


def metadata(config: ModelConfig) -> Metadata:
    """Return the metadata. Raises `CheckpointError` for a model that GGUF, or headrace's reader, cannot express."""
    model_type = config.values.get("model_type")
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: model_type is {model_type!r:.80}; headrace writes GGUF files of {', '.join(ARCHITECTURES)}, "
            "and reads those of others"
        )
    architecture = ARCHITECTURES[str(model_type)]
    return _gpt2(config) if architecture == "gpt2" else _decoder(config, str(model_type), architecture)


def refuse(key: str, value: object, bound: str) -> None:
    raise CheckpointError(f"config.json: {key} is {value!r:.80}; GGUF can say only {bound}")


def _decoder(config: ModelConfig, model_type: str, architecture: str) -> Metadata:
    kind: Any = models.find(model_type).Model
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.integer("head_dim", kind.default_head_dim or hidden // heads)
    longest = config.integer("max_position_embeddings")
    _verify(config, kind, model_type, head_dim)
    rope = _global_rope(config)
    if rope.values["rope_type"] == "dynamic":
        # GGUF has no such scaling. The model is the plain one up to its original context.
        longest = rope.integer("original_max_position_embeddings", longest)
    turned = int(head_dim * rope.number("partial_rotary_factor", 1.0))
    values: dict[str, Value] = {
        "context_length": longest,
        "embedding_length": hidden,
        "block_count": config.integer("num_hidden_layers"),
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.integer("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", kind.default_eps),
        "vocab_size": config.integer("vocab_size"),
        "rope.dimension_count": turned,
        "rope.freq_base": rope.number("rope_theta", kind.default_theta),
    }
    scaling, factors = _scaling(rope, head_dim, longest, kind.default_theta)
    values |= scaling
    window = config.values.get("sliding_window", kind.default_window)
    if model_type in WINDOWED and window is not None:
        values["attention.sliding_window"] = config.integer("sliding_window", kind.default_window)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if model_type.startswith("gemma") and config.number(name, 0.0):
            values[name] = config.number(name)
    if model_type == "gemma3_text":
        local = config.mapping("rope_parameters").mapping("sliding_attention")
        values["rope.freq_base_swa"] = local.number("rope_theta", config.number("rope_local_base_freq", 10000.0))
    if model_type == "mixtral":
        values["expert_count"] = config.integer("num_local_experts", 8)
        values["expert_used_count"] = config.integer("num_experts_per_tok", 2)
    if model_type == "qwen3_moe":
        key = "num_local_experts" if config.values.get("num_experts") is None else "num_experts"
        values["expert_count"] = config.integer(key)
        values["expert_used_count"] = config.integer("num_experts_per_tok")
        values["expert_feed_forward_length"] = config.integer("moe_intermediate_size")
    tied = config.flag("tie_word_embeddings", kind.default_tied)
    return Metadata(architecture, _named(architecture, values), head_dim, turned, tied, factors)


def _gpt2(config: ModelConfig) -> Metadata:
    hidden = config.integer("n_embd", 768)
    if config.choice("activation_function", ACTIVATIONS, "gelu_new") != "gelu_tanh":
        refuse("activation_function", config.values["activation_function"], "gelu_new")
    if not config.flag("scale_attn_weights", True) or config.flag("scale_attn_by_inverse_layer_idx", False):
        refuse("scale_attn_weights and scale_attn_by_inverse_layer_idx", "other than true and false", "these")
    heads = config.integer("n_head", 12)
    values: dict[str, Value] = {
        "context_length": config.integer("n_positions", 1024),
        "embedding_length": hidden,
        "block_count": config.integer("n_layer", 12),
        "feed_forward_length": config.integer("n_inner", 4 * hidden),
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "vocab_size": config.integer("vocab_size", 50257),
    }
    tied = config.flag("tie_word_embeddings", True)
    return Metadata("gpt2", _named("gpt2", values), hidden // heads, 0, tied)


def _named(architecture: str, values: dict[str, Value]) -> dict[str, Value]:
    return {f"{architecture}.{name}": value for name, value in values.items()}


def _global_rope(config: ModelConfig) -> ModelConfig:
    full = config.mapping("rope_parameters").mapping("full_attention").values
    return ModelConfig({"rope_type": "default", **full}) if full else config.rope


def _verify(config: ModelConfig, kind: Any, model_type: str, head_dim: int) -> None:
    """Refuse values that a model file reads and the metadata cannot express."""
    gemma = model_type.startswith("gemma")
    activation = config.choice(kind.activation_key, ACTIVATIONS, kind.default_activation)
    expected = "gelu_tanh" if gemma else "silu"
    if activation != expected:
        refuse(kind.activation_key, config.values[kind.activation_key], expected)
    num_layers = config.integer("num_hidden_layers")
    if model_type in ("qwen2", "qwen3", "qwen3_moe") and config.flag("use_sliding_window", False):
        refuse("use_sliding_window", True, "false")
    if model_type in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text") and config.flag("attention_bias", False):
        refuse("attention_bias", True, "false")
    if model_type == "qwen3_moe" and not config.flag("norm_topk_prob", False):
        refuse("norm_topk_prob", False, "true")
    if gemma:
        big = {"gemma2": 46, "gemma3_text": 62}[model_type]
        heads = config.integer("num_attention_heads")
        scalar = config.integer("hidden_size") // heads if num_layers == big else head_dim
        if config.number("query_pre_attn_scalar", 256) != scalar:
            refuse("query_pre_attn_scalar", config.number("query_pre_attn_scalar", 256), f"{scalar}")
    if model_type == "gemma3_text":
        if config.number("attn_logit_softcapping", 0.0):
            refuse("attn_logit_softcapping", config.number("attn_logit_softcapping"), "null")
        local = config.mapping("rope_parameters").mapping("sliding_attention").values
        if local.get("rope_type", "default") != "default":
            refuse("rope_parameters of sliding_attention", local, "the default type")
    kinds = config.words("layer_types", num_layers)
    if model_type == "llama":
        kinds = None  # its model file knows no windows
    pattern = {"gemma2": 2, "gemma3_text": 6}.get(model_type)
    if model_type == "gemma3_text" and kinds is None and config.integer("sliding_window_pattern", 6) != 6:
        refuse("sliding_window_pattern", config.values["sliding_window_pattern"], "6")
    for layer_id, stated in enumerate(kinds or ()):
        slides = (layer_id + 1) % pattern != 0 if pattern else _all_slide(config, kind, model_type)
        if stated != ("sliding_attention" if slides else "full_attention"):
            refuse(f"layer_types[{layer_id}]", stated, "the model's own rule")


def _all_slide(config: ModelConfig, kind: Any, model_type: str) -> bool:
    return model_type in WINDOWED and config.values.get("sliding_window", kind.default_window) is not None


def _scaling(
    rope: ModelConfig, head_dim: int, longest: int, theta: float
) -> tuple[dict[str, Value], NDArray[np.float32] | None]:
    kind = rope.values["rope_type"]
    if kind in ("default", "dynamic"):
        return {}, None
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")}, None
    if kind == "llama3":
        plain = frequencies_of(ModelConfig(rope.values | {"rope_type": "default"}), head_dim, longest, longest, theta)
        scaled = frequencies_of(rope, head_dim, longest, longest, theta)
        return {}, (plain[0] / scaled[0]).astype(np.float32)
    if kind != "yarn" or not rope.flag("truncate", True):
        refuse("rope_type", kind, "default, linear, llama3, dynamic (its original context) and yarn (truncated)")
    original = rope.integer("original_max_position_embeddings", longest)
    factor = rope.number("factor", longest / original)
    _, magnitude = frequencies_of(rope, head_dim, longest, longest, theta)
    values: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": rope.number("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": rope.number("beta_slow", 1.0),
    }
    if factor > 1:
        values["rope.scaling.attn_factor"] = magnitude / (0.1 * math.log(factor) + 1)
    return values, None


def planned(names: Iterable[str], metadata: Metadata, model_type: str, *, with_head: bool) -> list[Planned]:
    """Every tensor of the file, in the order of the layers. with_head: the head is not a copy of the table.

    Raises `CheckpointError` for tensors of the checkpoint that have no place in the file.
    """
    gpt2, gemma = metadata.architecture == "gpt2", model_type.startswith("gemma")
    layer = GPT2 if gpt2 else GEMMA if gemma else DECODER
    stems = {theirs: ours for ours, theirs in layer.items()}
    mixture, of_expert = MIXTURES.get(model_type, ("", {}))
    if mixture:
        stems[f"{mixture}.gate"] = "ffn_gate_inp"
    ends = {theirs.removeprefix("model."): ours for ours, theirs in (GPT2_ENDS if gpt2 else DECODER_ENDS).items()}
    inner = {theirs: ours for ours, theirs in of_expert.items()}
    root = re.compile(r"transformer\." if gpt2 else r"model\.")
    block = re.compile(r"h\.(\d+)\.(.+)" if gpt2 else r"layers\.(\d+)\.(.+)")
    plans: dict[tuple[int, str], Planned] = {}
    experts: dict[tuple[int, str], dict[int, str]] = {}
    others = []
    for name in names:
        if HARMLESS.fullmatch(name):
            continue
        stem, _, part = root.sub("", name, count=1).rpartition(".")
        match = block.fullmatch(stem)
        expert = re.fullmatch(rf"{mixture}\.experts\.(\d+)\.(\w+)", match[2]) if match and mixture else None
        if stem in ends:
            if ends[stem] != "output" or with_head:
                where = -1 if ends[stem].endswith("_embd") else 1 << 30
                offset = 1.0 if gemma and stem == "norm" else 0.0
                target = f"{ends[stem]}.{part}"
                plans[where, target] = Planned(target, (name,), offset=offset)
        elif match is not None and expert is not None and expert[2] in inner and part == "weight":
            target = f"blk.{match[1]}.{inner[expert[2]]}_exps.weight"
            experts.setdefault((int(match[1]), target), {})[int(expert[1])] = name
        elif match is not None and match[2] in stems and part in ("weight", "bias"):
            target = f"blk.{match[1]}.{stems[match[2]]}.{part}"
            turned = (
                metadata.turned
                if metadata.architecture == "llama" and target.split(".")[2] in ("attn_q", "attn_k")
                else 0
            )
            transposed = gpt2 and part == "weight" and ".c_" in name
            offset = 1.0 if gemma and name.endswith("norm.weight") else 0.0
            plans[int(match[1]), target] = Planned(target, (name,), turned, transposed, offset)
        else:
            others.append(name)
    if others:
        raise CheckpointError(f"{len(others)} tensors have no place in a GGUF file: {', '.join(sorted(others)[:5])}")
    for key, parts in experts.items():
        if sorted(parts) != list(range(len(parts))):
            raise CheckpointError(f"{key[1]}: experts {sorted(parts)[:8]} of the checkpoint are not all there")
        plans[key] = Planned(key[1], tuple(parts[i] for i in range(len(parts))))
    return [plans[key] for key in sorted(plans)]
