"""Native mixture of experts: routing, rows grouped by expert, there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.native.kernels.calls import (
    FAST,
    ISAS,
    Array,
    Floats,
    Quantized,
    Values,
    call,
    fma,
    normals,
    padded,
    quantized,
    same,
    untouched,
)


def route(isa: str, x: Floats, k: int, num_threads: int = 1) -> tuple[Array, Floats]:
    rows, experts = x.shape
    ids, weights = np.full((rows, k), -1, np.int32), np.full((rows, k), np.nan, np.float32)
    values: Values = {"num_experts": experts, "top_k": k, "ids": ids, "weights": weights}
    call("route", isa, rows, num_threads=num_threads, x=x, ld_x=experts, **values)
    return ids, weights


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("experts", "k"), [(4, 1), (8, 2), (64, 6), (60, 4), (128, 8), (100, 20), (5, 5)])
def test_route_is_the_softmax_of_the_best(isa: str, experts: int, k: int) -> None:
    x = normals(1, 50, experts, spread=3)
    x[3] = 1.0  # all equal: the lowest ids
    ids, weights = route(isa, x, k)
    assert (ids == np.argsort(-x, axis=1, kind="stable")[:, :k]).all()
    chosen = torch.from_numpy(np.take_along_axis(x, ids.astype(np.int64), 1))
    torch.testing.assert_close(torch.from_numpy(weights), chosen.softmax(1), rtol=1e-6, atol=1e-7)
    scalar_ids, scalar = route("scalar", x, k)
    assert (ids == scalar_ids).all()
    assert same(weights, scalar)
    assert same(route(isa, x, k, num_threads=2)[1], scalar)
    assert same(route(isa, x[9:10].copy(), k)[1], scalar[9:10])


def test_route_shares_equally_among_equals() -> None:
    """Equal logits: exp is 1, and the weights are exact."""
    x = np.full((1, 32), -50.0, np.float32)
    x[0, [3, 7, 21]] = 2.0
    ids, weights = route("scalar", x, 3)
    assert ids.tolist() == [[3, 7, 21]]
    assert same(weights, np.full((1, 3), np.float32(1) / np.float32(3)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_logit_that_is_not_finite_shows_in_the_weights_of_its_row(isa: str, bad: float, at: int) -> None:
    x = normals(1, 3, 20)
    x[1, at] = bad
    ids, weights = route(isa, x, 2)
    assert np.isnan(weights[1]).any()
    assert np.isfinite(weights[[0, 2]]).all()
    assert ((ids >= 0) & (ids < 20)).all()
    assert (ids[:, 0] != ids[:, 1]).all()


def group(isa: str, ids: Array, weights: Floats, experts: int, num_threads: int = 1) -> list[tuple[list[int], Floats]]:
    """(rows, weights) of each expert."""
    (rows, k), ld = ids.shape, len(ids) + 3
    lists, list_weights = np.full((experts, ld), -1, np.int32), padded(experts, 0, ld)
    values: Values = {
        "num_experts": experts,
        "lists": lists,
        "list_weights": list_weights,
        "ld_list": ld,
        "first_dim": 5,
    }
    dims = call("moe_group", isa, rows, num_threads=num_threads, ids=ids, weights=weights, top_k=k, **values)
    counts = dims[2 : 2 + experts]
    for e, n in enumerate(counts):
        assert (lists[e, n:] == -1).all()
    return [(lists[e, :n].tolist(), list_weights[e, :n]) for e, n in enumerate(counts)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_group_lists_rows_in_order(isa: str, num_threads: int) -> None:
    ids, weights = route(isa, normals(1, 70, 11), 3)
    for e, (rows, listed) in enumerate(group(isa, ids, weights, 11, num_threads)):
        where = np.argwhere(ids == e)
        assert rows == where[:, 0].tolist()
        assert same(listed, weights[where[:, 0], where[:, 1]])


@pytest.mark.parametrize("isa", ISAS)
def test_an_expert_nobody_chose_has_no_rows(isa: str) -> None:
    ids, weights = np.array([[2], [2]], np.int32), np.ones((2, 1), np.float32)
    assert [rows for rows, _ in group(isa, ids, weights, 4)] == [[], [], [0, 1], []]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_gather(isa: str, num_threads: int) -> None:
    x, rows = normals(1, 20, 700), np.array([1, 4, 5, 19], np.int32)
    out = padded(4, 700)
    values: Values = {"x": x, "ld_x": 700, "width": 700, "out": out, "ld_out": 705}
    call("moe_gather", isa, 4, num_threads=num_threads, list=rows, **values)
    assert same(out[:, :700], x[rows])
    assert untouched(out, 700)
    source, target = quantized(x, 64), Quantized(4, 700, 64)
    values = {f: v for f, v in source.fields().items() if f != "group"}
    to: Values = {"to_q": target.q, "to_scales": target.scales, "to_sums": target.sums}
    call("moe_gather", isa, 4, num_threads=num_threads, list=rows, width=700, **values, **to)
    assert same(target.q, source.q[rows])
    assert same(target.scales, source.scales[rows])
    assert same(target.sums, source.sums[rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_scatter_adds_by_one_fma(isa: str, num_threads: int) -> None:
    for width in (1, 37, 512):
        x, rows, weights = normals(1, 5, width), np.array([9, 0, 3, 4, 7], np.int32), normals(2, 5)
        out = normals(3, 10, width + 2)
        expected = out.copy()
        expected[rows, :width] = fma(weights[:, None], x, out[rows, :width])
        values: Values = {"x": x, "ld_x": width, "width": width, "out": out, "ld_out": width + 2}
        call("moe_scatter", isa, 5, num_threads=num_threads, list=rows, list_weights=weights, **values)
        assert same(out, expected)
    rounded_twice = weights[:, None] * x + normals(3, 10, width + 2)[rows, :width]
    assert not same(out[rows, :width].copy(), rounded_twice)  # control: the comparison tells an fma from two roundings


@pytest.mark.parametrize("isa", FAST)
def test_a_whole_layer_has_the_bits_of_scalar(isa: str) -> None:
    def layer(isa: str, num_threads: int) -> Floats:
        x, out = normals(5, 40, 96), np.full((40, 96), 3.0, np.float32)
        call("zero", isa, 40, num_threads=num_threads, out=out, ld_out=96, width=96)
        ids, weights = route(isa, normals(6, 40, 7), 2, num_threads)
        for rows, listed in group(isa, ids, weights, 7, num_threads):
            picked, n = np.empty((len(rows), 96), np.float32), len(rows)
            index = np.array(rows, np.int32)
            call("moe_gather", isa, n, list=index, x=x, ld_x=96, width=96, out=picked, ld_out=96)
            call(
                "moe_scatter", isa, n, list=index, list_weights=listed, x=picked, ld_x=96, width=96, out=out, ld_out=96
            )
        return out

    expected = layer("scalar", 1)
    assert same(layer(isa, 1), expected)
    assert same(layer(isa, 2), expected)
    assert np.abs(expected - normals(5, 40, 96)).max() < 1e-5  # the weights of a row sum to 1
