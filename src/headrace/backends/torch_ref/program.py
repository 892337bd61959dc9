"""`EagerProgram`: a model run operator by operator over its KV cache.

Owns the cache and the hidden states of the last step. Knows chunks and block tables; must not know parameters of
requests. Made by the backend, called by `runner.runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.base import SetUp
from headrace.backends.key_means import LENGTH, NUM_SEQS, probe_tokens
from headrace.backends.reads import ReadRows
from headrace.backends.states import StateCache
from headrace.backends.step import Chunks, HostLogits, num_block_kinds
from headrace.backends.torch_ref.batch import make_forward_batch
from headrace.backends.torch_ref.cache import LayerCache, make_caches
from headrace.backends.torch_ref.ops import RefOps
from headrace.protocol.kinds import CacheKind

UNBOUNDED = 2**31


class EagerProgram:
    """`Program` of torch_ref, over a cache for each layer. It computes all rows, and gives those that are read."""

    max_rows = UNBOUNDED
    max_logits = UNBOUNDED

    def __init__(self, model: Any, ops: RefOps, set_up: SetUp, layers: Sequence[int] = ()) -> None:
        self.model, self.ops, self._set_up = model, ops, set_up
        self.kinds: tuple[CacheKind, ...] = model.kinds
        self.pool_sizes, self.block_size = set_up.pool_sizes, set_up.block_size
        self.num_blocks = self.pool_sizes[0]
        self.caches = make_caches(model.cache_shapes, self.pool_sizes, self.block_size, set_up.kv_dtype, ops.device)
        self.num_threads = set_up.num_threads
        self.vocab_size: int = model.vocab_size
        self._hidden: Tensor | None = None
        self._read = ReadRows(Chunks([], [], []))
        self._layers, self._streams = layers, [torch.empty(0)] * len(layers)

    def measure_keys(self, max_len: int) -> None:
        """Run the probe over a float32 cache, and set each layer's mean key."""
        length, pool_sizes = min(LENGTH, max_len), (NUM_SEQS,) * len(self.kinds)
        probe_set_up = msgspec.structs.replace(
            self._set_up, pool_sizes=pool_sizes, block_size=length, kv_dtype="float32"
        )
        probe = EagerProgram(self.model, self.ops, probe_set_up)
        tokens = probe_tokens(self.vocab_size, length)
        probe.forward(Chunks([0] * NUM_SEQS, tokens, [[i] for i in range(NUM_SEQS)], states_in=[-1] * NUM_SEQS), [])
        for cache, probed in zip(self.caches, probe.caches, strict=True):
            if isinstance(cache, LayerCache) and isinstance(probed, LayerCache):
                cache.learn_mean(probed, NUM_SEQS, length)

    def _parts(self, kind: int | None) -> list[Tensor]:
        caches = {id(cache): cache for cache in self.caches if kind in (cache.kind, None)}
        blocks = [part for cache in caches.values() if isinstance(cache, LayerCache) for part in cache.parts()]
        states = [part for cache in caches.values() if isinstance(cache, StateCache) for part in cache.arrays]
        return blocks if kind is None else blocks or states

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        with torch.inference_mode():
            for part in self._parts(kind):
                for source, target in pairs:
                    part[target] = part[source]

    def read_block(self, block: int, kind: int | None = None) -> bytes:
        """Return all that a block holds, in one kind or in every block kind; or a slot of a state kind."""
        parts = [part[block].contiguous().view(torch.uint8).cpu().numpy() for part in self._parts(kind)]
        return b"".join(part.tobytes() for part in parts)

    def write_block(self, block: int, data: bytes, kind: int | None = None) -> None:
        """Set a block to the result of `read_block`."""
        with torch.inference_mode():
            for part in self._parts(kind):
                to = part[block]
                raw, data = data[: to.nbytes], data[to.nbytes :]
                to.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(to.dtype).view(to.shape))

    @torch.inference_mode()
    def forward(
        self, chunks: Chunks, rows: list[int], features: NDArray[np.float32] | None = None
    ) -> tuple[list[bool], HostLogits]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            batch = make_forward_batch(chunks, self.block_size, self.ops.device, num_block_kinds(self.kinds))
            if self.ops.adapters is not None:
                self.ops.adapters.follow(chunks)
            if size := self.model.feature_size:
                if features is None:
                    features = np.broadcast_to(np.float32(self.model.no_features), (sum(batch.lens), size)).copy()
                batch.features = torch.from_numpy(features).to(self.ops.device, self.ops.dtype)
            self._read = ReadRows(chunks, rows)
            batch.read = frozenset(self._read.rows().tolist())
            streams: list[Tensor] = []
            self._hidden = hidden = self.model.forward(batch, self.caches, streams if self._layers else None)
            self._streams = [streams[layer] for layer in self._layers]
            # A chunk without logits is checked too: its rows in the cache must not be published.
            finite = [bool(part.all()) for part in torch.split(torch.isfinite(hidden).all(dim=-1), batch.lens)]
            return finite, self._logits(rows)
        finally:
            torch.set_num_threads(before)  # a library must not change the process's setting

    @torch.inference_mode()
    def logits(self, rows: list[int]) -> HostLogits:
        return self._logits(rows)

    @torch.inference_mode()
    def hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        if not rows or self._hidden is None:
            return np.empty((0, self.model.hidden_size), np.float32)
        self._read.places(rows)
        row_ids = torch.tensor(rows, device=self._hidden.device)
        hidden: NDArray[np.float32] = self.model.final(self._hidden, row_ids).float().cpu().numpy()
        return hidden

    @torch.inference_mode()
    def features(self, rows: list[int]) -> NDArray[np.float32]:
        if not self._layers:
            return self.hidden_states(rows)
        self._read.places(rows)
        row_ids = torch.tensor(rows, dtype=torch.int64, device=self.ops.device)
        features: NDArray[np.float32] = torch.cat([x[row_ids] for x in self._streams], dim=1).float().cpu().numpy()
        return features

    def close(self) -> None:
        self.caches, self._hidden, self._streams = [], None, []

    def _logits(self, rows: list[int]) -> HostLogits:
        if not rows or self._hidden is None:
            return HostLogits(np.empty((0, self.vocab_size), np.float32), [], [])
        self._read.places(rows)
        row_ids = torch.tensor(rows, device=self._hidden.device)
        logits = self.model.logits(self._hidden, row_ids).float()
        # -inf forbids a token; a row of -inf alone is not finite.
        best, ids = logits.max(dim=-1)
        finite = (torch.isfinite(best) & ~torch.isnan(logits).any(dim=-1)).tolist()
        return HostLogits(logits.cpu().numpy(), finite, ids.tolist())
