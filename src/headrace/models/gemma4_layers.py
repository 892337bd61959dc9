"""The layers of Gemma 4: heads of layers with full attention have another size, the last layers read the cache of
earlier ones, and experts may run side by side with the MLP. Called by `gemma4_text`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.backends import base
from headrace.backends.base import Array, Cache, HeadNorm, Heads, LayerShape, Ops, RopeTable, Routing, Rows
from headrace.models import gemma2
from headrace.models.config import ModelConfig
from headrace.models.decoder import MAX_EXPERTS, Experts, GatedMLP, RMSNorm
from headrace.models.rope import make_rope_table
from headrace.models.weights import Linear, Weights
from headrace.protocol.errors import CheckpointError


class Frame(gemma2.Model):
    """The attributes and methods of the model that the layers read."""

    unread = ()
    norm_offset = 0.0
    default_window = 512

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        super().measure(config, weights, ops, max_model_len)
        if config.values.get("use_bidirectional_attention") == "all":
            raise CheckpointError("config.json: use_bidirectional_attention is all; headrace runs causal models only")
        self.extra_width = width = config.integer("hidden_size_per_layer_input", 256, low=0)
        root, num = "model." if weights.has_prefix("model.") else "", self.num_layers
        if width:
            vocab = config.integer("vocab_size_per_layer_input", self.vocab_size)
            self.extra = weights.table(f"{root}embed_tokens_per_layer.weight", (vocab, num * width))
            to_extra = Linear([f"{root}per_layer_model_projection"], self.hidden_size, [num * width])
            self.to_extra = weights.matrix(to_extra)
            self.extra_norm = RMSNorm(weights, ops, f"{root}per_layer_projection_norm", width, self.eps).of_head

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        by_type, longest = config.mapping("rope_parameters"), config.integer("max_position_embeddings")
        rope = ModelConfig(full | by_type.mapping("full_attention").values)
        size = self.sizes(self.num_layers - 1, is_full=True)[0]
        table = make_rope_table(rope, size, longest, self.max_model_len)
        self.full_rope_table = RopeTable(self.weights.constant(table.cos), self.weights.constant(table.sin))
        return ModelConfig({"rope_type": "default"} | by_type.mapping("sliding_attention").values)

    def sizes(self, layer_id: int, is_full: bool) -> tuple[int, int]:
        """Return the numbers of a head and the number of KV heads: of the layer, else of its type."""
        config, size, kv_heads = self.config, self.head_dim, self.num_kv_heads
        if is_full:
            size = config.integer("global_head_dim", 512)
            if config.flag("attention_k_eq_v", False):
                kv_heads = config.integer("num_global_key_value_heads", kv_heads)
        layer = config.mapping("per_layer_config").mapping(str(layer_id))
        return layer.integer("head_dim", size), layer.integer("num_key_value_heads", kv_heads)

    def source(self, layer_id: int) -> int | None:
        """Return the earlier layer of its type whose cache one of the last `num_kv_shared_layers` reads, else None."""
        first = self.num_layers - self.config.integer("num_kv_shared_layers", 0, low=0, high=self.num_layers - 1)
        alike = [i for i in range(first) if self.layer_type(i) == self.layer_type(layer_id)]
        if layer_id >= first and not alike:
            raise CheckpointError(f"config.json: num_kv_shared_layers leaves layer {layer_id} no cache of its type")
        return alike[-1] if layer_id >= first else None

    def default_layer_type(self, layer_id: int) -> str:
        return "sliding_attention" if (layer_id + 1) % 6 and layer_id + 1 < self.num_layers else "full_attention"


class Attention:
    """Attention with normed queries, keys and, without a weight, values. A layer `source` has its keys and values."""

    def __init__(self, model: Frame, name: str, layer_id: int) -> None:
        weights, ops, hidden, heads = model.weights, model.ops, model.hidden_size, model.num_heads
        self.ops, self.layer_id, window = ops, layer_id, model.window(layer_id)
        is_full, self.source, self.scoring = window is None, model.source(layer_id), base.Scoring(1.0, window)
        size, kv_heads = model.sizes(layer_id, is_full)
        self.rope_table = model.full_rope_table if is_full else model.rope_table
        self.heads = Heads(heads, kv_heads, size)
        model.keep(layer_id, LayerShape(kv_heads, size, source=self.source), window)
        bias, names, outs, k_norm = model.config.flag("attention_bias", False), ["q"], [heads * size], None
        if self.source is None:
            values = "k" if is_full and model.config.flag("attention_k_eq_v", False) else "v"
            names, outs = ["q", "k", values], [heads * size, kv_heads * size, kv_heads * size]
            k_norm = RMSNorm(weights, ops, f"{name}.k_norm", size, model.eps).of_head
            self.v_norm = HeadNorm(weights.constant(np.ones(size, np.float32)), model.eps, 0.0)
        self.qkv = weights.matrix(Linear([f"{name}.{part}_proj" for part in names], hidden, outs, bias=bias))
        self.q_norm = RMSNorm(weights, ops, f"{name}.q_norm", size, model.eps).of_head
        self.form = base.HeadForm(self.rope_table, self.q_norm, k_norm)
        self.out = weights.matrix(Linear([f"{name}.o_proj"], heads * size, [hidden], bias=bias))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, cache, (num, kv_heads, size, _) = self.ops, kv[self.layer_id], self.heads
        query = ops.linear(x, self.qkv)
        if self.source is None:
            qkv = ops.norm_columns(query, (num + kv_heads) * size, kv_heads, self.v_norm)
            query = ops.rope_store(qkv, self.heads, rows, cache, self.form)
        else:
            query = ops.rope(ops.norm_columns(query, 0, num, self.q_norm), num, size, rows, self.rope_table)
        return ops.linear(ops.attention(query, self.heads, rows, cache, self.scoring), self.out)


class Mixture:
    """norm(mlp(norm(x))) + norm(experts(norm(x))). The router reads x through another norm."""

    def __init__(self, model: Frame, name: str) -> None:
        config, weights, hidden = model.config, model.weights, model.hidden_size
        self.ops, self.eps, self.factor = model.ops, model.eps, hidden**-0.5
        num = config.integer("num_experts", high=MAX_EXPERTS)
        factors = weights.tensor(f"{name}.router.per_expert_scale", (num,))
        routing = Routing(config.integer("top_k_experts", high=num), factors=factors)
        inner = config.integer("moe_intermediate_size")
        self.experts = Experts(model, name, num, inner, routing, router="router.proj")
        self.weight = weights.tensor(f"{name}.router.scale", (hidden,))
        self.norms = [model.make_norm(f"{name}.{part}_feedforward_layernorm_2") for part in ("pre", "post")]
        self.mlp_norm = model.make_norm(f"{name}.post_feedforward_layernorm_1")

    def __call__(self, x: Array, dense: Array) -> Array:
        seen = self.ops.scale(self.ops.rms_norm(x, self.weight, self.eps), self.factor)
        return self.mlp_norm(dense) + self.norms[1](self.experts(self.norms[0](x), seen))


class Layer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))); x += norm(project(extra * act(gate(x)))); x *= scalar."""

    def __init__(self, model: Frame, name: str, layer_id: int) -> None:
        weights, hidden, width, wide = model.weights, model.hidden_size, model.extra_width, model.intermediate_size
        self.ops, self.kind, norm = model.ops, model.activation, model.make_norm
        self.attention = Attention(model, f"{name}.self_attn", layer_id)
        is_double = self.attention.source is not None and model.config.flag("use_double_wide_mlp", False)
        self.mlp = GatedMLP(model, f"{name}.mlp", inner=2 * wide if is_double else wide)
        self.mixture = Mixture(model, name) if model.config.flag("enable_moe_block", False) else None
        self.norms = [norm(f"{name}.{part}_layernorm") for part in ("input", "post_attention", "pre_feedforward")]
        self.last_norm = norm(f"{name}.post_feedforward_layernorm")
        if width:
            self.gate = weights.matrix(Linear([f"{name}.per_layer_input_gate"], hidden, [width]))
            self.project = weights.matrix(Linear([f"{name}.per_layer_projection"], width, [hidden]))
            self.extra_norm = norm(f"{name}.post_per_layer_input_norm")
        self.scalar = float(weights.numbers(f"{name}.layer_scalar", (1,)).item())

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache], extra: Array | None = None) -> Array:
        before, after, mlp_norm = self.norms
        x = x + after(self.attention(before(x), rows, kv))
        mixed = self.mlp(mlp_norm(x))
        x = x + self.last_norm(mixed if self.mixture is None else self.mixture(x, mixed))
        if extra is not None:
            gated = self.ops.multiply(extra, self.ops.linear(x, self.gate), self.kind)
            x = x + self.extra_norm(self.ops.linear(gated, self.project))
        return self.ops.scale(x, self.scalar)
