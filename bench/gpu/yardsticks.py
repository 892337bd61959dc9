"""What the kernels are measured beside: torch's operators, and FlashInfer where it is carried."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import shapes, tune
from bench.gpu.device import Call, Device
from bench.gpu.report import Result
from bench.gpu.weights import BLOCK
from headrace.backends.base import Heads

NOT_CARRIED = "not carried"
WORKSPACE = 128 * 2**20
"""Bytes that FlashInfer's wrappers take for what they merge."""


def yardstick(device: Device, make: Callable[[], list[Call]], seconds: float) -> Result:
    """Time torch's operator; say why where this torch does not run it."""
    try:
        theirs = device.seconds(make())
    except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        return {"yardstick": f"none: {type(error).__name__} {str(error)[:100]}"}
    return {"yardstick_us": 1e6 * theirs, "times_yardstick": theirs / seconds}


def products(device: Device, kind: str, layer: shapes.Layer, rows: int, copies: int) -> list[Call]:
    """Return torch's products for a kind of weights: mm, _weight_int4pack_mm, _scaled_mm."""
    x = device.random(rows, layer.num_in)
    calls: list[Call] = []
    for i in range(copies):
        if kind == "plain":
            w = tune.operands(device, "plain").sets[(layer, i)]
            calls.append(lambda w=w: torch.mm(x, w.t()))  # type: ignore[misc]
        elif kind == "eight":
            small, scale = x.to(torch.float8_e4m3fn), torch.ones((), device=device.name)
            w = tune.operands(device, "eight").sets[(layer, i)]
            calls.append(
                lambda w=w, small=small, scale=scale: torch._scaled_mm(  # type: ignore[misc]
                    small, w.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
                )
            )
        else:
            codes = torch.randint(0, 256, (layer.num_out, layer.num_in // 2), device=device.name, dtype=torch.uint8)
            packed = torch._convert_weight_to_int4pack(codes, 8)
            scales = device.random(layer.num_in // 64, layer.num_out, 2)
            calls.append(lambda p=packed, s=scales: torch._weight_int4pack_mm(x, p, 64, s))  # type: ignore[misc]
    return calls


def sdpa(device: Device, heads: Heads, step: tune.Chunked, copies: int) -> list[Call]:
    """Return torch's attention over as many positions, which lie in one piece: it has no blocks."""
    batch, queries = len(step.lens), step.lens[0]
    length = step.starts[0] + queries
    q = device.random(batch, heads.num_heads, queries, heads.head_dim)
    calls: list[Call] = []
    for _ in range(copies):
        k, v = device.random(2, batch, heads.num_kv_heads, length, heads.head_dim)
        calls.append(
            lambda k=k, v=v: F.scaled_dot_product_attention(  # type: ignore[misc]
                q, k, v, is_causal=queries > 1, enable_gqa=True
            )
        )
    return calls


def grouped(device: Device, pairs: int, gate_up: Tensor, down: Tensor) -> list[Call]:
    """Return torch's two products of a mixture's experts, with as many rows for each."""
    count = len(gate_up)
    ends = torch.arange(1, count + 1, device=device.name, dtype=torch.int32) * (pairs // count)
    a, b = device.random(pairs, gate_up.shape[2]), device.random(pairs, down.shape[2])

    def both() -> None:
        torch._grouped_mm(a, gate_up.transpose(1, 2), offs=ends)
        torch._grouped_mm(b, down.transpose(1, 2), offs=ends)

    return [both]


def flashinfer_version() -> str | None:
    """Return FlashInfer's version, None where it is not carried."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    return str(importlib.import_module("flashinfer").__version__)


def flashinfer_attention(
    device: Device, heads: Heads, step: tune.Chunked, query: Tensor, caches: list[Any]
) -> list[Call]:
    """Return FlashInfer's attention (0.5.3) on the backend's own queries [R, heads * D] and blocks: each of `caches`
    is keys and values [2, blocks, kv_heads, block, D], which is its layout HND."""
    flashinfer = importlib.import_module("flashinfer")

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device.name)

    counts = step.num_blocks
    pages = ints([0, *accumulate(counts)]), ints(list(range(sum(counts))))
    filled = ints([(first + rows - 1) % BLOCK + 1 for first, rows in zip(step.starts, step.lens, strict=True)])
    sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim, BLOCK
    types = {"q_data_type": query.dtype, "kv_data_type": caches[0].dtype}
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device.name)
    if max(step.lens) == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, filled, *sizes, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(ints([0, *accumulate(step.lens)]), *pages, filled, *sizes, causal=True, **types)
    rows = query.view(len(query), heads.num_heads, heads.head_dim)
    return [lambda cache=cache: wrapper.run(rows, (cache[0], cache[1])) for cache in caches]  # type: ignore[misc]
