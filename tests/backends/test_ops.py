"""The determinism law on the reference operators: a row's bits are the same alone, among others, on any threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.backends import make_backend
from headrace.backends.base import ExpertLayer, HeadNorm, Heads, LayerShape, Routing, Scoring, SetUp
from headrace.backends.torch_ref import rowwise
from headrace.backends.torch_ref.cache import LayerCache
from headrace.backends.torch_ref.ops import RefMatrix, RefOps
from headrace.backends.torch_ref.program import EagerProgram
from headrace.backends.torch_ref.tensors import zeros
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.kinds import CacheKind
from headrace.quant.base import QWeight, source_of

OPS = RefOps(torch.device("cpu"), torch.float32)
LAW = settings(max_examples=40, deadline=None)
sizes = st.one_of(st.integers(1, 300), st.sampled_from([16, 64, 128, 256, 688, 1024]))
num_rows = st.integers(2, 35)
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(*weights: QWeight, bias: Tensor | None = None) -> RefMatrix:
    return OPS.matrix(source_of(weights), bias)


def assert_rows_independent(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """`function` of rows x [R, ...] gives each row its own bits: alone, permuted, off alignment, by 1 and 2 threads."""
    torch.set_num_threads(1)
    together = function(x)
    alone = torch.cat([function(x[i : i + 1].clone()) for i in range(len(x))])
    assert same_bits(together, alone), "alone"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))
    assert same_bits(function(x[order]), together[order]), "permuted"
    assert same_bits(function(x[1:]), together[1:]), "without the first row"
    torch.set_num_threads(2)
    assert same_bits(function(x), together), "two threads"
    assert same_bits(torch.cat([function(row) for row in torch.split(x, 1)]), together), "alone with two threads"


@LAW
@given(seeds, num_rows, sizes, sizes, st.booleans())
def test_I_13_linear(seed: int, rows: int, num_in: int, num_out: int, bias: bool) -> None:
    matrix = matrix_of(QWeight(randn(seed, num_out, num_in)), bias=randn(seed + 1, num_out) if bias else None)
    x = randn(seed + 2, rows, num_in)
    assert_rows_independent(lambda x: OPS.linear(x, matrix), x)
    heads = torch.randn(x.shape[0], 3 * (matrix.num_in + 5))
    assert_rows_independent(lambda x: OPS.by_head(x, [matrix] * 3, tail=5), heads)
    expected = F.linear(x.double(), matrix.dense().double(), None if matrix.bias is None else matrix.bias.double())
    assert torch.allclose(OPS.linear(x, matrix).double(), expected, rtol=0, atol=1e-5 * math.sqrt(num_in))


@LAW
@given(seeds, num_rows, sizes)
def test_I_13_norms(seed: int, rows: int, width: int) -> None:
    x, weight, bias = randn(seed, rows, width) * 3, randn(seed + 1, width), randn(seed + 2, width)
    assert_rows_independent(lambda x: OPS.rms_norm(x, weight, 1e-6, 1.0), x)
    assert_rows_independent(lambda x: OPS.layer_norm(x, weight, bias, 1e-5), x)
    assert_rows_independent(lambda x: OPS.layer_norm(x, weight, None, 1e-5, 1.0), x)
    norm = HeadNorm(weight[: -(-width // 3)], 1e-6, 0.0)
    part = slice(width // 3, width // 3 + len(norm.weight))
    assert_rows_independent(lambda x: OPS.norm_columns(x, part.start, 1, norm), x)
    inside = x.clone()
    inside[:, part] = OPS.rms_norm(x[:, part].contiguous(), *norm)
    assert torch.equal(OPS.norm_columns(x, part.start, 1, norm), inside)
    assert torch.allclose(OPS.rms_norm(x, weight, 1e-6), F.rms_norm(x, (width,), weight, 1e-6), rtol=1e-4, atol=1e-5)
    expected = F.layer_norm(x, (width,), weight, bias, 1e-5)
    assert torch.allclose(OPS.layer_norm(x, weight, bias, 1e-5), expected, rtol=1e-3, atol=1e-4)


@LAW
@given(
    seeds, num_rows, st.integers(1, 2500), st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "relu2"])
)
def test_I_13_activations(seed: int, rows: int, width: int, kind: Any) -> None:
    x = randn(seed, rows, 2 * width) * 4
    assert_rows_independent(lambda x: OPS.activation(x, kind), x)
    assert_rows_independent(lambda x: OPS.gated(x, kind), x)
    assert_rows_independent(lambda x: OPS.multiply(x[:, :width], x[:, width:], kind), x)
    assert_rows_independent(lambda x: OPS.multiply(x, x[:, :1], kind), x)
    assert_rows_independent(lambda x: OPS.scale(x, 0.22), x)
    assert_rows_independent(lambda x: OPS.softcap(x, 30.0), x)
    assert_rows_independent(lambda x: OPS.xielu(x, 0.8, 1.1, 0.5), x)
    assert_rows_independent(lambda x: rowwise.elementwise(torch.exp, x), x)


@LAW
@given(seeds, num_rows, st.integers(1, 9), st.integers(1, 40), st.integers(0, 9))
def test_I_13_rope(seed: int, rows: int, heads: int, half: int, rest: int) -> None:
    angles = torch.cat([randn(seed, rows, heads * (2 * half + rest)), randn(seed + 1, rows, half)], dim=1)

    def turn(x: Tensor) -> Tensor:
        numbers, angle = x[:, :-half].reshape(len(x), heads, -1), x[:, -half:]
        return OPS.turn(numbers, angle.double().cos().float(), angle.double().sin().float())

    assert_rows_independent(turn, angles)


@LAW
@given(seeds, num_rows, st.integers(1, 9), st.integers(1, 70), st.integers(1, 70))
def test_I_13_experts(seed: int, rows: int, num_experts: int, hidden: int, inner: int) -> None:
    gate_up = [matrix_of(QWeight(randn(seed + i, 2 * inner, hidden))) for i in range(num_experts)]
    down = [matrix_of(QWeight(randn(seed - i, hidden, inner))) for i in range(num_experts)]
    router = matrix_of(QWeight(randn(seed + 99, num_experts, hidden)))
    top_k = 1 + seed % num_experts
    x = randn(seed, rows, hidden)
    bias = randn(seed + 98, num_experts)
    groups = (num_experts // 2, max(1, num_experts // 4), 2) if num_experts in (4, 8) and top_k < 3 else None
    for routing in (Routing(top_k), Routing(top_k, "sigmoid", bias, groups, seed % 2 == 0, 2.5, seed % 3 == 0)):
        assert_rows_independent(lambda x, r=routing: OPS.experts(x, ExpertLayer(router, r, gate_up, down, "silu")), x)


def test_route_gives_equal_logits_to_the_lower_expert() -> None:
    weights, ids = OPS.route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0]]), Routing(3))
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.sum().item() == pytest.approx(1.0)


def test_groups_are_chosen_by_their_best_experts() -> None:
    """Of four groups of two those two with the greatest sums: the greatest expert lies in one that takes no part."""
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.5, 2.0, 1.9, -1.0, -2.0]])
    assert OPS.route(logits, Routing(3, "sigmoid", groups=(4, 2, 2)))[1].tolist() == [[4, 5, 3]]
    weights, ids = OPS.route(logits, Routing(1, groups=(4, 2, 1), renormalise=False, scale=2.0))
    assert ids.tolist() == [[0]]
    assert weights.item() == pytest.approx(2 * logits.softmax(1)[0, 0].item())


@dataclass
class Rows:
    """As much of a ForwardBatch as attention reads."""

    starts: list[int]
    lens: list[int]
    block_tables: list[Tensor]
    slot_mapping: list[Tensor]
    copies: Tensor | None = None
    seen: list[int] | None = None
    notes: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """One sequence: query, key, value [length, heads, D]."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def length(self) -> int:
        return len(self.query)


