"""Replaces values of a config.json: by --hf-overrides, and by the flags of other engines that become such values.

Settings of a rotary embedding are set in the layout that the file has. Knows no files; called by `engine.library.load`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError

logger = logging.getLogger("headrace")

WITHOUT_EFFECT = {
    "eos_token_id": "set stop_token_ids by --override-generation-config",
    "bos_token_id": "the tokenizer has it",
    "torch_dtype": "see --dtype",
    "dtype": "see --dtype",
}
ROPE = ("rope_scaling", "rope_parameters", "rope_theta")


def overridden(values: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of a config.json with `overrides` (--hf-overrides) in their place. Objects are merged; the
    rotary embedding is set in the layout that the file has. Raises `CheckpointError` for an unknown layout.

    A name that the file lacks is only logged, since the model may still read it.
    """
    if not overrides:
        return values
    inner = overrides.get("text_config")
    changes = {**overrides, **(inner if isinstance(inner, dict) else {})}
    changes.pop("text_config", None)
    rope = {name: changes.pop(name) for name in ROPE if name in changes}
    for name in sorted(changes.keys() - values.keys()):
        logger.warning("hf_overrides.%s: config.json has no such value, and the model may not read it", name)
    for name in sorted(changes.keys() & WITHOUT_EFFECT.keys()):
        logger.warning("hf_overrides.%s has no effect here: %s", name, WITHOUT_EFFECT[name])
    changed = values | {name: _merged(values.get(name), value) for name, value in changes.items()}
    return changed | _rope_of(values, rope) if rope else changed


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {name: _merged(old.get(name), value) for name, value in new.items()}


def _rope_of(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the rotary embedding, changed. Where each kind of layer has one, full attention's is
    changed, unless the change names kinds itself."""
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = changes.get(name)
        if name in changes and part is not None and not isinstance(part, dict):
            raise CheckpointError(f"hf_overrides.{name} is {part!r:.80}, expected an object")
        scaling |= part or {}
    if "rope_theta" in changes:
        scaling["rope_theta"] = changes["rope_theta"]
    config = ModelConfig(values)
    by_kind = config.mapping("rope_parameters").values
    if "full_attention" in by_kind:
        kinds = scaling if "full_attention" in scaling else {"full_attention": _with_type(scaling, by_kind)}
        return {"rope_parameters": _merged(by_kind, kinds)}
    # null takes the file's scaling away.
    old = {} if None in (changes.get("rope_scaling", 0), changes.get("rope_parameters", 0)) else config.rope.values
    new = old | _with_type(scaling, old)
    fields: dict[str, Any] = {"rope_parameters": new, "rope_scaling": None}
    return fields | ({"rope_theta": new["rope_theta"]} if "rope_theta" in new else {})


def _with_type(scaling: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope scaling with its type under the newer name. A scaling with a factor and no type gets the file's
    type, else linear, as in llama.cpp."""
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind is None and "factor" in scaling and old.get("rope_type", "default") == "default":
        kind = "linear"
    return scaling if kind is None else scaling | {"rope_type": kind}
