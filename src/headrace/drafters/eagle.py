"""EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2's trees (arXiv 2406.16858) and EAGLE-3 (arXiv 2503.01840).

One decoder layer continues the target's features. The first EAGLE takes the state after the target's final norm and
predicts the next state; EAGLE-3 takes residual streams of three layers, and has another norm, another head and often
another vocabulary than the target. The tensors of a checkpoint show its kind; docs/maintainers/drafter-layouts.md has
the layouts. Files of `speculators` are read too. Called by `drafters.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.base import Array, Cache, Matrix, Rows
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.checkpoint.source import naming
from headrace.drafters.base import Target
from headrace.drafters.features import FeatureDrafter, Fusing, RowProgram
from headrace.drafters.files import directory_of, integers, load, verify_token_ids
from headrace.hub import read_config
from headrace.models import Model, llama
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention, AttentionOptions, Decoder, GatedMLP, RMSNorm
from headrace.models.unread import Unread, Values, log_unread
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError
from headrace.protocol.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from headrace.models.weights import SplitWeights, Weights


class Frame(Decoder):
    """Sizes of config.json, the embedding and the head: the checkpoint's own, or else the target's."""

    unread = (
        Unread("layernorms", False, "extra norms around a drafter's head"),
        Unread("parallel_drafting", False, "drafters of several tokens at once"),
        Unread("parallel_draft_step", 1, "drafters of several tokens at once"),
    )

    def __init__(
        self, values: dict[str, Any], weights: SplitWeights, target: Target, max_positions: int, head_size: int
    ) -> None:
        self.measure(ModelConfig(values), weights, target.backend.ops, max_positions)
        kinds = self.config.values.get("layer_types")
        if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds[: self.num_layers]):
            raise CheckpointError(
                f"config.json: layer_types is {kinds!r:.80}, expected full_attention: drafters have no windows"
            )
        self.feature_size = self.hidden_size
        shape = (target.vocab_size, self.hidden_size)
        self.embedding = target.model.embedding
        if weights.has("embed_tokens.weight"):
            self.embedding = weights.table("embed_tokens.weight", shape)
        elif self.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"config.json: hidden_size is {self.hidden_size}, the model's is {target.hidden_size}, and the "
                "checkpoint has no embed_tokens.weight of its own"
            )
        self.head = target.model.head
        self.vocab_size = head_size
        if weights.has("lm_head.weight"):
            self.head = weights.matrix(Linear(["lm_head"], self.hidden_size, [head_size]))
        elif (head_size, self.hidden_size) != (target.vocab_size, target.hidden_size):
            raise CheckpointError("lm_head.weight is missing from the checkpoint, and the model's head does not fit")


class Eagle1(Frame):
    """x = fc [embedding, feature]; layers; the output is a feature, which the target's head takes as it is."""

    def __init__(self, values: dict[str, Any], weights: SplitWeights, target: Target, max_positions: int) -> None:
        super().__init__(values, weights, target, max_positions, target.vocab_size)
        size = self.hidden_size
        # A matrix over two vectors side by side is split into two matrices, whose results are added.
        biased = weights.has("fc.bias")
        self.of_embedding = weights.columns(Linear(["fc"], size, [size], biased), 0, 2 * size)
        self.of_feature = weights.columns(Linear(["fc"], size, [size]), size, 2 * size)
        self.layers = [llama.Layer(self, f"layers.{i}", i) for i in range(self.num_layers)]

    def make_norm(self, name: str) -> Callable[[Array], Array]:
        """Return a norm; before the attention of the first layer, the identity."""
        return super().make_norm(name) if name != "layers.0.input_layernorm" else lambda x: x

    def enter(self, rows: Rows) -> Array:
        x = self.ops.linear(self.ops.embedding(rows.token_ids, self.embedding), self.of_embedding)
        return x + self.ops.linear(rows.features, self.of_feature)

    def final(self, hidden: Array, rows: Array) -> Array:
        return self.ops.select(hidden, rows)


