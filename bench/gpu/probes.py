"""Probes of the law on the GPU: the bits of one row, however many rows, tiles and programs there are around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.cache_problems import cache_of, make_cache
from bench.gpu.compiling import Recipe, Recorder
from bench.gpu.device import Device
from bench.gpu.drawing import drawing
from bench.gpu.problems import normal, scratch, sizes
from bench.gpu.weights import random_codes
from headrace.backends.base import Heads
from headrace.backends.cuda.cache import STORED
from headrace.backends.cuda.kernels import attention as paged
from headrace.backends.cuda.kernels import linear, linear_codes, spans
from headrace.backends.cuda.launch import Config
from headrace.quant.schemes import Scheme

BOTH_INSTRUCTIONS = {
    "mma.sync": Config({"BR": 16, "BN": 64, "BK": 64, "SWAP": 0, "APART": 0, "BAND": 1}, 4, 2),
    "wgmma": Config({"BR": 64, "BN": 64, "BK": 64, "SWAP": 0, "APART": 0, "BAND": 1}, 4, 2),
}
"""Tiles of 16 rows are too small for Hopper's wgmma, so the compiler takes mma.sync for them."""

FEW_KERNELS = ("order of K in tensor cores", "choose against the sampler")
"""Probes that take longer on the host than to compile."""

Result = dict[str, Any]
Probe = tuple[str, Callable[[], Result]]


def probes(device: Device) -> Iterator[Probe]:
    shapes = [(80, 600)] if device.toy else [(1024, 4096), (6144, 4096), (4096, 14336), (2048, 8192), (3000, 1000)]
    for num_out, num_in in shapes:
        yield f"rows: linear {num_out}x{num_in}", lambda n=num_out, k=num_in: rows(device, n, k)  # type: ignore[misc]
    yield "buckets: linear", lambda: buckets(device)
    for scheme in (Scheme("i4", 64), Scheme("i8")):
        yield f"codes in registers against widened, {scheme.kind}", lambda scheme=scheme: codes(device, scheme)  # type: ignore[misc]
    for kind, stored in STORED.items():
        if device.capability >= 90 or "fp8" not in kind:
            yield f"decode against prefill, cache of {kind}", lambda k=kind, s=stored: attention(device, k, s)  # type: ignore[misc]
    yield "order of K in tensor cores", lambda: order(device)
    yield "choose against the sampler", lambda: drawing(device)


def launched(toy: bool) -> list[Recipe]:
    """Return what the probes of rows, buckets, codes and attention launch, to be compiled before they run."""
    recorder = Recorder(toy)
    for name, probe in probes(recorder):
        if name not in FEW_KERNELS:
            probe()
    return recorder.recipes


def product(
    device: Device, x: Tensor, w: Tensor, num_rows: int, bucket: int = 0, config: Config | None = None
) -> Tensor:
    """Return the first rows of x times w in float32, so that no rounding hides a difference."""
    bucket = bucket or num_rows
    config = config or linear.default(w, bucket)
    out = torch.full((bucket, w.shape[0]), torch.nan, device=x.device)
    needed = linear.scratch_numbers(w, bucket, config)
    device.run([
        linear.linear(
            x, w, out, sizes(num_rows).to(x.device), 0, bucket, num_programs=device.num_programs,
            scratch=scratch(needed, x.device) if any(needed) else None, config=config,
        )
    ])  # fmt: skip
    return out[:num_rows]


def unequal(a: Tensor, b: Tensor) -> int:
    """Return how many numbers have other bits; NaN counts."""
    return int((~(a == b)).sum())


