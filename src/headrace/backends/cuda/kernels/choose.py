"""Draws one token for each row of logits: mask, temperature, min-p, top-k, top-p, and keyed Gumbel noise.

The tokens are the same as `sampling.sampler`'s for the same logits. `survey` looks at the parts of each row, and draws
where nothing is cut; `settle` makes the cuts of the other rows. Products and sums of float64 are not fused. The
logarithm of a GPU may differ in its last bit from a CPU's: where the two best sums lie within `MARGIN`, the row is left
to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.cuda.kernels.ranking import NUM_BINS
from headrace.backends.cuda.kernels.settle import DRAWS, LEFT, MASKED, SETTLE
from headrace.backends.cuda.kernels.survey import HIGHEST, PICK, SURVEY
from headrace.backends.cuda.launch import Argument, Config, Kernel, Launch
from headrace.backends.step import Draw

MARGIN = 1e-9
ROOM = 4096
"""Tokens of a row that `PICK` copies at most."""

KERNELS = (HIGHEST, SURVEY, PICK, SETTLE)


class Packed(NamedTuple):
    """How rows are drawn, as `pack` writes it: reals float64 [S, 3], wholes int64 [S, 4], masks int32
    [S, ceil(V / 32)]."""

    reals: Tensor
    wholes: Tensor
    masks: Tensor


class Space(NamedTuple):
    """Memory that the launches share, for S rows of P parts.

    highest float32 [S, P]: the greatest logit of each part of a row with a mask.
    sums, seconds float64, winners int32 [S, P]: of each part the best sum, the next, the token.
    part_mass int64 [S, P], counts int32 [S, P, bins]: of each part.
    arrived int32 [S]: parts that are done, 0 between two runs.
    offsets int32 [S, P + 1]: where the picked tokens of each part begin, and their number.
    reaches int64 [S, 2]: the last bin that is picked, and the mass of the row.
    picked float32, picked_ids int32, masses int64 [S, room]: the logits, tokens and weights that were picked.
    scratch int64 [S, 256].
    """

    highest: Tensor
    sums: Tensor
    seconds: Tensor
    winners: Tensor
    part_mass: Tensor
    counts: Tensor
    arrived: Tensor
    offsets: Tensor
    reaches: Tensor
    picked: Tensor
    picked_ids: Tensor
    masses: Tensor
    scratch: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(int(part.nbytes) for part in self)


def make_space(
    num_rows: int, width: int, device: torch.device | str, room: int = ROOM, block: int | None = None
) -> Space:
    """Return memory to draw from logits [num_rows, width] in parts of `block` tokens, the default's if None."""
    parts = -(-width // (block or SURVEY.configs[0].tiles["BLOCK"]))

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    return Space(
        highest=zeros(parts, dtype=torch.float32),
        sums=zeros(parts, dtype=torch.float64),
        seconds=zeros(parts, dtype=torch.float64),
        winners=zeros(parts, dtype=torch.int32),
        part_mass=zeros(parts, dtype=torch.int64),
        counts=zeros(parts, NUM_BINS.value, dtype=torch.int32),
        arrived=zeros(dtype=torch.int32),
        offsets=zeros(parts + 1, dtype=torch.int32),
        reaches=zeros(2, dtype=torch.int64),
        picked=zeros(room, dtype=torch.float32),
        picked_ids=zeros(room, dtype=torch.int32),
        masses=zeros(room, dtype=torch.int64),
        scratch=zeros(256, dtype=torch.int64),
    )


def choose(
    logits: Tensor,
    packed: Packed,
    values: Tensor,
    space: Space,
    ids: Tensor,
    margins: Tensor,
    sizes: Tensor,
    dim: int,
    *,
    block: int | None = None,
    last_block: int | None = None,
) -> list[Launch]:
    """Draw a token from each row of logits [S, V] float32: ids int32 [S], -1 where none is allowed.

    values float32 [S]: the greatest of each row, as `best` writes it.
    margins float64 [S]: by how much the best sum of scaled logit and noise exceeds the next, if that is less than 2 *
    MARGIN, else something greater; -inf where no token is allowed.
    block: tokens of a part, for which `space` must be made; last_block: those that `SETTLE` takes at a time. The
    defaults if None.
    """
    num_rows, width = logits.shape
    parts = space.highest.shape[1]
    arguments: dict[str, Argument] = {
        "logits": logits, "ld": logits.stride(0), "masks": packed.masks, "ld_masks": packed.masks.stride(0),
        "reals": packed.reals, "wholes": packed.wholes, "values": values, **space._asdict(), "ids": ids,
        "margins": margins, "sizes": sizes, "width": width, "PARTS": parts, "LANES": triton.next_power_of_2(parts),
        "ROOM": space.picked.shape[1], "DIM": dim,
    }  # fmt: skip

    def launch(kernel: Kernel, grid: tuple[int, ...], size: int | None) -> Launch:
        default = kernel.configs[0]
        config = Config({"BLOCK": size}, default.num_warps) if size else default
        used_arguments = {name: value for name, value in arguments.items() if name in kernel.jit.arg_names}
        return Launch(kernel, grid, used_arguments, config)

    listed = [launch(kernel, (num_rows, parts), block) for kernel in (HIGHEST, SURVEY, PICK)]
    return [*listed, launch(SETTLE, (num_rows,), last_block)]


def pack(
    indices: list[int],
    draws: list[Draw],
    reals: NDArray[np.float64],
    wholes: NDArray[np.int64],
    masks: NDArray[np.int32],
) -> None:
    """Write the numbers of the rows `indices` into the arrays that the kernels read; other rows are left out."""
    wholes[:, 3] = LEFT
    for i, each in zip(indices, draws, strict=True):
        reals[i] = each.temperature, each.floor, each.top_p
        flags = (DRAWS if each.temperature > 0 else 0) | (MASKED if each.mask is not None else 0)
        wholes[i] = each.top_k, np.uint64(each.seed).astype(np.int64), each.position, flags
        if each.mask is not None:
            masks[i] = each.mask.view(np.int32)
