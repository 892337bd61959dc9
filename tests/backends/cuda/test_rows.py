"""The kernels that take rows as they are: against their twins and float64, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.interpreter import run_interpreted
from tests.support.kernels import DTYPES, assert_twin_agrees, poisoned, written
from torch import Tensor

from headrace.backends.base import Activation, LayerShape
from headrace.backends.cuda.cache import KVCache, block_bytes
from headrace.backends.cuda.kernels import rows
from headrace.backends.cuda.launch import Config, Launch
from headrace.protocol.errors import CheckpointError

KINDS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")
NARROW = Config({"COLUMNS": 64}, 1)
"""Several programs in a row of a test."""

SIZES = torch.tensor([4, 0, 3, 0], dtype=torch.int32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launches(device: str = "meta") -> list[Launch]:
    """Every kernel of the file in every configuration, at the shapes of Llama-3.1-8B, and some of a small model."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    sizes, ids = empty(4, dtype=torch.int32), empty(256, dtype=torch.int32)
    x, out, table = empty(256, 4096), empty(256, 4096), empty(128256, 4096)
    wide, narrow, logits = empty(256, 28672), empty(256, 14336), empty(256, 128256, dtype=torch.float32)
    small, half = empty(256, 3072, dtype=torch.float16), empty(256, 1536, dtype=torch.float16)
    result = [
        rows.select(x, ids, out, sizes, 256),
        rows.activation(narrow, "relu", narrow, sizes, 256),
        *(rows.gated(wide, kind, narrow, sizes, 256) for kind in KINDS[1:]),
        rows.gated(small, "silu", half, sizes, 256),
        rows.add(x, out, out, sizes, 256),
        rows.finite(small, ids, sizes, 256),
    ]
    for config in rows.CONFIGS:
        result += [
            rows.embedding(ids, table, out, sizes, 256, 2.0, config),
            rows.gated(wide, "silu", narrow, sizes, 256, 0, config),
            rows.softcap(logits, 30.0, logits, sizes, 256, 2, config),
            rows.finite(x, ids, sizes, 256, 0, config),
        ]
    return result


def operators(dtype: torch.dtype, width: int, config: Config) -> dict[str, Callable[[Tensor], Launch]]:
    """Return each operator of rows as a function of its output [5, width]."""
    x, y = random(5, 2 * width + 12, dtype=dtype)[:, : 2 * width], random(5, width, dtype=dtype, seed=1)
    left, table, ids = x[:, :width], random(11, width, dtype=dtype, seed=2), torch.tensor([10, 0, 3, 3, 99]).int()
    inputs: dict[str, Any] = {"sizes": SIZES, "num_rows": 6, "config": config}
    result = {
        "embedding": lambda out: rows.embedding(ids, table, out, scale=1.7, **inputs),
        "select": lambda out: rows.select(table, ids, out, **inputs),
        "add": lambda out: rows.add(left, y, out, **inputs),
        "softcap": lambda out: rows.softcap(left, 1.5, out, **inputs),
    }
    for kind in KINDS:
        result[kind] = lambda out, kind=kind: rows.activation(left, kind, out, **inputs)
        result[f"gated {kind}"] = lambda out, kind=kind: rows.gated(x, kind, out, **inputs)
    return result


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_write_what_their_twins_write(dtype: torch.dtype, width: int) -> None:
    outcome = operators(dtype, width, NARROW)
    outputs = {name: poisoned(5, width, dtype=dtype) for name in outcome}

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [launch(out[name]) for name, launch in outcome.items()]

    assert_twin_agrees(make, outputs)
    results = written(make, outputs, "interpreted")
    for name, result in results.items():
        last = 3 if name == "select" else 4
        assert result[:last].isfinite().all()
        assert result[last:].isnan().all(), f"{name} wrote a row beyond the step's rows"
    whole = operators(dtype, width, rows.CONFIGS[0])
    for name, launch in whole.items():
        out = poisoned(5, width, dtype=dtype)
        run_interpreted(launch(out))
        assert torch.equal(out.nan_to_num(), results[name].nan_to_num()), f"{name} depends on the tile"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_is_scaled_as_the_reference_scales_it(dtype: torch.dtype) -> None:
    table, ids, out = random(11, 64, dtype=dtype), torch.tensor([10, 0, 3, 3], dtype=torch.int32), torch.zeros(4, 64)
    out = out.to(dtype)
    run_interpreted(rows.embedding(ids, table, out, SIZES, 4, scale=8.3))
    assert torch.equal(out, table[ids.long()] * table.new_tensor(8.3))