def attend(
    problems: list[Problem],
    chunks: list[list[tuple[int, int]]],
    block_size: int,
    seed: int,
    window: int | None,
    cap: float,
) -> list[Tensor]:
    """Outputs of all positions, step by step: step s computes chunks[s] = [(problem, number of rows), ...].

    Blocks are scattered over a cache whose other places hold NaN, as a sick neighbour might have left them.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-p.length // block_size) for p in problems]
    free = torch.randperm(sum(num_blocks) + 7, generator=generator).tolist()
    tables = [[free.pop() for _ in range(n)] for n in num_blocks]
    kv_heads, size = problems[0].key.shape[1:]
    heads = Heads(problems[0].query.shape[1], kv_heads, size)
    cache = LayerCache(*torch.full((2, sum(num_blocks) + 7, block_size, kv_heads, size), float("nan")))
    done = [0] * len(problems)
    outs: list[list[Tensor]] = [[] for _ in problems]
    for step in chunks:
        starts, lens = [done[i] for i, _ in step], [n for _, n in step]
        longest = max(len(tables[i]) for i, _ in step)
        table = torch.tensor([tables[i] + [0] * (longest - len(tables[i])) for i, _ in step])
        slots = [
            tables[i][p // block_size] * block_size + p % block_size
            for i, n in step
            for p in range(done[i], done[i] + n)
        ]
        rows_seen = [
            [getattr(problems[i], name)[done[i] : done[i] + n] for i, n in step] for name in ("query", "key", "value")
        ]
        qkv = torch.cat([torch.cat(parts) for parts in rows_seen], dim=1).flatten(1)
        rows = Rows(starts, lens, [table], [torch.tensor(slots)])
        query = OPS.rope_store(qkv, heads, rows, cache)  # type: ignore[arg-type]
        # A window below 0 is of chunks.
        wide, chunked = abs(window or 0) or None, (window or 0) < 0
        out = OPS.attention(query, heads, rows, cache, Scoring(0.3, wide, chunked, cap))  # type: ignore[arg-type]
        out = out.unflatten(1, (heads.num_heads, size))
        for (i, n), part in zip(step, torch.split(out, lens), strict=True):
            outs[i].append(part)
            done[i] += n
    return [torch.cat(parts) for parts in outs]


@settings(max_examples=30, deadline=None)
@given(
    st.data(), seeds, st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1), (10, 2), (9, 9)]), st.integers(1, 40),
    st.sampled_from([1, 3, 16, 32]), st.sampled_from([None, 1, 5, 100, 128, 200, -50, -128]),
    st.sampled_from([0.0, 20.0]),
)  # fmt: skip
def test_I_13_attention(
    data: st.DataObject, seed: int, heads: tuple[int, int], size: int, block_size: int, window: int | None, cap: float
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=2, max_size=6))
    problems = [
        Problem(
            randn(seed + i, n, heads[0], size),
            randn(seed + i + 50, n, heads[1], size),
            randn(seed + i + 99, n, heads[1], size),
        )
        for i, n in enumerate(lengths)
    ]
    torch.set_num_threads(1)
    whole = [attend([p], [[(0, p.length)]], block_size, seed + 1, window, cap)[0] for p in problems]
    left = list(lengths)
    chunks: list[list[tuple[int, int]]] = []
    while any(left):
        ready = [i for i, n in enumerate(left) if n]
        order = data.draw(st.permutations(ready))
        step = []
        for i in order[: data.draw(st.integers(1, len(order)))]:
            n = min(left[i], data.draw(st.sampled_from([1, 1, 2, 7, 64, 127, 128, 129, 300])))
            left[i] -= n
            step.append((i, n))
        chunks.append(step)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for i, out in enumerate(attend(problems, chunks, block_size, seed + 2, window, cap)):
            assert same_bits(out, whole[i]), (i, threads)


@pytest.mark.parametrize("window", [None, 3, 130, -50])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_attention_equals_the_plain_formula(window: int | None, cap: float) -> None:
    length, heads, kv_heads, size = 290, 6, 2, 20
    problem = Problem(*(randn(i, length, h, size) for i, h in enumerate((heads, kv_heads, kv_heads))))
    actual = attend([problem], [[(0, 113)], [(0, 177)]], 16, 5, window, cap)[0]
    key, value = (t.double().repeat_interleave(heads // kv_heads, dim=1) for t in (problem.key, problem.value))
    scores = torch.einsum("qhd,khd->hqk", problem.query.double(), key) * 0.3
    scores = cap * torch.tanh(scores / cap) if cap else scores
    reach = torch.arange(length)[:, None] - torch.arange(length)
    chunk = torch.arange(length) // -(window or -1)
    behind = chunk[:, None] != chunk if (window or 0) < 0 else reach >= (window or length)
    scores = scores.masked_fill((reach < 0) | behind, float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    assert (actual.double() - expected).abs().max() < 1e-5


def test_copy_blocks_goes_in_order() -> None:
    kinds, shapes = (
        (CacheKind(), CacheKind(7)),
        [LayerShape(1, 2), LayerShape(1, 3, kind=1), LayerShape(1, 2, source=0)],
    )
    model = SimpleNamespace(vocab_size=1, kinds=kinds, cache_shapes=shapes)
    program = EagerProgram(model, OPS, SetUp((4, 5), 3, "float32", 1, 1, 1, 1))
    for cache in program.caches:
        for part in (cache.keys, cache.values):
            part.copy_(torch.arange(len(part))[:, None, None, None].expand_as(part))
    program.copy_blocks([(0, 2), (2, 3)])
    program.copy_blocks([(4, 1)], kind=1)
    assert [cache.values[:, 0, 0, 0].tolist() for cache in program.caches] == [
        [0, 1, 0, 0], [0, 4, 2, 3, 4], [0, 1, 0, 0]
    ]  # fmt: skip


def test_control_a_matmul_over_all_rows_breaks_the_law() -> None:
    """What every framework does, one product for all rows: some shape must show it, or the tests above see nothing."""
    broken = 0
    for rows, num_in, num_out in [(9, 300, 70), (33, 688, 256), (5, 100, 999), (17, 256, 256)]:
        x, weight = randn(rows, rows, num_in), randn(num_in, num_out, num_in)
        try:
            assert_rows_independent(lambda x, weight=weight: F.linear(x, weight), x)
        except AssertionError:
            broken += 1
    assert broken > 0


@pytest.mark.parametrize("leak", ["mean", "max", "first row"])
def test_control_work_across_rows_is_caught(leak: str) -> None:
    """A double that scales activations by something of the whole batch, as careless quantisation does."""
    leaks = {"mean": lambda x: x.mean(), "max": lambda x: x.abs().max(), "first row": lambda x: x[0]}
    with pytest.raises(AssertionError):
        assert_rows_independent(lambda x: x / leaks[leak](x), randn(1, 8, 32))


def test_control_attention_spans_that_follow_the_chunk_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans counted from the row's own position instead of position 0: the sums must differ somewhere."""
    from headrace.backends.torch_ref import attention

    problems = [Problem(*(randn(i, 300, 2, 24) for i in range(3)))]
    whole = attend(problems, [[(0, 300)]], 16, 1, None, 0.0)[0]
    right = attention.pieces_of

    def wrong(starts: list[int], *rest: Any) -> list[Any]:
        monkeypatch.setattr(attention, "SPAN", 128 if starts[0] == 0 else 96)
        return right(starts, *rest)

    monkeypatch.setattr(attention, "pieces_of", wrong)
    assert not same_bits(attend(problems, [[(0, 150)], [(0, 150)]], 16, 1, None, 0.0)[0], whole)


