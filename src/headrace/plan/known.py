"""The sizes of some model types that headrace does not run, by formula: a plan says when its counts come from here.

Each formula makes the same `Counts` as `plan.counting.count`. A type that gets a model file needs no row any more, and
its row is no longer used. Called by `plan.planner`.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.models.config import ModelConfig
from headrace.plan.counting import CountingWeights, Counts, LayerKV, Mixture
from headrace.plan.forms import Forms


class _Sizes:
    """Adds up the parts of a model. `expert` is a part of one expert of a layer, which is not in the sums."""

    def __init__(self, config: ModelConfig, forms: Forms) -> None:
        self.config, self.weights = config, CountingWeights(forms)
        self.dense, self.macs, self.widest = 0.0, 0, 0

    def linear(self, name: str, num_in: int, num_out: int, *, times: int = 1, bias: bool = False) -> None:
        for _ in range(times):
            matrix = self.weights.linear([name], num_in, [num_out], bias=bias, plain=name == "router")
            self.dense += matrix.num_bytes
            self.macs += num_in * num_out
            self.widest = max(self.widest, num_out)

    def vectors(self, num: int, *, times: int = 1) -> None:
        for _ in range(times):
            self.weights.tensor("vector", (num,))

    def mixture(self, num: int, top_k: int, shapes: tuple[tuple[int, int], ...]) -> Mixture:
        matrices = [self.weights.linear(["mlp.experts"], num_in, [num_out]) for num_in, num_out in shapes * num]
        macs = sum(num_in * num_out for num_in, num_out in shapes)
        self.macs += top_k * macs
        parameters = sum(matrix.parameters for matrix in matrices)
        return Mixture(num, top_k, parameters, sum(matrix.num_bytes for matrix in matrices), macs)

    def counts(
        self, layer: LayerKV, num_layers: int, hidden: int, tied: bool, mixtures: tuple[tuple[Mixture, int], ...] = ()
    ) -> Counts:
        vocab = self.config.integer("vocab_size")
        _, head = self.weights.ends("embedding", "head", (vocab, hidden), tied=tied)
        inactive = sum((each.num - each.top_k) * each.parameters // each.num * num for each, num in mixtures)
        return Counts(
            parameters=self.weights.parameters,
            active_parameters=self.weights.parameters - inactive,
            tables=self.weights.tables,
            dense=self.dense + self.weights.small,
            head=head.num_bytes,
            macs=self.macs,
            head_macs=vocab * hidden,
            layers=((layer, num_layers),),
            state_bytes=0.0,
            mixtures=mixtures,
            forms=dict(self.weights.forms),
            widest=self.widest,
            vocab_size=vocab,
            source="a table of types that headrace does not run",
        )


def _latent(config: ModelConfig, forms: Forms) -> Counts:
    """DeepSeek-V2 and V3 (arXiv:2412.19437, section 2.1): latent attention, whose cache has one vector for all heads,
    and experts of which some see all rows. Without the layer for multi-token prediction."""
    sizes, integer = _Sizes(config, forms), config.integer
    hidden, heads, num_layers = integer("hidden_size"), integer("num_attention_heads"), integer("num_hidden_layers")
    nope, rope, value = integer("qk_nope_head_dim"), integer("qk_rope_head_dim"), integer("v_head_dim")
    rank, query_rank = integer("kv_lora_rank"), integer("q_lora_rank", 0, low=0)
    inner, expert = integer("intermediate_size"), integer("moe_intermediate_size")
    num_dense = min(num_layers, integer("first_k_dense_replace", 0, low=0))
    num_experts, num_sparse = integer("n_routed_experts"), num_layers - num_dense
    for _ in range(num_layers):
        if query_rank:
            sizes.linear("q_a_proj", hidden, query_rank)
            sizes.vectors(query_rank)
        sizes.linear("q_proj", query_rank or hidden, heads * (nope + rope))
        sizes.linear("kv_a_proj", hidden, rank + rope)
        sizes.linear("kv_b_proj", rank, heads * (nope + value))
        sizes.linear("o_proj", heads * value, hidden)
        sizes.vectors(rank)
        sizes.vectors(hidden, times=2)
    sizes.linear("mlp", hidden, inner, times=3 * num_dense)
    sizes.vectors(hidden)
    sizes.linear("shared_experts", hidden, expert, times=3 * integer("n_shared_experts", 0, low=0) * num_sparse)
    sizes.linear("router", hidden, num_experts, times=num_sparse)
    if config.values.get("topk_method") == "noaux_tc":
        sizes.vectors(num_experts, times=num_sparse)
    shapes = ((hidden, expert), (hidden, expert), (expert, hidden))
    mixtures = [sizes.mixture(num_experts, integer("num_experts_per_tok"), shapes) for _ in range(num_sparse)]
    layer = LayerKV(None, 1, rank + rope, 0, heads * (2 * rank + rope))
    tied = config.flag("tie_word_embeddings", False)
    return sizes.counts(layer, num_layers, hidden, tied, tuple((mixture, 1) for mixture in mixtures))


def _opt(config: ModelConfig, forms: Forms) -> Counts:
    """OPT (arXiv:2205.01068) whose embeddings are as wide as its rows."""
    return _with_biases(config, forms, config.integer("ffn_dim"), num_extra_positions=2, tied=True)


def _neox(config: ModelConfig, forms: Forms) -> Counts:
    """GPT-NeoX (arXiv:2204.06745) and Pythia."""
    return _with_biases(config, forms, config.integer("intermediate_size"), num_extra_positions=None, tied=False)


def _with_biases(
    config: ModelConfig, forms: Forms, inner: int, *, num_extra_positions: int | None, tied: bool
) -> Counts:
    """Layers like GPT-2's, where everything has a bias. num_extra_positions: of a table of positions, None for none."""
    sizes, integer = _Sizes(config, forms), config.integer
    hidden, heads, num_layers = integer("hidden_size"), integer("num_attention_heads"), integer("num_hidden_layers")
    if num_extra_positions is not None:
        sizes.weights.table("positions", (integer("max_position_embeddings") + num_extra_positions, hidden))
    for _ in range(num_layers):
        sizes.linear("qkv_proj", hidden, 3 * hidden, bias=True)
        sizes.linear("o_proj", hidden, hidden, bias=True)
        sizes.linear("up", hidden, inner, bias=True)
        sizes.linear("down", inner, hidden, bias=True)
        sizes.vectors(2 * hidden, times=2)
    sizes.vectors(2 * hidden)
    dim = hidden // heads
    layer = LayerKV(None, heads, dim, dim, 2 * hidden)
    return sizes.counts(layer, num_layers, hidden, config.flag("tie_word_embeddings", tied))


TABLE: dict[str, Callable[[ModelConfig, Forms], Counts]] = {
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "kimi_k2": _latent,
    "opt": _opt,
    "gpt_neox": _neox,
}
