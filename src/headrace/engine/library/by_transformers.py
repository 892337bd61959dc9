"""Loads a model through transformers: --model-impl transformers, or auto for a type that headrace has no file for.

Which of the two computes a model is decided here, and the settings that only headrace's own models have are refused.
transformers and torch are imported when such a model is loaded, not before. Called by `engine.library.load`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from headrace import hub, models, transformers_models
from headrace.backends import make_backend
from headrace.backends.base import Backend
from headrace.checkpoint.mapped import MappedCheckpoint, choose_dtype, read_config
from headrace.checkpoint.names import text_config
from headrace.checkpoint.overrides import overridden
from headrace.checkpoint.reader import Progress
from headrace.models.config import ModelConfig
from headrace.protocol.config import DEQUANTIZE, EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.schemes import parse

DRAFTERS = ("ngram", "suffix")
"""Methods that guess from tokens alone."""

logger = logging.getLogger(__name__)


def reason(config: EngineConfig, directory: Path) -> str:
    """Return why transformers computes this model, or "" where headrace does. Raises `RequestError` for transformers
    and a GGUF file, and `CheckpointError` for a type that needs transformers where that is not installed."""
    if config.model_impl == "headrace":
        return ""
    if directory.is_file():
        if config.model_impl == "transformers":
            raise RequestError("model_impl", "transformers", "auto or headrace for a GGUF file")
        return ""
    if config.model_impl == "transformers":
        return "--model-impl asks for it"
    known = [*models.names(), *models.encoder_names()]
    values = hub.read_config(directory)
    model_type = values.get("model_type")
    if text_config(values, known).get("model_type") in known or not isinstance(model_type, str):
        return ""
    if not transformers_models.is_installed():
        try:
            read_config(directory, known)
        except CheckpointError as error:
            hint = "transformers, which is not installed, may have it: pip install 'headrace[transformers]'"
            raise CheckpointError(f"{error}. {hint}") from error
    has_class = model_type in transformers_models.classes()
    return f"headrace has no model file for model_type {model_type}" if has_class else ""


def load(
    config: EngineConfig, directory: Path, progress: Progress, has_seat: bool
) -> tuple[Backend, models.Model, ModelConfig]:
    """As `load.load_model`. has_seat: as one of several ranks. Raises `RequestError` for settings that this path does
    not have."""
    _check(config, has_seat)
    values = overridden(hub.read_config(directory), config.hf_overrides)
    model_type, known = values.get("model_type"), transformers_models.classes()
    if model_type not in known:
        raise CheckpointError(f"config.json: transformers has no causal model of model_type {model_type!r:.80}")
    if model_type in transformers_models.REFUSED:
        why_not = transformers_models.REFUSED[str(model_type)]
        raise CheckpointError(f"config.json: model_type {model_type} cannot run here: {why_not}")
    checkpoint = MappedCheckpoint(directory)
    backend: Any = make_backend("torch_ref", config.device, choose_dtype(config.dtype, checkpoint, values))
    from headrace.transformers_models import loading

    backend.name = f"transformers-{loading.VERSION}"
    quantization = None if config.quantization in (None, DEQUANTIZE) else parse(config.quantization)
    why = reason(config, directory)
    logger.warning(
        "%s of transformers %s computes this model, one row at a time, which is slow: %s",
        known[str(model_type)], loading.VERSION, why,
    )  # fmt: skip
    model = loading.load(values, checkpoint, backend, quantization, progress)
    return backend, model, ModelConfig(values)


def in_short_steps(config: EngineConfig, model: models.Model) -> EngineConfig:
    """Return the config with as few rows in a step as a model of transformers computes in short time; of another model
    the config as it is."""
    most = getattr(model, "rows_of_a_step", config.max_num_batched_tokens)
    if most >= config.max_num_batched_tokens or not config.enable_chunked_prefill:
        return config
    logger.info("steps have at most %d tokens, not %d: each takes a pass", most, config.max_num_batched_tokens)
    return msgspec.structs.replace(config, max_num_batched_tokens=most)


def _check(config: EngineConfig, has_seat: bool) -> None:
    def refuse(field: str, value: Any, bound: str) -> None:
        raise RequestError(field, value, f"{bound} for a model that transformers computes")

    if config.backend not in ("auto", "torch_ref"):
        refuse("backend", config.backend, "auto or torch_ref")
    if has_seat:
        refuse(*config.ranks, "1")
    if config.enable_lora:
        refuse("enable_lora", True, "left out")
    spec = config.speculative_config
    if spec is not None and spec.method not in DRAFTERS:
        refuse("speculative_config.method", spec.method, f"one of {', '.join(DRAFTERS)}")
    if config.save_packed:
        logger.warning("save_packed has no effect for a model that transformers computes")
