"""Finds a backend by the name of its folder and chooses the device. Called by `engine.library.load` alone."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace.backends.base import Backend

logger = logging.getLogger(__name__)

GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
NEEDS = {"torch_ref": {"torch": "torch"}, "cuda": {"torch": "cuda", "triton": "cuda"}}
"""Packages that backends need, each with the extra of headrace that brings it."""


def names() -> list[str]:
    """Return the names of the backends: the folders in this file's folder."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.ispkg)


def make_backend(name: str, device: str, dtype: str) -> Backend:
    """Return a backend with weights of `dtype`. Raises as `choose_backend`."""
    name, device = choose_backend(name, device)
    backend: Backend = importlib.import_module(f"headrace.backends.{name}").make(device, dtype)
    return backend


def choose_backend(name: str, device: str) -> tuple[str, str]:
    """Return the names of the backend and of the device ("auto" is cuda where there is one, else cpu).

    "auto" is cpu, the native kernels, on a CPU, and cuda, the Triton kernels, on a GPU; where those are missing it is
    torch_ref. Backend cuda also runs on device cpu, for tests: its kernels' twins, in plain torch. Raises
    `RequestError` naming what exists, or the package that is missing.
    """
    if name != "auto" and (not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name not in names()):
        raise RequestError("backend", name, "one of auto, " + ", ".join(names()))
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise RequestError("device", device, "auto, cpu, cuda or cuda:N")
    if device == "auto":
        device = "cuda" if name != "cpu" and has_cuda() else "cpu"
        if name == "cuda" and device == "cpu":
            bound = "auto, cpu or torch_ref on this machine: torch finds no CUDA device (for tests there is device cpu)"
            raise RequestError("backend", name, bound)
    if device != "cpu" and not has_cuda():
        raise RequestError("device", device, "cpu on this machine: torch finds no CUDA device")
    if name == "auto":
        name = _best_on_gpu() if device != "cpu" else _best_on_cpu()
    for package, extra in NEEDS.get(name, {}).items():
        if importlib.util.find_spec(package) is None:
            raise RequestError("backend", name, f"cpu, or install {package}: pip install 'headrace[{extra}]'")
    return name, device


def num_gpus() -> int:
    """Return the number of CUDA devices. Imports torch."""
    import torch

    return torch.cuda.device_count()


def has_cuda() -> bool:
    """Return whether torch is installed and finds a CUDA device. Import torch, which takes a second, only where there
    is a driver."""
    if importlib.util.find_spec("torch") is None or not any(Path(node).exists() for node in GPU_NODES):
        return False
    import torch

    return torch.cuda.is_available()


def _best_on_gpu() -> str:
    if "cuda" in names() and importlib.util.find_spec("triton") is not None:
        return "cuda"
    logger.warning("the GPU kernels need triton (the extra cuda): running on the slow reference path, torch_ref")
    return "torch_ref"


def _best_on_cpu() -> str:
    from headrace.backends.native import native

    module, reason = native()
    if module is not None:
        return "cpu"
    logger.warning("the native kernels are missing (%s): running on the slow reference path, torch_ref", reason)
    return "torch_ref"
