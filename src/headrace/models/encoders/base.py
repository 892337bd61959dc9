"""The parts that encoders share: attention in which a row sees its whole text, layers, the frame around them.

A model file reads its sizes, and builds layers out of `Attention` and `decoder`'s parts. The keys and values of a text
lie in the cache only while the step runs. Knows `Ops` and `Weights` only. Called by the model files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, Cache, HeadForm, Heads, LayerShape, RopeTable, Rows, Scoring
from headrace.models import Model
from headrace.models.config import MAX_LAYERS, ModelConfig
from headrace.models.decoder import ACTIVATIONS
from headrace.models.encoders.head import Head, WordWeights, dense, labels
from headrace.models.rope import make_rope_table, pair_order
from headrace.models.unread import verify
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Activation, Matrix, Ops
    from headrace.models.weights import Weights


def num_classes(config: ModelConfig) -> int:
    """Return the number of classes of a classifier or reranker, 0 for a model of vectors. Raises `CheckpointError` for
    other tasks: their rows are meant for neither."""
    stated = config.values.get("architectures")
    for name in stated if isinstance(stated, list) else ():
        task = str(name).partition("For")[2]
        if task == "SequenceClassification":
            return len(labels(config))
        if task and task not in ("MaskedLM", "PreTraining"):
            raise CheckpointError(
                f"config.json: architectures has {name!r:.80}, expected a model of vectors or of classes "
                "(ForSequenceClassification)"
            )
    return 0


class Keys(NamedTuple):
    """The keys of config.json for an encoder's sizes, with defaults for those that may be absent."""

    hidden_size: str = "hidden_size"
    intermediate_size: str = "intermediate_size"
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    activation: str = "hidden_act"
    eps: str = "layer_norm_eps"
    default_eps: float = 1e-12
    default_activation: str = "gelu"


class Sizes(Protocol):
    """What a part reads of the model that it belongs to: an `Encoder`, or a tower for pictures."""

    weights: Weights
    ops: Ops
    hidden_size: int
    intermediate_size: int
    num_heads: int
    max_model_len: int
    eps: float
    activation: Any


