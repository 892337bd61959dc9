"""Finds the tower of a model_type: the file with the type's name, whose `Tower` turns pictures into rows of the text.

Called by `engine.library.towers`. How to write one: docs/howto-add-a-model.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def names() -> list[str]:
    """Return every model_type whose pictures headrace reads."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name not in ("base", "rows"))


def find(model_type: object) -> Any:
    """Return the module of the tower of `model_type`, None without one."""
    return importlib.import_module(f"{__name__}.{model_type}") if model_type in names() else None
