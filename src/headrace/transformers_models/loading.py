"""Loads a model of transformers: its config and class by model_type, its weights from safetensors files.

The files are read by headrace (`checkpoint.mapped`), so pickles are refused; transformers gets tensors, and never sees
the folder. Nothing of a config may name code: attention and experts are those of the package. Called by
`engine.library.by_transformers`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as their_logging

from headrace.backends.torch_ref import TorchRef
from headrace.backends.torch_ref.tensors import tensor
from headrace.checkpoint.mapped import MappedCheckpoint, MappedFile
from headrace.checkpoint.reader import Progress
from headrace.models.config import MAX_LAYERS
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import Quantization
from headrace.transformers_models import classes
from headrace.transformers_models.matrices import quantise
from headrace.transformers_models.model import Model
from headrace.transformers_models.pieces import Team

CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")
"""Names of a model's context in configs."""
UNBOUNDED = 8192
"""The context of a model without one, such as those with states alone."""
CODE = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation",
        "kernel_config", "fusion_config", "distributed_config", "transformers_weights")  # fmt: skip
"""Keys of a config.json that could bring code or other files. They are left out."""

VERSION: str = transformers.__version__


def load(
    values: dict[str, Any],
    checkpoint: MappedCheckpoint,
    backend: TorchRef,
    quantization: Quantization | None,
    progress: Progress,
) -> Model:
    """Return the model of a config.json and its weights. Raises `CheckpointError`."""
    model_type = values["model_type"]
    if values.get("quantization_config") is not None:
        raise CheckpointError("config.json has a quantization_config, which is not read with model_impl transformers")
    _forbid_hub_kernels()
    kind = getattr(transformers, classes()[model_type])
    tensors = dict(_tensors(checkpoint))
    before = their_logging.get_verbosity()
    their_logging.set_verbosity(logging.ERROR)
    try:
        config = _config(values, kind)
        _check_size(kind, config, tensors)
        progress(0, len(tensors))
        theirs, report = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype=backend.ops.dtype, attn_implementation="eager",
            output_loading_info=True, trust_remote_code=False, local_files_only=True,
        )  # fmt: skip
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"transformers cannot load this {model_type}: {type(error).__name__}: {error}") from error
    finally:
        their_logging.set_verbosity(before)
    missing = sorted(report["missing_keys"]) + sorted(str(each) for each in report["mismatched_keys"])
    if missing:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors of the model, {missing[0]} first")
    theirs = theirs.to(backend.device).eval().requires_grad_(False)
    checkpoint.release()
    progress(len(tensors), len(tensors))
    backend.ops.weight_bytes += sum(p.numel() * p.element_size() for p in theirs.parameters())
    if quantization is not None:
        quantise(theirs, backend, quantization)
    team = Team()
    if backend.ops.device.type == "cpu":
        team.cut(theirs)
    return Model(theirs, backend.ops, context_of(config), team)


def _forbid_hub_kernels() -> None:
    """Have transformers load no kernels from the hub, which are code. Must come before a model's module is imported.
    Raises `CheckpointError` where that cannot be switched off."""
    if importlib.util.find_spec("kernels") is None:
        return
    switch = importlib.import_module("transformers.integrations.hub_kernels")
    if not hasattr(switch, "_kernels_enabled"):
        raise CheckpointError(
            f"transformers {VERSION} may load kernels from the hub, which are code: uninstall the package kernels"
        )
    setattr(switch, "_kernels_enabled", False)  # noqa: B010


def context_of(config: Any) -> int:
    """Return the model's context in tokens by its config."""
    text = config.get_text_config(decoder=True)
    lengths = [getattr(text, name, None) for name in CONTEXTS]
    return min([length for length in lengths if isinstance(length, int) and length > 0], default=UNBOUNDED)


def _config(values: dict[str, Any], model: Any) -> Any:
    """Return transformers' config of a config.json: that of its text, where the class `model` takes that alone."""
    for name, value in values.items():
        if "layers" in name and isinstance(value, int) and value > MAX_LAYERS:
            raise CheckpointError(f"config.json: {name} is {value}, expected at most {MAX_LAYERS}")
    kind = CONFIG_MAPPING[values["model_type"]]
    config = kind.from_dict(_plain(values))
    if model.config_class is not kind and model.config_class is kind.sub_configs.get("text_config"):
        config = config.get_text_config()
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    return config


def _plain(value: Any) -> Any:
    """Return a part of a config.json without the keys of `CODE`, at any depth, and with the numbers that transformers
    writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: _plain(part) for name, part in value.items() if name not in CODE}


def _check_size(kind: Any, config: Any, tensors: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` for a config of a model that is larger than the files: what they lack would be made up,
    at any size."""
    with torch.device("meta"):
        num = sum(parameter.numel() for parameter in kind(config).parameters())
    stored = sum(x.numel() for x in tensors.values())
    if num > stored * 1.1 + 1000:
        raise CheckpointError(f"config.json describes {num:,} weights, and the files hold {stored:,}")


def _tensors(checkpoint: MappedCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder under the names that the files have."""
    for path in checkpoint.files:
        file = MappedFile(Path(path))
        for name in file.entries:
            # A copy: transformers may write to it, and each begins on a cache line.
            yield name, tensor(file.array(name)).clone()
