"""The reference backend: every operator in plain torch, on a CPU or a CUDA device. The oracle of the other backends."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from headrace.backends.torch_ref.ops import RefOps

SMALL_MODEL_BYTES = 64 * 2**20
"""Below it the calls are so short that a second thread costs more than it gives, at every batch size (ADR 0008)."""


class TorchRef:
    """Memory and operators of the reference backend. Weights and KV cache hold `dtype`; sums are float32."""

    name = "torch_ref"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.ops = RefOps(device, dtype)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> Tensor:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def available_memory(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)

    def num_threads(self, model_bytes: int) -> int:
        """Threads to compute with; bits do not depend on them."""
        return 1 if model_bytes < SMALL_MODEL_BYTES else torch.get_num_threads()


def make(device: torch.device, dtype: torch.dtype) -> TorchRef:
    return TorchRef(device, dtype)
