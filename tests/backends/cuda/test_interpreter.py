"""The mended interpreter computes bfloat16 and fp8 as a GPU does; as released it does not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from tests.support.interpreter import interpret
from triton.runtime import interpreter


@triton.jit
def _to_bfloat16(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def _to_fp8(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.float8e4nv).to(tl.float32))


@triton.jit
def _product(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    tl.store(out + square, tl.dot(tl.load(x + square), tl.load(y + square)))


@triton.jit
def _count(bound, out):
    total = 0
    for i in range(0, tl.load(bound)):
        total += i
    tl.store(out, total)


def numbers() -> torch.Tensor:
    return torch.randn(256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 256)


def test_bfloat16_rounds_to_nearest_even() -> None:
    x, out = numbers(), torch.empty(256, dtype=torch.bfloat16)
    interpret(_to_bfloat16, (1,), {"x": x, "out": out, "N": 256})
    assert torch.equal(out, x.bfloat16())


def test_unmended_the_interpreter_truncates() -> None:
    x, out = numbers(), torch.empty(256, dtype=torch.bfloat16)
    interpreter.InterpretedFunction(_to_bfloat16.fn)[(1,)](x=x, out=out, N=256)
    assert not torch.equal(out, x.bfloat16()), "mending is not needed any more"


def test_fp8_keeps_subnormal_numbers_and_saturates() -> None:
    x, out = torch.cat([numbers()[:-1], torch.tensor([1000.0])]), torch.empty(256)
    interpret(_to_fp8, (1,), {"x": x, "out": out, "N": 256})
    assert torch.equal(out, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert ((out != 0) & (out.abs() < 2**-6)).any()


def test_dot_multiplies_numbers_not_bit_patterns() -> None:
    x, y = numbers().view(16, 16).bfloat16(), numbers().view(16, 16).T.contiguous().bfloat16()
    out = torch.empty(16, 16)
    interpret(_product, (1,), {"x": x, "y": y, "out": out, "N": 16})
    assert torch.allclose(out, x.float() @ y.float())


def test_loops_take_their_bounds_from_memory() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    interpret(_count, (1,), {"bound": torch.tensor([5], dtype=torch.int32), "out": out})
    assert out.item() == 10


def test_mending_leaves_the_compiler_alone() -> None:
    before = interpreter._convert_float, triton.runtime.jit.JITFunction.__call__
    test_bfloat16_rounds_to_nearest_even()
    assert (interpreter._convert_float, triton.runtime.jit.JITFunction.__call__) == before
