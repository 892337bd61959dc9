"""The settings of an encoder's engine, and the files that sentence-transformers keeps beside a model: how the rows of a
text become its vector.

Called by `load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace import foreign
from headrace.models import Model
from headrace.models.config import ModelConfig
from headrace.models.encoders.head import labels
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.step import Activation, Classes, Pooling

KINDS: dict[object, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Kinds of pooling by sentence-transformers' names. Older files have a flag for each kind."""
FLAGS = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "lasttoken": "lasttoken",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
}


ACTIVATIONS: tuple[Activation, ...] = ("sigmoid", "softmax", "identity")
PROBLEMS: dict[str, Activation | None] = {
    "regression": "identity",
    "single_label_classification": None,
    "multi_label_classification": "sigmoid",
}
"""Activations by transformers' names of problems; None: the one that makes probabilities of all classes."""


class SentenceFiles(NamedTuple):
    """pooling: "" where the files name none. max_length: the most tokens of a text; None for the model's own."""

    pooling: Pooling = ""
    max_length: int | None = None


def read_sentence_files(directory: Path) -> SentenceFiles:
    """Read modules.json, the pooling's config.json and sentence_bert_config.json, as far as they are there. Raises
    `CheckpointError` for modules and kinds of pooling that would give other vectors here."""
    if not (directory / "modules.json").is_file():
        return SentenceFiles()
    pooling: Pooling = ""
    for module in _modules(directory):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(directory, str(module.get("path", "")))
        elif kind not in ("Transformer", "Normalize"):
            raise CheckpointError(
                f"{directory / 'modules.json'}: a module {kind:.80}, expected Transformer, Pooling and Normalize "
                "alone: without it the vectors would be others"
            )
    return SentenceFiles(pooling, _max_length(directory))


def _modules(directory: Path) -> list[dict[str, Any]]:
    path = directory / "modules.json"
    data = foreign.read_bytes(path, foreign.TABLE.num_bytes)
    modules = foreign.parse_object(b'{"modules":' + data + b"}", path, foreign.TABLE)["modules"]
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{path}: expected a list of objects")
    return modules


def _pooling(directory: Path, folder: str) -> Pooling:
    path = directory / folder / "config.json"
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise CheckpointError(f"{directory / 'modules.json'}: path {folder:.80}, expected a folder beside the file")
    values = foreign.read_object(path, foreign.TABLE)
    flags = [name for flag, name in FLAGS.items() if values.get(f"pooling_mode_{flag}") is True]
    named = values.get("pooling_mode", flags[0] if len(flags) == 1 else flags)
    if not isinstance(named, str) or named not in KINDS:
        raise CheckpointError(f"{path}: pooling_mode is {named!r:.80}, expected one of {', '.join(map(str, KINDS))}")
    return KINDS[named]


def _max_length(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    length = foreign.read_object(path, foreign.TABLE).get("max_seq_length") if path.is_file() else None
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
        raise CheckpointError(f"{path}: max_seq_length is {length!r:.80}, expected an integer of at least 2")
    return length


def pooled_form(model: Model, config: ModelConfig, sentences: SentenceFiles) -> tuple[Pooling, Classes | None]:
    """Return the kind of vectors that a model has where a request names none, and the classes of a classifier. Raises
    `CheckpointError`."""
    head = getattr(model, "classifier", None)
    if head is None:
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
