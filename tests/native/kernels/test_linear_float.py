"""Native linear layers with float weights: one chain of fma for each output, whatever the ISA, tile or company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.native.kernels.calls import (
    BF16,
    F16,
    F32,
    FAST,
    ISAS,
    Array,
    Floats,
    call,
    fma,
    normals,
    padded,
    same,
    untouched,
)

from headrace import _native

TYPES = {"f32": F32, "f16": F16, "bf16": BF16}
# Below, at and past the edges of tiles (6 and 12 rows), of widening (24), of a block (192), of a panel (64 outputs).
SHAPES = [(1, 1, 1), (1, 70, 64), (2, 33, 65), (5, 64, 130), (6, 100, 16), (7, 65, 63), (12, 128, 80), (13, 129, 150)]
LARGE = [(24, 130, 64), (25, 130, 64), (31, 200, 129), (191, 70, 64), (193, 140, 77), (400, 65, 70)]


def stored(weights: Floats, kind: str) -> tuple[Array, Floats]:
    """The weights as stored, and the floats that those are."""
    if kind == "f32":
        return weights, weights
    if kind == "f16":
        half = weights.astype(np.float16)
        return half, half.astype(np.float32)
    bf16 = (weights.view(np.uint32) >> 16).astype(np.uint16)
    return bf16, (bf16.astype(np.uint32) << 16).view(np.float32)


def packed(codes: Array, kind: str, first: int = 0, last: int | None = None, into: Array | None = None) -> Array:
    num_out, num_in = codes.shape
    last = num_out if last is None else last
    if into is None:
        into = np.full(_native.packed_bytes("f", num_out, num_in, 0, TYPES[kind]), 0xA5, np.uint8)
    part = np.ascontiguousarray(codes[first:last])
    _native.pack("f", part.ctypes.data, 0, 0, num_in, 0, TYPES[kind], first, last, num_out, into.ctypes.data)
    return into


def linear(isa: str, x: Floats, codes: Array, kind: str, *, num_threads: int = 1, **values: Any) -> Floats:
    (rows, num_in), num_out = x.shape, len(codes)
    out = padded(rows, num_out)
    values |= {"weights": packed(codes, kind), "type": TYPES[kind], "num_in": num_in, "num_out": num_out}
    call("linear_f", isa, rows, num_threads=num_threads, x=x, ld_x=num_in, **values, out=out, ld_out=out.shape[1])
    assert untouched(out, num_out)
    return out[:, :num_out].copy()


def chain(x: Floats, weights: Floats) -> Floats:
    """[rows, num_in], [num_out, num_in] -> [rows, num_out]"""
    acc = np.zeros((len(x), len(weights)), np.float32)
    for k in range(x.shape[1]):
        acc = fma(x[:, k, None], weights[None, :, k], acc)
    return acc


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
def test_each_output_is_the_stated_chain_to_the_bit(isa: str, kind: str) -> None:
    for rows, num_in, num_out in SHAPES:
        x = normals(rows, rows, num_in)
        codes, weights = stored(normals(num_out, num_out, num_in), kind)
        assert same(linear(isa, x, codes, kind), chain(x, weights)), (rows, num_in, num_out)


def test_a_chain_from_the_other_end_shows() -> None:
    """Control: the same sum in another order has other bits."""
    x, weights = normals(1, 3, 100), normals(2, 20, 100)
    backwards = chain(np.ascontiguousarray(x[:, ::-1]), np.ascontiguousarray(weights[:, ::-1]))
    assert not same(linear("scalar", x, weights, "f32"), backwards)


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("kind", TYPES)
def test_same_bits_on_every_isa_and_any_number_of_threads(isa: str, kind: str) -> None:
    for rows, num_in, num_out in LARGE:
        x = normals(rows, rows, num_in)
        codes, _ = stored(normals(num_out, num_out, num_in), kind)
        expected = linear("scalar", x, codes, kind)
        assert same(linear(isa, x, codes, kind), expected)
        assert same(linear(isa, x, codes, kind, num_threads=2), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_alone_and_in_company(isa: str) -> None:
    x = normals(1, 200, 90)
    codes, _ = stored(normals(2, 100, 90), "bf16")
    whole = linear(isa, x, codes, "bf16")
    for begin, end in [(0, 1), (199, 200), (50, 56), (7, 15), (20, 80)]:
        assert same(linear(isa, x[begin:end].copy(), codes, "bf16"), whole[begin:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", TYPES)
def test_close_to_torch_and_bias_and_residual(isa: str, kind: str) -> None:
    for rows in (1, 9, 30):
        x, bias, residual = normals(1, rows, 300), normals(3, 70), normals(4, rows, 70)
        codes, weights = stored(normals(2, 70, 300), kind)
        plain = linear(isa, x, codes, kind)
        near = torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(weights)).numpy()
        assert np.abs(plain - near).max() < 1e-4
        assert same(linear(isa, x, codes, kind, bias=bias), plain + bias)
        assert same(linear(isa, x, codes, kind, residual=residual, ld_res=70), plain + residual)
        assert same(linear(isa, x, codes, kind, bias=bias, residual=residual, ld_res=70), (plain + bias) + residual)
        values: dict[str, Any] = {"type": TYPES[kind], "num_in": 300, "num_out": 70, "residual": residual, "ld_res": 70}
        call("linear_f", isa, rows, x=x, ld_x=300, weights=packed(codes, kind), **values, out=residual, ld_out=70)
        assert same(residual, plain + normals(4, rows, 70))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_or_its_output(isa: str, bad: float) -> None:
    for rows in (3, 20):
        x, weights = normals(1, rows, 70), normals(2, 66, 70)
        x[1, 69] = bad
        y = linear(isa, x, weights, "f32")
        assert not np.isfinite(y[1]).any()
        assert np.isfinite(np.delete(y, 1, 0)).all()
        x[1, 69], weights[65, 3] = 0, bad
        y = linear(isa, x, weights, "f32")
        assert not np.isfinite(y[:, 65]).any()
        assert np.isfinite(y[:, :65]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_more_inputs_than_scratch_holds_rows_of(isa: str) -> None:
    x, weights = normals(1, 14, 90_000), normals(2, 3, 90_000)
    y = linear(isa, x, weights, "f32", num_threads=2)
    assert same(y[13:], linear(isa, x[13:].copy(), weights, "f32"))
    assert np.abs(y - x @ weights.T).max() < 0.05


@pytest.mark.parametrize("kind", TYPES)
def test_packing_in_parts_and_unpacking(kind: str) -> None:
    panel = _native.panel("f")
    for num_out, num_in in [(1, 1), (16, 5), (64, 40), (65, 33), (3 * panel + 20, 17)]:
        codes, weights = stored(normals(num_out, num_out, num_in), kind)
        whole = packed(codes, kind)
        parts = np.full_like(whole, 0x5A)
        for first in range(0, num_out, 2 * panel):
            packed(codes, kind, first, min(first + 2 * panel, num_out), parts)
        assert same(whole, parts)
        row = np.empty(num_in, np.float32)
        for n in range(num_out):
            _native.unpack_row("f", whole.ctypes.data, num_out, num_in, 0, TYPES[kind], n, row.ctypes.data)
            assert same(row, weights[n])
