"""Products, sums and transcendental functions whose bits for one row do not depend on the other rows.

Framework kernels choose their order of summation by the whole problem, and vectorised ones treat the ragged end of a
tensor by another formula. Here each call is arranged so that neither can happen (ADR 0008). Plain torch; the only state
is which shapes allow batched products. Called by the operators of `torch_ref` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16
"""Operands are padded to multiples of 16 floats = 64 bytes, so that each row starts on a cache line like any other."""

PIECE = 16384
"""Elements in one elementwise call: a multiple of every vector width, and too few for torch to split among threads."""

SPLIT = 32768
"""From as many elements on torch may sum a lone row in parts, one for each thread."""


MAX_TRIAL = 2**22
"""Numbers in the largest matrix that batched products are tried on."""


def padded(size: int) -> int:
    return -(-size // LANES) * LANES


def products(a: Tensor, b: Tensor) -> Tensor:
    """a [B, M, K] times b [B, K, N], float32, each of the B products as one thread computes it alone.

    K and N are multiples of 16. `b` may be expanded along B. Where a batched call was seen to give the bits of B lone
    calls of the same shape, it is used, if possible by all threads; elsewhere the calls are lone ones: on all of CUDA,
    whose libraries choose by B, and for large matrices, where a trial would take seconds and a batched call gains
    nothing.
    """
    a = aligned(a)
    _, m, k = a.shape
    n = b.shape[2]
    if a.device.type != "cpu":
        return _lone_products(a, b)
    shape = m, k, n, b.stride(1) == 1
    may_batch = k * n <= MAX_TRIAL
    if may_batch and one_call_is_exact(*shape, torch.get_num_threads()):
        return torch.bmm(a, b)
    with one_thread():
        return torch.bmm(a, b) if may_batch and one_call_is_exact(*shape, 1) else _lone_products(a, b)


def _lone_products(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], device=a.device)
    for i in range(a.shape[0]):
        torch.bmm(a[i : i + 1], b[i : i + 1], out=out[i : i + 1])
    return out


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: with more, it may split the sums of one product into as many parts."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def aligned(a: Tensor) -> Tensor:
    """Return `a`, or a copy of it, contiguous and starting on a cache line."""
    a = a.contiguous()
    return a if a.data_ptr() % 64 == 0 else a.clone()


@functools.cache
def one_call_is_exact(m: int, k: int, n: int, transposed: bool, num_threads: int) -> bool:
    """Whether a batched product by `num_threads`, the caller's threads, gives the bits of lone products [m, k] x [k, n]
    by one thread: tried on random numbers."""
    generator = torch.Generator().manual_seed(m * 1_000_003 + k * 1009 + n)
    a = torch.randn(9, m, k, generator=generator)
    b = torch.randn(n, k, generator=generator).t() if transposed else torch.randn(k, n, generator=generator)
    with one_thread():
        alone = torch.cat([torch.bmm(row[None].clone(), b[None]) for row in a])
    return all(torch.equal(torch.bmm(a[:size], b.expand(size, k, n)), alone[:size]) for size in (1, 2, 3, 4, 8, 9))


def row_sums(x: Tensor) -> Tensor:
    """Sum over the last dimension, which stays. torch sums each row by itself, except a lone and very long one."""
    if x.shape[-1] >= SPLIT and x.numel() == x.shape[-1]:
        return torch.stack([x, x]).sum(-1, keepdim=True)[0]
    return x.sum(-1, keepdim=True)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of `x` (float32), all of them by the kernel's vector path and none by its tail."""
    if x.device.type != "cpu":
        return function(x)  # one thread of the device for each element: there is no tail
    flat = x.reshape(-1)
    size = flat.numel()
    if size % 64:
        flat = F.pad(flat, (0, -size % 64))
    if flat.numel() <= PIECE:
        out = function(aligned(flat))
    else:
        out = torch.empty_like(flat)
        for piece, target in zip(torch.split(flat, PIECE), torch.split(out, PIECE), strict=True):
            target.copy_(function(aligned(piece)))
    return out[:size].view(x.shape)
