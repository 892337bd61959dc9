"""Draws tokens where the logits lie: the arrays that the kernel `choose` reads, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.cuda.kernels.choose import LEFT, MARGIN, Packed, choose, pack
from headrace.backends.graph import LOGITS
from headrace.backends.step import Draw


class Drawing:
    """For the rows of `logits` [S, V] float32, of which `sizes[LOGITS]` hold a step's."""

    def __init__(self, logits: Tensor, sizes: Tensor) -> None:
        num_rows, self._width = logits.shape
        pinned = logits.device.type == "cuda"

        def pair(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            host = torch.zeros(*shape, dtype=dtype, pin_memory=pinned)
            return host, torch.zeros(*shape, dtype=dtype, device=logits.device)

        self._pairs = (
            pair(num_rows, 3, dtype=torch.float64),
            pair(num_rows, 4, dtype=torch.int64),
            pair(num_rows, -(-self._width // 32), dtype=torch.int32),
        )
        self._arrays: list[NDArray[np.generic]] = [host.numpy() for host, _ in self._pairs]
        self._ids, self._margins = pair(num_rows, dtype=torch.int32)[1], pair(num_rows, dtype=torch.float64)[1]
        scratch = pair(num_rows, 256, dtype=torch.int64)[1]
        packed = Packed(*(image for _, image in self._pairs))
        self._launch = choose(logits, packed, scratch, self._ids, self._margins, sizes, LOGITS)

    def send(self, indices: list[int], draws: Sequence[Draw]) -> None:
        """Send to the device how the rows `indices` are drawn."""
        pack(indices, list(draws), *self._arrays)  # type: ignore[arg-type]
        masked = any(each.mask is not None for each in draws)
        for host, image in self._pairs if masked else self._pairs[:2]:
            image.copy_(host, non_blocking=True)

    def run(self) -> None:
        """Draw the rows that were sent last, once their logits are computed."""
        if self._ids.device.type == "cuda":
            self._launch.run_gpu()
        else:
            self._launch.run_twin()

    def choices(self, best: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of the first rows, on the device, and which of them are certain: those drawn last, and
        `best` of the rows that were left out."""
        num_rows = len(best)
        is_drawn = self._pairs[1][1][:num_rows, 3] != LEFT
        ids = torch.where(is_drawn, self._ids[:num_rows], best).clamp(0, self._width - 1)
        return ids, ~is_drawn | (self._margins[:num_rows] > MARGIN)

    def draw(self, indices: list[int], draws: Sequence[Draw]) -> list[int]:
        """Return the tokens of the rows `indices`; -1 where none is allowed, or the two best are too close to tell."""
        self.send(indices, draws)
        self.run()
        ids, margins = self._ids.cpu().numpy()[indices], self._margins.cpu().numpy()[indices]
        return [int(i) for i in np.where(margins > MARGIN, ids, -1)]
