"""`EagerProgram`: a model run operator by operator over its KV cache.

Owns the cache and the hidden states of the last step. Knows chunks and block tables; must not know parameters of
requests. Made by the backend, called by `runner.runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.base import Chunks, HostLogits
from headrace.backends.key_means import LENGTH, NUM_SEQS, probe_tokens
from headrace.backends.torch_ref.batch import make_forward_batch
from headrace.backends.torch_ref.ops import RefOps
from headrace.backends.torch_ref.rounded import KINDS, RoundedCache

UNBOUNDED = 2**31


class EagerProgram:
    """`Program` of torch_ref. The cache is [layers, 2, num_blocks, block_size, kv_heads, head_dim]."""

    max_rows = UNBOUNDED
    max_logits = UNBOUNDED

    def __init__(
        self,
        model: Any,
        ops: RefOps,
        kv: Tensor,
        num_threads: int,
        layers: Sequence[int] = (),
        kv_dtype: str = "float32",
    ) -> None:
        self.model, self.ops, self.kv = model, ops, kv
        self._caches: Any = [RoundedCache(layer, kv_dtype) for layer in kv] if kv_dtype in KINDS else kv
        self.num_threads = num_threads
        self.vocab_size: int = model.vocab_size
        self.num_blocks, self.block_size = kv.shape[2], kv.shape[3]
        self._hidden: Tensor | None = None
        self._layers, self._streams = layers, [kv.new_empty(0)] * len(layers)

    def measure_keys(self, max_len: int) -> None:
        """Run the probe over a float32 cache, and set each layer's mean key."""
        length = min(LENGTH, max_len)
        sizes = (len(self.kv), 2, NUM_SEQS, length, *self.kv.shape[4:])
        probe = EagerProgram(self.model, self.ops, self.kv.new_zeros(sizes), self.num_threads)
        probe._caches = [RoundedCache(layer, "float32") for layer in probe.kv]
        tokens = probe_tokens(self.vocab_size, length)
        # A drafter sees zeros beside its tokens, as on the native backend.
        features = np.zeros((NUM_SEQS * length, self.model.feature_size), np.float32)
        probe.forward(Chunks([0] * NUM_SEQS, tokens, [[i] for i in range(NUM_SEQS)]), [], features)
        for cache, probed in zip(self._caches, probe._caches, strict=True):
            cache.learn_mean(probed, NUM_SEQS, length)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with torch.inference_mode():
            for source, target in pairs:
                self.kv[:, :, target] = self.kv[:, :, source]

    def read_block(self, block: int) -> bytes:
        """Return all that a block of the cache holds."""
        return self.kv[:, :, block].contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """Set a block to what `read_block` returned."""
        part = self.kv[:, :, block]
        with torch.inference_mode():
            part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(part.dtype).view(part.shape))

    @torch.inference_mode()
    def forward(
        self, chunks: Chunks, rows: list[int], features: NDArray[np.float32] | None = None
    ) -> tuple[list[bool], HostLogits]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            batch = make_forward_batch(chunks, self.block_size, self.kv.device)
            if features is not None:
                batch.features = torch.from_numpy(features).to(self.kv.device, self.ops.dtype)
            streams: list[Tensor] = []
            self._hidden = hidden = self.model.forward(batch, self._caches, streams if self._layers else None)
            self._streams = [streams[layer] for layer in self._layers]
            # A chunk without logits is checked too: what it wrote to the cache must not be published.
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
        row_ids = torch.tensor(rows, device=self._hidden.device)
        hidden: NDArray[np.float32] = self.model.final(self._hidden, row_ids).float().cpu().numpy()
        return hidden

    @torch.inference_mode()
    def features(self, rows: list[int]) -> NDArray[np.float32]:
        if not self._layers:
            return self.hidden_states(rows)
        row_ids = torch.tensor(rows, dtype=torch.int64, device=self.kv.device)
        features: NDArray[np.float32] = torch.cat([x[row_ids] for x in self._streams], dim=1).float().cpu().numpy()
        return features

    def close(self) -> None:
        self.kv, self._caches, self._hidden, self._streams = self.kv.new_empty(0), [], None, []

    def _logits(self, rows: list[int]) -> HostLogits:
        if not rows or self._hidden is None:
            return HostLogits(np.empty((0, self.vocab_size), np.float32), [], [])
        row_ids = torch.tensor(rows, device=self._hidden.device)
        logits = self.model.logits(self._hidden, row_ids).float()
        # -inf forbids a token; a row of -inf alone is not finite.
        best, ids = logits.max(dim=-1)
        finite = (torch.isfinite(best) & ~torch.isnan(logits).any(dim=-1)).tolist()
        return HostLogits(logits.cpu().numpy(), finite, ids.tolist())
