"""Paged attention: against its twin, float64 and torch_ref, and the same bits for a row however the step is cut."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.kernels import DTYPES, assert_close, assert_twin_agrees, backwards, poisoned, written
from torch import Tensor

from headrace.backends.base import Chunks
from headrace.backends.cuda.cache import STORED, LayerCache
from headrace.backends.cuda.kernels import attention as kernel
from headrace.backends.cuda.kernels import spans
from headrace.backends.cuda.launch import Config, Launch
from headrace.backends.torch_ref.attention import attention as reference
from headrace.backends.torch_ref.batch import make_forward_batch

BLOCK = 16
SCALE = 0.3
Chunk = tuple[int, int, int]
"""A sequence, and its positions from the second number to before the third."""


class Problem:
    """Sequences whose queries, keys and values are fixed by their number: any chunks of them are computed."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, cache: str = "bfloat16", heads: int = 4, kv_heads: int = 2,
        head_dim: int = 16, lens: Sequence[int] = (1100, 90), block: int = BLOCK, **options: Any,
    ) -> None:  # fmt: skip
        self.dtype, self.cache_dtype, self.heads, self.kv_heads, self.head_dim = dtype, cache, heads, kv_heads, head_dim
        self.options, self.block = options, block
        generator = torch.Generator().manual_seed(1)
        self.query = [2 * torch.randn(n, heads * head_dim, generator=generator).to(dtype) for n in lens]
        stored = STORED[cache]
        shape = (2, kv_heads, head_dim)
        numbers = [torch.randn(n, *shape, generator=generator) for n in lens]
        self.scales = [x.abs().amax(-1) / 100 if cache in ("int8", "fp8_e4m3") else None for x in numbers]
        scaled = [x if s is None else x / s[..., None] for x, s in zip(numbers, self.scales, strict=True)]
        self.codes = [(x.round() if cache == "int8" else x).to(stored) for x in scaled]

    def exact(self, chunk: Chunk) -> Tensor:
        """Attention of a chunk in float64."""
        sequence, first, last = chunk
        numbers = self.codes[sequence][:last].double()
        scales = self.scales[sequence]
        if scales is not None:
            numbers = numbers * scales[:last, ..., None].double()
        group = self.heads // self.kv_heads
        keys, values = (x.repeat_interleave(group, 1) for x in numbers.unbind(1))
        q = self.query[sequence][first:last].double().view(-1, self.heads, self.head_dim)
        s = torch.einsum("rhd,nhd->hrn", q, keys) * SCALE
        if cap := self.options.get("softcap"):
            s = cap * torch.tanh(s / cap)
        position, at = torch.arange(first, last)[:, None], torch.arange(last)
        seen = at <= position
        if window := self.options.get("window"):
            seen &= at > position - window
        p = s.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hrn,nhd->rhd", p, values).flatten(1)

    def step(
        self, chunks: Sequence[Chunk], partials: int = 64, many: int = 64, programs: int = 3, seed: int = 0,
        spare: int = 1, module: ModuleType = kernel,
    ) -> tuple[Callable[[Mapping[str, Tensor]], Sequence[Launch]], dict[str, Tensor]]:  # fmt: skip
        """Return the maker of a step's launches, and its outputs: the cache has NaN wherever no chunk's sequence is.

        seed: of the blocks' places. spare: blocks of NaN at the end of each chunk's table.
        """
        counts = [-(-last // self.block) for _, _, last in chunks]
        places = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed))
        codes = torch.full((2, len(places), self.kv_heads, self.block, self.head_dim), torch.nan)
        codes = codes.to(STORED[self.cache_dtype])
        if self.cache_dtype == "int8":
            codes.fill_(77)
        scales = torch.full(codes.shape[:-1], torch.nan)
        table, begin = [], []
        for (sequence, _, last), count in zip(chunks, counts, strict=True):
            begin.append(len(table))
            blocks = places[: count]
            places = places[count:]
            at = torch.arange(last)
            where = (slice(None), blocks[at // self.block], slice(None), at % self.block)
            bits = codes.view(torch.uint8) if codes.element_size() == 1 else codes
            ours = self.codes[sequence][:last]
            bits[where] = (ours.view(torch.uint8) if bits is not codes else ours).transpose(0, 1).permute(1, 0, 2, 3)
            own_scales = self.scales[sequence]
            if own_scales is not None:
                scales[where] = own_scales[:last].transpose(0, 1).permute(1, 0, 2)
            table += [*blocks.tolist(), *[int(places[-1])] * spare]
        scaled = tuple(scales) if self.cache_dtype in ("int8", "fp8_e4m3") else (None, None)
        cache = LayerCache(self.cache_dtype, codes[0], codes[1], *scaled)
        rows = torch.cat([self.query[sequence][first:last] for sequence, first, last in chunks])
        # Rows of a wider tensor, as queries lie beside keys and values; one more row than the step has.
        query = torch.full((len(rows) + 1, rows.shape[1] + 16), torch.nan, dtype=self.dtype)
        query[:-1, : rows.shape[1]] = rows
        group = spans.group_rows(self.heads, self.kv_heads)
        few = max(16, group)
        items = spans.work_list(
            [first for _, first, _ in chunks], [last - first for _, first, last in chunks], begin, few // group,
            many // group, partials,
        )  # fmt: skip
        scratch = spans.make_scratch(max(partials, 1), self.heads, self.kv_heads, self.head_dim, "cpu")
        scratch.sums.fill_(torch.nan)
        scratch.totals.fill_(torch.nan)

        def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
            launches: list[Launch] = module.attention(
                query, out["out"], cache, torch.tensor(table, dtype=torch.int32), torch.from_numpy(items), scratch,
                heads=self.heads, kv_heads=self.kv_heads, scale=SCALE, programs=programs,
                configs=(Config({"BM": few}), Config({"BM": many})), **self.options,
            )  # fmt: skip
            return launches

        return make, {"out": poisoned(len(rows) + 1, rows.shape[1], dtype=self.dtype)}

    def run(
        self, mode: str, chunks: Sequence[Chunk], order: Callable[[int], list[int]] | None = None, **options: Any
    ) -> list[Tensor]:
        """Return the rows of each chunk."""
        make, outputs = self.step(chunks, **options)
        out = written(make, outputs, mode, order)["out"]
        assert out[-1].isnan().all(), "a row beyond the step's rows was written"
        again = written(make, outputs, mode, order)["out"]
        assert torch.equal(out[:-1], again[:-1]), "a replay gives other bits"
        return list(out[:-1].split([last - first for _, first, last in chunks]))


LONG = [(0, 1000, 1040), (1, 60, 61), (0, 1023, 1026), (1, 0, 20)]
CASES = [
    {"cache": "bfloat16"},
    {"cache": "bfloat16", "window": 40},
    {"cache": "bfloat16", "window": 600, "softcap": 3.0},
    {"cache": "int8"},
    {"cache": "fp8_e4m3", "softcap": 3.0},
    {"cache": "fp8_e5m2"},
    {"cache": "float16", "dtype": torch.float16, "heads": 3, "kv_heads": 1, "head_dim": 24, "block": 8},
    {"cache": "float32", "dtype": torch.float32, "heads": 2, "block": 128},
    {"cache": "float16", "heads": 2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_the_kernel_writes_what_its_twin_writes(case: dict[str, Any]) -> None:
    problem = Problem(**case)
    make, outputs = problem.step(LONG)
    assert_twin_agrees(make, outputs)
    expected = torch.cat([problem.exact(chunk) for chunk in LONG])
    assert_close(written(make, outputs)["out"][:-1], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_is_near_the_reference(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    problem = Problem(dtype, name, window=300, softcap=2.0, lens=(600,))
    blocks = -(-600 // BLOCK)
    cache = problem.codes[0].transpose(0, 1)
    padded = torch.zeros(2, blocks * BLOCK, *cache.shape[2:], dtype=dtype)
    padded[:, :600] = cache
    rows = make_forward_batch(Chunks([500], [list(range(100))], [list(range(blocks))]), BLOCK, torch.device("cpu"))
    query = problem.query[0][500:].view(100, 4, 16)
    expected = reference(query, padded.view(2, blocks, BLOCK, 2, 16), rows, SCALE, 300, 2.0)
    assert_close(problem.run("twin", [(0, 500, 600)])[0], expected.flatten(1))


def assert_law(problem: Problem, mode: str, module: ModuleType = kernel) -> None:
    """A row has the same bits in a long chunk and in a short one, alone and in a batch, split or not, in any blocks."""

    def run(chunks: Sequence[Chunk], **options: Any) -> list[Tensor]:
        return problem.run(mode, chunks, module=module, **options)

    whole = run([(0, 1000, 1040)])[0]
    assert whole.isfinite().all()
    for position in (1000, 1023, 1024, 1039):
        alone = run([(0, position, position + 1)], seed=position)[0][0]
        assert torch.equal(alone, whole[position - 1000]), f"position {position} alone"
    batch = run([(1, 3, 50), (0, 1005, 1006), (1, 70, 71), (0, 1022, 1028), (0, 1000, 1017)], spare=3, programs=2)
    assert torch.equal(batch[1][0], whole[5]), "alone in a batch"
    assert torch.equal(batch[3], whole[22:28]), "in a short chunk"
    assert torch.equal(batch[4], whole[:17]), "in a chunk of other length"
    for options in ({"many": 128}, {"many": 16, "programs": 1}, {"order": backwards}):
        assert torch.equal(run([(0, 1000, 1040)], **options)[0], whole), f"with {options}"
    unsplit = run([(0, 1005, 1006), (0, 1022, 1028)], partials=0)
    assert torch.equal(unsplit[0][0], whole[5])
    assert torch.equal(unsplit[1], whole[22:28])


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize("options", [{}, {"window": 700, "softcap": 2.0}], ids=["full", "window"])
def test_a_row_has_the_same_bits_however_the_step_is_cut(options: dict[str, Any], mode: str) -> None:
    assert_law(Problem(**options), mode)