def rows(device: Device, num_out: int, num_in: int) -> Result:
    """Rows in steps of 1 to 8,192 rows, in the config that the backend takes for each and in all others."""
    most = 40 if device.toy else 8192
    x = normal(most, num_in, dtype=torch.bfloat16).to(device.name)
    w = normal(num_out, num_in, seed=1, dtype=torch.bfloat16).to(device.name)
    expected = product(device, x, w, most)
    wrong = {}
    num_rows = 1
    while num_rows <= most:
        for each in (num_rows, num_rows + 1):
            if each <= most and unequal(product(device, x, w, each), expected[:each]):
                wrong[f"{each} rows"] = unequal(product(device, x, w, each), expected[:each])
        num_rows *= 2
    suited = [c for c in linear.KERNEL.configs if linear.suits(c, w) and (not c.capabilities or 90 in c.capabilities)]
    for config in suited:
        if count := unequal(product(device, x, w, min(most, 300), config=config), expected[: min(most, 300)]):
            wrong[config.name] = count
    result: Result = {"configs": len(suited), "wrong": wrong, "fault": "other bits" if wrong else ""}
    # No config of the backend depends on it, but its tiles would have more room.
    for name, config in BOTH_INSTRUCTIONS.items():
        result[f"other bits by {name}"] = unequal(product(device, x, w, 16, config=config), expected[:16])
    return result


def buckets(device: Device) -> Result:
    x = normal(64, 2048, dtype=torch.bfloat16).to(device.name)
    w = normal(512, 2048, seed=1, dtype=torch.bfloat16).to(device.name)
    expected = product(device, x, w, 5)
    wrong = [bucket for bucket in (8, 16, 24, 64, 1024) if unequal(product(device, x, w, 5, bucket), expected)]
    return {"wrong": wrong, "fault": f"other bits in buckets {wrong}" if wrong else ""}


def codes(device: Device, scheme: Scheme) -> Result:
    """Codes in registers and widened into scratch, with assembly and without, against weights widened by torch."""
    torch.manual_seed(3)
    num_out, num_in, num_rows = (96, 512, 5) if device.toy else (1024, 4096, 50)
    packed = linear_codes.pack(random_codes(num_out, num_in, scheme, device.name), scheme, torch.bfloat16)
    x = normal(num_rows, num_in, dtype=torch.bfloat16).to(device.name)
    expected = product(device, x, packed.dense().contiguous(), num_rows)
    wrong = {}
    for base in (each for each in linear_codes.KERNEL.configs if linear_codes.suits(each, packed, False)):
        for assembly in (0, 1):
            config = Config(dict(base.tiles) | {"ASM": assembly}, base.num_warps, base.num_stages)
            needed = linear_codes.scratch_numbers(packed, num_rows, config)
            out = torch.full((num_rows, num_out), torch.nan, device=device.name)
            device.run(linear_codes.linear_codes(
                x, packed, out, sizes(num_rows).to(device.name), 0, num_rows, num_programs=device.num_programs,
                scratch=scratch(needed, x.device) if any(needed) else None, config=config,
            ))  # fmt: skip
            if count := unequal(out, expected):
                wrong[config.name] = count
    for assembly in (0, 1):
        wide = torch.full((num_out * num_in,), torch.nan, dtype=torch.bfloat16, device=device.name)
        plain = wide.view(num_out, num_in)
        needed = linear.scratch_numbers(plain, num_rows, linear.default(plain, num_rows))
        listed = linear_codes.linear_codes(
            x, packed, torch.empty_like(expected), sizes(num_rows).to(device.name), 0, num_rows,
            num_programs=device.num_programs, scratch=scratch(needed, x.device) if any(needed) else None, wide=wide,
        )  # fmt: skip
        base = listed[0].config
        config = Config(dict(base.tiles) | {"ASM": assembly}, base.num_warps, base.num_stages)
        device.run([replace(listed[0], config=config)])
        if count := unequal(plain, packed.dense()):
            wrong[f"widened, {config.name}"] = count
    return {"wrong": wrong, "fault": "other bits" if wrong else ""}


