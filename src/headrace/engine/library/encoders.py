"""The settings of an encoder's engine: how the rows of a text become its vector, or the numbers of its classes.

Called by `load`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.library.class_heads import class_form
from headrace.engine.library.sentence_files import SentenceFiles, read_projection, read_sentence_files
from headrace.models import Model, find
from headrace.models.config import ModelConfig
from headrace.models.encoders.head import Head, WordWeights, labels
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.step import Activation, Classes, Pooling

ACTIVATIONS: tuple[Activation, ...] = ("sigmoid", "softmax", "identity")
PROBLEMS: dict[str, Activation | None] = {
    "regression": "identity",
    "single_label_classification": None,
    "multi_label_classification": "sigmoid",
}
"""Activations by transformers' names of problems; None: the one that makes probabilities of all classes."""


def add_layers(model: Model, sentences: SentenceFiles) -> SentenceFiles:
    """Have the layers behind the pooling, if the files have any, applied to the pooled vector. Return the files. Raises
    `CheckpointError`."""
    if sentences.words is not None:
        if not isinstance(model.classifier, WordWeights):
            raise CheckpointError("modules.json: SpladePooling, expected an encoder with a head for masked words")
        model.classifier = replace(model.classifier, sums=sentences.words.sums, num_logs=sentences.words.num_logs)
        return sentences
    if not sentences.layers:
        return sentences
    width = sentences.layers[0].weight.shape[1]
    expected = sentences.pooled_width(model.hidden_size)
    if model.classifier is not None or width != expected or not sentences.pooling:
        raise CheckpointError(
            f"modules.json: a Dense layer reads {width} numbers, expected one of the model's {expected}, which has no "
            "classes"
        )
    model.classifier = Head(sentences.layers, sentences.pooling)
    return sentences


def with_ends(values: dict[str, Any], names: Collection[str], directory: Path) -> tuple[dict[str, Any], bool]:
    """Return the values of config.json, and whether the checkpoint has the head of a decoder or one that is tied to its
    table. Where a model of vectors has none, which its files or its class (`MistralModel`) show, or one of classes,
    whose head is `score`, the values tie one. Of an encoder they tell whether its vectors are weights of words,
    and how wide ColBERT's are."""
    kind, form = find(values["model_type"]).Model, class_form(values)
    if kind.both_ways:
        gives_words, layer = read_sentence_files(directory).words is not None, read_projection(directory)
        width = 0 if layer is None else len(layer.weight)
        return values | {"gives_word_weights": gives_words, "token_width": width}, True
    if form is not None and not form.tokens:
        return values | {"tie_word_embeddings": True}, True
    if values.get("tie_word_embeddings", getattr(kind, "default_tied", True)):
        return values, True
    stated = values.get("architectures")
    is_bare = (directory / "modules.json").is_file() or any(str(name).endswith("Model") for name in stated or ())
    if not is_bare or any(name.startswith("lm_head.") for name in names):
        return values, True
    return values | {"tie_word_embeddings": True}, False


def pooled_form(model: Model, config: ModelConfig, sentences: SentenceFiles) -> tuple[Pooling, Classes | None]:
    """Return the kind of vectors that a model has where a request names none, and the classes of a classifier. Raises
    `CheckpointError`."""
    head = getattr(model, "classifier", None)
    if head is None or sentences.layers or sentences.words is not None:
        return sentences.pooling or ("mean" if model.both_ways else ""), None
    names = labels(config)
    activation, second_type = _activation(config.values, len(names)), getattr(model, "second_type", 0)
    is_qwen3 = bool(config.values.get("is_original_qwen3_reranker"))
    return head.pooling, Classes(names, activation, second_type, "qwen3" if is_qwen3 else "")


def _activation(values: dict[str, Any], num_classes: int) -> Activation:
    """The activation of the classes' numbers: by the kind of problem that the model was trained for, or by the name
    that sentence-transformers' cross-encoders have; else it makes probabilities of them."""
    probabilities: Activation = "softmax" if num_classes > 1 else "sigmoid"
    problem = values.get("problem_type")
    if problem is not None:
        if problem not in PROBLEMS:
            expected = ", ".join(PROBLEMS)
            raise CheckpointError(f"config.json: problem_type is {problem!r:.80}, expected one of {expected}")
        return PROBLEMS[problem] or probabilities
    options = values.get("sentence_transformers")
    stated = options.get("activation_fn") if isinstance(options, dict) else None
    name = stated or values.get("sbert_ce_default_activation_function")
    if name is None:
        return probabilities
    for kind in ACTIVATIONS:
        if str(name).rpartition(".")[2].lower() == kind:
            return kind
    raise CheckpointError(f"config.json: activation_fn is {name!r:.80}, expected torch's Sigmoid, Softmax or Identity")


def for_encoder(config: EngineConfig, most: int, sentences: SentenceFiles) -> EngineConfig:
    """Return the config of an encoder's engine, whose texts have at `most` so many tokens: a text is one chunk, and its
    keys and values are of no use to another. Raises `RequestError` for settings of decoders."""
    for field, value, harmless in (
        ("speculative_config", config.speculative_config, None),
        ("enable_lora", config.enable_lora, False),
        ("tensor_parallel_size", config.tensor_parallel_size, 1),
        ("pipeline_parallel_size", config.pipeline_parallel_size, 1),
    ):
        if value != harmless:
            raise RequestError(field, value, f"{harmless}: the model is an encoder")
    most = min(most, sentences.max_length or most)
    if (config.max_model_len or 0) > most:
        bound = f"at most {most}, the longest text by the model's files (sentence_bert_config.json, config.json)"
        raise RequestError("max_model_len", config.max_model_len, bound)
    length = config.max_model_len or most
    num_tokens = max(config.max_num_batched_tokens, length)
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None and config.kv_cache_memory_bytes is None:
        num_blocks = -(-num_tokens // config.block_size) + config.max_num_seqs
    return msgspec.structs.replace(
        config,
        max_model_len=length,
        max_num_batched_tokens=num_tokens,
        num_gpu_blocks_override=num_blocks,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
