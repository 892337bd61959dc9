"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), always in the absorbed form.

The cache has one row for each position, [latent | rope]: the key of all heads, whose first numbers are their value. A
head's query goes through the transposed weights that would make its key of a latent, and what attention gives it goes
through those that would make its value. There is no second form for prefill: it would have bits of its own. Called by
the model files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.backends.base import Array, Cache, HeadForm, Heads, LayerShape, RopeTable, Routing, Rows, Scoring
from headrace.models.config import ModelConfig
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts, GatedMLP, PreNormLayer, RMSNorm, SharedExperts
from headrace.models.rope import make_rope_table, mscale, pair_order
from headrace.models.weights import Linear

EPS = 1e-6
"""Of the norms of latents, whatever that of the others is."""


class LatentAttention:
    """`paired`: numbers 2i and 2i + 1 of what turns are turned together in the checkpoint. `query_scale`: a table of
    factors by position."""

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
        num, latent, turned = decoder.num_heads, config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
        straight, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
        self.ops, self.layer_id, self.turned, self.query_scale = ops, layer_id, turned, query_scale
        self.heads = Heads(num, 1, latent + turned, latent)
        self.rope_table = decoder.rope_table
        self.scoring = Scoring((straight + turned) ** -0.5 * magnitude(decoder.global_rope(config)) ** 2)
        decoder.keep(layer_id, LayerShape(1, latent + turned, latent, shares_key=True), None)
        size, hidden, bias = num * (straight + turned), decoder.hidden_size, config.flag("attention_bias", False)
        q_order = pair_order(size, straight + turned, turned, straight) if paired else None
        kv_order = pair_order(latent + turned, latent + turned, turned, latent) if paired else None
        self.q_a = self.q_norm = None
        if config.values.get("q_lora_rank") is None:
            self.q = weights.matrix(Linear([f"{name}.q_proj"], hidden, [size], orders=[q_order]))
        else:
            rank = config.integer("q_lora_rank")
            self.q_a = weights.matrix(Linear([f"{name}.q_a_proj"], hidden, [rank], bias=bias))
            self.q_norm = RMSNorm(weights, ops, f"{name}.q_a_layernorm", rank, EPS)
            self.q = weights.matrix(Linear([f"{name}.q_b_proj"], rank, [size], orders=[q_order]))
        kv_a = f"{name}.kv_a_proj_with_mqa"
        self.kv_a = weights.matrix(Linear([kv_a], hidden, [latent + turned], bias=bias, orders=[kv_order]))
        self.kv_norm = RMSNorm(weights, ops, f"{name}.kv_a_layernorm", latent, EPS).of_head
        self.keys, self.values = weights.by_head(f"{name}.kv_b_proj", latent, num, straight, value)
        self.out = weights.matrix(Linear([f"{name}.o_proj"], num * value, [hidden], bias=bias))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, cache = self.ops, kv[self.layer_id]
        key = ops.norm_columns(ops.linear(x, self.kv_a), 0, 1, self.kv_norm)
        ops.rope_store(key, self.heads._replace(num_heads=0), rows, cache, HeadForm(self.rope_table))
        if self.q_a is not None and self.q_norm is not None:
            x = self.q_norm(ops.linear(x, self.q_a))
        query = ops.by_head(ops.linear(x, self.q), self.keys, self.turned)
        query = ops.rope(query, self.heads.num_heads, self.heads.head_dim, rows, self.rope_table)
        if self.query_scale is not None:
            query = ops.multiply(query, ops.embedding(rows.positions, self.query_scale), "identity")
        mixed = ops.attention(query, self.heads, rows, cache, self.scoring)
        return ops.linear(ops.by_head(mixed, self.values), self.out)


class LatentLayer(PreNormLayer):
    """Latent attention, then an MLP or a mixture beside shared experts. `num_dense`: layers without a mixture, and
    `num_experts` of one, of a config that does not say them."""

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
        """The last numbers of a head turn, all of them."""
        turned, longest = self.config.integer("qk_rope_head_dim"), self.config.integer("max_position_embeddings")
        rope = ModelConfig(rope.values | {"partial_rotary_factor": 1.0})
        table = make_rope_table(rope, turned, longest, self.max_model_len, self.default_theta)
        cos, sin = (self.weights.constant(part) for part in (table.cos, table.sin))
        return RopeTable(cos, sin, self.config.integer("kv_lora_rank"))


def magnitude(rope: ModelConfig) -> float:
    """What YaRN multiplies queries and keys with, beside what is in the table."""
    weight = rope.number("mscale_all_dim", 0.0)
    if not weight or rope.values["rope_type"] == "default":
        return 1.0
    return mscale(rope.number("factor", low=1e-6), weight)
