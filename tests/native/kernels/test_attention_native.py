"""Native paged attention: the contract's order of operations to the bit, alike on every ISA and in any company."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.kernels.cache import KINDS, SCALED, Cache
from tests.native.kernels.calls import FAST, ISAS, Array, Floats, call, fma, lanes_sum, normals, padded, same, tree

from headrace.backends.base import Scoring
from headrace.backends.torch_ref import attention as reference
from headrace.backends.torch_ref.cache import LayerCache

SPAN = 128


@dataclass
class Problem:
    """Sequences of the given lengths; the rows of a step are the last rows of each, so many as `rows` says."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    kind: str = "f32"
    lengths: tuple[int, ...] = (150,)
    block_size: int = 16
    window: int = 0
    ahead: int = 0
    wholes: tuple[tuple[int, int], ...] = ()
    softcap: float = 0.0
    sinks: bool = False
    bias: bool = False
    value_dim: int = 0
    shares: bool = False
    rubbish: float = np.nan
    seed: int = 1
    scale: float = 0.3
    tables: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        counts = [-(-n // self.block_size) for n in self.lengths]
        ids = rng.permutation(sum(counts) + 5).astype(np.int32)
        self.tables = [ids[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
        self.cache = Cache(
            len(ids) * self.block_size,
            self.kv_heads,
            self.head_dim,
            self.kind,
            self.rubbish,
            self.value_dim,
            self.shares,
        )
        self.queries = [normals(self.seed + i, n, self.heads, self.head_dim) for i, n in enumerate(self.lengths)]
        for i, n in enumerate(self.lengths):
            keys = normals(self.seed + 100 + i, n, self.kv_heads, self.head_dim)
            values = normals(self.seed + 200 + i, n, self.kv_heads, self.cache.value_dim)
            self.cache.put(self.slots(i), keys, values)

    @property
    def sink(self) -> Floats | None:
        return normals(self.seed + 900, self.heads) if self.sinks else None

    @property
    def biases(self) -> Floats | None:
        """[heads, 2 * P - 1] by distance, with no room behind the longest text."""
        return normals(self.seed + 950, self.heads, 2 * max(self.lengths) - 1) if self.bias else None

    def slots(self, i: int) -> Array:
        p = np.arange(self.lengths[i])
        return self.tables[i][p // self.block_size] * self.block_size + p % self.block_size

    def seen(self, i: int, p: int) -> int:
        """The last position that position p of sequence i sees."""
        most = min(p + self.ahead, self.lengths[i] - 1)
        stops = [min(stop, self.lengths[i]) for first, stop in self.wholes if first <= p < stop]
        return max([p, *(stop - 1 for stop in stops)]) if self.wholes else most

    def run(self, isa: str, chunks: list[tuple[int, int, int]], num_threads: int = 1) -> list[Floats]:
        """One step of chunks (sequence, first position, rows) -> an output [rows, heads * value_dim] of each."""
        width = self.heads * self.head_dim
        x = np.concatenate([self.queries[i][p : p + n].reshape(n, width) for i, p, n in chunks])
        x = np.concatenate([x, np.full((len(x), 7), np.nan, np.float32)], 1)  # keys and values lie there
        row_begin = np.cumsum([0] + [n for _, _, n in chunks]).astype(np.int32)
        table_begin = np.cumsum([0] + [len(self.tables[i]) for i, _, _ in chunks]).astype(np.int32)
        blocks = np.concatenate([self.tables[i] for i, _, _ in chunks])
        width = self.heads * self.cache.value_dim
        out = padded(len(x), width)
        values: dict[str, Any] = {"x": x, "ld_x": x.shape[1], "heads": self.heads, "head_dim": self.head_dim}
        values |= {"scale": self.scale, "window": self.window, "softcap": self.softcap, "block_size": self.block_size}
        values["ahead"] = self.ahead
        if self.wholes:
            values["seen"] = np.array([self.seen(i, p + r) for i, p, n in chunks for r in range(n)], np.int32)
        values["sinks"] = self.sink
        values["bias"], values["ld_bias"] = self.biases, 2 * max(self.lengths) - 1 if self.bias else 0
        values |= {"row_begin": row_begin, "start": np.array([p for _, p, _ in chunks], np.int32)}
        values |= {"table_begin": table_begin, "blocks": blocks, "out": out, "ld_out": out.shape[1]}
        call("attention", isa, len(chunks), num_threads=num_threads, **values, **self.cache.fields())
        assert (out[:, width:] == padded(1, 0)).all()
        return np.split(out[:, :width].copy(), row_begin[1:-1])

    def whole(self, isa: str, num_threads: int = 1) -> list[Floats]:
        return self.run(isa, [(i, 0, n) for i, n in enumerate(self.lengths)], num_threads)


def const(x: float) -> Floats:
    return np.full(1, x, np.float32)


def exp(x: Floats) -> Floats:
    """csrc/generic/math.h"""
    with np.errstate(invalid="ignore", over="ignore"):
        y = np.clip(x, const(-88), const(89))
        n = np.rint(y * const(1.44269504088896341))
        r = fma(n, const(2.12194440e-4), fma(n, const(-0.693359375), y))
        p = np.full_like(x, 1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma(p, r, const(c))
        p = fma(p, r * r, r + const(1)) * np.ldexp(const(1), np.nan_to_num(n).astype(np.int32))
    return np.where(x < const(-87.3), const(0), p).astype(np.float32)


def defined(problem: Problem, i: int, p: int, *, origin: int = 0, backwards: bool = False) -> Floats:
    """The output [heads * value_dim] of position p of sequence i, operation by operation as the contract has it."""
    f32, group = np.float32, problem.heads // problem.kv_heads
    q = problem.queries[i][p]
    k, v, k_scale, v_scale = (np.repeat(a, group, 1) for a in problem.cache.get(problem.slots(i)))
    low = max(0, p - problem.window + 1) if problem.window > 0 else 0
    low = p - p % -problem.window if problem.window < 0 else low
    m, total = np.full(problem.heads, -np.inf, np.float32), np.zeros(problem.heads, np.float32)
    if problem.sink is not None:
        m, total = problem.sink, np.ones(problem.heads, np.float32)
    acc, extra = np.zeros((problem.heads, problem.cache.value_dim), np.float32), np.zeros(problem.heads, np.float32)
    k_least = v_least = None
    if problem.kind == "int4":
        (k_scale, k_least), (v_scale, v_least) = (np.moveaxis(sides, -1, 0) for sides in (k_scale, v_scale))
    end = problem.seen(i, p) + 1
    for begin in range((low - origin) // SPAN * SPAN + origin, end, SPAN):
        keys = np.arange(max(begin, low), min(begin + SPAN, end))
        s = np.zeros((len(keys), problem.heads), np.float32)
        if problem.kind == "int8_dot":
            amax = np.abs(q).max(1)
            codes = np.rint(q * (f32(16256) / amax)[:, None]).astype(np.int64)
            high = (codes + 64) >> 7
            sums = [(part * k[keys].astype(np.int64)).sum(2).astype(np.float32) for part in (high, codes - 128 * high)]
            s = fma(sums[0], const(128), sums[1]) * ((f32(problem.scale) * (amax / f32(16256))) * k_scale[keys])
        else:
            for d in range(problem.head_dim):
                s = fma(q[:, d], k[keys, :, d], s)
            s = s * (f32(problem.scale) * k_scale[keys] if problem.kind in SCALED else f32(problem.scale))
        if k_least is not None:
            s = fma(f32(problem.scale) * k_least[keys], lanes_sum(q)[None], s)
        if problem.softcap:
            t = s / f32(problem.softcap)
            s = f32(problem.softcap) * (f32(1) - f32(2) / (f32(1) + exp(t + t)))
        if problem.biases is not None:
            s = s + problem.biases[:, keys - p + problem.biases.shape[1] // 2].T
        top = np.maximum(m, s.max(0))
        alpha, w = exp(m - top), exp(s - top)
        lanes, least = np.zeros((2, problem.heads, 16), np.float32)
        for j in range(len(keys)):
            lanes[:, keys[j] % 16] += w[j]
            if v_least is not None:
                least[:, keys[j] % 16] = fma(w[j], v_least[keys[j]], least[:, keys[j] % 16])
        m, total, acc = top, total * alpha + tree(lanes), acc * alpha[:, None]
        extra = extra * alpha + tree(least)
        if problem.kind in SCALED:
            w = w * v_scale[keys]
        if problem.kind == "int8_dot":
            top_w = w.max(0)
            inverse = np.where(top_w > 2.0**-100, f32(255) / top_w, f32(0)).astype(np.float32)
            codes = np.rint(np.minimum(w * inverse, f32(255)) - f32(128)).astype(np.int64) + 128
            total_codes = (codes[:, :, None] * v[keys].astype(np.int64)).sum(0).astype(np.float32)
            acc = fma(total_codes, (top_w / f32(255))[:, None], acc)
            continue
        for j in reversed(range(len(keys))) if backwards else range(len(keys)):
            acc = fma(w[j][:, None], v[keys[j]], acc)
    out: Floats = ((acc + extra[:, None] if v_least is not None else acc) / total[:, None]).astype(np.float32)
    return out.reshape(-1)


DEFINED = [
    Problem(heads=4, kv_heads=2, head_dim=24, lengths=(290, 129, 3), wholes=((100, 140), (141, 270)), block_size=24),
    Problem(heads=6, kv_heads=1, lengths=(290, 150), wholes=((1, 40), (120, 137)), window=17, softcap=5.0, sinks=True),
    Problem(lengths=(150,)),
    Problem(heads=3, kv_heads=1, head_dim=20, lengths=(40, 131), block_size=24),
    Problem(heads=7, kv_heads=1, head_dim=24, lengths=(290,), window=140, softcap=5.0, block_size=4),
    Problem(heads=2, kv_heads=2, head_dim=64, lengths=(260,), window=5, block_size=32),
    Problem(heads=6, kv_heads=2, head_dim=20, lengths=(150, 3), window=37, sinks=True),
    Problem(heads=4, kv_heads=2, head_dim=20, lengths=(150, 300, 3), window=-37),
    Problem(heads=2, kv_heads=1, head_dim=32, lengths=(290,), window=-128, block_size=5),
    Problem(heads=6, kv_heads=2, head_dim=20, lengths=(150, 3), value_dim=29),
    Problem(heads=14, kv_heads=1, head_dim=41, lengths=(140,), value_dim=33, shares=True),
    Problem(heads=2, kv_heads=1, head_dim=40, lengths=(140,), value_dim=32, shares=True, window=20, block_size=24),
    Problem(heads=3, kv_heads=3, head_dim=20, lengths=(150, 1, 300), ahead=10**6, bias=True),
    Problem(heads=6, kv_heads=2, head_dim=20, lengths=(290, 3), window=140, softcap=5.0, sinks=True, bias=True),
    Problem(heads=3, kv_heads=3, head_dim=20, lengths=(150, 1, 300), ahead=10**6),
    Problem(heads=4, kv_heads=2, head_dim=24, lengths=(290, 7), ahead=64, window=65, block_size=24),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_output_is_the_stated_order_to_the_bit(isa: str, kind: str) -> None:
    for plan in DEFINED:
        if kind == "int8_dot" and plan.shares:
            continue  # they are stored as int8
        problem = replace(plan, kind=kind)
        for i, out in enumerate(problem.whole(isa)):
            for p in {0, len(out) // 2, len(out) - 1} | {stop - 2 for _, stop in plan.wholes if stop <= len(out)}:
                assert same(out[p], defined(problem, i, p)), (plan, i, p)


def test_control_another_order_shows() -> None:
    """Spans counted from elsewhere, or keys in reverse, have other bits: the comparison above sees the order."""
    problem = Problem(lengths=(150,))
    out = problem.whole("scalar")[0]
    assert same(out[149], defined(problem, 0, 149))
    assert not same(out[149], defined(problem, 0, 149, origin=-50))
    assert not same(out[149], defined(problem, 0, 149, backwards=True))


def test_control_another_bias_shows() -> None:
    for plan in (DEFINED[-4], DEFINED[-3]):
        out = plan.whole("scalar")[0][140]
        assert same(out, defined(plan, 0, 140))
        assert not same(out, defined(replace(plan, bias=False), 0, 140))


def test_control_later_positions_show() -> None:
    for plan in DEFINED[-2:]:
        assert not same(plan.whole("scalar")[0][0], defined(replace(plan, ahead=plan.ahead and 1), 0, 0))


def test_control_a_picture_that_is_cut_shows() -> None:
    for plan in DEFINED[:2]:
        out, (first, stop) = plan.whole("scalar")[0], plan.wholes[1]
        assert same(out[first], defined(plan, 0, first))
        assert not same(out[first], defined(replace(plan, wholes=(plan.wholes[0], (first, stop - 1))), 0, first))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_a_picture_whole_have_the_same_bits_in_any_chunks(isa: str, kind: str) -> None:
    """Chunks that begin before, in and behind a picture, of which no row before may be there again."""
    for plan in DEFINED[:2]:
        problem = replace(plan, kind=kind, lengths=(290, 150))
        whole = problem.whole(isa)
        for cuts in ([0, 100, 140, 141, 270, 290], [0, 99, 270, 290], [120, 137, 290], [125, 290], [269, 290]):
            chunks = [(0, first, stop - first) for first, stop in itertools.pairwise(cuts)]
            for (_, first, num), out in zip(chunks, problem.run(isa, [*chunks, (1, 0, 150)], 2), strict=False):
                assert same(out, whole[0][first : first + num])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("isa", ISAS)
def test_a_text_that_is_seen_whole_has_the_same_bits_alone_and_in_a_batch(isa: str, bias: bool) -> None:
    problem = replace(DEFINED[-2], lengths=(1, 300, 129, 150), bias=bias)
    whole = problem.whole(isa)
    for i, n in enumerate(problem.lengths):
        assert same(problem.run(isa, [(i, 0, n)], 2)[0], whole[i])


@functools.cache
def grid(kind: str) -> list[tuple[Problem, list[Floats]]]:
    """Ragged problems of all sorts, and what scalar makes of them."""
    rng = np.random.default_rng(KINDS.index(kind))

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    problems = []
    for seed, group in enumerate([1, 2, 3, 4, 5, 6, 7, 8, 12, 16]):
        kv_heads, lengths = pick(1, 2, 3), tuple(pick(1, 2, 17, 40, 127, 129, 200) for _ in range(pick(1, 2, 4)))
        problem = Problem(
            heads=group * kv_heads,
            kv_heads=kv_heads,
            head_dim=pick(7, 16, 20, 40, 64, 80, 128, 256),
            kind=kind,
            lengths=lengths,
            block_size=pick(1, 4, 16, 24, 32, 64),
            window=pick(0, 0, 0, 1, 5, 100, 128, 200, -1, -64, -100),
            ahead=pick(0, 0, 3, 140, 2**40),
            softcap=pick(0.0, 0.0, 20.0),
            bias=pick(False, True),
            seed=seed,
        )
        problems.append((problem, problem.whole("scalar")))
    return problems


@pytest.mark.sampled(5)
@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_on_every_isa_and_any_number_of_threads(isa: str, kind: str) -> None:
    for problem, expected in grid(kind):
        assert all(np.isfinite(out).all() for out in expected)
        for num_threads in (1, 2, 3):
            for out, right in zip(problem.whole(isa, num_threads), expected, strict=True):
                assert same(out, right), (problem, num_threads)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_in_a_chunk_and_in_a_batch(isa: str, kind: str) -> None:
    lengths = (1, 300, 129, 150)
    for plan in [Problem(head_dim=64, heads=8), Problem(heads=5, kv_heads=1, head_dim=20, window=70, block_size=24)]:
        problem = replace(plan, kind=kind, lengths=lengths)
        whole = problem.whole(isa)
        rng = np.random.default_rng(3)
        done = [0] * len(lengths)
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            chunks = []
            for i in rng.permutation(len(lengths)):
                n = min(int(rng.choice([0, 1, 1, 2, 7, 64, 129])), lengths[i] - done[i])
                if n > 0:
                    chunks.append((int(i), done[i], n))
                    done[i] += n
            if chunks:
                for (i, p, n), out in zip(chunks, problem.run(isa, chunks, int(rng.integers(1, 3))), strict=True):
                    assert same(out, whole[i][p : p + n]), (plan, i, p, n)


@pytest.mark.parametrize(("window", "bias"), [(0, False), (0, True), (3, False), (130, True), (-50, False)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("isa", ISAS)
def test_against_torch_ref(isa: str, window: int, bias: bool, softcap: float) -> None:
    problem = Problem(heads=6, head_dim=20, lengths=(290, 33), window=window, softcap=softcap, value_dim=13, bias=bias)
    if softcap:
        problem.wholes = ((3, 30), (120, 135), (140, 289))

    @dataclass
    class Rows:
        starts: list[int]
        lens: list[int]
        block_tables: list[torch.Tensor]
        seen: list[int] | None
        notes: dict[Any, Any] = field(default_factory=dict)

    longest = max(len(t) for t in problem.tables)
    tables = torch.tensor(np.array([np.pad(t, (0, longest - len(t))) for t in problem.tables]), dtype=torch.int64)
    num_slots = problem.cache.k.shape[0] * 16
    keys, values, _, _ = problem.cache.get(np.arange(num_slots))
    cache = LayerCache(*(torch.from_numpy(x).view(-1, 16, *x.shape[1:]) for x in (keys, values)))
    seen = [problem.seen(i, p) for i, length in enumerate(problem.lengths) for p in range(length)]
    rows: Any = Rows([0, 0], list(problem.lengths), [tables], seen if problem.wholes else None)
    query = torch.from_numpy(np.concatenate(problem.queries))
    # A window below 0 is of chunks.
    table = None if problem.biases is None else torch.from_numpy(problem.biases)
    scoring = Scoring(problem.scale, abs(window) or None, window < 0, softcap, bias=table)
    expected = reference.attention(query, cache, rows, scoring).flatten(1).numpy()
    np.testing.assert_allclose(np.concatenate(problem.whole(isa)), expected, atol=3e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [16, 24])
def test_what_lies_in_slots_that_no_key_occupies_does_not_matter(isa: str, kind: str, block_size: int) -> None:
    outs = []
    for rubbish in (np.nan, 0.0, -3e4):
        problem = Problem(8, 2, 20, kind, (135, 20), block_size, rubbish=rubbish)
        chunks = [(0, 128, 7), (1, 0, 19), (0, 134, 1)]
        outs.append(problem.run(isa, chunks))
        assert np.isfinite(np.concatenate(outs[-1])).all()
    for other in outs[1:]:
        assert all(same(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["key", "value", "query"])
def test_what_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(isa: str, kind: str, what: str) -> None:
    """Also the control of the test above: a slot that a row sees does matter."""
    for bad in (np.nan, np.inf):
        for at, window in ((70, 0), (131, 9), (0, 0)):
            problem = Problem(6, 2, 20, kind, (150, 30), window=window)
            sound = problem.whole(isa)
            tile, lane = problem.slots(0)[at] // 16, problem.slots(0)[at] % 16
            fill = Cache(16, 1, 1, kind, bad)
            if what == "query":
                problem.queries[0][at, 2] = bad
            elif kind in SCALED:
                k_scale = problem.cache.k_scale if what == "key" else problem.cache.v_scale
                k_scale[tile, 0, ..., lane] = 0x7FC0 if kind == "int4" else np.nan
            elif what == "key":
                problem.cache.k[tile, 0, :, lane] = fill.k.flat[0]
            else:
                problem.cache.v[tile, 0, lane] = fill.v.flat[0]
            out = problem.whole(isa)
            last = at + 1 if what == "query" else at + window if window else 150
            sees = np.zeros((150, 6), bool)
            sees[at:last, 2 if what == "query" else slice(0, 3)] = True
            has_nan = ~np.isfinite(out[0].reshape(150, 6, 20))
            # An infinite key may give a score of minus infinity, whose weight is 0.
            if what != "key" or np.isnan(bad) or kind in SCALED:
                assert has_nan[sees].all()
            assert not has_nan[~sees].any()
            assert same(out[0].reshape(150, 6, 20)[~sees], sound[0].reshape(150, 6, 20)[~sees])
            assert same(out[1], sound[1])
