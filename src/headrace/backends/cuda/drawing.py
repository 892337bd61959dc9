"""Draws tokens where the logits lie: the arrays that the kernels of `choose` read, on the host and on the device, and
what the host receives of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.cuda.kernels.carry import REPORT, carry, report
from headrace.backends.cuda.kernels.choose import MARGIN, Packed, Space, choose, make_space, pack
from headrace.backends.cuda.kernels.settle import LEFT
from headrace.backends.cuda.launch import Launch
from headrace.backends.cuda.replay import Replay
from headrace.backends.graph import LOGITS
from headrace.backends.step import Draw


class Drawing:
    """For the rows of `logits` [S, V] float32, of which `sizes[LOGITS]` hold a step's.

    Args:
        best: ids, finite and values of `best` for these rows.
        finite_rows: flags of the rows of hidden states, int32 [R].
        buckets: numbers of rows that launches are bound for, ascending, the last S.
    """

    def __init__(
        self,
        logits: Tensor,
        sizes: Tensor,
        best: tuple[Tensor, Tensor, Tensor],
        finite_rows: Tensor,
        buckets: Sequence[int],
    ) -> None:
        num_rows, width = logits.shape
        device = logits.device
        pinned = device.type == "cuda"
        self._logits, self._sizes, self._values = logits, sizes, best[2]
        # Whole numbers, then real ones in the same memory: one copy sends both.
        self._host = torch.zeros(7 * num_rows, dtype=torch.int64, pin_memory=pinned)
        self._image = torch.zeros(7 * num_rows, dtype=torch.int64, device=device)
        self._masks = torch.zeros(num_rows, -(-width // 32), dtype=torch.int32, pin_memory=pinned)
        self._arrays: tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int32]] = (
            self._host[4 * num_rows :].view(torch.float64).view(num_rows, 3).numpy(),
            self._host[: 4 * num_rows].view(num_rows, 4).numpy(),
            self._masks.numpy(),
        )
        wholes = self._image[: 4 * num_rows].view(num_rows, 4)
        self._packed = Packed(
            self._image[4 * num_rows :].view(torch.float64).view(num_rows, 3),
            wholes,
            torch.zeros(num_rows, -(-width // 32), dtype=torch.int32, device=device),
        )
        wholes[:, 3] = LEFT
        self._is_masked, self._is_blank = False, True
        self._space: Space = make_space(num_rows, width, device)
        self._ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._margins = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self._highest = self._launches(num_rows)[0]
        self.replay = Replay(lambda size: [*self._launches(size)[1:]], buckets, device, (sizes,))
        # The tokens of the last step come first; the next one's inputs are taken from here.
        self._outcome = torch.zeros(3 * num_rows + len(finite_rows), dtype=torch.int32, device=device)
        margin = torch.full((1,), MARGIN, dtype=torch.float64, device=device)
        tokens = self._ids, self._margins
        self._report = report(tokens, wholes, best, finite_rows, self._outcome, margin, sizes, width)

    def _launches(self, size: int) -> list[Launch]:
        rows = [part[:size] for part in (self._logits, self._values, self._ids, self._margins)]
        logits, values, ids, margins = rows
        return choose(logits, self._packed, values, self._space, ids, margins, self._sizes, LOGITS)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        others = (self._image, self._packed.masks, self._ids, self._margins, self._outcome)
        return self._space.num_bytes + sum(int(each.nbytes) for each in others)

    def send(self, indices: list[int], draws: Sequence[Draw]) -> None:
        """Send to the device how the rows `indices` are drawn."""
        if not indices and self._is_blank:
            return
        pack(indices, list(draws), *self._arrays)
        self._is_masked, self._is_blank = any(each.mask is not None for each in draws), not indices
        self._image.copy_(self._host, non_blocking=True)
        if self._is_masked:
            self._packed.masks.copy_(self._masks, non_blocking=True)

    def run(self, num_rows: int) -> None:
        """Draw, of the first `num_rows` rows, those that were sent last, once their logits are computed."""
        if self._is_masked:
            self._run(self._highest, num_rows)
        self.replay.run(num_rows)

    def report(self, num_rows: int, num_logits: int) -> Tensor:
        """Return what the host receives of a step of so many rows and rows of logits, on the device, int32.

        That is tokens, flags of finite logits, flags of certain tokens, flags of finite rows. Tokens are those drawn
        last, and the likeliest of the rows that were left out.
        """
        self._run(self._report, -(-max(num_rows, num_logits) // REPORT.configs[0].tiles["BLOCK"]))
        return self._outcome[: 3 * num_logits + num_rows]

    def carry(self, places: Tensor, token_ids: Tensor, most: int) -> Launch:
        """Return the launch that writes the tokens of the last step at `places` into `token_ids`, of `most` rows."""
        return carry(places, self._outcome, token_ids, self._sizes, most)

    def _run(self, launch: Launch, num_programs: int) -> None:
        """Run a launch with so many programs in the first dimension of its grid."""
        if self._logits.is_cuda:
            dataclasses.replace(launch, grid=(num_programs, *launch.grid[1:])).run_gpu()
        else:
            launch.run_twin()

    def draw(self, indices: list[int], draws: Sequence[Draw], num_rows: int) -> list[int]:
        """Return the tokens of the rows `indices` of the step's `num_rows`; -1 where none is allowed, or the two best
        are too close to tell."""
        self.send(indices, draws)
        self.run(num_rows)
        ids, margins = self._ids.cpu().numpy()[indices], self._margins.cpu().numpy()[indices]
        return [int(i) for i in np.where(margins > MARGIN, ids, -1)]

    def close(self) -> None:
        self.replay.close()