def test_activations_are_within_their_bounds_of_float64() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-6, 1.5, 999), -torch.logspace(-6, 1.5, 999)])[None]
    d, one = x.double(), torch.tensor([1, 0, 0, 0], dtype=torch.int32)
    exact = {
        "silu": (d * d.sigmoid(), 8 + d.abs()),
        "gelu": (d * 0.5 * torch.erfc(-d / 2**0.5), 16 * (1 + d * d)),
        "gelu_tanh": (d * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (d + 0.044715 * d**3)), 16 * (1 + d * d)),
        "relu": (d.relu(), 0 * d),
    }
    for kind in KINDS:
        out = torch.zeros_like(x)
        run_interpreted(rows.activation(x, kind, out, one, 1))
        expected, bound = exact[kind]
        assert ((out.double() - expected).abs() <= bound * 2**-24 * expected.abs() + 1e-37).all(), kind
    out = torch.zeros_like(x)
    run_interpreted(rows.softcap(x, 30.0, out, one, 1))
    expected = 30 * torch.tanh(d / 30)
    assert ((out.double() - expected).abs() <= 2**-21 * expected.abs()).all()


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_row_has_the_same_bits_alone_and_among_others(mode: str) -> None:
    x = random(5, 200, dtype=torch.bfloat16)

    def run(first: int, last: int, config: Config) -> Tensor:
        sizes = torch.tensor([last - first, 0, 0, 0], dtype=torch.int32)

        def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
            return [rows.gated(x[first:last], "gelu", out["out"], sizes, 8, config=config)]

        return written(make, {"out": poisoned(last - first, 100, dtype=torch.bfloat16)}, mode)["out"]

    together = run(0, 5, rows.CONFIGS[0])
    for row in range(5):
        assert torch.equal(run(row, row + 1, NARROW)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_found_anywhere_in_a_row(dtype: torch.dtype, bad: float | None) -> None:
    x = random(5, 144, dtype=dtype)[:, :130]
    x[2, 5] = torch.finfo(dtype).max
    x[4] = torch.nan
    if bad is not None:
        x[1, 129] = x[3, 0] = bad
    outputs = {"out": poisoned(5, dtype=torch.int32)}

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [rows.finite(x, out["out"], SIZES, 6, config=NARROW)]

    assert_twin_agrees(make, outputs)
    others = 1 if bad is None else 0
    assert written(make, outputs, "interpreted")["out"].tolist() == [1, others, 1, others, 2**31 - 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3"])
def test_blocks_are_copied_one_pair_after_the_other(dtype: str) -> None:
    cache = KVCache([LayerShape(2, 24), LayerShape(2, 24, kind=1)], [6, 6], 8, dtype, torch.device("cpu"))
    codes = [part.view(torch.uint8) for layer in cache.layers for part in (layer.keys, layer.values)]
    before = [part.random_(0, 100, generator=torch.Generator().manual_seed(3)).clone() for part in codes]
    cache.copy_blocks([(0, 3), (3, 4), (1, 0)])
    assert all(torch.equal(a, b[[1, 1, 2, 0, 0, 5]]) for a, b in zip(codes[:2], before[:2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(codes[2:], before[2:], strict=True)), "of that kind alone"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_block_takes_the_bytes_that_it_is_said_to_take(dtype: str) -> None:
    shapes = [LayerShape(2, 24), LayerShape(1, 20, 9, kind=1), LayerShape(2, 24), LayerShape(2, 24, source=0)]
    shapes += [LayerShape(1, 24, 16, shares_key=True)]
    cache = KVCache(shapes, [5, 3], 16, dtype, torch.device("cpu"))
    assert [len(cache.read_block(2, kind)) for kind in (0, 1)] == [block_bytes(shapes, k, 16, dtype) for k in (0, 1)]
    assert cache.layers[2].keys.shape == (5, 2, 16, 24)
    assert cache.layers[3] is cache.layers[0]
    assert cache.layers[1].values.shape == (3, 1, 16, 9)
    assert cache.layers[4].values.data_ptr() == cache.layers[4].keys.data_ptr()
    with pytest.raises(CheckpointError, match="keys of 580 numbers with values of 512, 576 and 512 at most"):
        KVCache([LayerShape(1, 580, 512)], [1], 16, dtype, torch.device("cpu"))


def test_a_grid_from_a_host_number_is_caught_by_the_next_step() -> None:
    """The negative control of fixed grids: a launch made for the rows of one step leaves rows of the next unwritten."""
    x, sizes = random(4, 64), torch.tensor([2, 0, 0, 0], dtype=torch.int32)
    for num_rows, complete in ((4, True), (2, False)):
        out = poisoned(4, 64, dtype=torch.float32)
        sizes[0] = 2
        launch = rows.add(x, x, out, sizes, num_rows)
        run_interpreted(launch)
        assert out[2:].isnan().all()
        sizes[0] = 4
        run_interpreted(launch)
        assert torch.equal(out, 2 * x) is complete