class WideAttention(Attention):
    """Attention whose queries, keys and values are made of two vectors: the embedding's, then the feature's."""

    of_embedding: Matrix

    def __init__(self, frame: Frame, weights: SplitWeights, name: str, bias: bool) -> None:
        self.split = weights
        super().__init__(frame, name, 0, AttentionOptions(bias, bias))

    def make_qkv(self, weights: Weights, linear: Linear) -> Matrix:
        width = 2 * linear.num_in
        self.of_embedding = self.split.columns(linear, 0, width)
        return self.split.columns(linear._replace(bias=False), linear.num_in, width)

    def of_both(self, embedding: Array, feature: Array, rows: Rows, kv: Sequence[Cache]) -> Array:
        qkv = self.ops.linear(embedding, self.of_embedding) + self.ops.linear(feature, self.qkv)
        return self.mix(qkv, rows, kv)


class Eagle3(Frame):
    """g + attention [norm(embedding), norm(g)], then an MLP; further layers are Llama's; a norm before the head."""

    def __init__(
        self,
        values: dict[str, Any],
        weights: SplitWeights,
        target: Target,
        max_positions: int,
        head_size: int,
    ) -> None:
        super().__init__(values, weights, target, max_positions, head_size)
        name = "midlayer" if weights.has_prefix("midlayer.") else "layers.0"
        bias = self.config.flag("attention_bias", False)
        self.embedding_norm = self.make_norm(f"{name}.input_layernorm")
        self.feature_norm = self.make_norm(f"{name}.hidden_norm")
        self.attention = WideAttention(self, weights, f"{name}.self_attn", bias)
        self.mlp_norm = self.make_norm(f"{name}.post_attention_layernorm")
        self.mlp = GatedMLP(self, f"{name}.mlp", bias=self.config.flag("mlp_bias", False))
        self.normed_residual = self.config.flag("norm_before_residual", False)
        self.feeds_normed = self.config.flag("norm_output", False)
        """Whether the next guess continues the state after the last norm (EAGLE-3.1)."""
        self.layers = [llama.Layer(self, f"layers.{i}", i) for i in range(1, self.num_layers)]
        self.norm = self.make_norm("norm")

    def fusing_norm(self, weights: SplitWeights, num_layers: int, size: int) -> Callable[[Array], Array] | None:
        """Return the norm of `num_layers` features of the target, of `size` numbers each, before they become one
        (EAGLE-3.1): of all together, or of each."""
        whole, each = self.config.flag("norm_before_fc", False), self.config.flag("fc_norm", False)
        if whole and each:
            raise CheckpointError("config.json: fc_norm is true, expected false where norm_before_fc is true")
        if whole:
            return RMSNorm(weights, self.ops, "input_norm", num_layers * size, self.eps)
        if not each:
            return None
        parts = [weights.numbers(f"fc_norm.{i}.weight", (size,)) for i in range(num_layers)]
        weight = weights.constant(np.concatenate(parts))
        return lambda x: self.ops.rms_norm(x, weight, self.eps, heads=num_layers)

    def forward(self, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None) -> Array:
        embedding = self.embedding_norm(self.ops.embedding(rows.token_ids, self.embedding))
        normed = self.feature_norm(rows.features)
        x = normed if self.normed_residual else rows.features
        x = x + self.attention.of_both(embedding, normed, rows, kv)
        x = x + self.mlp(self.mlp_norm(x))
        for layer in self.layers:
            x = layer(x, rows, kv)
        if streams is not None:
            streams.append(x)
        return x


@dataclass(frozen=True, slots=True)
class Form:
    """The kind of a checkpoint: EAGLE-3 or not, the config in Llama's names, layers of the target that it reads."""

    third: bool
    values: Values
    layers: tuple[int, ...]


