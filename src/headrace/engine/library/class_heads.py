"""Decoders with classes: the head `score` that transformers puts on the last token, or the rows of the output head for
some tokens, such as "no" and "yes", whose logits a reranker is trained to answer with.

Called by `load`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace import hub
from headrace.checkpoint.reader import Reader
from headrace.models import Model
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder
from headrace.models.encoders.head import Head, labels, last_token_head
from headrace.models.weights import Weights
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError

TASK = "ForSequenceClassification"
MAX_TOKENS = 64


class ClassForm(NamedTuple):
    """The classes of a decoder: of the head `score`, or (tokens) of the output head's rows for these tokens. Two tokens
    are one class, whose number is the difference of theirs: its sigmoid is the probability of the second."""

    num_classes: int
    tokens: tuple[str, ...] = ()


def class_form(values: dict[str, Any]) -> ClassForm | None:
    """Return the classes that config.json names for a decoder; None for a model that answers. Raises
    `CheckpointError`."""
    tokens = values.get("classifier_from_token")
    if tokens:
        if (
            not isinstance(tokens, list)
            or len(tokens) > MAX_TOKENS
            or not all(isinstance(each, str) for each in tokens)
        ):
            bound = f"at most {MAX_TOKENS} texts of one token each"
            raise CheckpointError(f"config.json: classifier_from_token is {tokens!r:.80}, expected {bound}")
        return ClassForm(len(labels(ModelConfig(values))), tuple(tokens))
    stated = values.get("architectures")
    if isinstance(stated, list) and any(str(name).endswith(TASK) for name in stated):
        return ClassForm(len(labels(ModelConfig(values))))
    return None


def with_class_head(
    make: Callable[[Reader], Model], form: ClassForm | None, config: EngineConfig
) -> Callable[[Reader], Model]:
    """Return `make` of a decoder, which then has a classifier if there is a `form`. Raises `RequestError` for settings
    of decoders that answer."""
    if form is None:
        return make
    for field, value, harmless in (
        ("speculative_config", config.speculative_config, None),
        ("tensor_parallel_size", config.tensor_parallel_size, 1),
        ("pipeline_parallel_size", config.pipeline_parallel_size, 1),
    ):
        if value != harmless:
            raise RequestError(field, value, f"{harmless}: the model is a classifier")

    def build(weights: Reader) -> Model:
        model = make(weights)
        if not model.both_ways:
            model.classifier = _head(
                model, weights, form, hub.resolve_tokenizer(config.model, config.tokenizer, config.revision)
            )
        return model

    return build


def _head(model: Model, weights: Weights, form: ClassForm, directory: Path) -> Head:
    if not form.tokens:
        return last_token_head(weights.numbers("score.weight", (form.num_classes, model.hidden_size)))
    if not isinstance(model, Decoder):
        raise CheckpointError("config.json: classifier_from_token, expected none for this model_type")
    names = [f"{model.head_name}.weight", *(f"{root}{model.table}.weight" for root in (*model.roots, ""))]
    name = next(name for name in names if weights.has(name))
    table = weights.numbers(name, (model.vocab_size, model.hidden_size))
    rows = table[_token_ids(form.tokens, directory)]
    return last_token_head(rows[1:] - rows[:1] if len(rows) == 2 else rows)


def _token_ids(tokens: tuple[str, ...], directory: Path) -> list[int]:
    from headrace.text import bounded_tokenizer

    tokenizer = bounded_tokenizer.load(directory)
    try:
        ids = [tokenizer.token_to_id(token) for token in tokens]
    finally:
        tokenizer.close()
    for token, token_id in zip(tokens, ids, strict=True):
        if token_id is None:
            raise CheckpointError(f"config.json: classifier_from_token has {token!r:.80}, which is no token")
    return [token_id for token_id in ids if token_id is not None]
