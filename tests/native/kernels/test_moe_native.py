"""Native mixture of experts: routing, rows grouped by expert, there and back."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.native.kernels.calls import (
    CANARY,
    F32,
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

from headrace.backends.base import Routing
from headrace.backends.cpu.memory import aligned
from headrace.backends.native import op_code, pack, require_native
from headrace.backends.torch_ref.ops import RefOps

PLAIN: Values = {"num_groups": 1, "top_groups": 1, "group_top": 1, "renormalise": 1, "scale": 1.0}


def route(isa: str, x: Floats, k: int, num_threads: int = 1, **options: Array | float) -> tuple[Array, Floats]:
    rows, experts = x.shape
    ids, weights = np.full((rows, k), -1, np.int32), np.full((rows, k), np.nan, np.float32)
    values: Values = PLAIN | {"num_experts": experts, "top_k": k, "ids": ids, "weights": weights} | options
    call("route", isa, rows, num_threads=num_threads, x=x, ld_x=experts, **values)
    return ids, weights


ROUTINGS: list[Values] = [
    {"renormalise": 0},
    {"score": 1, "renormalise": 0},
    {"score": 1, "scale": 2.5},
    {"bias": True},
    {"factors": True},
    {"score": 1, "bias": True, "num_groups": 4, "top_groups": 2, "group_top": 2, "scale": 2.5},
    {"renormalise": 0, "num_groups": 8, "top_groups": 3, "group_top": 1, "scale": 16.0},
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", ROUTINGS, ids=str)
def test_route_is_that_of_the_reference(isa: str, options: Values) -> None:
    x, k = normals(1, 30, 32, spread=2), 5
    bias = normals(2, 32, spread=0.1) if options.get("bias") else None
    factors = normals(3, 32) if options.get("factors") else None
    options = options | ({} if bias is None else {"bias": bias}) | ({} if factors is None else {"factors": factors})
    ids, weights = route(isa, x, k, **options)
    groups = tuple(int(options[name]) for name in ("num_groups", "top_groups", "group_top") if name in options)
    routing = Routing(
        k, "sigmoid" if options.get("score") else "softmax", None if bias is None else torch.from_numpy(bias),
        groups or None, bool(options.get("renormalise", 1)), float(options.get("scale", 1.0)),
        factors=None if factors is None else torch.from_numpy(factors),
    )  # fmt: skip
    expected, expected_ids = RefOps(torch.device("cpu"), torch.float32).route(torch.from_numpy(x), routing)
    assert (ids == expected_ids.numpy()).all()
    torch.testing.assert_close(torch.from_numpy(weights), expected, rtol=2e-6, atol=1e-7)
    assert same(weights, route("scalar", x, k, 2, **options)[1])
    assert same(route(isa, x[9:10].copy(), k, **options)[1], weights[9:10])
    x[3, 7] = np.nan
    assert np.isnan(route(isa, x, k, **options)[1][3]).any()


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


class Groups(NamedTuple):
    begin: Array
    rows: Array
    places: Array
    weights: Floats


def group(isa: str, ids: Array, weights: Floats, experts: int, num_threads: int = 1) -> Groups:
    rows, k = ids.shape
    groups = Groups(
        np.full(experts + 1, -1, np.int32), np.full(rows * k, -1, np.int32), np.full((rows, k), -1, np.int32),
        np.full(rows * k, np.nan, np.float32),
    )  # fmt: skip
    values: Values = {"num_experts": experts, "begin": groups.begin, "rows": groups.rows, "places": groups.places}
    values |= {"pair_weights": groups.weights}
    dims = call("moe_group", isa, rows, num_threads=num_threads, ids=ids, weights=weights, top_k=k, **values)
    assert dims == [rows * k, 0]
    return groups


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_group_lists_pairs_expert_by_expert(isa: str, num_threads: int) -> None:
    ids, weights = route(isa, normals(1, 70, 11), 3)
    result = group(isa, ids, weights, 11, num_threads)
    for e, (first, last) in enumerate(itertools.pairwise(result.begin.tolist())):
        where = np.argwhere(ids == e)
        assert result.rows[first:last].tolist() == where[:, 0].tolist()
        assert same(result.weights[first:last], weights[where[:, 0], where[:, 1]])
    assert (np.diff(result.places) > 0).all()
    assert (result.rows[result.places] == np.arange(70)[:, None]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_an_expert_nobody_chose_has_no_pairs(isa: str) -> None:
    ids, weights = np.array([[2], [2]], np.int32), np.ones((2, 1), np.float32)
    assert group(isa, ids, weights, 4).begin.tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rank_with_some_experts_has_their_pairs_alone(isa: str, num_threads: int) -> None:
    ids, weights = route(isa, normals(1, 30, 11), 3)
    whole = group(isa, ids, weights, 11)
    for first, num in ((0, 4), (4, 3), (7, 4), (0, 11), (5, 0)):
        own_begin, begin, places = np.full(num + 1, -1, np.int32), whole.begin.copy(), whole.places.copy()
        values: Values = {
            "begin": begin,
            "rows": whole.rows.copy(),
            "places": places,
            "pair_weights": whole.weights.copy(),
        }
        values |= {"num_experts": 11, "first": first, "num_own": num, "own_begin": own_begin}
        dims = call("moe_group", isa, 30, num_threads=num_threads, ids=ids, weights=weights, top_k=3, **values)
        assert (own_begin == whole.begin[first : first + num + 1] - whole.begin[first]).all()
        assert dims == [90, own_begin[-1]]
        assert (begin == whole.begin).all()
        assert (places == whole.places).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_gather(isa: str, num_threads: int) -> None:
    x, rows = normals(1, 20, 700), np.array([1, 4, 5, 19], np.int32)
    out = padded(4, 700)
    values: Values = {"x": x, "ld_x": 700, "width": 700, "out": out, "ld_out": 705}
    call("moe_gather", isa, 4, num_threads=num_threads, list=rows, **values)
    assert same(out[:, :700], x[rows])
    assert untouched(out, 700)
    call("moe_gather", isa, 4, num_threads=num_threads, list=rows, weights=x[0, :4].copy(), **values)
    assert same(out[:, :700], x[rows] * x[0, :4, None])
    begin = np.array([2], np.int32)
    values |= {"list": rows, "weights": x[0, :4].copy(), "from": begin}
    call("moe_gather", isa, 2, num_threads=num_threads, **values)
    assert same(out[:2, :700], x[rows[2:]] * x[0, 2:4, None])
    source, target = quantized(x, 64), Quantized(4, 700, 64)
    values = {f: v for f, v in source.fields().items() if f != "group"}
    to: Values = {"to_q": target.q, "to_scales": target.scales, "to_sums": target.sums}
    call("moe_gather", isa, 4, num_threads=num_threads, list=rows, width=700, **values, **to)
    assert same(target.q, source.q[rows])
    assert same(target.scales, source.scales[rows])
    assert same(target.sums, source.sums[rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_combine_adds_by_fma_in_the_order_of_experts(
    isa: str, num_threads: int, weighted: bool, with_residual: bool
) -> None:
    for width in (1, 37, 512):
        x, weights, before = normals(1, 15, width), normals(2, 15), normals(3, 5, width)
        places = np.sort(np.random.default_rng(4).permutation(15).astype(np.int32).reshape(5, 3), axis=1)
        out, expected = padded(5, width), np.zeros((5, width), np.float32)
        for j in range(3):
            at = places[:, j]
            expected = fma(weights[at, None], x[at], expected) if weighted else expected + x[at]
        if with_residual:
            expected = expected + before
        values: Values = {"places": places, "top_k": 3, "x": x, "ld_x": width, "width": width, "out": out}
        values |= {"weights": weights if weighted else None, "ld_out": out.shape[1]}
        values |= {"residual": before, "ld_res": width} if with_residual else {}
        call("moe_combine", isa, 5, num_threads=num_threads, **values)
        assert same(out[:, :width], expected)
        assert untouched(out, width)
    wrong = fma(weights[places[:, 1], None], x[places[:, 1]], np.zeros((5, width), np.float32))
    assert not same(expected, wrong)  # control: one addend too few shows


def linear_each(
    isa: str, x: Floats, weights: list[Floats], begin: Array, num_threads: int, experts: list[int]
) -> Floats:
    """Pairs x [P, in] times the weights [out, in] of each of `experts` -> [P, out]."""
    native = require_native()
    (num_out, num_in), out = weights[0].shape, padded(len(x), len(weights[0]))
    packed, calls = [], []
    for e in experts:
        data = aligned(native.packed_bytes("f", num_out, num_in, 0, F32))
        native.pack("f", weights[e].ctypes.data, 0, 0, num_in, 0, F32, 0, num_out, num_out, data.ctypes.data)
        packed.append(data)
        calls.append(
            pack(
                "linear_f", dim=0, x=x.ctypes.data, ld_x=num_in, weights=data.ctypes.data, type=F32, num_in=num_in,
                num_out=num_out, bias=0, residual=0, ld_res=0, out=out.ctypes.data, ld_out=out.shape[1],
            )
        )  # fmt: skip
    args = np.frombuffer(b"".join(calls), np.uint8)
    counters = np.zeros(8 * (len(experts) + 1), np.int64)
    values: Values = {"op": op_code("linear_f"), "args": args, "experts": np.array(experts, np.int32)}
    values |= {"count": len(experts), "begin": begin, "counters": counters}
    call("linear_each", isa, len(x), num_threads=num_threads, **values)
    assert not counters.any()  # ready for the next layer
    assert untouched(out, num_out)
    return out[:, :num_out]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_expert_multiplies_its_own_pairs(isa: str, num_threads: int) -> None:
    x, weights = normals(5, 40, 70), [normals(e, 150, 70) for e in range(4)]
    begin = np.array([0, 3, 3, 39, 40], np.int32)
    result = linear_each(isa, x, weights, begin, num_threads, [0, 1, 2, 3])
    for e, (first, last) in enumerate(itertools.pairwise(begin.tolist())):
        np.testing.assert_allclose(result[first:last], x[first:last] @ weights[e].T, atol=1e-4)
    assert same(result, linear_each("scalar", x, weights, begin, 1, [0, 1, 2, 3]))
    some = linear_each(isa, x, weights, begin, num_threads, [0, 3])
    assert same(some[[0, 1, 2, 39]], result[[0, 1, 2, 39]])
    assert (some[3:39] == CANARY).all()  # the pairs of others are left alone
