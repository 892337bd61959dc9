"""Reads adapters in PEFT's layout (adapter_config.json and adapter_model.safetensors), LoRA and DoRA alone, and by
`gguf_adapters` in llama.cpp's.

Everything in the config that would change the output and that headrace does not compute is refused by name. Knows files
and shapes; must not know models or backends. Called by `engine.library.adapter_set`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from headrace import foreign
from headrace.backends.adapters import LayerAdapter
from headrace.checkpoint import gguf_adapters
from headrace.checkpoint.gguf_adapters import Base
from headrace.checkpoint.mapped import MappedFile
from headrace.checkpoint.names import text_name
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, cast, type_name

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX, SIDES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
MAGNITUDES = ".lora_magnitude_vector"

ENDS = re.compile(r"\.lora_embedding_[AB]$|(^|\.)(embed_tokens|wte|lm_head)\.")
REFUSED = {
    "modules_to_save": "whole layers in place of the base's, which all rows of a step share; merge them",
    "bias": "biases that were trained too",
    "lora_bias": "a bias of B",
    "target_parameters": "adapters of experts' parameters",
    "trainable_token_indices": "rows of the embedding that were trained too",
    "alora_invocation_tokens": "activated LoRA, which begins in mid-prompt",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "layer_replication": "layers of the base in another number",
    "megatron_config": "Megatron's layers",
}
"""Keys that change the output, with the reason why they are refused where they are set."""
HARMLESS = frozenset(
    "peft_type task_type auto_mapping base_model_name_or_path revision inference_mode r lora_alpha lora_dropout "
    "target_modules exclude_modules use_rslora rank_pattern alpha_pattern fan_in_fan_out init_lora_weights "
    "layers_to_transform layers_pattern megatron_core loftq_config eva_config corda_config runtime_config peft_version "
    "qalora_group_size ensure_weight_tying arrow_config lora_ga_config use_dora".split()
)
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base's weights: the adapter fits those alone."""


class Adapter(NamedTuple):
    """An adapter as it was read. digest: of all that decides its numbers, in hex. base: the model that it was trained
    on, as its config names it."""

    layers: Mapping[str, LayerAdapter]
    digest: str
    rank: int
    base: str


def read(path: Path, base: Base | None = None) -> Adapter:
    """Read the adapter in a folder, or in a GGUF file for the model `base`. Raises `CheckpointError`, which names the
    file and the key or tensor."""
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is no folder with {CONFIG} and {WEIGHTS}, and no GGUF file")
    return _adapter(gguf_adapters.read(path, base))


def _read_folder(directory: Path) -> Adapter:
    path = directory / CONFIG
    config = foreign.read_object(path, foreign.CONFIG)
    _check(config, path)
    if not (directory / WEIGHTS).is_file():
        others = f", only {PICKLE}, a pickle, which can run any code" if (directory / PICKLE).is_file() else ""
        raise CheckpointError(f"{directory} has no {WEIGHTS}{others}")
    file = MappedFile(directory / WEIGHTS)
    adapter = _adapter(_layers(file, config, path), str(config.get("base_model_name_or_path") or ""))
    file.release()
    return adapter


def _adapter(layers: Mapping[str, LayerAdapter], base: str = "") -> Adapter:
    hasher = sha256()
    for name, (a, b, scale, magnitudes) in sorted(layers.items(), key=lambda item: item[0]):
        arrays = [a, b] if magnitudes is None else [a, b, magnitudes]
        for part in (name, *(each for array in arrays for each in (type_name(array), str(array.shape))), scale.hex()):
            hasher.update(part.encode() + b"\0")
        for array in arrays:
            hasher.update(array.tobytes())
    return Adapter(layers, hasher.hexdigest(), max(len(layer.a) for layer in layers.values()), base)


