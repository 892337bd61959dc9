"""Models with random weights made on the device: no checkpoint is read."""

from __future__ import annotations

import zlib
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from headrace import models
from headrace.backends.base import SetUp
from headrace.backends.cuda import Cuda
from headrace.backends.cuda.program import CudaProgram
from headrace.backends.cuda.replay import Replay
from headrace.models.config import ModelConfig
from headrace.models.weights import ByHead, Expert, Linear, Weights
from headrace.quant.base import QWeight
from headrace.quant.schemes import Quantization, Scheme, parse

BLOCK = 16
"""Positions of a block of the cache."""


class RandomMatrix:
    """A `MatrixSource` of normal numbers, or of codes of `scheme`: the same for the same name on the same device."""

    columns = None
    inputs = ()
    permutation = None

    def __init__(self, name: str, num_out: int, num_in: int, scheme: Scheme, device: torch.device) -> None:
        self.name, self.num_out, self.num_in, self.scheme, self.device = name, num_out, num_in, scheme, device

    def slab(self, first: int, last: int) -> QWeight:
        torch.manual_seed(zlib.crc32(f"{self.name} {first}".encode()))
        rows, size = last - first, self.num_in**-0.5
        if self.scheme.kind == "f":
            return QWeight((torch.randn(rows, self.num_in, device=self.device) * size).bfloat16())
        return random_codes(rows, self.num_in, self.scheme, self.device)


def random_codes(num_out: int, num_in: int, scheme: Scheme, device: torch.device | str) -> QWeight:
    """Return random codes of 4 or 8 bits, with scales that give weights of about 1 / sqrt(num_in)."""
    bits = 4 if scheme.kind == "i4" else 8
    group = scheme.group or num_in
    low, high = (0, 16) if bits == 4 else (-127, 128)
    codes = torch.randint(low, high, (num_out, num_in), device=device, dtype=torch.int16)
    shape = (num_out, -(-num_in // group))
    size = num_in**-0.5 / 2 ** (bits - 2)
    scales = (torch.rand(shape, device=device) + 0.5) * size
    mins = -8.0 * scales * torch.rand(shape, device=device) if scheme.has_min else None
    zeros = torch.full(shape, 8.0, device=device) if bits == 4 and not scheme.has_min else None
    return QWeight(codes, scales, zeros, mins, group, bits)


OF_EXPERTS = " experts"
"""Ends the name of a quantisation that experts alone have."""


class RandomWeights:
    """`Weights` of a model whose tensors have the shapes that it asks for."""

    def __init__(self, backend: Any, quantization: str = "") -> None:
        self.backend, self.device = backend, backend.ops.device
        self.plain = Scheme("f", dtype=backend.dtype)
        self.of_experts = quantization.endswith(OF_EXPERTS)
        name = quantization.removesuffix(OF_EXPERTS)
        self.quantization: Quantization | None = parse(name) if name else None

    def has(self, name: str) -> bool:
        # As GGUF files have the rates of states: negative numbers, which a positive one would let grow.
        return not name.endswith(".rates")

    def has_prefix(self, prefix: str) -> bool:
        return True

    def constant(self, values: Any) -> Any:
        return self.backend.constant(values)

    def constant_table(self, values: Any) -> Any:
        return self.backend.table(values)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        return self.backend.constant(self._small(name, shape), is_weight=True)

    def numbers(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._small(name, shape).cpu().numpy()

    def table(self, name: str, shape: tuple[int, int]) -> Any:
        torch.manual_seed(zlib.crc32(name.encode()))
        return self.backend.table(torch.randn(shape, device=self.device))

    def by_head(self, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        return ByHead.separate(cast(Weights, self), name, num_in, num_heads, key_dim, value_dim)

    def _small(self, name: str, shape: tuple[int, ...]) -> Tensor:
        torch.manual_seed(zlib.crc32(name.encode()))
        return 1 + 0.1 * torch.randn(shape, device=self.device)

    def matrix(self, linear: Linear) -> Any:
        is_plain = linear.plain or (self.of_experts and not isinstance(linear.cut, Expert))
        scheme = self.plain if self.quantization is None or is_plain else self.quantization.layer
        bias = 0.1 * self._small(f"{linear.names[0]}.bias", (sum(linear.num_outs),)) if linear.bias else None
        return self._matrix(linear.names[0], sum(linear.num_outs), linear.num_in, scheme, bias)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Tensor, Any]:
        scheme = self.plain if self.quantization is None or self.of_experts else self.quantization.head
        return self.table(embedding, shape), self._matrix(head, *shape, scheme)

    def _matrix(self, name: str, num_out: int, num_in: int, scheme: Scheme, bias: Tensor | None = None) -> Any:
        return self.backend.ops.matrix(RandomMatrix(name, num_out, num_in, scheme, self.device), bias)


def make_model(config: dict[str, Any], backend: Any, quantization: str, max_len: int) -> models.Model:
    """Return a model on a backend, with the weights of its tensors' names."""
    weights: Any = RandomWeights(backend, quantization)
    model: models.Model = models.find(config["model_type"]).Model(ModelConfig(config), weights, backend.ops, max_len)
    return model


def make_program(
    config: dict[str, Any], device: str, quantization: str, max_rows: int, max_seqs: int, max_len: int, positions: int
) -> tuple[CudaProgram, Cuda]:
    """Return a program whose cache has room for `positions`, and is full of normal numbers. Nothing is captured yet:
    its kernels can be compiled in many processes first."""
    backend = Cuda(device, "bfloat16")
    model = make_model(config, backend, quantization, max_len)
    num_blocks, per_seq = (-(-size // BLOCK) for size in (positions, max_len))
    with mock.patch.object(Replay, "prepare"):
        pools = (num_blocks,) * len(model.kinds)
        program = backend.program(model, SetUp(pools, BLOCK, "bfloat16", max_seqs, max_rows, per_seq, 1))
    for layer in program.cache.layers:
        layer.keys.normal_(), layer.values.normal_()
    return program, backend
