"""Finds the tower of a model_type: the file with the type's name, whose `Tower` turns pictures into rows of the text.

Called by `engine.library.towers`. How to write one: docs/howto-add-a-model.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.models.towers.base import Tower


def names() -> list[str]:
    """Return every model_type whose pictures headrace reads."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name not in ("base", "rows"))


def find(model_type: object) -> Any:
    """Return the module of the tower of `model_type`, None without one."""
    return importlib.import_module(f"{__name__}.{model_type}") if model_type in names() else None


def kind_of(values: Mapping[str, Any]) -> type[Tower]:
    """Return the class of the tower of a config.json whose model_type has a module. Models of a type
    with a `choose` have one of several towers. Raises `CheckpointError`."""
    module = find(values["model_type"])
    kind: type[Tower] = module.choose(values["vision_config"]) if hasattr(module, "choose") else module.Tower
    return kind
