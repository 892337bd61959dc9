"""The names by which the settings of a quantised checkpoint mean a layer.

Settings have the names of the checkpoint's own module tree. A model with a tower for images or sound has its text model
below a prefix, and its experts may be one tensor; `checkpoint.names` gives such tensors a text model's names. Settings
keep the other ones, in lists, regular expressions and keys, so each function here tries all names that a layer has.
Called by the formats and by `checkpoint.names`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from headrace.protocol.errors import CheckpointError
from headrace.quant import patterns

PREFIXES = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}  # fmt: skip
"""Prefixes of the text model's tensors in a checkpoint with towers, and the text model's own."""
GRANITE = {
    "block_sparse_moe.input_linear": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear": "block_sparse_moe.experts.down_proj",
}
"""Granite's names of the matrices of all experts, and the usual names."""
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)")


@functools.lru_cache(maxsize=4096)
def names_of(layer: str) -> tuple[str, ...]:
    """Return all names of the layer that a model file calls `layer`, that one first."""
    names = [layer]
    stacked = _EXPERT.fullmatch(layer)
    if stacked is not None:
        names.append(f"{stacked[1]}.{stacked[2]}")
        names += [names[1].removesuffix(ours) + theirs for theirs, ours in GRANITE.items() if names[1].endswith(ours)]
    dotted = [f"{name}." for name in names]  # the head is named by itself
    for theirs, ours in PREFIXES.items():
        names += [(theirs + name.removeprefix(ours)).removesuffix(".") for name in dotted if name.startswith(ours)]
    return tuple(names)


def names_listed(config: Mapping[str, Any], *keys: str) -> list[str]:
    """Return the lists of layers under `keys` of a quantization_config, as one. Raises `CheckpointError`."""
    names: list[str] = []
    for key in keys:
        value = config.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise CheckpointError(f"config.json: quantization_config.{key} is {value!r:.80}, expected a list of names")
        names += value or []
    return names


def left_alone(layer: str, listed: Sequence[str]) -> bool:
    """Return whether a list has `layer`, a module that it is in, or its last parts."""
    return any(
        name == text or name.startswith(f"{text}.") or name.endswith(f".{text}") or f".{text}." in name
        for name in names_of(layer)
        for text in listed
    )


def is_listed(layer: str, listed: Iterable[str]) -> bool:
    """Return whether a list has `layer`, or a regular expression of it after "re:". Raises `CheckpointError`."""
    return any(
        matches(text.removeprefix("re:"), layer) if text.startswith("re:") else text in names_of(layer)
        for text in listed
    )


def matches(pattern: str, layer: str, *, anywhere: bool = False) -> bool:
    """As `patterns.matches`, of any name of the layer."""
    return any(patterns.matches(pattern, name, anywhere=anywhere) for name in names_of(layer))


def fits(pattern: str, layer: str) -> bool:
    """Return whether a pattern of file names, such as "*.q_proj", fits a name of the layer."""
    return any(fnmatchcase(name, pattern) for name in names_of(layer))


def first_match(rules: Any, layer: str, key: str) -> Any:
    """Return the value in `rules` of the first pattern that matches. Patterns have an optional "+:" or "-:" before them
    (GPTQModel's `dynamic`); the value is False behind "-:", None if none matches. Raises `CheckpointError` naming
    `key`."""
    if not isinstance(rules, dict):
        raise CheckpointError(f"config.json: quantization_config.{key} is {rules!r:.80}, expected settings by pattern")
    for pattern, settings in rules.items():
        if matches(pattern.removeprefix("+:").removeprefix("-:"), layer):
            return False if pattern.startswith("-:") else settings
    return None


def entry_of(settings: Mapping[str, Any], layer: str) -> Any:
    """Return the value under a name of the layer; None if there is none."""
    return next((settings[name] for name in names_of(layer) if name in settings), None)
