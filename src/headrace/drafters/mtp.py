"""Drafts by the checkpoint's layer for multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

A decoder layer like the target's reads [norm(embedding of the next token), norm(state)] through one matrix, and
predicts the token after it; for later draft tokens it takes its own state in place of the target's. It is in the
target's checkpoint (`num_nextn_predict_layers`) or in a separate one. Of several such layers the first is used at every
depth. Called by `drafters.build`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace import models
from headrace.backends.base import Array, Rows
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.drafters.base import Target
from headrace.drafters.features import FeatureDrafter
from headrace.drafters.files import directory_of, load
from headrace.hub import read_config
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError
from headrace.protocol.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from headrace.models import Model
    from headrace.models.weights import SplitWeights


class Layout(NamedTuple):
    """Names of the parts, behind `root`. `state_first`: the matrix has the state's columns first. `feeds_normed`: the
    next guess continues the state after the last norm. `number`: of the layer among the model's."""

    root: str
    embedding_norm: str
    state_norm: str
    matrix: str
    last_norm: str
    block: str = ""
    state_first: bool = False
    feeds_normed: bool = False
    number: int = 0


LAYOUTS = (
    # DeepSeek-V3 and GLM-4; {n} is the number of the target's layers.
    Layout("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    # MiMo
    Layout(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        state_first=True, feeds_normed=True,
    ),
    # Qwen3-Next, Qwen3.5 and 3.6
    Layout(
        "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", block="layers.0.", feeds_normed=True
    ),
)  # fmt: skip


def next_layer(base: type[Decoder]) -> type[Decoder]:
    """Return the class of an MTP layer with the decoder layer of `base`, a model file's `Model`."""

    class Next(base):  # type: ignore[misc, valid-type]
        def __init__(
            self, values: dict[str, Any], weights: SplitWeights, target: Target, layout: Layout, most: int
        ) -> None:
            self.measure(ModelConfig(values), weights, target.backend.ops, most)
            size, root, self.first_layer = self.hidden_size, layout.root, layout.number
            self.feature_size = size
            self.embedding_norm = self.make_norm(root + layout.embedding_norm)
            self.state_norm = self.make_norm(root + layout.state_norm)
            # A matrix over two vectors side by side is split into two matrices, whose results are added.
            places = (size, 0) if layout.state_first else (0, size)
            self.of_embedding, self.of_state = (
                weights.columns(Linear([root + layout.matrix], size, [size]), first, 2 * size) for first in places
            )
            self.layers = [self.Layer(self, (root + layout.block).removesuffix("."), 0)]
            self.norm = self.make_norm(root + layout.last_norm)
            shape = (target.vocab_size, size)
            table, head = root + "embed_tokens.weight", root + "shared_head.head"
            self.embedding = weights.table(table, shape) if weights.has(table) else target.model.embedding
            self.head = target.model.head
            if weights.has(head + ".weight"):
                self.head = weights.matrix(Linear([head], size, [target.vocab_size]))

        def layer_type(self, layer_id: int) -> str:
            return "full_attention"

        def enter(self, rows: Rows) -> Array:
            x = self.ops.linear(self.embedding_norm(self.embed(rows.token_ids)), self.of_embedding)
            return x + self.ops.linear(self.state_norm(rows.features), self.of_state)

    return Next


def layout_of(directory: Path, num_layers: int) -> Layout | None:
    """Return the names of the checkpoint's MTP layer, None if it has none."""
    names = MappedCheckpoint(directory).names
    for layout in LAYOUTS:
        number = num_layers if "{n}" in layout.root else 0
        named = layout._replace(root=layout.root.format(n=num_layers), number=number)
        if f"{named.root}{layout.matrix}.weight" in names:
            return named
    return None


def make(spec: SpeculativeConfig, target: Target) -> FeatureDrafter:
    """Make the drafter. Raises `CheckpointError` if there is no such layer, or one that does not fit the target."""
    directory, values = target.directory, target.config
    is_own = spec.model is None and directory.is_dir() and layout_of(directory, target.num_layers) is not None
    if not is_own:
        directory = directory_of(spec, target, "mtp")
        values = read_config(directory)
    layout = layout_of(directory, target.num_layers)
    if layout is None:
        roots = ", ".join(row.root.format(n=target.num_layers) + row.matrix for row in LAYOUTS)
        raise CheckpointError(f"{directory} has no layer for multi-token prediction; looked for {roots}")
    for name, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if values.get(name) != size:
            raise CheckpointError(f"{directory}: {name} is {values.get(name)!r}, the model's is {size}")
    base = models.find(target.config.get("model_type")).Model
    if not issubclass(base, Decoder):
        raise CheckpointError(f"a {target.config.get('model_type')} model has no layers for multi-token prediction")
    window = min(spec.max_model_len, target.max_model_len)
    # All other tensors belong to the target, or to the layers after this one.
    spare = rf"(?!{re.escape(layout.root)}).*"
    kind: Any = next_layer(base)
    model: Model = load(
        directory, spec, target, values,
        lambda weights: kind(values, weights, target, layout, window + spec.num_drafts), spare,
    )  # fmt: skip
    return FeatureDrafter(model, spec, target, (), () if layout.feeds_normed else (1,), window)