def attention(device: Device, kind: str, stored: torch.dtype) -> Result:
    """Queries of one sequence in chunks of all lengths: small and large tiles, shared and unshared spans."""
    heads = Heads(4, 2, 16) if device.toy else Heads(32, 8, 128)
    length = 150 if device.toy else 2100
    num_blocks, width = -(-length // 16), heads.num_heads * heads.head_dim
    dtype = stored if stored in (torch.float16, torch.float32) else torch.bfloat16
    tensors = {name: tensor.to(device.name) for name, tensor in make_cache(heads, num_blocks, 16, kind).items()}
    cache, keys = cache_of(tensors, kind), tensors["keys"]
    query = 2 * normal(length, width, dtype=dtype).to(device.name)
    blocks = torch.arange(num_blocks, dtype=torch.int32, device=device.name)
    kinds = (heads.num_heads, heads.num_kv_heads)
    chosen = paged.default_configs(*kinds, heads.head_dim, query.dtype, keys.dtype)

    def rows_of(first: int, last: int, partials: int) -> Tensor:
        out = torch.full((last - first, width), torch.nan, device=device.name)
        items = spans.work_list([first], [last - first], [0], *paged.tile_rows(*kinds, chosen), partials)
        shared = spans.make_scratch(max(partials, 1), *kinds, heads.head_dim, device.name)
        device.run(paged.attention(
            query[first:last], out, cache, blocks, torch.from_numpy(items).to(device.name), shared,
            heads=heads.num_heads, kv_heads=heads.num_kv_heads, scale=heads.head_dim**-0.5,
            programs=2 * device.num_programs, chosen=chosen,
        ))  # fmt: skip
        return out

    expected = rows_of(0, length, 0)
    wrong = []
    ends = {1, 2, 63, 64, 65, length // 2, length - 3, length, *(n for n in (511, 512, 513, 1500) if n < length)}
    for last in (65, length) if device.toy else sorted(ends):
        for count in (1, 17) if device.toy else (1, 5, 16, 17, 100):
            for partials in (0, 256):
                first = max(last - count, 0)
                if unequal(rows_of(first, last, partials), expected[first:last]):
                    wrong.append(f"{first}-{last} with {partials} partials")
    return {"wrong": wrong[:20], "fault": f"{len(wrong)} chunks have other bits" if wrong else ""}


def order(device: Device) -> Result:
    """The share of sums that equal a model of the tensor cores: products in fused sums of `depth` in order of K, each
    then cut or rounded to float32. Says which model holds; no model is required."""
    num_in = 512
    x = normal(64, num_in, dtype=torch.bfloat16).to(device.name)
    w = normal(64, num_in, seed=1, dtype=torch.bfloat16).to(device.name)
    result: Result = {}
    width = linear.SPAN_LEAST // 2
    for name, config in BOTH_INSTRUCTIONS.items():
        rows = config.tiles["BR"]
        # One span, so that the sum is the tensor cores' alone.
        short_x, short_w = x[:, :width].contiguous(), w[:, :width].contiguous()
        actual = product(device, short_x, short_w, rows, config=config).cpu().numpy()
        a, b = short_x[:rows].double().cpu().numpy(), short_w.double().cpu().numpy()
        for depth in (4, 8, 16, 32):
            for cut in (True, False):
                model = np.zeros(actual.shape, np.float32)
                for first in range(0, width, depth):
                    piece = slice(first, first + depth)
                    model = to_float32(model + a[:, piece] @ b[:, piece].T, cut)
                result[f"{name} {depth} {'cut' if cut else 'rounded'}"] = float((model == actual).mean())
    return result


def to_float32(x: np.ndarray[Any, Any], cut: bool) -> np.ndarray[Any, Any]:
    """Round float64 to float32: to the nearest, or towards zero."""
    near: np.ndarray[Any, Any] = x.astype(np.float32)
    if not cut:
        return near
    beyond = np.abs(near.astype(np.float64)) > np.abs(x)
    smaller: np.ndarray[Any, Any] = np.where(beyond, np.nextafter(near, np.float32(0)), near)
    return smaller
