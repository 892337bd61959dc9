"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), always in the absorbed form.

The cache has one row for each position, [latent | rope]: the key of all heads, whose first numbers are their value. A
head's query is multiplied by the transposed weights that make keys out of latents, and its result of attention by the
weights that make values. There is no second form for prefill, because its bits would differ. Called by the model files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.backends.base import Array, Cache, HeadForm, Heads, LayerShape, RopeTable, Routing, Rows, Scoring
from headrace.models.config import ModelConfig
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts, GatedMLP, PreNormLayer, RMSNorm, SharedExperts
from headrace.models.rope import make_rope_table, mscale, pair_order
from headrace.models.weights import Linear

EPS = 1e-6
"""Epsilon of the norms of latents, whatever the epsilon of the other norms."""


class LatentAttention:
    """Latent attention in one layer. `paired`: of the rotated numbers, 2i and 2i + 1 turn together in the checkpoint.
    `query_scale`: a table of factors by position."""

    def __init__(
        self,
        decoder: Decoder,
        name: str,
        layer_id: int,
        *,
        paired: bool = True,
        query_scale: Array | None = None,
    ) -> None:
        config, weights, ops = decoder.config, decoder.weights, decoder.ops
        num, latent, rope_dim = decoder.num_heads, config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
        nope_dim, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
        self.ops, self.layer_id, self.rope_dim, self.query_scale = ops, layer_id, rope_dim, query_scale
        self.heads = Heads(num, 1, latent + rope_dim, latent)
        self.rope_table = decoder.rope_table
        self.scoring = Scoring((nope_dim + rope_dim) ** -0.5 * magnitude(decoder.global_rope(config)) ** 2)
        decoder.keep(layer_id, LayerShape(1, latent + rope_dim, latent, shares_key=True), None)
        size, hidden, bias = num * (nope_dim + rope_dim), decoder.hidden_size, config.flag("attention_bias", False)
        q_order = pair_order(size, nope_dim + rope_dim, rope_dim, nope_dim) if paired else None
        kv_order = pair_order(latent + rope_dim, latent + rope_dim, rope_dim, latent) if paired else None
        self.q_a = self.q_norm = None
        if config.values.get("q_lora_rank") is None:
            self.q = weights.matrix(Linear([f"{name}.q_proj"], hidden, [size], orders=[q_order]))
        else:
            rank = config.integer("q_lora_rank")
            self.q_a = weights.matrix(Linear([f"{name}.q_a_proj"], hidden, [rank], bias=bias))
            self.q_norm = RMSNorm(weights, ops, f"{name}.q_a_layernorm", rank, EPS)
            self.q = weights.matrix(Linear([f"{name}.q_b_proj"], rank, [size], orders=[q_order]))
        kv_a = f"{name}.kv_a_proj_with_mqa"
        self.kv_a = weights.matrix(Linear([kv_a], hidden, [latent + rope_dim], bias=bias, orders=[kv_order]))
        self.kv_norm = RMSNorm(weights, ops, f"{name}.kv_a_layernorm", latent, EPS).of_head
        self.keys, self.values = weights.by_head(f"{name}.kv_b_proj", latent, num, nope_dim, value)
        self.out = weights.matrix(Linear([f"{name}.o_proj"], num * value, [hidden], bias=bias))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, cache = self.ops, kv[self.layer_id]
        key = ops.norm_columns(ops.linear(x, self.kv_a), 0, 1, self.kv_norm)
        ops.rope_store(key, self.heads._replace(num_heads=0), rows, cache, HeadForm(self.rope_table))
        if self.q_a is not None and self.q_norm is not None:
            x = self.q_norm(ops.linear(x, self.q_a))
        query = ops.by_head(ops.linear(x, self.q), self.keys, self.rope_dim)
        query = ops.rope(query, self.heads.num_heads, self.heads.head_dim, rows, self.rope_table)
        if self.query_scale is not None:
            query = ops.multiply(query, ops.embedding(rows.positions, self.query_scale), "identity")
        mixed = ops.attention(query, self.heads, rows, cache, self.scoring)
        return ops.linear(ops.by_head(mixed, self.values), self.out)


class LatentLayer(PreNormLayer):
    """Latent attention, then an MLP or a mixture with shared experts. Defaults for configs without the keys:
    `num_dense` first layers without a mixture, `num_experts` of a mixture."""

    num_dense = 0
    num_experts = 256

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> LatentAttention:
        return LatentAttention(decoder, name, layer_id, paired=decoder.config.flag("rope_interleave", True))

    def is_dense(self, config: ModelConfig, layer_id: int) -> bool:
        return layer_id < config.integer("first_k_dense_replace", self.num_dense, low=0)

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        config, name = decoder.config, f"{name}.mlp"
        if self.is_dense(config, layer_id):
            return GatedMLP(decoder, name)
        num = config.integer("n_routed_experts", self.num_experts, high=MAX_EXPERTS)
        inner = config.integer("moe_intermediate_size")
        shared = GatedMLP(decoder, f"{name}.shared_experts", inner=config.integer("n_shared_experts") * inner)
        return SharedExperts(Experts(decoder, name, num, inner, self.routing(decoder, name, num)), shared)

    def routing(self, decoder: Decoder, name: str, num: int) -> Routing:
        raise NotImplementedError


class LatentDecoder(Decoder):
    def make_rope_table(self, rope: ModelConfig) -> RopeTable:
        """Make the table for the rope's part of a head, which comes last and turns as a whole."""
        rope_dim, longest = self.config.integer("qk_rope_head_dim"), self.config.integer("max_position_embeddings")
        rope = ModelConfig(rope.values | {"partial_rotary_factor": 1.0})
        table = make_rope_table(rope, rope_dim, longest, self.max_model_len, self.default_theta)
        cos, sin = (self.weights.constant(part) for part in (table.cos, table.sin))
        return RopeTable(cos, sin, self.config.integer("kv_lora_rank"))


def magnitude(rope: ModelConfig) -> float:
    """Return YaRN's factor of queries and keys in addition to the table's."""
    weight = rope.number("mscale_all_dim", 0.0)
    if not weight or rope.values["rope_type"] == "default":
        return 1.0
    return mscale(rope.number("factor", low=1e-6), weight)