def test_a_shape_whose_batched_product_is_inexact_is_done_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = randn(1, 5, 1, 32), randn(2, 5, 32, 48)
    batched = rowwise.products(a, b)
    monkeypatch.setattr(rowwise, "one_call_is_exact", lambda *shape: False)
    assert same_bits(rowwise.products(a, b), batched)


@pytest.mark.parametrize("shape", [(1, 256, 16), (1, 2048, 256), (16, 1024, 128), (16, 2048, 2048), (1, 2048, 2064)])
def test_I_13_products_by_any_number_of_threads(shape: tuple[int, int, int]) -> None:
    """Large ones among them, which are not tried before."""
    m, k, n = shape
    a, b = randn(1, 3, m, k), randn(2, k, n)
    for matrix in (b, b.t().contiguous().t()):
        torch.set_num_threads(1)
        expected = rowwise.products(a, matrix.expand(3, k, n))
        for num_threads in (2, 3, 4):
            torch.set_num_threads(num_threads)
            for size in (1, 3):
                assert same_bits(rowwise.products(a[:size], matrix.expand(size, k, n)), expected[:size])
            assert torch.get_num_threads() == num_threads


def test_I_13_control_a_product_that_threads_share_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.bmm

    def shared(a: Tensor, b: Tensor) -> Tensor:
        return real(a, b) * (1 + 1e-7 * (torch.get_num_threads() > 1))

    monkeypatch.setattr(torch, "bmm", shared)
    torch.set_num_threads(2)
    assert not rowwise.one_call_is_exact.__wrapped__(1, 32, 16, False, 2)
    torch.set_num_threads(1)
    assert rowwise.one_call_is_exact.__wrapped__(1, 32, 16, False, 1)