def form_of(directory: Path, target: Target) -> Form:
    """Read the kind of a checkpoint. Raises `CheckpointError` if it is no EAGLE, or does not fit the target's shape."""
    values = read_config(directory)
    inner = values.get("transformer_layer_config")
    if isinstance(inner, dict):
        # `speculators` has Llama's fields in an object inside its config.
        values = inner | {name: value for name, value in values.items() if name != "transformer_layer_config"}
    inner = values.get("eagle_config")
    if isinstance(inner, dict):
        # ModelOpt and SpecForge have some of the drafter's fields in an inner object.
        values = inner | {name: value for name, value in values.items() if value is not None}
    # Files for the oldest models leave these out.
    values = Values({"num_hidden_layers": 1, "max_position_embeddings": target.max_model_len} | values)
    checkpoint = MappedCheckpoint(directory)
    names = set(checkpoint.names)
    if "fc.weight" not in names:
        is_older = "fusion_fc.weight" in names
        hint = "; fusion_fc.weight is an older form of `speculators`, convert it with a newer one" if is_older else ""
        raise CheckpointError(f"{directory} has no fc.weight: it is no EAGLE checkpoint{hint}")
    if not any(name.endswith(".hidden_norm.weight") for name in names):
        return Form(False, values, ())
    shape = checkpoint.entry("fc.weight").shape
    width = shape[-1] if shape else 0
    layers = values.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = [2, target.num_layers // 2, target.num_layers - 3]
    is_sound = isinstance(layers, list) and all(type(i) is int and 0 <= i <= target.num_layers for i in layers)
    if not is_sound or not layers:
        raise CheckpointError(
            f"config.json: eagle_aux_hidden_state_layer_ids is {layers!r}, "
            f"the model has layers 0 to {target.num_layers}"
        )
    if width != len(layers) * target.hidden_size:
        raise CheckpointError(
            f"fc.weight takes {width} features; the model gives {len(layers)} layers of {target.hidden_size}"
        )
    return Form(True, values, tuple(layers))


def make(spec: SpeculativeConfig, target: Target) -> FeatureDrafter:
    """Make the drafter. Raises `CheckpointError` for a checkpoint that is no EAGLE, or was trained for another
    model."""
    directory = directory_of(spec, target, "eagle")
    with naming(directory):
        form = form_of(directory, target)
        vocab_size = ModelConfig(form.values).integer("vocab_size", target.vocab_size)
    window = min(spec.max_model_len, target.max_model_len)
    if vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{directory} was trained for a vocabulary of {vocab_size}, the model has {target.vocab_size}"
        )
    if not form.third:
        first: Model = load(
            directory,
            spec,
            target,
            form.values,
            lambda weights: Eagle1(form.values, weights, target, window + spec.num_drafts),
        )
        log_unread(form.values, first.unread)
        return FeatureDrafter(first, spec, target, (), (len(first.layers),), window)
    size = ModelConfig(form.values).integer("draft_vocab_size", target.vocab_size, high=target.vocab_size)
    token_ids = integers(directory, "d2t", size)
    if token_ids is not None:
        token_ids = np.arange(size) + token_ids
        verify_token_ids(directory, "d2t", token_ids, target)
    elif size != target.vocab_size:
        raise CheckpointError(f"{directory}: draft_vocab_size is {size} of {target.vocab_size}, and there is no d2t")

    def build(weights: SplitWeights) -> tuple[Eagle3, Fusing]:
        model, width = Eagle3(form.values, weights, target, window + spec.num_drafts, size), target.hidden_size
        fusing = Linear(["fc"], len(form.layers) * width, [model.hidden_size], bias=weights.has("fc.bias"))
        norm = model.fusing_norm(weights, len(form.layers), width)
        return model, Fusing(target.backend, weights.matrix(fusing), norm)

    third, fusing = load(directory, spec, target, form.values, build, spare="d2t|t2d")
    log_unread(form.values, third.unread)
    fuse = RowProgram(fusing, target.backend, target.num_threads, (0,))
    own_layers = () if third.feeds_normed else (0,)
    return FeatureDrafter(third, spec, target, form.layers, own_layers, window, token_ids, fuse)
