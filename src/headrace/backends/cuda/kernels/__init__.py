"""The kernels of the cuda backend, one operator's in each file: a Triton function, its twin in torch, its configs."""

from __future__ import annotations

import importlib
import pkgutil


def names() -> list[str]:
    """Return the names of all kernels, for tools."""
    from headrace.backends.cuda.launch import Kernel

    listed = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        listed += [each.name.lstrip("_") for each in vars(module).values() if isinstance(each, Kernel)]
    return sorted(set(listed))
