"""The GPU backend: Triton kernels on a tape, replayed by CUDA graphs. Also runs on a CPU, for tests: each kernel has a
twin in plain torch.

Values between operators have the model's dtype, sums are float32. Weights are kept in the model's dtype or as codes,
the cache as `kv_cache_dtype` says. Needs torch and triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from headrace.backends.base import SampleText, SetUp, part_of_memory
from headrace.backends.cuda import cache
from headrace.backends.cuda.cache import KVCache
from headrace.backends.cuda.matrix import schemes
from headrace.backends.cuda.ops import CudaOps
from headrace.backends.cuda.program import MAX_ROWS, CudaProgram, capability, planned_bytes
from headrace.backends.cuda.ranks import CudaRankOps
from headrace.backends.shares import DeviceSeat
from headrace.backends.step import StepSizes
from headrace.backends.torch_ref.activations import float_activations
from headrace.backends.torch_ref.tensors import DTYPES, tensor
from headrace.protocol.errors import RequestError

GRAPH_BYTES = 512 * 2**20
"""Left for CUDA graphs and the driver's own needs; not measured on hardware."""


class Cuda:
    """Memory and operators of the GPU backend."""

    name = "cuda"
    kv_dtypes = tuple(cache.STORED)
    block_tables = ()
    mixes = False
    sees_wholes = False

    def __init__(self, device: str, dtype: str) -> None:
        self.device, self.dtype = device, dtype
        self.ops: CudaOps | CudaRankOps = CudaOps(torch.device(device), DTYPES[dtype])
        self.schemes = schemes(DTYPES[dtype], capability(self.ops.device))
        if self.ops.device.index is not None:
            # Triton launches on the current device, wherever its arguments lie.
            torch.cuda.set_device(self.ops.device)

    def take_seat(self, seat: DeviceSeat) -> CudaRankOps:
        """Record one rank's part of all models from now on, and return the operators of it. Before any matrix.

        Raises `RequestError` for whole experts, which every rank has here."""
        if not isinstance(self.ops, CudaOps):
            raise ValueError("a backend has one seat")
        if seat.plan.whole_experts:
            raise RequestError("enable_expert_parallel", True, "left out on backend cuda")
        self.ops = CudaRankOps(self.ops, seat)
        return self.ops

    def take_stage(self) -> None:
        """Load some layers of all models from now on."""

    def constant(self, values: Any, is_weight: bool = False) -> Tensor:
        """Return a norm or bias in the model's dtype; a rope table stays float32."""
        return tensor(values).to(self.ops.device, self.ops.dtype if is_weight else torch.float32, copy=is_weight)

    def table(self, values: Any) -> Tensor:
        return self.constant(values, is_weight=True)

    def layouts(self) -> dict[str, str]:
        return {}

    def take_adapters(self, num_slots: int, max_rank: int) -> None:
        """Return None: there are no kernels for adapters as yet."""

    def choose_activations(
        self, model: Any, mode: str, num_threads: int, stated: str = "", text: SampleText | None = None
    ) -> str:
        kinds = {matrix.scheme.kind for matrix in self.ops.matrices}
        return float_activations(self.name, mode, kinds, always_fp8=True)

    def chooser(self, width: int, num_threads: int) -> None:
        return None

    def block_bytes(self, model: Any, kind: int, block_size: int, kv_dtype: str) -> int:
        # Each rank has its own device: the fullest of them counts.
        return max(cache.block_bytes(shapes, kind, block_size, kv_dtype) for shapes in self.ops.every_cache(model))

    def program(self, model: Any, set_up: SetUp, feature_layers: Sequence[int] = ()) -> CudaProgram:
        """Raises `RequestError` for blocks of a size that the kernels do not have."""
        block_size, per_seq = set_up.block_size, set_up.max_blocks_per_seq
        if block_size & (block_size - 1):
            raise RequestError("block_size", block_size, "a power of two for backend cuda")
        max_rows = min(MAX_ROWS, set_up.max_num_batched_tokens)
        max_chunks = min(set_up.max_num_seqs, max_rows)
        shapes = self.ops.cache_shapes(model)
        kv = KVCache(shapes, set_up.pool_sizes, block_size, set_up.kv_dtype, self.ops.device)
        sizes = StepSizes(max_rows, max_chunks, max_chunks * per_seq)
        return CudaProgram(model, self.ops, kv, sizes, per_seq * block_size, feature_layers)

    def available_memory(self) -> int:
        if self.ops.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.ops.device)[0])
        return int(psutil.virtual_memory().available)

    def kv_budget(
        self, model: Any, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, utilization: float
    ) -> int:
        """On a GPU: its share of the memory, less the memory in use and the program's needs. Nothing is run."""
        if self.ops.device.type != "cuda":
            return part_of_memory(self.available_memory())
        # The pieces that joined experts came in are free, but torch keeps them.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.ops.device)
        max_rows = min(MAX_ROWS, max_num_batched_tokens)
        planned = planned_bytes(model, self.ops, max_rows, min(max_num_seqs, max_rows), max_model_len)
        return max(int(utilization * total) - (total - free) - planned - GRAPH_BYTES, 0)


def make(device: str, dtype: str) -> Cuda:
    return Cuda(device, dtype)
