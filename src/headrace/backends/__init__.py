"""Finds a backend by the name of its folder and picks the device. Called by `runner.build` alone."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from typing import TYPE_CHECKING

from headrace.errors import RequestError

if TYPE_CHECKING:
    import torch

    from headrace.backends.base import Backend


def names() -> list[str]:
    """Names of the backends that exist: the folders beside this file."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.ispkg)


def make_backend(name: str, device: str, dtype: torch.dtype) -> Backend:
    """The backend `name` ("auto" is torch_ref) on `device` ("auto" is cuda where there is one, else cpu).

    Raises `RequestError` naming what exists.
    """
    import torch

    if name == "auto":
        name = "torch_ref"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name not in names():
        raise RequestError("backend", name, "one of auto, " + ", ".join(names()))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise RequestError("device", device, "auto, cpu, cuda or cuda:N")
    if device != "cpu" and not torch.cuda.is_available():
        raise RequestError("device", device, "cpu on this machine: torch finds no CUDA device")
    made: Backend = importlib.import_module(f"headrace.backends.{name}").make(torch.device(device), dtype)
    return made
