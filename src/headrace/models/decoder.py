"""The parts that decoder-only transformers share: attention over the paged cache, gated MLP, the frame around layers.

A model file subclasses `Decoder` and overrides what differs: the order of norms, windows, scales, experts. Knows `Ops`
and `Weights` only. Called by the model files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.backends.base import (
    Array,
    Cache,
    ExpertLayer,
    HeadForm,
    HeadNorm,
    Heads,
    LayerShape,
    RopeTable,
    Routing,
    Rows,
    Scoring,
)
from headrace.models import Model
from headrace.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from headrace.models.rope import make_rope_table, pair_order
from headrace.models.unread import verify
from headrace.models.weights import Expert, Linear
from headrace.protocol.errors import CheckpointError
from headrace.protocol.kinds import CacheKind

if TYPE_CHECKING:
    from headrace.backends.base import Activation, Matrix, Ops
    from headrace.models.weights import Weights

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


STATE = MAX_SIZE + 1
"""In place of the window of a layer with a state: greater than any, because its kind is the last."""

MAX_EXPERTS = 4096
"""Experts of a layer."""


def stacked(weights: Weights, linear: Linear, fused: str) -> Matrix:
    """Return the layers as one matrix. A checkpoint may have them as one layer already, whose last name is `fused`."""
    whole, outs = f"{linear.names[0].rpartition('.')[0]}.{fused}", linear.num_outs
    if weights.has(f"{whole}.weight"):
        linear = linear._replace(names=[whole], num_outs=[sum(outs)], cut=linear.cut or outs)
    return weights.matrix(linear)


class LayerNorm:
    """(x - mean) / deviation * (offset + weight) + bias, over the model's rows."""

    def __init__(self, decoder: Decoder, name: str, eps: float, *, bias: bool = True, offset: float = 0.0) -> None:
        self.weight = decoder.weights.tensor(f"{name}.weight", (decoder.hidden_size,))
        self.bias = decoder.weights.tensor(f"{name}.bias", (decoder.hidden_size,)) if bias else None
        self.ops, self.eps, self.offset = decoder.ops, eps, offset

    def __call__(self, x: Array) -> Array:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, self.offset)