def test_the_trial_of_batched_products_notices_a_kernel_that_mixes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.bmm

    def mixing(a: Tensor, b: Tensor) -> Tensor:
        return real(a, b) * (1 + 1e-7 * (len(a) > 4))

    assert rowwise.one_call_is_exact.__wrapped__(1, 32, 16, False, 1)
    monkeypatch.setattr(torch, "bmm", mixing)
    assert not rowwise.one_call_is_exact.__wrapped__(1, 32, 16, False, 1)


def test_rows_off_the_cache_line_are_brought_onto_it() -> None:
    off = randn(1, 1 + 4 * 32)[1:].view(4, 32)
    assert off.data_ptr() % 64
    assert rowwise.aligned(off).data_ptr() % 64 == 0
    assert torch.equal(rowwise.aligned(off), off)
    on = randn(1, 4, 32)
    assert rowwise.aligned(on) is on


def test_a_lone_long_row_is_summed_as_among_others() -> None:
    x = randn(3, 3, 70001)
    assert_rows_independent(rowwise.row_sums, x)


def made_up_int8(seed: int, num_out: int, num_in: int, group: int, *, zeros: bool, permuted: bool) -> QWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-num_in // group)
    return QWeight(
        codes=torch.randint(-127, 128, (num_out, num_in), generator=generator, dtype=torch.int8),
        scales=torch.rand(num_out, groups, generator=generator) / 64 + 1e-3,
        zeros=torch.randint(-9, 9, (num_out, groups), generator=generator).float() if zeros else None,
        group=group,
        bits=8,
        permutation=torch.randperm(num_in, generator=generator) if permuted else None,
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("permuted", [False, True])
def test_linear_takes_a_quantised_weight(zeros: bool, permuted: bool) -> None:
    weight, other = (made_up_int8(seed, 24, 70, 32, zeros=zeros, permuted=permuted) for seed in (7, 8))
    x = randn(1, 5, 70)
    expected = torch.zeros(5, 24, dtype=torch.float64)
    for o in range(24):
        for j in range(70):
            zero = 0.0 if weight.zeros is None else weight.zeros[o, j // 32]
            w = (weight.codes[o, j].double() - zero) * weight.scales[o, j // 32].double()  # type: ignore[index]
            expected[:, o] += w * x[:, j if weight.permutation is None else weight.permutation[j]].double()
    actual = OPS.linear(x, matrix_of(weight, other))
    assert torch.allclose(actual[:, :24].double(), expected, atol=1e-3)
    assert torch.equal(actual[:, 24:], OPS.linear(x, matrix_of(other)))


def test_parts_of_a_layer_in_different_forms_are_refused() -> None:
    coded, plain = made_up_int8(7, 24, 70, 32, zeros=False, permuted=False), QWeight(randn(2, 11, 70))
    with pytest.raises(CheckpointError, match="its parts are quantised differently"):
        source_of([coded, plain], "qkv")


def test_backends_are_found_by_folder_name() -> None:
    for name in ("nothing", "../torch_ref", "base", "torch_ref.ops", ""):
        with pytest.raises(RequestError, match=r"backend: .* must be one of auto, .*torch_ref"):
            make_backend(name, "cpu", "float32")
    with pytest.raises(RequestError, match="device"):
        make_backend("auto", "tpu", "float32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_I_13_linear_on_cuda() -> None:
    ops = make_backend("torch_ref", "cuda", "float32").ops
    matrix = ops.matrix(source_of([QWeight(randn(1, 70, 300))]))
    x = randn(2, 9, 300).cuda()
    together = ops.linear(x, matrix)
    assert torch.equal(together, torch.cat([ops.linear(row, matrix) for row in torch.split(x, 1)]))


def test_zeros_of_every_size_and_type() -> None:
    for size in ((0, 2, 3), (2, 0), (3, 4)):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
            values = zeros(size, dtype, torch.device("cpu"))
            assert (values.shape, values.dtype, values.is_contiguous()) == (size, dtype, True)
            assert not values.float().any()
