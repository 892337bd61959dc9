"""The sizes of some model types that headrace does not run, by formula: a plan says when its counts come from here.

Each formula makes the same `Counts` as `plan.counting.count`. A type that gets a model file needs no row any more, and
its row is no longer used. Called by `plan.planner`.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.models.config import MAX_LAYERS, ModelConfig
from headrace.models.weights import Linear
from headrace.plan.counting import CountingWeights, Counts, LayerKV
from headrace.plan.forms import Forms


class _Sizes:
    """Adds up the parts of a model."""

    def __init__(self, config: ModelConfig, forms: Forms) -> None:
        self.config, self.weights = config, CountingWeights(forms)
        self.dense, self.macs, self.widest = 0.0, 0, 0

    def linear(self, name: str, num_in: int, num_out: int, *, times: int = 1, bias: bool = False) -> None:
        for _ in range(times):
            matrix = self.weights.matrix(Linear([name], num_in, [num_out], bias))
            self.dense += matrix.num_bytes
            self.macs += num_in * num_out
            self.widest = max(self.widest, num_out)

    def vectors(self, num: int, *, times: int = 1) -> None:
        for _ in range(times):
            self.weights.tensor("vector", (num,))

    def counts(self, layer: LayerKV, num_layers: int, hidden: int, tied: bool) -> Counts:
        vocab = self.config.integer("vocab_size")
        _, head = self.weights.ends("embedding", "head", (vocab, hidden), tied=tied)
        return Counts(
            parameters=self.weights.parameters,
            active_parameters=self.weights.parameters,
            tables=self.weights.tables,
            dense=self.dense + self.weights.small,
            head=head.num_bytes,
            macs=self.macs,
            head_macs=vocab * hidden,
            layers=((layer, num_layers),),
            state_bytes=0.0,
            mixtures=(),
            forms=dict(self.weights.forms),
            widest=self.widest,
            vocab_size=vocab,
            source="a table of types that headrace does not run",
        )


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
    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    num_layers = integer("num_hidden_layers", high=MAX_LAYERS)
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
    "opt": _opt,
    "gpt_neox": _neox,
}
