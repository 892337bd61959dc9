"""Native operators that take each number on its own, the quantiser, and those that pick rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.native.kernels.calls import (
    BF16,
    CLAMPED_SWIGLU,
    F16,
    F32,
    FAST,
    GELU,
    GELU_TANH,
    IDENTITY,
    ISAS,
    RELU,
    RELU2,
    SIGMOID,
    SILU,
    Array,
    Floats,
    Quantized,
    Values,
    call,
    normals,
    padded,
    quantized,
    same,
    untouched,
)

SHAPES = [(1, 1), (3, 15), (2, 16), (5, 17), (4, 63), (7, 100), (1, 5000), (9, 640)]
KINDS = [SILU, GELU, GELU_TANH, RELU, SIGMOID, RELU2, IDENTITY]
TORCH: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: torch.nn.functional.silu,
    GELU: torch.nn.functional.gelu,
    GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    RELU: torch.nn.functional.relu,
    SIGMOID: torch.sigmoid,
    RELU2: lambda x: torch.relu(x).square(),
    IDENTITY: lambda x: x,
}


def unary(op: str, isa: str, x: Floats, *, num_threads: int = 1, **values: Array | float | None) -> Floats:
    """x [rows, width] -> [rows, width], or for gated [rows, width / 2]"""
    rows, width = x.shape
    width = width // 2 if op == "gated" else width
    out = padded(rows, width)
    call(
        op,
        isa,
        rows,
        num_threads=num_threads,
        x=x,
        ld_x=x.shape[1],
        width=width,
        out=out,
        ld_out=out.shape[1],
        **values,
    )
    assert untouched(out, width)
    return out[:, :width].copy()


@pytest.mark.parametrize("isa", ISAS)
def test_add(isa: str) -> None:
    for rows, width in SHAPES:
        x, y, out = normals(1, rows, width), normals(2, rows, width), padded(rows, width)
        call("add", isa, rows, x=x, ld_x=width, y=y, ld_y=width, width=width, out=out, ld_out=out.shape[1])
        assert same(out[:, :width], x + y)
        assert untouched(out, width)
        call("add", isa, rows, x=x, ld_x=width, y=y, ld_y=width, width=width, out=y, ld_out=width, num_threads=2)
        assert same(out[:, :width], y)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_against_torch(kind: int) -> None:
    x = np.concatenate([np.linspace(-12, 12, 40_001, dtype=np.float32), normals(1, 20_000, spread=0.01)])[None]
    exact = TORCH[kind](torch.from_numpy(x.astype(np.float64))).numpy()
    near = TORCH[kind](torch.from_numpy(x)).numpy()
    for isa in ISAS:
        ours = unary("activation", isa, x, kind=kind)
        assert np.abs(ours - near).max() <= 2e-7 * 12
        # The square of relu is greater than its input.
        assert (np.abs(ours - exact) <= 2e-7 * np.maximum(np.maximum(np.abs(x), np.abs(exact)), 0.5)).all()
        assert (np.abs(ours - exact) <= 4e-7 * np.abs(exact))[x > -0.5].all()


def test_a_wrong_activation_shows() -> None:
    """Control: the two gelus differ by more than the comparison above lets pass."""
    x = np.linspace(-12, 12, 40_001, dtype=np.float32)[None]
    assert (
        np.abs(unary("activation", "scalar", x, kind=GELU) - unary("activation", "scalar", x, kind=GELU_TANH)).max()
        > 1e-4
    )


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_have_the_same_bits_on_every_isa(isa: str, kind: int) -> None:
    for rows, width in [*SHAPES, (40, 1030)]:
        x = normals(width, rows, 2 * width, spread=4)
        x[0, :1] = 88.5  # where exp changes to infinity
        for op in ("activation", "gated"):
            expected = unary(op, "scalar", x, kind=kind)
            assert same(unary(op, isa, x, kind=kind), expected)
            assert same(unary(op, isa, x, kind=kind, num_threads=2), expected)
            assert same(unary(op, isa, x[-1:].copy(), kind=kind), expected[-1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_is_activation_times_the_other_half(isa: str, kind: int) -> None:
    for rows, width in SHAPES:
        x = normals(width, rows, 2 * width)
        left = unary("activation", isa, x[:, :width].copy(), kind=kind)
        assert same(unary("gated", isa, x, kind=kind), left * x[:, width:])


@pytest.mark.parametrize("isa", ISAS)
def test_the_clamped_gate_holds_both_halves_and_hides_nothing(isa: str) -> None:
    x = normals(3, 40, 60, spread=6)
    gate, up = torch.from_numpy(x[:, :30]).clamp(max=7), torch.from_numpy(x[:, 30:]).clamp(-7, 7)
    actual = unary("gated", isa, x, kind=CLAMPED_SWIGLU)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=1e-5, atol=1e-6)
    assert same(actual, unary("gated", "scalar", x, kind=CLAMPED_SWIGLU, num_threads=2))
    for column, bad in ((0, np.inf), (1, np.nan), (32, -np.inf)):
        x[5, column] = bad
    assert np.isnan(unary("gated", isa, x, kind=CLAMPED_SWIGLU)[5, :3]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_multiply_and_scale(isa: str, kind: int, with_residual: bool) -> None:
    for rows, width in SHAPES:
        x, gate, before = (normals(seed, rows, width) for seed in (1, 2, 3))
        more: Values = {"residual": before, "ld_res": width} if with_residual else {}
        wide = x * unary("activation", isa, gate, kind=kind)
        narrow = x * unary("activation", isa, gate[:, :1].copy(), kind=kind)
        for values, gate_width in ((wide, width), (narrow, 1)):
            gates: Values = {"gate": gate, "ld_gate": width, "gate_width": gate_width}
            actual = unary("multiply", isa, x, kind=kind, num_threads=2, **gates, **more)
            assert same(actual, values + before if with_residual else values)
        scaled = unary("scale", isa, x, factor=0.22, **more)
        expected = x * np.float32(0.22)
        assert same(scaled, expected + before if with_residual else expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["activation", "gated"])
def test_fused_quantisation_is_quantisation_of_the_result(isa: str, op: str) -> None:
    for rows, width, group in [(3, 256, 64), (2, 100, 32), (4, 100, 100), (1, 37, 128), (1, 4096, 64), (2, 90, 20)]:
        x = normals(width, rows, 2 * width)
        x = x if op == "gated" else x[:, :width].copy()
        expected = quantized(unary(op, isa, x, kind=SILU), group)
        for num_threads in (1, 2):
            actual, out = Quantized(rows, width, group), padded(rows, width)
            values: Values = {"x": x, "ld_x": x.shape[1], "width": width, "kind": SILU}
            call(op, isa, rows, num_threads=num_threads, **values, **actual.fields())
            assert actual.agrees(expected), (rows, width, group)
            actual = Quantized(rows, width, group)
            call(op, isa, rows, num_threads=num_threads, **values, **actual.fields(), out=out, ld_out=out.shape[1])
            assert actual.agrees(expected)
            assert same(out[:, :width], unary(op, isa, x, kind=SILU))
            assert untouched(out, width)


def quantize(isa: str, x: Floats, group: int, num_threads: int = 1) -> Quantized:
    rows, width = x.shape
    result = Quantized(rows, width, group)
    call("quantize", isa, rows, num_threads=num_threads, x=x, ld_x=width, width=width, **result.fields())
    return result


@pytest.mark.parametrize("isa", ISAS)
def test_quantise_by_the_formulas(isa: str) -> None:
    for rows, width in SHAPES:
        for group in (16, 32, 64, 128, width, 11):
            x = normals(width, rows, width, spread=10)
            x[0] = 0  # a group of zeros
            x[-1] *= np.float32(1e-39)  # so small that 127 / amax overflows
            x[-1, :: max(width // 3, 1)] = 0
            expected = quantized(x, group)
            for num_threads in (1, 2):
                assert quantize(isa, x, group, num_threads).agrees(expected), (width, group)


def test_quantise_rounds_to_even_and_keeps_within_an_eighth_of_a_percent() -> None:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 126.5]], np.float32)
    result = quantize("scalar", x, 8)
    assert result.q[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -127, 126]
    x = normals(1, 10, 512)
    result = quantize("scalar", x, 64)
    back = result.q[:, :512].astype(np.float32) * np.repeat(result.scales[:, :8], 64, axis=1)
    assert (np.abs(back - x).reshape(10, 8, 64).max(2) <= 0.5001 * result.scales[:, :8]).all()


def test_truncation_in_place_of_rounding_shows() -> None:
    """Control: the comparison of codes sees one step."""
    expected = quantized(normals(1, 3, 64), 32)
    actual = quantize("scalar", normals(1, 3, 64), 32)
    assert actual.agrees(expected)
    actual.q[1, 5] += 1
    assert not actual.agrees(expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 36, 39])
def test_what_is_not_finite_makes_its_scale_nan(isa: str, bad: float, at: int) -> None:
    x = normals(1, 3, 40)
    x[1, at] = bad
    result = quantize(isa, x, 32)
    assert np.isnan(result.scales[1, at // 32])
    assert np.isfinite(result.scales[:, :2]).sum() == 5
    y = unary("softcap", isa, x, cap=30.0)
    assert np.isnan(y[1, at])
    assert np.isfinite(y).sum() == 119
    for kind in KINDS:
        y = unary("activation", isa, x, kind=kind)
        assert not np.isfinite(y[1, at])
        assert np.isfinite(y).sum() == 119
        assert not np.isfinite(unary("gated", isa, x, kind=kind)[1, at % 20])


def test_softcap() -> None:
    x = np.concatenate([normals(1, 1000, spread=40), np.array([0.0, -0.0, 1e4, -1e4], np.float32)])[None]
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    scalar = unary("softcap", "scalar", x, cap=30.0)
    assert np.abs(scalar - expected).max() <= 30 * 2e-7
    for isa in FAST:
        assert same(unary("softcap", isa, x, cap=30.0), scalar)
        assert same(unary("softcap", isa, x, cap=30.0, num_threads=2), scalar)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_xielu(rows: int, width: int) -> None:
    x = normals(1, rows, width, spread=3)
    x[0, : width // 3] *= 1e-4  # where exp(x) - 1 - x is much smaller than exp(x)
    wide = x.astype(np.float64)
    bent = np.where(wide > 0, 0.8 * wide * wide, 1.1 * (np.expm1(np.minimum(wide, 0)) - wide))
    values = {"positive": 0.8, "negative": 1.1, "beta": 0.5}
    scalar = unary("xielu", "scalar", x, **values)
    assert np.abs(scalar - (bent + 0.5 * wide)).max() <= 4e-7 * np.abs(wide).max() ** 2 + 1e-12
    small = np.abs(wide) < 1e-3
    assert np.allclose(scalar[small], (bent + 0.5 * wide)[small], rtol=1e-6, atol=0)
    for isa in FAST:
        assert same(unary("xielu", isa, x, **values), scalar)
        assert same(unary("xielu", isa, x, **values, num_threads=2), scalar)
    for bad in (np.inf, -np.inf, np.nan):
        for isa in ISAS:
            assert not np.isfinite(unary("xielu", isa, np.full((1, 5), bad, np.float32), **values)).any()


@pytest.mark.parametrize("isa", ISAS)
def test_embedding(isa: str) -> None:
    for width in (1, 16, 37, 256):
        table, ids = normals(1, 11, width), np.array([3, 0, 10, 3, 7], np.int32)
        bf16 = (table.view(np.uint32) >> 16).astype(np.uint16)
        wide = (bf16.astype(np.uint32) << 16).view(np.float32)
        half = table.astype(np.float16)
        for kind, stored, values in ((F32, table, table), (F16, half, half.astype(np.float32)), (BF16, bf16, wide)):
            for scale in (1.0, 1.7):
                out = padded(5, width)
                call(
                    "embedding",
                    isa,
                    5,
                    ids=ids,
                    table=stored,
                    file=-1,
                    type=kind,
                    width=width,
                    scale=scale,
                    out=out,
                    ld_out=out.shape[1],
                )
                assert same(out[:, :width], values[ids] * np.float32(scale))
                assert untouched(out, width)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_embedding_of_a_table_in_a_file(isa: str, num_threads: int, tmp_path: Path) -> None:
    """Also rows that are read in several pieces; rows behind the end of the file are NaN, and no other row is."""
    ids = np.array([3, 0, 10, 3, 7], np.int32)
    for width in (1, 37, 4096, 9001):
        for kind, dtype in ((F32, np.float32), (F16, np.float16)):
            table = normals(1, 11, width).astype(dtype)
            path = tmp_path / "table"
            path.write_bytes(b"\x01" * 24 + table.tobytes())
            with path.open("rb") as file:
                values: Values = {"ids": ids, "file": file.fileno(), "place": 24, "type": kind, "width": width}
                values |= {"scale": 1.0}
                out = padded(5, width)
                call("embedding", isa, 5, num_threads=num_threads, **values, out=out, ld_out=out.shape[1])
                assert same(out[:, :width], table[ids].astype(np.float32))
                assert untouched(out, width)
                os.truncate(path, 24 + table.nbytes - table.itemsize)  # the last number of row 10
                call("embedding", isa, 5, num_threads=num_threads, **values, out=out, ld_out=out.shape[1])
                assert np.isnan(out[2, width - 1])
                others = [0, 1, 3, 4]
                assert same(out[others, :width], table[ids[others]].astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
def test_select_rows(isa: str) -> None:
    for width in (1, 16, 37, 6000):
        x, rows, out = normals(1, 9, width), np.array([8, 0, 3], np.int32), padded(3, width)
        call(
            "select_rows", isa, 3, num_threads=2, rows=rows, x=x, ld_x=width, width=width, out=out, ld_out=out.shape[1]
        )
        assert same(out[:, :width], x[rows])
        assert untouched(out, width)


@pytest.mark.parametrize("isa", ISAS)
def test_permute(isa: str) -> None:
    for rows, width in SHAPES:
        x, columns = normals(1, rows, width), np.random.default_rng(width).permutation(width).astype(np.int32)
        assert same(unary("permute", isa, x, num_threads=2, columns=columns, begin=None, count=1), x[:, columns])
        # Each expert's rows in an order of their own; the first of three has none.
        orders, begin = np.stack([np.roll(columns, i) for i in range(3)]), np.array([0, 0, rows // 2, rows], np.int32)
        expected = [x[row, orders[1 if row < rows // 2 else 2]] for row in range(rows)]
        assert same(unary("permute", isa, x, columns=orders, begin=begin, count=3), np.array(expected))
        codes = quantized(x[:, columns], 32)
        actual = quantized(np.zeros_like(x), 32)
        call(
            "permute", isa, rows, x=x, ld_x=width, width=width, columns=columns, begin=None, count=1, **actual.fields()
        )
        assert np.array_equal(actual.q, codes.q)
        assert same(actual.scales, codes.scales)
        assert np.array_equal(actual.sums, codes.sums)


@pytest.mark.parametrize("isa", ISAS)
def test_finite(isa: str) -> None:
    for width in (1, 16, 37, 64, 200):
        x, result = normals(1, 6, width, spread=1e37), np.full(6, 9, np.int32)
        x[1, 0], x[3, width // 2], x[4, width - 1] = np.nan, np.inf, -np.inf
        call("finite", isa, 6, x=x, ld_x=width, width=width, bound=math.inf, finite=result)
        assert result.tolist() == [1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("isa", ISAS)
def test_numbers_below_a_bound(isa: str) -> None:
    """A bound of its own: the first number that rounds to infinity in float16."""
    below = np.nextafter(np.float32(65520), np.float32(0))
    for width in (1, 16, 37, 64, 200):
        x, result = normals(1, 6, width, spread=1e4), np.full(6, 9, np.int32)
        x = x.clip(-60000, 60000)
        x[1, 0], x[2, width - 1], x[3, width // 2], x[4, width - 1] = 65520, below, -65520, -below
        x[5, width // 2] = np.nan
        call("finite", isa, 6, x=x, ld_x=width, width=width, bound=65520.0, finite=result)
        assert result.tolist() == [1, 0, 1, 0, 1, 0]
        with np.errstate(over="ignore"):
            assert result.tolist() == np.isfinite(x.astype(np.float16)).all(axis=1).tolist()
        rows, some = np.array([5, 4, 1], np.int32), np.full(3, 9, np.int32)
        call("finite", isa, 3, rows=rows, x=x, ld_x=width, width=width, bound=65520.0, finite=some)
        assert some.tolist() == [0, 1, 0]
