"""Native head norms, rope and the store into the cache: the contract's operations to the bit, for every cache type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.kernels.cache import KINDS, SCALED, Cache, encoded
from tests.native.kernels.calls import FAST, ISAS, Array, Floats, call, fma, lanes_sum, normals, same

EPS = 1e-6
RUBBISH = -123.0


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    pairs: int = 8
    normed: bool = False
    offset: float = 0.0
    rows: int = 20
    value_dim: int = 0
    shares: bool = False

    @property
    def values(self) -> int:
        """Where the values of a row begin."""
        return (self.heads + self.kv_heads) * self.head_dim

    @property
    def width(self) -> int:
        return self.values + (0 if self.shares else self.kv_heads * (self.value_dim or self.head_dim))

    def cache(self, kind: str) -> Cache:
        slots = self.rows + 40
        return Cache(slots, self.kv_heads, self.head_dim, kind, RUBBISH, self.value_dim, self.shares)


SHAPES = [
    Shape(),
    Shape(heads=3, kv_heads=1, head_dim=20, pairs=10, normed=True),
    Shape(heads=2, kv_heads=2, head_dim=64, pairs=32, normed=True, offset=1.0, rows=33),
    Shape(heads=6, kv_heads=3, head_dim=80, pairs=16),  # turned in part
    Shape(heads=1, kv_heads=1, head_dim=7, pairs=0, normed=True, rows=1),
    Shape(head_dim=128, pairs=64, rows=17),
    Shape(head_dim=24, pairs=12, value_dim=41, normed=True),
    Shape(heads=3, kv_heads=1, head_dim=40, pairs=4, value_dim=32, shares=True),
]


def shapes_of(kind: str) -> list[Shape]:
    """A cache of int8_dot has values of its own."""
    return [shape for shape in SHAPES if kind != "int8_dot" or not shape.shares]


class Call:
    """Inputs of one call, drawn anew for each shape; `x` is what the call may change."""

    def __init__(self, shape: Shape, kind: str, seed: int = 1, centred: bool = False) -> None:
        self.shape = shape
        self.mean = normals(seed + 3, shape.kv_heads, shape.head_dim, spread=5) if centred else None
        rng = np.random.default_rng(seed)
        self.x = normals(seed, shape.rows, shape.width + 3, spread=2)
        self.positions = rng.integers(0, 50, shape.rows).astype(np.int32)
        self.slots = rng.permutation(shape.rows + 40)[: shape.rows].astype(np.int32)
        angles = np.arange(50)[:, None] * (0.7 ** np.arange(shape.pairs))
        self.cos, self.sin = (np.ascontiguousarray(f(angles), dtype=np.float32) for f in (np.cos, np.sin))
        self.q_norm, self.k_norm = normals(seed + 1, shape.head_dim), normals(seed + 2, shape.head_dim)
        self.cache = shape.cache(kind)

    def run(self, isa: str, num_threads: int = 1) -> tuple[Floats, Cache]:
        s, x = self.shape, self.x.copy()
        values: dict[str, Any] = {"x": x, "ld_x": x.shape[1], "heads": s.heads, "head_dim": s.head_dim, "eps": EPS}
        values |= {"offset": s.offset, "cos": self.cos, "sin": self.sin, "pairs": s.pairs}
        if s.normed:
            values |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
        values |= {"positions": self.positions, "slots": self.slots}
        if self.mean is not None:
            values["k_mean"] = self.mean
        cache = s.cache(self.cache.kind)
        call("rope_store", isa, s.rows, num_threads=num_threads, **values, **cache.fields())
        return x, cache

    def expected(self, *, fused: bool = True) -> tuple[Floats, Cache]:
        """x and cache as the contract has them; with fused unset, rope by separate products and sums."""
        s, x = self.shape, self.x.copy()
        turned = x[:, : s.values].reshape(s.rows, -1, s.head_dim)
        stored = x[:, s.values : s.width].reshape(s.rows, -1, s.value_dim or s.head_dim)
        if s.normed:
            one = np.float32(s.offset)
            gains = np.stack([self.q_norm] * s.heads + [self.k_norm] * s.kv_heads)
            root = np.sqrt(lanes_sum(turned, squares=True) / np.float32(s.head_dim) + np.float32(EPS))
            turned = turned / root[..., None] * (gains + one if s.offset else gains)
        if s.pairs:
            cos, sin = self.cos[self.positions, None], self.sin[self.positions, None]
            left, right = turned[..., : s.pairs], turned[..., s.pairs : 2 * s.pairs]
            if fused:
                parts = [fma(left, cos, -(right * sin)), fma(right, cos, left * sin)]
            else:
                parts = [left * cos - right * sin, right * cos + left * sin]
            turned = np.concatenate([*parts, turned[..., 2 * s.pairs :]], -1)
        keys = turned[:, s.heads :] if self.mean is None else turned[:, s.heads :] - self.mean
        self.cache.put(self.slots, keys, stored)
        queries = turned[:, : s.heads].reshape(s.rows, -1)
        return queries, self.cache


def agree(a: Cache, b: Cache) -> bool:
    """Everything, the slots that nothing was stored in included."""
    return all(same(getattr(a, n), getattr(b, n)) for n in ("k", "v", "k_scale", "v_scale"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_cache_to_the_bit(isa: str, kind: str) -> None:
    for seed, shape in enumerate(shapes_of(kind)):
        problem = Call(shape, kind, seed, centred=seed % 2 == 1)
        x, cache = problem.run(isa)
        queries, expected = problem.expected()
        if kind not in SCALED:  # they have no room for what the caller's rubbish is
            cache.k_scale[:], cache.v_scale[:] = expected.k_scale, expected.v_scale
        width = queries.shape[1]
        assert same(x[:, :width].copy(), queries), shape
        assert same(x[:, shape.values :].copy(), problem.x[:, shape.values :].copy())
        assert agree(cache, expected), shape


def test_control_products_and_sums_apart_show() -> None:
    problem = Call(SHAPES[2], "f32")
    x, _ = problem.run("scalar")
    queries, _ = problem.expected(fused=False)
    assert not same(x[:, : queries.shape[1]].copy(), queries)
    np.testing.assert_allclose(x[:, : queries.shape[1]], queries, atol=1e-5)


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_on_every_isa_and_any_number_of_threads(isa: str, kind: str) -> None:
    for shape in shapes_of(kind):
        problem = Call(shape, kind, 5)
        right_x, right = problem.run("scalar")
        for num_threads in (1, 2, 3):
            x, cache = problem.run(isa, num_threads)
            assert same(x, right_x)
            assert agree(cache, right)


@pytest.mark.parametrize("isa", ISAS)
def test_rope_against_torch(isa: str) -> None:
    shape = SHAPES[2]
    problem = Call(shape, "f32")
    x, cache = problem.run(isa)
    heads = torch.from_numpy(problem.x[:, : shape.width]).double().view(shape.rows, -1, shape.head_dim)
    for part, weight, at in ((slice(0, 2), problem.q_norm, None), (slice(2, 4), problem.k_norm, problem.slots)):
        y = torch.nn.functional.rms_norm(heads[:, part], (64,), torch.from_numpy(weight).double() + 1, EPS)
        pairs = torch.complex(y[..., :32], y[..., 32:])
        angles = torch.complex(*(torch.from_numpy(t[problem.positions]).double() for t in (problem.cos, problem.sin)))
        turned = torch.view_as_real(pairs * angles[:, None]).transpose(-1, -2).flatten(-2).numpy()
        result = x[:, :128].reshape(-1, 2, 64) if at is None else cache.get(at)[0]
        np.testing.assert_allclose(result, turned, atol=2e-5)


def one_row(numbers: Array, kind: str) -> Call:
    shape = Shape(heads=1, kv_heads=1, head_dim=len(numbers), pairs=0, rows=1)
    problem = Call(shape, kind)
    problem.x[0, len(numbers) : shape.width] = np.tile(numbers, 2)
    return problem


@pytest.mark.parametrize("isa", ISAS)
def test_half_precision_rounds_to_even_and_saturates_to_infinity(isa: str) -> None:
    numbers = np.array(
        [65519, 65520, -1e30, np.inf, np.nan, 1e-8, 6e-8, 2049, 2051, 1 + 2**-8, 1 + 3 * 2**-8], np.float32
    )
    for kind in ("f16", "bf16", "e5m2"):
        problem = one_row(numbers, kind)
        stored = problem.run(isa)[1].get(problem.slots)
        right, _ = encoded(numbers, kind)
        expected = Cache(16, 1, len(numbers), kind)
        expected.put(np.array([0]), numbers[None, None], numbers[None, None])
        assert same(stored[0], expected.get(np.array([0]))[0])
        assert same(stored[1], stored[0])
        assert len(right) == len(numbers)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SCALED)
def test_scales_tell_of_what_is_not_finite_and_zeros_are_stored_as_zeros(isa: str, kind: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for at in (0, 17, 19):
            numbers = normals(3, 20)
            numbers[at] = bad
            problem = one_row(numbers, kind)
            _, _, k_scale, v_scale = problem.run(isa)[1].get(problem.slots)
            assert not np.isfinite(k_scale).any()
            assert not np.isfinite(v_scale).any()
    problem = one_row(np.zeros(20, np.float32), kind)
    keys, values, k_scale, v_scale = problem.run(isa)[1].get(problem.slots)
    assert not np.concatenate([keys.ravel(), values.ravel(), k_scale.ravel(), v_scale.ravel()]).any()
