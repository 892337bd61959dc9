"""The parts that towers share: patches of pixels as rows, layers over all of them, and the connector to the text.

A tower is an encoder whose rows are patches of one picture. Its rows are merged on the host (`Tower.merged`), and the
`Connector`, a program of its own, turns each merged row into one of the text's width. A model file reads its sizes, and
names its tensors without the part before the tower. Knows `Ops` and `Weights` only. Called by the model files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Array, Cache, LayerShape, RopeTable, Rows
from headrace.models import Model
from headrace.models.config import MAX_LAYERS, ModelConfig
from headrace.models.decoder import ACTIVATIONS
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

F32 = NDArray[np.float32]
MAX_PATCHES = 16384
"""Patches of one picture or tile."""


class PreNormLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self,
        attention_norm: Callable[[Array], Array],
        attention: Callable[[Array, Rows, Sequence[Cache]], Array],
        mlp_norm: Callable[[Array], Array],
        mlp: Callable[[Array], Array],
    ) -> None:
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def __call__(self, x: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        x = x + self.attention(self.attention_norm(x), rows, kv)
        return x + self.mlp(self.mlp_norm(x))


class Connector(Model):
    """The frame of the program that turns merged rows [N, K] into rows of the text [N, H]."""

    cache_shapes = ()
    layers = ()
    embedding = None
    head: Any = None
    vocab_size = 1

    def __init__(self, ops: Ops, feature_size: int, hidden_size: int, through: Callable[[Array], Array]) -> None:
        self.ops, self.feature_size, self.hidden_size, self._through = ops, feature_size, hidden_size, through

    def enter(self, rows: Rows) -> Array:
        return self._through(rows.features)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.ops.select(hidden, rows)

    def logits(self, hidden: Array, rows: Array) -> Array:
        """The rows themselves: nothing is drawn from them."""
        return self.final(hidden, rows)


class Part(Model):
    """Layers of a tower that are a program of their own, rows [R, H] -> rows [R, H]: in a program all layers see the
    same rows. is_windowed: each row sees its window alone (`Tower.windows`). Layer i has the layer_id i."""

    both_ways = True
    embedding = None
    head: Any = None
    vocab_size = 1

    def __init__(self, tower: Tower, layers: Sequence[PreNormLayer], *, is_windowed: bool) -> None:
        self.ops, self.layers, self.is_windowed = tower.ops, layers, is_windowed
        self.feature_size = self.hidden_size = tower.hidden_size
        self.rope_table = tower.rope_table
        self.cache_shapes = list(tower.cache_shapes)[: len(layers)]

    def enter(self, rows: Rows) -> Array:
        return rows.features

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.ops.select(hidden, rows)

    def logits(self, hidden: Array, rows: Array) -> Array:
        """The rows themselves."""
        return self.final(hidden, rows)


def two_layers(
    tower: Tower, names: tuple[str, str], sizes: tuple[int, int, int], kind: Any, *, bias: bool = True
) -> Callable[[Array], Array]:
    """Return second(act(first(x))); sizes: the widths before, between and after the layers."""
    ops, (num_in, inner, num_out) = tower.ops, sizes
    first = tower.weights.matrix(Linear([names[0]], num_in, [inner], bias=bias))
    second = tower.weights.matrix(Linear([names[1]], inner, [num_out], bias=bias))
    return lambda x: ops.linear(ops.activation(ops.linear(x, first), kind), second)


class Tower(Model):
    """Patches, layers, and the merging of their rows. A model file makes the parts in its constructor, `connector`
    among them. `config` is the vision_config, `outer` the config.json.

    Raises `CheckpointError` for a config that is not valid and for weights that do not fit it.
    """

    both_ways = True
    vocab_size: int
    """The places that a patch can have: the id of a row is the place of its patch (`places`)."""
    head: Any = None
    defaults: ClassVar[dict[str, Any]] = {}
    """The vision_config's values where config.json leaves them out."""
    scaled: ClassVar[dict[str, str]] = {}
    """Tensors that are multiplied, row by row, by another one: regular expressions, and the other one's name."""
    connector: Connector
    text_size: int
    """Width of the text's rows."""
    eps_key, default_eps = "layer_norm_eps", 1e-6
    activations: ClassVar[dict[str, Any]] = dict(ACTIVATIONS)
    default_activation = "gelu_pytorch_tanh"
    sees_whole: ClassVar[bool] = False
    """Whether rows of the text see the whole picture that they stand in (`Model.sees_wholes`)."""
    num_extra = 0
    """Rows before those of the patches, such as the class token's; they are dropped before merging."""
    further: Sequence[tuple[int, Connector]] = ()
    """Layers, and the connectors that make further rows of the rows before them, to be added behind the text's first
    layers (DeepStack, Meng et al. 2024)."""
    parts: Sequence[Part] = ()
    """Layers behind the tower's own, which then `is_windowed`."""
    is_windowed = False
    rope_table: RopeTable | None = None
    side_of_row = 0
    """Pixels of a side of a row's square, where rows of the text turn by their line and column (`models.axes`)."""

    def __init__(self, config: ModelConfig, outer: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.config, self.outer, self.weights, self.ops = config, outer, weights, ops
        self.hidden_size = config.integer("hidden_size")
        self.intermediate_size = config.integer("intermediate_size")
        self.num_heads = config.integer("num_attention_heads")
        self.num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        self.patch_size = self.side(config, "patch_size")
        self.text_size = outer.mapping("text_config").integer("hidden_size")
        self.eps = config.number(self.eps_key, self.default_eps)
        self.activation = config.choice("hidden_act", self.activations, self.default_activation)
        if config.integer("num_channels", 3) != 3:
            raise CheckpointError(f"config.json: vision_config.num_channels is {config.values['num_channels']}, not 3")
        if self.hidden_size % self.num_heads:
            raise CheckpointError(
                f"config.json: vision_config.hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_heads}"
            )
        self.max_model_len = MAX_PATCHES
        self.feature_size = 3 * self.patch_size**2
        self.cache_shapes = [LayerShape(self.num_heads, self.hidden_size // self.num_heads)] * self.num_layers

    @staticmethod
    def side(config: ModelConfig, name: str, default: Any = ...) -> int:
        """Return a number of config.json that may be written as a pair of equal ones."""
        value = config.values.get(name)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            config = ModelConfig({name: value[0]})
        return config.integer(name) if default is ... else config.integer(name, default)

    def patch_linear(self, name: str, *, bias: bool = True) -> Any:
        """Return the convolution `name` over patches as a linear layer of their numbers."""
        return self.weights.matrix(Linear([name], self.feature_size, [self.hidden_size], bias=bias, plain=True))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the lines of patches of a picture, and the patches in a line."""
        return height // self.patch_size, width // self.patch_size

    def patches(self, pixels: F32) -> F32:
        """pixels [height, width, 3] -> the numbers of each patch [R, F], line by line; those of a patch are ordered as
        a convolution's weights are: channel, line, column."""
        size, (lines, columns) = self.patch_size, self.grid(*pixels.shape[:2])
        parts = pixels[: lines * size, : columns * size].reshape(lines, size, columns, size, 3)
        rows = np.ascontiguousarray(parts.transpose(0, 2, 4, 1, 3)).reshape(lines * columns, self.feature_size)
        return np.concatenate([np.zeros((self.num_extra, self.feature_size), np.float32), rows])

    def places(self, height: int, width: int) -> list[int]:
        """Return the place of each row of a picture, which chooses its embedding."""
        lines, columns = self.grid(height, width)
        return list(range(self.num_extra + lines * columns))

    def turns(self, height: int, width: int) -> NDArray[np.int64] | None:
        """Return the lines and columns [R, 2] by which patches turn; None for a tower without a rope."""
        return None

    def windows(self, height: int, width: int) -> list[int]:
        """Return the numbers of rows of the windows of a picture, whose rows follow each other window by window."""
        raise NotImplementedError

    def merged(self, hidden: F32, height: int, width: int) -> F32:
        """The last layer's rows [R, H] -> the connector's [N, K]."""
        raise NotImplementedError

    def num_rows(self, height: int, width: int) -> int:
        """Return the rows N of the text for a picture; 0 for a size that the tower does not take."""
        raise NotImplementedError

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.ops.select(hidden, rows)

    def logits(self, hidden: Array, rows: Array) -> Array:
        """The rows themselves: nothing is drawn from a tower."""
        return self.final(hidden, rows)


def shuffled(rows: F32, lines: int, columns: int, factor: int, *, by_columns: bool = False) -> F32:
    """Join each square of `factor` x `factor` neighbours [lines * columns, H] -> [.., factor^2 * H], line by line
    (Shi et al. 2016, reversed). In a joined row the neighbours of one line follow each other; by_columns: those of one
    column do."""
    width = rows.shape[1]
    parts = rows.reshape(lines // factor, factor, columns // factor, factor, width)
    order = (0, 2, 3, 1, 4) if by_columns else (0, 2, 1, 3, 4)
    return np.ascontiguousarray(parts.transpose(order)).reshape(-1, factor**2 * width)


def take_pictures(model: Any, num_further: int = 0, *, sees_wholes: bool = False) -> None:
    """Have rows of pictures take the places of the tokens that a decoder embeds. Columns [0, H) of `Rows.features` are
    such a row, zeros for a token; the last one is 0 for a row of a picture and 1 for a token. Between them are
    `num_further` more rows, each to be added behind one of the first layers."""
    ops, width, embed = model.ops, model.hidden_size, model.enter
    last = (1 + num_further) * width

    def enter(rows: Rows) -> Array:
        tokens = ops.multiply(embed(rows), ops.columns(rows.features, last, 1), "identity")
        return tokens + ops.columns(rows.features, 0, width)

    def added(layer: Callable[..., Array], first: int) -> Callable[..., Array]:
        return lambda x, rows, kv: layer(x, rows, kv) + ops.columns(rows.features, first, width)

    for i in range(num_further):
        model.layers[i] = added(model.layers[i], (1 + i) * width)
    model.enter, model.feature_size, model.sees_wholes = enter, last + 1, sees_wholes
    model.no_features = np.append(np.zeros(last, np.float32), np.float32(1))
