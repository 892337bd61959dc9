"""Native norms: the contract's order of operations to the bit, alike on every ISA, for any company and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.native.kernels.calls import (
    FAST,
    ISAS,
    Floats,
    Quantized,
    Values,
    call,
    fma,
    lanes_sum,
    normals,
    padded,
    quantized,
    same,
    untouched,
)

SHAPES = [(1, 1), (3, 15), (2, 16), (5, 17), (4, 63), (7, 100), (1, 257), (9, 640)]
EPS = 1e-5


def rms(isa: str, x: Floats, weight: Floats, *, heads: int = 1, offset: float = 0.0, num_threads: int = 1) -> Floats:
    """x [rows, heads * width]"""
    rows, whole = x.shape
    out = padded(rows, whole)
    values: dict[str, Any] = {"x": x, "ld_x": whole, "weight": weight, "eps": EPS, "offset": offset, "heads": heads}
    call("rms_norm", isa, rows, num_threads=num_threads, **values, width=len(weight), out=out, ld_out=out.shape[1])
    assert untouched(out, whole)
    return out[:, :whole].copy()


def rms_expected(x: Floats, weight: Floats, *, heads: int = 1, offset: float = 0.0, sequential: bool = False) -> Floats:
    pieces = x.reshape(len(x), heads, -1)
    ss = (pieces * pieces).cumsum(-1)[..., -1] if sequential else lanes_sum(pieces, squares=True)
    root: Floats = np.sqrt(ss / np.float32(len(weight)) + np.float32(EPS))
    gain: Floats = weight if offset == 0 else weight + np.float32(offset)
    y: Floats = (pieces / root[..., None]) * gain
    return y.reshape(x.shape)


def layer(isa: str, x: Floats, weight: Floats, bias: Floats | None, *, num_threads: int = 1) -> Floats:
    rows, width = x.shape
    out = padded(rows, width)
    values: dict[str, Any] = {"x": x, "ld_x": width, "weight": weight, "bias": bias, "eps": EPS, "width": width}
    call("layer_norm", isa, rows, num_threads=num_threads, **values, out=out, ld_out=out.shape[1])
    assert untouched(out, width)
    return out[:, :width].copy()


def layer_expected(x: Floats, weight: Floats, bias: Floats) -> Floats:
    width = np.float32(x.shape[1])
    d = x - (lanes_sum(x) / width)[:, None]
    dev = np.sqrt(lanes_sum(d, squares=True) / width + np.float32(EPS))
    return fma(d / dev[:, None], weight, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_the_stated_order_to_the_bit(isa: str, offset: float) -> None:
    for rows, width in SHAPES:
        x, weight = normals(width, rows, width, spread=3), normals(1, width)
        assert same(rms(isa, x, weight, offset=offset), rms_expected(x, weight, offset=offset)), (rows, width)
    x, weight = normals(2, 6, 5 * 24), normals(3, 24)
    assert same(rms(isa, x, weight, heads=5, offset=offset), rms_expected(x, weight, heads=5, offset=offset))


def test_another_order_of_summation_shows() -> None:
    """Control: were the lanes summed one after the other, the comparison above would fail."""
    x, weight = normals(4, 64, 640), normals(5, 640)
    assert not same(rms("scalar", x, weight), rms_expected(x, weight, sequential=True))


@pytest.mark.parametrize("isa", ISAS)
def test_layer_norm_is_the_stated_order_to_the_bit(isa: str) -> None:
    for rows, width in SHAPES:
        x, weight, bias = normals(width, rows, width) + 2, normals(1, width), normals(2, width)
        assert same(layer(isa, x, weight, bias), layer_expected(x, weight, bias)), (rows, width)


def test_norms_agree_with_torch() -> None:
    x, weight, bias = normals(1, 33, 300, spread=2) + 1, normals(2, 300), normals(3, 300)
    tx, tw, tb = torch.from_numpy(x), torch.from_numpy(weight), torch.from_numpy(bias)
    for isa in ISAS:
        ours = torch.from_numpy(rms(isa, x, weight))
        torch.testing.assert_close(ours, torch.nn.functional.rms_norm(tx, (300,), tw, EPS), rtol=2e-6, atol=2e-6)
        expected = torch.nn.functional.layer_norm(tx, (300,), tw, tb, EPS)
        torch.testing.assert_close(torch.from_numpy(layer(isa, x, weight, bias)), expected, rtol=2e-6, atol=4e-6)
        unbiased = torch.nn.functional.layer_norm(tx, (300,), tw, None, EPS)
        torch.testing.assert_close(torch.from_numpy(layer(isa, x, weight, None)), unbiased, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_fused_quantisation_is_quantisation_of_the_norm(isa: str, op: str) -> None:
    for rows, width, group in [(3, 256, 64), (2, 100, 32), (4, 100, 100), (1, 37, 128), (5, 24, 8), (2, 90, 20)]:
        x, weight, bias = normals(width, rows, width), normals(1, width), normals(2, width)
        values: Values = {"x": x, "ld_x": width, "weight": weight, "eps": EPS, "width": width}
        values |= {"heads": 1} if op == "rms_norm" else {"bias": bias}
        plain = rms(isa, x, weight) if op == "rms_norm" else layer(isa, x, weight, bias)
        alone, beside, out = Quantized(rows, width, group), Quantized(rows, width, group), padded(rows, width)
        call(op, isa, rows, **values, **alone.fields())
        call(op, isa, rows, **values, **beside.fields(), out=out, ld_out=out.shape[1])
        expected = quantized(plain, group)
        assert all(actual.agrees(expected) for actual in (alone, beside)), (rows, width, group)
        assert same(out[:, :width].copy(), plain)
        assert untouched(out, width)


@pytest.mark.parametrize("isa", FAST)
def test_rows_alone_in_company_and_on_two_threads(isa: str) -> None:
    x, weight, bias = normals(1, 70, 530), normals(2, 530), normals(3, 530)
    whole, layers = rms(isa, x, weight), layer(isa, x, weight, bias)
    assert same(whole, rms(isa, x, weight, num_threads=2))
    assert same(layers, layer(isa, x, weight, bias, num_threads=2))
    for row in (0, 33, 69):
        assert same(whole[row : row + 1].copy(), rms(isa, x[row : row + 1].copy(), weight))
        assert same(layers[row : row + 1].copy(), layer(isa, x[row : row + 1].copy(), weight, bias))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 21, 36])
def test_what_is_not_finite_stays_so_and_stays_in_its_row(isa: str, bad: float, at: int) -> None:
    x, weight, bias = normals(1, 3, 37), normals(2, 37), normals(3, 37)
    x[1, at] = bad
    for y in (rms(isa, x, weight), layer(isa, x, weight, bias)):
        assert not np.isfinite(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()
    result = Quantized(3, 37, 16)
    call("rms_norm", isa, 3, x=x, ld_x=37, weight=weight, eps=EPS, heads=1, width=37, **result.fields())
    assert np.isnan(result.scales[1, at // 16])
    assert np.isfinite(result.scales[[0, 2], :3]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_in_place(isa: str) -> None:
    x, weight = normals(1, 4, 50), normals(2, 50)
    expected = rms(isa, x, weight)
    call("rms_norm", isa, 4, x=x, ld_x=50, weight=weight, eps=EPS, heads=1, width=50, out=x, ld_out=50)
    assert same(x, expected)
