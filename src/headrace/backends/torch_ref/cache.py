"""The cache of each layer: keys and values by slot, in plain tensors.

Knows slots and blocks; must not know sequences. A cache of codes holds the floats that the codes stand for
(`rounded.as_stored`), so it shows the cost of rounding and saves no memory: the oracle of the native caches. Made by
`program`, used by `ops`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.backends.base import ITEM_BYTES, LayerShape, RopeTable
from headrace.backends.key_means import mean_key
from headrace.backends.states import StateCache
from headrace.backends.torch_ref.rounded import KINDS, as_stored
from headrace.backends.torch_ref.tensors import DTYPES, zeros


@dataclass(slots=True, eq=False)
class LayerCache:
    """keys [num_blocks, block_size, kv_heads, D] and values [..., V] of one layer, of block kind `kind`; where it
    `shares_key`, the values are a view of the keys' first numbers.

    rounds_to: the codes that the numbers are rounded to, if any. `mean` [kv_heads, D] is subtracted from int4's keys
    before they are rounded. `rope_table`: of the layer's last operator; attention `needs_scores` where they are more
    than a softmax sees (soft caps, sinks).
    """

    keys: Tensor
    values: Tensor
    kind: int = 0
    shares_key: bool = False
    rounds_to: str = ""
    mean: Tensor | None = None
    rope_table: RopeTable | None = field(default=None, repr=False)
    needs_scores: bool = False

    def store(self, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Write key [R, kv_heads, D] and value [R, kv_heads, V] to slots."""
        for part, numbers, mean in ((self.keys, key, self.mean), (self.values, value, None)):
            if numbers is not None:
                part.view(-1, *part.shape[2:])[slots] = self._rounded(numbers, mean).to(part.dtype)

    def _rounded(self, x: Tensor, mean: Tensor | None) -> Tensor:
        if not self.rounds_to:
            return x
        if mean is None:
            return as_stored(x.float(), self.rounds_to)
        return as_stored(x.float() - mean, self.rounds_to) + mean

    def parts(self) -> list[Tensor]:
        """Return the arrays, with blocks on the first axis."""
        return [self.keys] if self.shares_key else [self.keys, self.values]

    def learn_mean(self, probed: LayerCache, num_seqs: int, length: int) -> None:
        """Set `mean` from a cache that the probe has filled, one block for each of its sequences."""
        # A soft cap depends on the scores themselves, so there no mean may be subtracted; nor where it were a value's.
        if not probed.needs_scores and not self.shares_key:
            keys: Any = probed.keys[:num_seqs, :length].cpu().numpy()
            rope = probed.rope_table
            angles = (None, None) if rope is None else (rope.cos.cpu().numpy(), rope.sin.cpu().numpy())
            self.mean = torch.from_numpy(mean_key(keys, *angles)).to(self.keys.device)


def make_caches(
    shapes: Sequence[LayerShape], pool_sizes: Sequence[int], block_size: int, kv_dtype: str, device: torch.device
) -> list[Any]:
    """Return a zeroed `LayerCache` or `StateCache` for each layer, over the pool of its kind; a layer with a source has
    the source's."""
    caches: list[Any] = []
    dtype, rounds_to = DTYPES.get(kv_dtype, torch.float32), kv_dtype if kv_dtype in KINDS else ""
    for shape in shapes:
        if shape.states:
            slots = pool_sizes[shape.kind]
            arrays = [zeros((slots, *size), torch.float32, device) for size in shape.states]
            caches.append(StateCache(shape.kind, tuple(arrays)))
            continue
        if shape.source is not None:
            caches.append(caches[shape.source])
            continue
        size = (pool_sizes[shape.kind], block_size, shape.num_kv_heads)
        keys = zeros((*size, shape.head_dim), dtype, device)
        values = keys[..., : shape.value_size]
        if not shape.shares_key:
            values = zeros((*size, shape.value_size), dtype, device)
        caches.append(LayerCache(keys, values, shape.kind, shape.shares_key, rounds_to))
    return caches


def block_bytes(shapes: Sequence[LayerShape], kind: int, block_size: int, kv_dtype: str) -> int:
    """Return the bytes of a block of a kind over all its layers."""
    states = sum(math.prod(size) for shape in shapes if shape.kind == kind for size in shape.states)
    numbers = sum(
        shape.num_kv_heads * (shape.head_dim + (0 if shape.shares_key else shape.value_size))
        for shape in shapes
        if shape.kind == kind and shape.source is None
    )
    return 4 * states + numbers * block_size * ITEM_BYTES.get(kv_dtype, 4)
