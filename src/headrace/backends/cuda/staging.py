"""A step's ints on the host and on the device: small arrays side by side, sent by one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Staging:
    """int32 arrays of the given sizes: `host` as numpy arrays, `device` as tensors of the same numbers once sent.

    The last array is sent only where `send` says so: it is large and rarely used.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // 16) * 16)
        self._host = torch.zeros(begins[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(begins[-1], dtype=torch.int32, device=device)
        places = list(zip(begins, sizes, strict=False))
        self.host: list[NDArray[np.int32]] = [self._host[at : at + size].numpy() for at, size in places]
        self.device: list[Tensor] = [self._device[at : at + size] for at, size in places]
        self._few = begins[-2]

    @property
    def num_bytes(self) -> int:
        """Of the device's images."""
        return self._device.nbytes

    def send(self, whole: bool) -> None:
        """Copy the arrays to the device, behind all earlier copies."""
        size = len(self._host) if whole else self._few
        self._device[:size].copy_(self._host[:size], non_blocking=True)


class Mark:
    """A place in the work of a GPU that the host can wait for. On a CPU work is done when it is given."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Mark the end of the work given so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the work before the mark is done."""
        if self._event is not None:
            self._event.synchronize()


def to_host(rows: Sequence[Tensor]) -> Tensor:
    """Return a copy in host memory of rows of one size and type, complete once the work given so far is done."""
    first = rows[0]
    host = torch.empty(len(rows), *first.shape, dtype=first.dtype, pin_memory=first.is_cuda)
    for place, row in zip(host, rows, strict=True):
        place.copy_(row, non_blocking=True)
    return host
