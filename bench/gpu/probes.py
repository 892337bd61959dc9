"""Probes of the law on the GPU: the bits of one row, however many rows, tiles and programs there are around it."""

from __future__ import annotations

import time
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
from bench.gpu.state_problems import state_probes
from bench.gpu.weights import random_codes
from headrace.backends.base import Heads
from headrace.backends.cuda import trust
from headrace.backends.cuda.cache import STORED
from headrace.backends.cuda.kernels import attention as paged
from headrace.backends.cuda.kernels import linear, linear_codes, linear_ws, spans
from headrace.backends.cuda.launch import Config
from headrace.quant.schemes import Scheme

BOTH_INSTRUCTIONS = {
    "mma.sync": Config({"BR": 16, "BN": 64, "BK": 64, "SWAP": 0, "APART": 0, "BAND": 1}, 4, 2),
    "wgmma": Config({"BR": 64, "BN": 64, "BK": 64, "SWAP": 0, "APART": 0, "BAND": 1}, 4, 2),
}
"""Tiles of 16 rows are too small for Hopper's wgmma, so the compiler takes mma.sync for them."""

TRUST = "check before linear_ws is used"
FEW_KERNELS = ("order of K in tensor cores", "choose against the sampler", TRUST)
"""Probes that take longer on the host than to compile, and one that launches by itself."""

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
    if device.capability == 90:
        yield TRUST, lambda: trusted(device)
    small, bf16 = device.toy, torch.bfloat16
    sinks, latent = (Heads(4, 2, 16), Heads(20, 1, 40, 24)) if small else (Heads(64, 8, 64), Heads(40, 1, 576, 512))
    wide = Heads(2, 1, 40) if small else Heads(16, 2, 512)
    yield "decode against prefill, sinks", lambda: attention(device, "bfloat16", bf16, sinks, sinks=True, window=128)
    yield "decode against prefill, chunks", lambda: attention(device, "bfloat16", bf16, sinks, window=-700)
    for kind in ("bfloat16", "int8"):
        yield (
            f"decode against prefill, values in the keys, cache of {kind}",
            lambda k=kind: attention(device, k, STORED[k], latent, shared=True),  # type: ignore[misc]
        )
    yield "decode against prefill, wide heads", lambda: attention(device, "bfloat16", bf16, wide)
    yield from state_probes(device)
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
    config = config or (linear_ws.default(w, bucket) if device.capability == 90 else None) or linear.default(w, bucket)
    product = linear_ws.linear_ws if linear_ws.is_config(config) else linear.linear
    out = torch.full((bucket, w.shape[0]), torch.nan, device=x.device)
    needed = linear.scratch_numbers(w, bucket, config)
    device.run([
        product(
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
    specialised = [c for c in linear_ws.KERNEL.configs if device.capability == 90 and linear_ws.suits(c, w, False)]
    # The kernel for many rows on both sides of the border, whatever is taken there.
    trials = [(c, min(most, 300)) for c in suited] + [(c, n) for c in specialised for n in (17, 65, 300) if n <= most]
    for config, each in trials:
        if count := unequal(product(device, x, w, each, config=config), expected[:each]):
            wrong[f"{config.name}, {each} rows"] = count
    result: Result = {"configs": len(suited + specialised), "wrong": wrong, "fault": "other bits" if wrong else ""}
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


def attention(
    device: Device, kind: str, stored: torch.dtype, heads: Heads | None = None, window: int = 0, sinks: bool = False,
    shared: bool = False,
) -> Result:  # fmt: skip
    """Queries of one sequence in chunks of all lengths: small and large tiles, shared and unshared spans. shared:
    values are a part of the keys."""
    heads = heads or (Heads(4, 2, 16) if device.toy else Heads(32, 8, 128))
    length, size = 150 if device.toy else 2100, max(heads.head_dim, heads.value_size)
    num_blocks, width = -(-length // 16), heads.num_heads * heads.head_dim
    dtype = stored if stored in (torch.float16, torch.float32) else torch.bfloat16
    tensors = {name: tensor.to(device.name) for name, tensor in make_cache(heads, num_blocks, 16, kind, shared).items()}
    cache, keys = cache_of(tensors, kind, heads.value_size), tensors["keys"]
    query = 2 * normal(length, width, dtype=dtype).to(device.name)
    blocks = torch.arange(num_blocks, dtype=torch.int32, device=device.name)
    kinds = (heads.num_heads, heads.num_kv_heads)
    scores = normal(heads.num_heads, seed=11, dtype=dtype).to(device.name) if sinks else None
    chosen = paged.default_configs(*kinds, size, query.dtype, keys.dtype, device.capability, shared)

    def rows_of(first: int, last: int, partials: int) -> Tensor:
        out = torch.full((last - first, heads.num_heads * heads.value_size), torch.nan, device=device.name)
        items = spans.work_list([first], [last - first], [0], *paged.tile_rows(*kinds, chosen, size), partials)
        sums = spans.make_scratch(max(partials, 1), *kinds, heads.head_dim, device.name, heads.value_size)
        device.run(paged.attention(
            query[first:last], out, cache, blocks, torch.from_numpy(items).to(device.name), sums,
            heads=heads.num_heads, kv_heads=heads.num_kv_heads, scale=heads.head_dim**-0.5,
            programs=2 * device.num_programs, chosen=chosen, window=window, sinks=scores,
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


def trusted(device: Device) -> Result:
    """The backend's own check of the kernel for many rows: where it fails, that kernel is not used."""
    types = (torch.bfloat16,) if device.toy else tuple(linear_ws.TYPES)
    problems = trust.PROBLEMS[-1:] if device.toy else trust.PROBLEMS

    def wrong() -> list[str]:
        place = torch.device(device.name)
        return [each for kind in types for each in trust.differences(place, kind, linear_ws.linear_ws, problems)]

    first, began = wrong(), time.perf_counter()
    again = wrong()
    seconds = time.perf_counter() - began
    return {"wrong": first, "wrong_again": again, "seconds_compiled": seconds, "fault": "; ".join((first + again)[:2])}


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
