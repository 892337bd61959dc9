"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025): layers of one part each, which is Mamba2, attention without
positions, an MLP with squared ReLUs, or a mixture of such MLPs, whose inputs and outputs may be narrower."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.backends.base import Array, Cache, Rows
from headrace.models.config import ModelConfig
from headrace.models.decoder import ACTIVATIONS, MAX_EXPERTS, MLP, Attention, AttentionOptions, Decoder, Experts
from headrace.models.glm4_moe import sigmoid_routing
from headrace.models.mamba import Mamba2, MambaForm, heads_of
from headrace.models.unread import Alias, Unread
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = {
    "model_type": "nemotron_h",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 20,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 20,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "mlp_bias": True,
}
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
KEEPING = ("linear_attention", "full_attention")
"""Kinds of layers that keep something of a sequence in the cache."""


class Mixture:
    """shared(x) + out(experts(into(x))); the router reads x. `into` and `out` are there for narrower experts only."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        config, hidden, self.ops = decoder.config, decoder.hidden_size, decoder.ops
        num, bias = config.integer("n_routed_experts", 8, high=MAX_EXPERTS), config.flag("mlp_bias", False)
        narrow = 0 if config.values.get("moe_latent_size") is None else config.integer("moe_latent_size")
        self.into = self.out = None
        if narrow:
            self.into = decoder.weights.matrix(Linear([f"{name}.fc1_latent_proj"], hidden, [narrow], bias=bias))
            self.out = decoder.weights.matrix(Linear([f"{name}.fc2_latent_proj"], narrow, [hidden], bias=bias))
        inner, routing = config.integer("moe_intermediate_size", 7688), sigmoid_routing(decoder, name, num, top_k=2)
        self.experts = Experts(decoder, name, num, inner, routing, parts=("up_proj", "down_proj"), outer=narrow)
        inner = config.integer("moe_shared_expert_intermediate_size", 7688)
        self.shared = MLP(decoder, f"{name}.shared_experts", bias, inner=inner)

    def __call__(self, x: Array) -> Array:
        if self.into is None or self.out is None:
            return self.shared(x) + self.experts(x)
        y = self.experts(self.ops.linear(x, self.into), x)
        return self.shared(x) + self.ops.linear(y, self.out)


class Layer:
    """x += part(norm(x))."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        config, kind = decoder.config, decoder.layer_type(layer_id)
        self.norm, name = decoder.make_norm(f"{name}.norm"), f"{name}.mixer"
        self.mixer: Callable[[Array, Rows, Sequence[Cache]], Array]
        # Layers that keep nothing have no cache: caches are numbered without them.
        cache_id = sum(decoder.layer_type(i) in KEEPING for i in range(layer_id))
        if kind == "linear_attention":
            heads = heads_of(config, ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim"))
            form = MambaForm(
                heads, config.integer("conv_kernel", 4, low=2, high=64),
                bias=config.flag("use_bias", False), conv_bias=config.flag("use_conv_bias", True),
                limits=(config.number("time_step_min", 0.001), math.inf),
                activation=config.choice("mamba_hidden_act", ACTIVATIONS, "silu"),
            )  # fmt: skip
            self.mixer = Mamba2(decoder, name, cache_id, form)
        elif kind == "full_attention":
            self.mixer = Attention(decoder, name, cache_id, AttentionOptions(rotates=False))
        else:
            is_mixture = kind == "moe"
            mlp = Mixture(decoder, name) if is_mixture else MLP(decoder, name, config.flag("mlp_bias", False))
            self.mixer = lambda x, rows, kv: mlp(x)

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        return x + self.mixer(self.norm(x), rows, kv)


class Model(Decoder):
    Layer: Any = Layer
    unread = (
        Unread("sliding_window", None, "windows in this model's layers"),
        Alias("num_local_experts", "n_routed_experts"),
    )
    roots = ("backbone.", "model.")
    table = "embeddings"
    final_norm = "norm_f"
    activation_key = "mlp_hidden_act"
    default_activation = "relu2"
    eps_key = "layer_norm_epsilon"
    default_eps = 1e-5
    default_head_dim = 128
    layer_types = tuple(LETTERS.values())

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        kinds = kinds_of(config)
        config = ModelConfig(config.values | {"layer_types": kinds, "num_hidden_layers": len(kinds)})
        super().measure(config, weights, ops, max_model_len)


def kinds_of(config: ModelConfig) -> list[str]:
    """Return the layers' kinds, from `layers_block_type` (or `layer_types`), or from a letter for each layer."""
    letters = config.values.get("hybrid_override_pattern")
    if isinstance(letters, str) and set(letters) <= set(LETTERS):
        return [LETTERS[letter] for letter in letters]
    key = "layer_types" if config.values.get("layers_block_type") is None else "layers_block_type"
    kinds = config.values.get(key)
    if letters is not None or not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(
            f"config.json: hybrid_override_pattern is {letters!r:.80}, expected letters of {''.join(LETTERS)}, or a "
            "list layers_block_type"
        )
    return [NAMES.get(str(kind), str(kind)) for kind in kinds]