def _check(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type {config.get('peft_type')!r}; headrace takes LORA alone")
    for name, what in REFUSED.items():
        if config.get(name) not in (None, False, [], {}, "none"):
            raise CheckpointError(f"{path}: {name} {config[name]!r} is not computed here ({what})")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights {start!r} changes the base's weights; save the adapter as plain LoRA, which "
            "PEFT does with path_initial_model_for_weight_conversion"
        )
    others = sorted(name for name, value in config.items() if name not in HARMLESS | REFUSED.keys() and value)
    if others:
        logger.warning("%s: %s: keys that headrace does not know", path, ", ".join(others))


def _layers(file: MappedFile, config: Mapping[str, Any], path: Path) -> dict[str, LayerAdapter]:
    values = ModelConfig(dict(config))
    rank, alpha = values.integer("r"), values.number("lora_alpha", 8.0)
    ranks, alphas = (_pattern(config, name, path) for name in ("rank_pattern", "alpha_pattern"))
    ends = (*SIDES, MAGNITUDES) if values.flag("use_dora", False) else SIDES
    sides: dict[str, dict[str, Any]] = {}
    for name in file.entries:
        if ENDS.search(name):
            raise CheckpointError(
                f"{file.path}: {name} changes the embedding or the head, which all rows of a step share and which take "
                "no adapter; train without it, or merge the adapter into the weights"
            )
        side = next((side for side in ends if name.endswith(side)), None)
        if side is None or not name.startswith(PREFIX):
            raise CheckpointError(f"{file.path}: {name} is no {PREFIX}<layer>{' or '.join(ends)}")
        values_of, kind = file.array(name), "vector" if side == MAGNITUDES else "matrix"
        if type_name(values_of) not in PLAIN or values_of.ndim != (1 if side == MAGNITUDES else 2):
            raise CheckpointError(
                f"{file.path}: {name} is {type_name(values_of)} {list(values_of.shape)}, no {kind} of floats"
            )
        if type_name(values_of) == "float64" or side == MAGNITUDES:
            values_of = cast(values_of, "float32")
        layer = text_name(name.removeprefix(PREFIX).removesuffix(side))
        if layer is None:
            raise CheckpointError(f"{file.path}: {name} belongs to a tower for images or sound")
        sides.setdefault(layer, {})[side] = values_of
    layers: dict[str, LayerAdapter] = {}
    for layer, pair in sides.items():
        if len(pair) < len(ends):
            raise CheckpointError(f"{file.path}: {layer} has no {next(each for each in ends if each not in pair)}")
        a, b = (pair[side] for side in SIDES)
        of_layer = _of(ranks, layer, rank)
        if len(a) != of_layer or b.shape[1] != of_layer or of_layer < 1:
            raise CheckpointError(
                f"{file.path}: {layer} has A {list(a.shape)} and B {list(b.shape)}; its rank in {path.name} is "
                f"{of_layer:g}"
            )
        root = math.sqrt(of_layer) if config.get("use_rslora") else of_layer
        layers[layer] = LayerAdapter(a, b, float(_of(alphas, layer, alpha)) / root, pair.get(MAGNITUDES))
    if not layers:
        raise CheckpointError(f"{file.path} has no adapters")
    return layers


def _pattern(config: Mapping[str, Any], name: str, path: Path) -> dict[str, float]:
    """Return the numbers of a pattern by the end of a layer's name. Regular expressions are a stranger's: names alone
    are taken."""
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {name} is no object")
    numbers: dict[str, float] = {}
    for key, value in pattern.items():
        plain = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not all(letter.isalnum() or letter in "._-" for letter in plain):
            raise CheckpointError(f"{path}: {name} {key!r} is a regular expression; names of layers are taken alone")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise CheckpointError(f"{path}: {name} {key!r} is {value!r}, a number above 0 is expected")
        numbers[plain] = value
    return numbers


def _of(pattern: Mapping[str, float], layer: str, usual: float) -> float:
    """Return the number of the first key that is the layer's name, or whole parts at its end; else `usual`."""
    return next((value for key, value in pattern.items() if layer == key or layer.endswith("." + key)), usual)