class RMSNorm:
    """x / rms(x) * (offset + weight)."""

    def __init__(self, weights: Weights, ops: Ops, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.ops, self.eps, self.offset = ops, eps, offset

    def __call__(self, x: Array) -> Array:
        return self.ops.rms_norm(x, self.weight, self.eps, self.offset)

    @property
    def of_head(self) -> HeadNorm:
        return HeadNorm(self.weight, self.eps, self.offset)


class AttentionOptions(NamedTuple):
    """The settings in which models' attention differs.

    qk_norm_offset: offset of the norms of q and k by head; None for no norms. window, chunked, softcap, scale: as in
    `Scoring`; scale None: 1 / sqrt(head size). rope_table: in place of the model's. rotates: False for no positions at
    all (NoPE). paired: numbers 2i and 2i + 1 of a head turn together in the checkpoint. sinks: each head has a learned
    score without a key. query_scale: a table of factors by position. out: the last name of the output projection.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_offset: float | None = None
    window: int | None = None
    chunked: bool = False
    softcap: float = 0.0
    scale: float | None = None
    rope_table: RopeTable | None = None
    rotates: bool = True
    paired: bool = False
    sinks: bool = False
    query_scale: Array | None = None
    out: str = "o_proj"


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions, over layer `layer_id` of the cache."""

    def __init__(
        self, decoder: Decoder, name: str, layer_id: int, options: AttentionOptions = AttentionOptions()
    ) -> None:
        weights, ops, size, window = decoder.weights, decoder.ops, decoder.head_dim, options.window
        self.ops, self.layer_id, self.query_scale = ops, layer_id, options.query_scale
        self.heads = Heads(decoder.num_heads, decoder.num_kv_heads, size)
        decoder.keep(layer_id, LayerShape(decoder.num_kv_heads, size), window)
        rope_table = options.rope_table or decoder.rope_table
        # Also in layers without a rope, so that q and k of all layers have one order.
        self.turned = 2 * rope_table.cos.shape[1] if options.paired else 0
        scale = size**-0.5 if options.scale is None else options.scale
        sinks = weights.tensor(f"{name}.sinks", (decoder.num_heads,)) if options.sinks else None
        self.scoring = Scoring(scale, window, options.chunked, options.softcap, sinks)
        width, hidden = decoder.num_heads * size, decoder.hidden_size
        outs = [width, decoder.num_kv_heads * size, decoder.num_kv_heads * size]
        names = [f"{name}.{part}_proj" for part in "qkv"]
        self.qkv = self.make_qkv(weights, Linear(names, hidden, outs, options.qkv_bias, cut=self.heads))
        self.out = weights.matrix(Linear([f"{name}.{options.out}"], width, [hidden], bias=options.out_bias))
        self.form = HeadForm(rope_table if options.rotates else None)
        if options.qk_norm_offset is not None:
            q_norm, k_norm = (
                RMSNorm(weights, ops, f"{name}.{part}_norm", size, decoder.eps, options.qk_norm_offset).of_head
                for part in "qk"
            )
            self.form = self.form._replace(q_norm=q_norm, k_norm=k_norm)

    def make_qkv(self, weights: Weights, linear: Linear) -> Matrix:
        """Return q, k and v as one matrix. Override it where the checkpoint has them under other names or orders."""
        if not self.turned:
            return stacked(weights, linear, "qkv_proj")
        q_order, k_order = (pair_order(num_rows, self.heads.head_dim, self.turned) for num_rows in linear.num_outs[:2])
        return weights.matrix(linear._replace(orders=[q_order, k_order, None]))

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        return self.mix(self.ops.linear(x, self.qkv), rows, kv)

    def mix(self, qkv: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        return self.ops.linear(self.attend(qkv, rows, kv), self.out)

    def attend(self, qkv: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        """qkv [R, heads] -> the sums of values that attention weights [R, num_heads * D]."""
        ops, cache = self.ops, kv[self.layer_id]
        query = ops.rope_store(qkv, self.heads, rows, cache, self.form)
        if self.query_scale is not None:
            query = ops.multiply(query, ops.embedding(rows.positions, self.query_scale), "identity")
        return ops.attention(query, self.heads, rows, cache, self.scoring)


class DecoderLayer(Protocol):
    """x [R, H] -> x [R, H]."""

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array: ...


class GatedMLP:
    """down(act(gate(x)) * up(x)). `inner`: the width between the layers, by default the model's. `parts` are the last
    names of gate, up and down."""

    def __init__(
        self,
        decoder: Decoder,
        name: str,
        bias: bool = False,
        inner: int = 0,
        parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        weights, hidden, inner = decoder.weights, decoder.hidden_size, inner or decoder.intermediate_size
        self.ops, self.kind = decoder.ops, decoder.activation
        names = [f"{name}.{parts[0]}", f"{name}.{parts[1]}"]
        self.gate_up = stacked(weights, Linear(names, hidden, [inner, inner], bias), "gate_up_proj")
        self.down = weights.matrix(Linear([f"{name}.{parts[2]}"], inner, [hidden], bias=bias))

    def __call__(self, x: Array) -> Array:
        return self.ops.linear(self.ops.gated(self.ops.linear(x, self.gate_up), self.kind), self.down)


class MLP:
    """down(act(up(x))). `parts` are the last names of both layers. `inner`: as in `GatedMLP`."""

    def __init__(
        self,
        decoder: Decoder,
        name: str,
        bias: bool = False,
        parts: tuple[str, str] = ("up_proj", "down_proj"),
        inner: int = 0,
    ) -> None:
        weights, hidden, inner = decoder.weights, decoder.hidden_size, inner or decoder.intermediate_size
        self.up = weights.matrix(Linear([f"{name}.{parts[0]}"], hidden, [inner], bias=bias))
        self.down = weights.matrix(Linear([f"{name}.{parts[1]}"], inner, [hidden], bias=bias))
        self.ops, self.kind = decoder.ops, decoder.activation

    def __call__(self, x: Array) -> Array:
        return self.ops.linear(self.activate(self.ops.linear(x, self.up)), self.down)

    def activate(self, x: Array) -> Array:
        return self.ops.activation(x, self.kind)


class Experts:
    """The mixture of a layer: of `num` experts of width `inner`, `routing` chooses by the router `router`. `parts` are
    the last names of an expert's gate, up and down, or of up and down where they have no gate. `outer`: the width of
    the experts' inputs and outputs, by default the width of the model's rows. by_shape: of tensors of all experts, as
    `Linear` has it."""

    def __init__(
        self,
        decoder: Decoder,
        name: str,
        num: int,
        inner: int,
        routing: Routing,
        *,
        router: str = "gate",
        parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        outer: int = 0,
        by_shape: bool = False,
    ) -> None:
        weights, outer = decoder.weights, outer or decoder.hidden_size
        self.ops = decoder.ops
        if routing.top_k > num:
            raise CheckpointError(f"config.json: num_experts_per_tok is {routing.top_k}, expected at most {num}")
        chooser = weights.matrix(Linear([f"{name}.{router}"], decoder.hidden_size, [num], plain=True))
        *first, down = parts
        names, outs = [f"{name}.experts.{e}" for e in range(num)], [inner] * len(first)
        gates = [
            Linear([f"{n}.{part}" for part in first], outer, outs, by_shape=by_shape, cut=Expert(e, num, outs))
            for e, n in enumerate(names)
        ]
        downs = [
            Linear([f"{n}.{down}"], inner, [outer], by_shape=by_shape, cut=Expert(e, num, [outer]))
            for e, n in enumerate(names)
        ]
        gate_up = [stacked(weights, linear, "gate_up_proj") for linear in gates]
        self.layer = ExpertLayer(chooser, routing, gate_up, [weights.matrix(d) for d in downs], decoder.activation)

    def __call__(self, x: Array, seen: Array | None = None) -> Array:
        """Return the mixture of x. `seen`: the router's input, where it is not x."""
        return self.ops.experts(x, self.layer, seen)


class SharedExperts:
    """experts(x) + shared(x)."""

    def __init__(self, experts: Callable[[Array], Array], shared: Callable[[Array], Array]) -> None:
        self.experts, self.shared = experts, shared

    def __call__(self, x: Array) -> Array:
        return self.shared(x) + self.experts(x)


class Decoder(Model):
    """Embedding, layers, final norm, head. A model file defines `Layer` and overrides class attributes as needed.

    Raises `CheckpointError` for a config that is not valid and for weights that do not fit it.
    """

    activation_key = "hidden_act"
    activations = ACTIVATIONS
    default_activation = "silu"
    norm_offset = 0.0
    default_tied = False
    default_theta = 10000.0
    default_rotary_factor = 1.0
    default_eps = 1e-6
    eps_key = "rms_norm_eps"
    table = "embed_tokens"
    """Name of the embedding table, behind the root."""
    final_norm = "norm"
    head_name = "lm_head"
    """Name of the output head, without a root."""
    roots: tuple[str, ...] = ("model.",)
    """Prefixes that the names of all tensors but the head's may have. The first that the checkpoint has is the root; a
    checkpoint without any has the root ""."""
    default_window: int | None = 4096
    default_head_dim: int | None = None
    first_layer = 0
    """The number of its first layer: that of a drafter may lie behind the layers of a model."""
    has_mlp = True
    """Whether any layer has one; else the config may lack its width."""
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
    Layer: Callable[[Decoder, str, int], DecoderLayer]

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        self.measure(config, weights, ops, max_model_len)
        root = next((root for root in self.roots if weights.has_prefix(root)), "")
        self.embedding, self.head = self.read_ends(root)
        self.layers = [self.Layer(self, f"{root}layers.{i}", i) for i in range(self.num_layers)]
        self.norm = self.make_final_norm(f"{root}{self.final_norm}")

    def read_ends(self, root: str) -> tuple[Array, Matrix]:
        """Return the embedding table and the output head."""
        tied, shape = self.config.flag("tie_word_embeddings", self.default_tied), (self.vocab_size, self.hidden_size)
        return self.weights.ends(f"{root}{self.table}", self.head_name, shape, tied=tied)

    def measure(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        """Set sizes and the rope table, which the parts read in their constructors."""
        verify(config.values, self.unread)
        self.config, self.weights, self.ops, self.max_model_len = config, weights, ops, max_model_len
        self._windowed: dict[int, tuple[LayerShape, int]] = {}
        self.hidden_size = config.integer("hidden_size")
        self.intermediate_size = config.integer("intermediate_size") if self.has_mlp else 0
        self.num_heads = config.integer("num_attention_heads")
        self.num_kv_heads = config.integer("num_key_value_heads", self.num_heads)
        self.head_dim = config.integer("head_dim", self.default_head_dim or self.hidden_size // self.num_heads)
        self.num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        self.vocab_size = config.integer("vocab_size")
        self.eps = config.number(self.eps_key, self.default_eps)
        self.activation = config.choice(self.activation_key, self.activations, self.default_activation)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        self.rope_table = self.make_rope_table(self.global_rope(config))

    def keep(self, layer_id: int, shape: LayerShape, window: int | None) -> None:
        """Register `shape` as the cache of a layer that sees `window` positions, None for all."""
        if shape.source is not None:
            window = self._windowed[shape.source][1]
        is_short = window is not None and window < self.max_model_len
        self._windowed[layer_id] = shape, window if is_short and window is not None else 0
        self._number_kinds()

    def keep_states(self, layer_id: int, *states: tuple[int, ...]) -> None:
        """Register arrays of these shapes as the cache of a layer with a state."""
        self._windowed[layer_id] = LayerShape(0, 0, states=states), STATE
        self._number_kinds()

    def _number_kinds(self) -> None:
        windows = sorted({window for _, window in self._windowed.values()})
        if windows == [STATE]:  # blocks, which no layer has, still count the positions of sequences
            windows = [0, STATE]
        self.kinds = tuple(CacheKind(is_state=True) if w == STATE else CacheKind(w) for w in windows)
        layers = [self._windowed[i] for i in sorted(self._windowed)]
        self.cache_shapes = [shape._replace(kind=windows.index(window)) for shape, window in layers]

    def make_rope_table(self, rope: ModelConfig) -> RopeTable:
        longest = self.config.integer("max_position_embeddings")
        rope = ModelConfig({"partial_rotary_factor": self.default_rotary_factor} | rope.values)
        table = self.placed(make_rope_table(rope, self.head_dim, longest, self.max_model_len, self.default_theta), rope)
        return table._replace(cos=self.weights.constant(table.cos), sin=self.weights.constant(table.sin))

    def placed(self, table: RopeTable, rope: ModelConfig) -> RopeTable:
        """Return the rope table of a model whose rows have positions on several axes; here they have one."""
        return table

    def layer_type(self, layer_id: int) -> str:
        """Return one of the class's `layer_types`: from the config.json's layer_types, else the model's default."""
        kinds = self.config.words("layer_types", self.num_layers)
        kind = self.default_layer_type(layer_id) if kinds is None else kinds[layer_id]
        if kind not in self.layer_types:
            raise CheckpointError(
                f"config.json: layer_types has {kind!r:.80}, expected {' or '.join(self.layer_types)}"
            )
        return kind

    def default_layer_type(self, layer_id: int) -> str:
        return "full_attention"

    def window(self, layer_id: int) -> int | None:
        """Return the number of positions that layer `layer_id` sees, None for all."""
        if self.layer_type(layer_id) == "full_attention":
            return None
        return self.config.integer("sliding_window", self.default_window)

    def global_rope(self, config: ModelConfig) -> ModelConfig:
        """Return the rope settings of all layers, or of the layers with full attention."""
        return config.rope

    def make_norm(self, name: str) -> Callable[[Array], Array]:
        return RMSNorm(self.weights, self.ops, name, self.hidden_size, self.eps, self.norm_offset)

    def make_post_norm(self, name: str) -> Callable[[Array], Array]:
        """Make the norm of a part's output, before it is added to the rows."""
        return self.make_norm(name)

    def make_final_norm(self, name: str) -> Callable[[Array], Array]:
        return self.make_norm(name)

    def embed(self, token_ids: Array) -> Array:
        return self.ops.embedding(token_ids, self.embedding)

    def enter(self, rows: Rows) -> Array:
        return self.embed(rows.token_ids)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.norm(self.ops.select(hidden, rows))


class PreNormLayer:
    """x += attention(norm(x)); x += mlp(norm(x)). Subclasses define attention and mlp."""

    def __init__(self, decoder: Decoder, name: str, layer_id: int) -> None:
        self.attention_norm = decoder.make_norm(f"{name}.input_layernorm")
        self.attention = self.make_attention(decoder, f"{name}.self_attn", layer_id)
        self.mlp_norm = decoder.make_norm(f"{name}.post_attention_layernorm")
        self.mlp = self.make_mlp(decoder, name, decoder.first_layer + layer_id)

    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> DecoderLayer:
        return Attention(decoder, name, layer_id)

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        return GatedMLP(decoder, f"{name}.mlp")

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.attention(self.attention_norm(x), rows, kv)
        return x + self.mlp(self.mlp_norm(x))
