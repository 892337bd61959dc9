"""The reference backend: every operator in plain torch, on a CPU or a CUDA device. The oracle of the other backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import psutil
import torch
from torch import Tensor

from headrace.backends.base import SampleText, SetUp, part_of_memory
from headrace.backends.torch_ref import cache, rounded
from headrace.backends.torch_ref.activations import float_activations
from headrace.backends.torch_ref.adapters import RefAdapters
from headrace.backends.torch_ref.ops import RefOps
from headrace.backends.torch_ref.program import EagerProgram
from headrace.backends.torch_ref.tensors import DTYPES, tensor
from headrace.quant.schemes import F8_SCHEMES, SCHEMES

SMALL_MODEL_BYTES = 64 * 2**20
"""Below it the calls are so short that a second thread costs more than it gives, at every batch size (ADR 0008)."""


class TorchRef:
    """Memory and operators of the reference backend. Weights and KV cache hold `dtype`; sums are float32."""

    name = "torch_ref"
    kv_dtypes = ("float32", "bfloat16", "float16", *rounded.KINDS)
    block_tables = ()
    schemes = SCHEMES | F8_SCHEMES
    mixes = True
    sees_wholes = True
    """All codes are computed as the floats that they stand for, as an oracle for the other backends."""

    def __init__(self, device: str, dtype: str) -> None:
        self.device = device
        self.dtype = dtype
        self.ops = RefOps(torch.device(device), DTYPES[dtype])

    def constant(self, values: Any, is_weight: bool = False) -> Tensor:
        """A norm or bias in the model's dtype. A rope table stays float32."""
        return tensor(values).to(self.ops.device, self.ops.dtype if is_weight else torch.float32, copy=is_weight)

    def table(self, values: Any) -> Tensor:
        return self.constant(values, is_weight=True)

    def layouts(self) -> dict[str, str]:
        return {}

    def take_adapters(self, num_slots: int, max_rank: int) -> RefAdapters:
        self.ops.adapters = RefAdapters(num_slots, max_rank, self.ops.device)
        return self.ops.adapters

    def choose_activations(
        self, model: Any, mode: str, num_threads: int, stated: str = "", text: SampleText | None = None
    ) -> str:
        kinds = {"f" if part.scheme is None else part.scheme.kind for part in self.ops.parts()}
        chosen = float_activations(self.name, mode, kinds)
        self.ops.rounds_inputs = mode == "fp8"
        return chosen

    def chooser(self, width: int, num_threads: int) -> None:
        return None

    def block_bytes(self, model: Any, kind: int, block_size: int, kv_dtype: str) -> int:
        return cache.block_bytes(model.cache_shapes, kind, block_size, kv_dtype)

    def program(self, model: Any, set_up: SetUp, feature_layers: Sequence[int] = ()) -> EagerProgram:
        num_threads = set_up.num_threads or self.num_threads(self.ops.weight_bytes)
        program = EagerProgram(
            model, self.ops, msgspec.structs.replace(set_up, num_threads=num_threads), feature_layers
        )
        if set_up.kv_dtype == "int4":
            program.measure_keys((set_up.max_blocks_per_seq - 1) * set_up.block_size + 1)
        return program

    def available_memory(self) -> int:
        if self.ops.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.ops.device)[0])
        return int(psutil.virtual_memory().available)

    def kv_budget(
        self, model: Any, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, utilization: float
    ) -> int:
        return part_of_memory(self.available_memory())

    def num_threads(self, weight_bytes: int) -> int:
        """Return the number of threads for a model of that size; bits do not depend on it."""
        return 1 if weight_bytes < SMALL_MODEL_BYTES else torch.get_num_threads()


def make(device: str, dtype: str) -> TorchRef:
    """Raises `ValueError` if there is no such device."""
    return TorchRef(device, dtype)