class LayerNorm:
    """(x - mean) / deviation * weight + bias. Old files name the parts gamma and beta."""

    def __init__(self, model: Sizes, name: str, *, bias: bool = True) -> None:
        weight = "gamma" if model.weights.has(f"{name}.gamma") else "weight"
        self.weight = model.weights.tensor(f"{name}.{weight}", (model.hidden_size,))
        second = "beta" if weight == "gamma" else "bias"
        self.bias = model.weights.tensor(f"{name}.{second}", (model.hidden_size,)) if bias else None
        self.ops, self.eps = model.ops, model.eps

    def __call__(self, x: Array) -> Array:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class Attention:
    """Attention over the whole text, or `window` positions to each side (Beltagy et al. 2020). `names`: of the layers
    q, k and v, or of one layer that has all three. out_bias: of the last layer, where it is not as the others.
    paired: numbers 2i and 2i + 1 of a head turn together in the checkpoint. by_distance: biases of the scores
    (`Scoring.bias`)."""

    def __init__(
        self,
        model: Sizes,
        layer_id: int,
        names: Sequence[str],
        out: str,
        *,
        bias: bool = True,
        out_bias: bool | None = None,
        paired: bool = False,
        window: int | None = None,
        rope_table: RopeTable | None = None,
        by_distance: Array | None = None,
    ) -> None:
        width = model.hidden_size
        self.ops, self.layer_id, self.form = model.ops, layer_id, HeadForm(rope_table)
        self.heads = Heads(model.num_heads, model.num_heads, width // model.num_heads)
        ahead = model.max_model_len if window is None else window
        scale, window = self.heads.head_dim**-0.5, None if window is None else window + 1
        self.scoring = Scoring(scale, window, ahead=ahead, bias=by_distance)
        outs = [width] * 3 if len(names) == 3 else [3 * width]
        pairs = pair_order(width, self.heads.head_dim, self.heads.head_dim) if paired else None
        orders = [pairs, pairs, None] if paired else ()
        self.qkv = model.weights.matrix(Linear(list(names), width, outs, bias=bias, orders=orders, cut=self.heads))
        self.out = model.weights.matrix(Linear([out], width, [width], bias=bias if out_bias is None else out_bias))

    def inputs(self, x: Array) -> Array:
        """x [R, H] -> queries, keys and values [R, 3 * H]."""
        return self.ops.linear(x, self.qkv)

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        ops, cache = self.ops, kv[self.layer_id]
        query = ops.rope_store(self.inputs(x), self.heads, rows, cache, self.form)
        return ops.linear(ops.attention(query, self.heads, rows, cache, self.scoring), self.out)


class MLP:
    """down(act(up(x)))."""

    def __init__(self, model: Sizes, up: str, down: str) -> None:
        hidden, inner = model.hidden_size, model.intermediate_size
        self.up = model.weights.matrix(Linear([up], hidden, [inner], bias=True))
        self.down = model.weights.matrix(Linear([down], inner, [hidden], bias=True))
        self.ops, self.kind = model.ops, model.activation

    def __call__(self, x: Array) -> Array:
        return self.ops.linear(self.ops.activation(self.ops.linear(x, self.up), self.kind), self.down)


class GatedMLP:
    """down(act(gate(x)) * up(x)). `names`: of gate and up, or of one layer that has both, gate first unless `up_first`.
    bias: of both layers; down_bias: of the second alone."""

    def __init__(
        self,
        model: Sizes,
        names: Sequence[str],
        down: str,
        *,
        bias: bool = False,
        down_bias: bool = False,
        up_first: bool = False,
    ) -> None:
        hidden, inner = model.hidden_size, model.intermediate_size
        outs = [inner] * 2 if len(names) == 2 else [2 * inner]
        orders = [np.roll(np.arange(2 * inner), inner)] if up_first else ()
        self.gate_up = model.weights.matrix(
            Linear(list(names), hidden, outs, bias=bias, orders=orders, cut=[inner, inner])
        )
        self.down = model.weights.matrix(Linear([down], inner, [hidden], bias=bias or down_bias))
        self.ops, self.kind = model.ops, model.activation

    def __call__(self, x: Array) -> Array:
        return self.ops.linear(self.ops.gated(self.ops.linear(x, self.gate_up), self.kind), self.down)


class PostNormLayer:
    """x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    def __init__(
        self,
        attention: Attention,
        attention_norm: Callable[[Array], Array],
        mlp: Callable[[Array], Array],
        mlp_norm: Callable[[Array], Array],
    ) -> None:
        self.attention, self.attention_norm, self.mlp, self.mlp_norm = attention, attention_norm, mlp, mlp_norm

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = self.attention_norm(x + self.attention(x, rows, kv))
        return self.mlp_norm(x + self.mlp(x))


class WordLayers(NamedTuple):
    """The names of the parts of a head for masked words (`ForMaskedLM`). activation: None for the model's own. biased,
    norm_biased: whether the first layer and the norm have biases."""

    dense: str
    norm: str
    decoder: str
    bias: str
    activation: Activation | None = "gelu"
    biased: bool = True
    norm_biased: bool = True


class WordHead:
    """x -> its logits for the tokens of the vocabulary [S, V], without their bias: words @ norm(act(dense(x)))."""

    def __init__(self, model: Encoder, parts: WordLayers, words: Matrix) -> None:
        width = model.hidden_size
        self.dense = model.weights.matrix(Linear([parts.dense], width, [width], bias=parts.biased))
        self.norm = LayerNorm(model, parts.norm, bias=parts.norm_biased)
        self.ops, self.kind, self.words = model.ops, parts.activation or model.activation, words

    def __call__(self, x: Array) -> Array:
        x = self.ops.activation(self.ops.linear(x, self.dense), self.kind)
        return self.ops.linear(self.norm(x), self.words)


class Encoder(Model):
    """Embeddings and layers; no head. A model file sets `keys`, and makes the parts in its constructor.

    Raises `CheckpointError` for a config that is not valid and for weights that do not fit it.
    """

    both_ways = True
    second_type = 0
    """What the ids of a pair's second text are raised by, where the model has types of tokens."""
    word_layers: WordLayers | None = None
    word_head: WordHead | None = None
    """Of a model whose vectors are weights of words (SPLADE)."""
    positions: Array | None = None
    """A table that is added to the tokens' embeddings, by position."""
    spare = r"(\w+\.)?(pooler|classifier|cls|lm_head|head|decoder|vocab_\w+|pre_classifier|qa_outputs)(\..*|$)"
    keys = Keys()
    norm: Callable[[Array], Array]
    """Of the embeddings."""
    default_theta = 10000.0

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        verify(config.values, self.unread)
        keys = self.keys
        self.config, self.weights, self.ops, self.max_model_len = config, weights, ops, max_model_len
        self.hidden_size = config.integer(keys.hidden_size)
        self.intermediate_size = config.integer(keys.intermediate_size)
        self.num_heads = config.integer(keys.num_heads)
        self.num_layers = config.integer(keys.num_layers, high=MAX_LAYERS)
        self.vocab_size = config.integer("vocab_size")
        self.eps = config.number(keys.eps, keys.default_eps)
        self.activation = config.choice(keys.activation, ACTIVATIONS, keys.default_activation)
        if self.hidden_size % self.num_heads:
            raise CheckpointError(
                f"config.json: {keys.hidden_size} {self.hidden_size} is no multiple of {keys.num_heads} "
                f"{self.num_heads}"
            )
        self.num_classes = num_classes(config)
        if width := config.integer("token_width", 0, low=0):
            # ColBERT's layer, which `engine.library` reads: it has no place among this model's own.
            weights.numbers("linear.weight", (width, self.hidden_size))
        self.cache_shapes = [LayerShape(self.num_heads, self.hidden_size // self.num_heads)] * self.num_layers

    def root_of(self, *roots: str) -> str:
        """Return the first of `roots` with which names of tensors begin, or ""."""
        return next((root for root in roots if self.weights.has_prefix(root)), "")

    def words(self, name: str) -> Array:
        """Return the table of the tokens' embeddings, and make the head for masked words where the model's vectors
        are made by it."""
        shape = (self.vocab_size, self.hidden_size)
        if not self.config.flag("gives_word_weights", False):
            return self.weights.table(name, shape)
        parts = self.word_layers
        if parts is None or self.num_classes:
            raise CheckpointError(
                "modules.json: SpladePooling, expected a model of another type: of this one no head for masked words "
                "is read"
            )
        tied = self.config.flag("tie_word_embeddings", True)
        table, words = self.weights.ends(name.removesuffix(".weight"), parts.decoder, shape, tied=tied)
        self.word_head = WordHead(self, parts, words)
        # A bias is stored under either name, or both, and they are tied as the matrix is.
        biases = (parts.bias, f"{parts.decoder}.bias")
        bias = next((each for each in (biases if tied else biases[::-1]) if self.weights.has(each)), None)
        numbers = np.zeros(self.vocab_size) if bias is None else self.weights.numbers(bias, shape[:1])
        self.classifier = WordWeights(numbers.astype(np.float64))
        return table

    def type_rows(self, name: str) -> NDArray[np.float32]:
        """Return the embeddings of the types of tokens [types, H]. All tokens of a single text have the first."""
        num = self.config.integer("type_vocab_size", 2)
        return self.weights.numbers(name, (num, self.hidden_size))

    def typed_words(self, name: str, types: NDArray[np.float32]) -> Array:
        """Return the table of the tokens' embeddings. A classifier with two types has them twice, with the step to the
        second type added: ids from `second_type` on are tokens of that type."""
        if not self.num_classes or len(types) < 2:
            return self.words(name)
        words = self.weights.numbers(name, (self.vocab_size, self.hidden_size))
        self.second_type, self.vocab_size = self.vocab_size, 2 * self.vocab_size
        return self.weights.constant_table(np.concatenate([words, words + (types[1] - types[0])]))

    def make_head(self, *layers: tuple[str, str]) -> None:
        """Make the head of a classifier out of `layers`, each a name and an activation; the last one has the
        classes."""
        if not self.num_classes:
            return
        width, (last, _) = self.hidden_size, layers[-1]
        inner = [dense(self.weights, name, (width, width), activation) for name, activation in layers[:-1]]
        self.classifier = Head((*inner, dense(self.weights, last, (self.num_classes, width))))

    def rotary(self, rope: ModelConfig) -> RopeTable:
        longest = self.max_positions(self.config)
        head_dim = self.hidden_size // self.num_heads
        table = make_rope_table(rope, head_dim, longest, self.max_model_len, self.default_theta)
        return RopeTable(self.weights.constant(table.cos), self.weights.constant(table.sin))

    def enter(self, rows: Rows) -> Array:
        x = self.ops.embedding(rows.token_ids, self.embedding)
        return self.norm(x if self.positions is None else x + self.ops.embedding(rows.positions, self.positions))

    def final(self, hidden: Array, rows: Array) -> Array:
        """The vectors, or with a head for masked words the logits."""
        x = self.last(hidden, rows)
        return x if self.word_head is None else self.word_head(x)

    def last(self, hidden: Array, rows: Array) -> Array:
        """The rows behind the last layer."""
        return self.ops.select(hidden, rows)

    def logits(self, hidden: Array, rows: Array) -> Array:
        """The vectors themselves: nothing is drawn from an encoder."""
        return self.last(hidden, rows)
