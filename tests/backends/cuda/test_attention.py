"""Paged attention: against its twin, float64 and torch_ref, and the same bits for a row however the step is cut."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.cubin import CAPABILITIES, compiled, faults
from tests.support.kernels import DTYPES, TOLERANCES, assert_close, assert_twin_agrees, backwards, poisoned, written
from torch import Tensor

from headrace.backends.base import LayerShape, Scoring
from headrace.backends.cuda.cache import STORED, KVCache, LayerCache
from headrace.backends.cuda.kernels import attention as kernel
from headrace.backends.cuda.kernels import spans
from headrace.backends.cuda.launch import Config, Kernel, Launch
from headrace.backends.step import Chunks
from headrace.backends.torch_ref.attention import attention as reference
from headrace.backends.torch_ref.batch import make_forward_batch
from headrace.backends.torch_ref.cache import LayerCache as TorchCache

BLOCK = 16
SCALE = 0.3
Chunk = tuple[int, int, int]
"""A sequence, and its positions from the second number to before the third."""


class Problem:
    """Sequences whose queries, keys and values are fixed by their number: any chunks of them are computed."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, cache: str = "bfloat16", heads: int = 4, kv_heads: int = 2,
        head_dim: int = 16, lens: Sequence[int] = (1100, 90), block: int = BLOCK,
        out_dtype: torch.dtype | None = None, value_dim: int = 0, shared: bool = False, sinks: bool = False,
        ahead: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        self.dtype, self.cache_dtype, self.heads, self.kv_heads, self.head_dim = dtype, cache, heads, kv_heads, head_dim
        self.options, self.block, self.out_dtype = options, block, out_dtype or dtype
        self.value_dim, self.shared, self.ahead, self.lens = value_dim or head_dim, shared, ahead, lens
        # The widest of keys and values decides about tiles and pieces.
        self.size = max(head_dim, self.value_dim)
        generator = torch.Generator().manual_seed(1)
        self.query = [2 * torch.randn(n, heads * head_dim, generator=generator).to(dtype) for n in lens]
        stored = STORED[cache]
        shape = (2, kv_heads, self.size)
        self.sinks = torch.randn(heads, generator=generator).to(dtype) if sinks else None
        numbers = [torch.randn(n, *shape, generator=generator) for n in lens]
        for each in numbers:
            each[:, 0, :, head_dim:] = 0.0
            if shared:
                each[:, 1] = each[:, 0]
        self.scales = [x.abs().amax(-1) / 100 if cache in ("int8", "fp8_e4m3") else None for x in numbers]
        scaled = [x if s is None else x / s[..., None] for x, s in zip(numbers, self.scales, strict=True)]
        self.codes = [(x.round() if cache == "int8" else x).to(stored) for x in scaled]

    def exact(self, chunk: Chunk) -> Tensor:
        """Attention of a chunk in float64."""
        sequence, first, last = chunk
        end = min(last + self.ahead, self.lens[sequence])
        numbers = self.codes[sequence][:end].double()
        scales = self.scales[sequence]
        if scales is not None:
            numbers = numbers * scales[:end, ..., None].double()
        group = self.heads // self.kv_heads
        keys, values = (x.repeat_interleave(group, 1) for x in numbers.unbind(1))
        q = self.query[sequence][first:last].double().view(-1, self.heads, self.head_dim)
        s = torch.einsum("rhd,nhd->hrn", q, keys[..., : self.head_dim]) * SCALE
        if cap := self.options.get("softcap"):
            s = cap * torch.tanh(s / cap)
        position, at = torch.arange(first, last)[:, None], torch.arange(end)
        seen = at <= position + self.ahead
        if window := self.options.get("window"):
            seen &= at > position - window if window > 0 else at >= position // -window * -window
        s = s.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            s = torch.cat([s, self.sinks.double()[:, None, None].expand(-1, last - first, 1)], -1)
        p = s.softmax(-1)[..., :end]
        return torch.einsum("hrn,nhd->rhd", p, values[..., : self.value_dim]).flatten(1)

    def step(
        self, chunks: Sequence[Chunk], partials: int = 64, many: int = 64, programs: int = 3, seed: int = 0,
        spare: int = 1, module: ModuleType = kernel,
    ) -> tuple[Callable[[Mapping[str, Tensor]], Sequence[Launch]], dict[str, Tensor]]:  # fmt: skip
        """Return the maker of a step's launches, and its outputs: the cache has NaN wherever no chunk's sequence is.

        seed: of the blocks' places. spare: blocks of NaN at the end of each chunk's table.
        """
        counts = [-(-last // self.block) for _, _, last in chunks]
        places = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed))
        codes = torch.full((2, len(places), self.kv_heads, self.block, self.size), torch.nan)
        codes = codes.to(STORED[self.cache_dtype])
        if self.cache_dtype == "int8":
            codes.fill_(77)
        scales = torch.full(codes.shape[:-1], torch.nan)
        table, begin = [], []
        for (sequence, _, last), count in zip(chunks, counts, strict=True):
            begin.append(len(table))
            blocks = places[:count]
            places = places[count:]
            at = torch.arange(last)
            assert not self.ahead or last == self.lens[sequence], "rows see the end of their text"
            where = (slice(None), blocks[at // self.block], slice(None), at % self.block)
            bits = codes.view(torch.uint8) if codes.element_size() == 1 else codes
            ours = self.codes[sequence][:last]
            bits[where] = (ours.view(torch.uint8) if bits is not codes else ours).transpose(0, 1).permute(1, 0, 2, 3)
            own_scales = self.scales[sequence]
            if own_scales is not None:
                scales[where] = own_scales[:last].transpose(0, 1).permute(1, 0, 2)
            table += [*blocks.tolist(), *[int(places[-1])] * spare]
        scaled = tuple(scales) if self.cache_dtype in ("int8", "fp8_e4m3") else (None, None)
        keys = codes[0, ..., : self.head_dim].contiguous()
        values = keys[..., : self.value_dim] if self.shared else codes[1, ..., : self.value_dim].contiguous()
        if self.shared:
            scaled = (scaled[0], scaled[0])
        cache = LayerCache(self.cache_dtype, keys, values, *scaled, shares_key=self.shared)
        rows = torch.cat([self.query[sequence][first:last] for sequence, first, last in chunks])
        # Rows of a wider tensor, as queries lie beside keys and values; one more row than the step has.
        query = torch.full((len(rows) + 1, rows.shape[1] + 16), torch.nan, dtype=self.dtype)
        query[:-1, : rows.shape[1]] = rows
        group = spans.group_rows(self.heads, self.kv_heads, self.size)
        few = max(16, group)
        items = getattr(module, "spans", spans).work_list(
            [first for _, first, _ in chunks], [last - first for _, first, last in chunks], begin, few // group,
            many // group, partials, self.ahead > 0,
        )  # fmt: skip
        scratch = spans.make_scratch(max(partials, 1), self.heads, self.kv_heads, self.head_dim, "cpu", self.value_dim)
        scratch.sums.fill_(torch.nan)
        scratch.totals.fill_(torch.nan)

        def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
            launches: list[Launch] = module.attention(
                query, out["out"], cache, torch.tensor(table, dtype=torch.int32), torch.from_numpy(items), scratch,
                heads=self.heads, kv_heads=self.kv_heads, scale=SCALE, programs=programs,
                chosen=(Config({"BM": few}), Config({"BM": many})), sinks=self.sinks, ahead=self.ahead, **self.options,
            )  # fmt: skip
            return launches

        return make, {"out": poisoned(len(rows) + 1, self.heads * self.value_dim, dtype=self.out_dtype)}

    def run(
        self, mode: str, chunks: Sequence[Chunk], order: Callable[[int], list[int]] | None = None, **options: Any
    ) -> list[Tensor]:
        """Return the rows of each chunk."""
        make, outputs = self.step(chunks, **options)
        out = written(make, outputs, mode, order)["out"]
        assert out[-1].isnan().all(), "a row beyond the step's rows was written"
        return list(out[:-1].split([last - first for _, first, last in chunks]))


LONG = [(0, 500, 532), (1, 60, 61), (0, 511, 514), (1, 0, 20)]
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
    {"sinks": True, "window": 40, "softcap": 3.0},
    {"sinks": True, "cache": "int8"},
    {"window": -600},
    {"head_dim": 24, "value_dim": 40, "cache": "fp8_e4m3"},
    {"head_dim": 24, "value_dim": 16, "shared": True, "kv_heads": 1},
    {"head_dim": 40, "value_dim": 24, "shared": True, "kv_heads": 1, "cache": "int8", "sinks": True},
]
WIDE_HEADS = [
    {"heads": 20, "kv_heads": 1, "head_dim": 288, "value_dim": 256, "shared": True},
    {"heads": 2, "kv_heads": 1, "head_dim": 272},
    {"heads": 2, "kv_heads": 1, "head_dim": 272, "dtype": torch.float32, "cache": "float32"},
]
"""Heads in tiles of fewer keys, in pieces, and with keys in two parts."""
SHORT = [(0, 500, 504), (1, 70, 90), (0, 512, 513)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_the_kernel_writes_what_its_twin_writes(case: dict[str, Any]) -> None:
    problem = Problem(**case)
    make, outputs = problem.step(LONG)
    assert_twin_agrees(make, outputs)
    expected = torch.cat([problem.exact(chunk) for chunk in LONG])
    assert_close(written(make, outputs)["out"][:-1], expected)


@pytest.mark.parametrize("case", WIDE_HEADS, ids=lambda case: " ".join(map(str, case.values())))
def test_heads_wider_than_256_are_summed_alike(case: dict[str, Any]) -> None:
    problem = Problem(**case, out_dtype=torch.float32, lens=(514, 90))
    make, outputs = problem.step(SHORT)
    expected = torch.cat([problem.exact(chunk) for chunk in SHORT])
    few = problem.run("interpreted", SHORT, order=backwards)
    assert_close(torch.cat(few), written(make, outputs)["out"][:-1], 5e-3)
    assert_close(torch.cat(few), expected, 2e-2)
    many = problem.run("interpreted", [(0, 496, 513)], many=32)[0]
    assert torch.equal(many[4:8], few[0]), "in a large tile"
    assert torch.equal(many[16:], few[2]), "split among programs"


def test_rows_that_see_later_ones_have_the_bits_of_their_text() -> None:
    """In any tile, with another text beside it; `ahead` beyond the text, and a window to both sides."""
    for ahead, window in ((600, 0), (30, 31)):
        problem = law_problem(ahead=ahead, window=window, lens=(530, 12))
        texts = [(0, 500, 530), (1, 0, 12)]
        make, outputs = problem.step(texts, many=16)
        whole = written(make, outputs, "interpreted")["out"][:-1]
        assert_close(written(make, outputs)["out"][:-1], whole, TOLERANCES[torch.bfloat16])
        assert_close(whole, torch.cat([problem.exact(text) for text in texts]), TOLERANCES[torch.bfloat16])
        alone = problem.run("interpreted", texts[:1], many=64, order=backwards)[0]
        assert torch.equal(alone, whole[:30])
        last = problem.run("interpreted", [(0, 520, 530)])[0]
        assert torch.equal(last, whole[20:30]), "in small tiles, split"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_is_near_the_reference(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    problem = Problem(dtype, name, window=300, softcap=2.0, lens=(600,), sinks=True)
    blocks = -(-600 // BLOCK)
    cache = problem.codes[0].transpose(0, 1)
    padded = torch.zeros(2, blocks * BLOCK, *cache.shape[2:], dtype=dtype)
    padded[:, :600] = cache
    rows = make_forward_batch(Chunks([500], [list(range(100))], [list(range(blocks))]), BLOCK, torch.device("cpu"))
    query = problem.query[0][500:].view(100, 4, 16)
    scoring = Scoring(SCALE, 300, softcap=2.0, sinks=problem.sinks)
    expected = reference(query, TorchCache(*padded.view(2, blocks, BLOCK, 2, 16)), rows, scoring)
    assert_close(problem.run("twin", [(0, 500, 600)])[0], expected.flatten(1))


Modules = Callable[[Sequence[Chunk]], ModuleType]


def law_problem(**options: Any) -> Problem:
    """A small problem whose results are not rounded to 16 bits, so that any difference shows."""
    return Problem(heads=2, kv_heads=1, out_dtype=torch.float32, **options)


def assert_law(problem: Problem, mode: str, module: Modules = lambda chunks: kernel) -> None:
    """A row has the same bits in a long chunk and in a short one, alone and in a batch, split or not, in any blocks."""

    def run(chunks: Sequence[Chunk], **options: Any) -> list[Tensor]:
        return problem.run(mode, chunks, module=module(chunks), **options)

    whole = run([(0, 1000, 1040)])[0]
    assert whole.isfinite().all()
    for position in (1023, 1024, 1039):
        alone = run([(0, position, position + 1)], seed=position)[0][0]
        assert torch.equal(alone, whole[position - 1000]), f"position {position} alone"
    batch = run([(1, 3, 50), (0, 1033, 1034), (1, 70, 71), (0, 1022, 1028), (0, 1000, 1017)], spare=3, programs=2)
    assert torch.equal(batch[1][0], whole[33]), "alone in a batch"
    assert torch.equal(batch[3], whole[22:28]), "in a short chunk"
    assert torch.equal(batch[4], whole[:17]), "in a chunk of other length"
    wider = run([(0, 1000, 1040)], many=128, programs=1, order=backwards)
    assert torch.equal(wider[0], whole), "in a larger tile"
    unsplit = run([(0, 1022, 1028)], partials=0)
    assert torch.equal(unsplit[0], whole[22:28]), "not split"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 700, "softcap": 2.0},
        {"sinks": True},
        {"window": -515, "sinks": True},
        {"head_dim": 24, "value_dim": 16, "shared": True},
    ],
    ids=["full", "window", "sinks", "chunks", "latent"],
)
def test_a_row_has_the_same_bits_however_the_step_is_cut(options: dict[str, Any], mode: str) -> None:
    assert_law(law_problem(**options), mode)


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize("window", [1, 512, 513])
def test_a_window_ends_at_a_border(window: int, mode: str) -> None:
    problem = law_problem(window=window)
    long, short = problem.run(mode, [(0, 1018, 1036), (0, 1024, 1025)])
    assert_close(long, problem.exact((0, 1018, 1036)), TOLERANCES[torch.bfloat16])
    assert torch.equal(short[0], long[6])


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_replay_gives_the_same_bits(mode: str) -> None:
    """The last program to arrive leaves the counters at 0."""
    make, outputs = law_problem().step([(0, 1030, 1033), (0, 600, 601)])
    first = written(make, outputs, mode)["out"]
    assert torch.equal(written(make, outputs, mode)["out"][:-1], first[:-1])


@pytest.mark.parametrize("seed", range(20))
def test_a_work_list_has_each_row_and_span_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    lens = [int(n) for n in random.choice([1, 1, 2, 5, 16, 17, 100, 700], random.integers(1, 12))]
    starts = [int(n) for n in random.integers(0, 3000, len(lens))]
    few, many, max_len = int(random.choice([1, 4, 16])), 32, 4096
    partials = int(random.choice([0, 20, spans.num_partials(sum(lens), max_len)]))
    items = spans.work_list(starts, lens, [100 * i for i in range(len(lens))], few, many, partials)
    assert items.shape[1] == spans.ITEM
    assert len(items) == 1 + items[0, :2].sum() <= spans.max_items(sum(lens), max_len)
    seen: dict[tuple[int, int], int] = {}
    places: dict[int, int] = {}
    for i, (row, num_rows, position, table, first, end, slot, _) in enumerate(items[1:].tolist()):
        assert 1 <= num_rows <= (few if i < items[0, 0] else many)
        for offset in range(num_rows):
            chunk = table // 100
            assert position + offset - starts[chunk] == row + offset - sum(lens[:chunk])
            for span in range(first, end):
                assert (row + offset, span) not in seen
                seen[row + offset, span] = position + offset
            if slot >= 0:
                place = slot + first * num_rows + offset
                assert end == first + 1
                assert place < partials
                assert places.setdefault(place, row + offset) == row + offset
                assert (
                    sum(value == row + offset for value in places.values()) <= 1 + (position + num_rows) // spans.SPAN
                )
    positions = [start + i for start, n in zip(starts, lens, strict=True) for i in range(n)]
    for row, position in enumerate(positions):
        assert all((row, span) in seen for span in range(position // spans.SPAN + 1))


def variant(folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """Return the kernel's module, its work list at `spans`, with pieces of the sources replaced."""
    folder.mkdir(exist_ok=True)
    texts = [inspect.getsource(module) for module in (spans, kernel)]
    for old, new in changes:
        assert any(old in text for text in texts), old
        texts = [text.replace(old, new) for text in texts]
    name = f"variant_{folder.name}_spans"
    texts[1] = texts[1].replace(spans.__name__, name)
    modules = []
    for title, text in zip((name, f"{name}_attention"), texts, strict=True):
        path = folder / f"{title}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(title, path)
        assert spec is not None
        assert spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        sys.modules[title] = modules[-1]
        spec.loader.exec_module(modules[-1])
    vars(modules[1])["spans"] = modules[0]
    return modules[1]


BY_STEP: dict[str, tuple[list[tuple[str, str]], Callable[[Sequence[Chunk]], bool]]] = {
    "spans by batch": ([("SPAN = 512", "SPAN = 256")], lambda chunks: len(chunks) > 1),
    "key tile by rows": ([("TILE = 64", "TILE = 32")], lambda chunks: chunks[0][2] - chunks[0][1] > 1),
}
BROKEN = {
    "read past the end": [("inside = (at < end)", "inside = (at < end + 1)"), ("mask=at < end,", "mask=at < end + 1,")],
    "merged backwards": [
        (
            "for _ in tl.range(0, parts):",
            "place += (parts - 1) * num_rows * HEADS\n                    for _ in tl.range(0, parts):",
        ),
        ("place += num_rows * HEADS", "place -= num_rows * HEADS"),
    ],
    "merged too soon": [("== parts - 1", "== parts - 2")],
    "no sink in small tiles": [("if sinks is not None:", "if KIND == 1 and sinks is not None:")],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize("fault", BY_STEP)
def test_tiles_and_spans_that_follow_the_step_are_caught(fault: str, mode: str, tmp_path: Path) -> None:
    changes, applies = BY_STEP[fault]
    broken = variant(tmp_path / "broken", *changes)
    with pytest.raises(AssertionError):
        assert_law(law_problem(), mode, lambda chunks: broken if applies(chunks) else kernel)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_caught(fault: str, tmp_path: Path) -> None:
    broken = variant(tmp_path / "broken", *BROKEN[fault])
    with pytest.raises(AssertionError):
        assert_law(law_problem(sinks="sink" in fault), "interpreted", lambda chunks: broken)


def test_a_twin_that_reads_past_the_end_is_caught(tmp_path: Path) -> None:
    change = ("min(span * SPAN + SPAN, end), device", "min(span * SPAN + SPAN, end + 1), device")
    broken = variant(tmp_path / "broken", change)
    with pytest.raises(AssertionError):
        assert_law(law_problem(), "twin", lambda chunks: broken)


def test_an_unchanged_copy_obeys_the_law(tmp_path: Path) -> None:
    copy = variant(tmp_path / "same")
    assert_law(law_problem(), "twin", lambda chunks: copy)


def launches() -> list[Launch]:
    """Llama-3.1-8B with each type of cache, small models, and heads of 256 numbers, in every configuration."""

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def every(
        heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, cache: str, value_dim: int = 0, **options: Any
    ) -> Iterator[Launch]:
        stored, shared = STORED[cache], bool(value_dim)
        shape = LayerShape(kv_heads, head_dim, value_dim, shares_key=shared)
        layer = KVCache([shape], [64], BLOCK, cache, torch.device("meta")).layers[0]
        rows, out = (meta(512, heads * size, dtype=dtype) for size in (head_dim, shape.value_size))
        sinks = {"sinks": meta(heads, dtype=dtype)} if options.pop("sinks", False) else {}
        pair = kernel.attention(
            rows, out, layer, meta(512), meta(512, spans.ITEM),
            spans.make_scratch(64, heads, kv_heads, head_dim, "meta", value_dim), heads=heads, kv_heads=kv_heads,
            scale=SCALE, programs=264, **sinks, **options,
        )  # fmt: skip
        for launch in pair:
            suited: dict[str, tuple[Config, list[int]]] = {}
            for capability in CAPABILITIES[1:] if "fp8" in cache else CAPABILITIES:
                for config in kernel.configs(
                    launch.kernel, heads, kv_heads, head_dim, dtype, stored, capability, shared
                ):
                    suited.setdefault(config.name, (config, []))[1].append(capability)
            for config, capabilities in suited.values():
                yield dataclasses.replace(launch, config=dataclasses.replace(config, capabilities=tuple(capabilities)))

    bf16 = torch.bfloat16
    return [
        *every(32, 8, 128, bf16, "bfloat16"),
        *every(32, 8, 128, bf16, "int8"),
        *every(32, 8, 128, bf16, "fp8_e4m3"),
        *every(32, 8, 128, bf16, "fp8_e5m2", window=4096),
        *every(32, 8, 128, torch.float32, "float32"),
        *every(8, 4, 256, bf16, "bfloat16"),
        *every(9, 3, 64, torch.float16, "float16", softcap=30.0),
        *every(64, 8, 64, bf16, "bfloat16", window=128, sinks=True),
        *every(128, 1, 576, bf16, "bfloat16", 512),
        *every(16, 1, 576, bf16, "int8", 512),
        *every(32, 1, 320, bf16, "bfloat16", 256),
        *every(16, 2, 512, bf16, "bfloat16"),
        *every(16, 1, 576, torch.float32, "float32", 512),
    ]


def is_default(launch: Launch, capability: int) -> bool:
    """Whether a launch of `launches` has the configuration that is taken where none was measured."""
    a: Any = launch.arguments
    heads = (a["KV_HEADS"] * a["GROUP"], a["KV_HEADS"], a["DIM"], a["query"].dtype, a["keys"].dtype)
    return launch.config.name == kernel.configs(launch.kernel, *heads, capability, a["SHARED"])[0].name


@pytest.mark.slow
def test_prefill_uses_wgmma_and_keys_are_loaded_by_sixteen_bytes() -> None:
    few, *_, many = [one for one in launches()[:5] if 90 in one.config.capabilities]
    assert (few.kernel, many.kernel) == (kernel.FEW, kernel.MANY)
    assert compiled(many, 90).count("HGMMA") > 0
    for cubin in (compiled(few, 90), compiled(many, 90)):
        assert cubin.count("LDGSTS.E.BYPASS.128") > 0
        for loop in cubin.loops():
            assert not [name for name in loop if name.startswith(("LDG.E.U16", "LDS.U16"))]
        assert not faults(cubin)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [kernel.FEW, kernel.MANY], ids=["few", "many"])
def test_keys_of_eight_bits_are_multiplied_in_the_order_of_those_of_sixteen(kind: Kernel) -> None:
    """On an H100 decode and prefill differed where the compiler had made it another one."""
    few = [one for one in launches() if one.kernel is kind and one.arguments["keys"].dtype == torch.int8]  # type: ignore[union-attr]
    for launch in few:
        if launch.config.fits(90):
            assert set(compiled(launch, 90).operands()) == {("bf16", 2)}


def test_another_order_of_k_is_found(tmp_path: Path) -> None:
    """The compiler's own choice for keys of 8 bits, with the tile of 32 rows that had other bits on an H100."""
    launch = next(one for one in launches() if one.arguments["keys"].dtype == torch.int8)  # type: ignore[union-attr]
    plain = variant(tmp_path / "plain", ("= opaque(", "= ("))
    seen = compiled(dataclasses.replace(launch, kernel=plain.MANY, config=Config({"BM": 32}, 8, 2)), 90)
    assert set(seen.operands()) == {("bf16", 2), ("bf16", 4)}
    assert any("out of order" in fault for fault in faults(seen))


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_no_large_tile_is_too_small_for_wgmma_on_hopper(cache: torch.dtype) -> None:
    for head_dim in (64, 128):
        rows = [c.tiles["BM"] for c in kernel.configs(kernel.MANY, 32, 8, head_dim, torch.bfloat16, cache, 90)]
        assert rows == [64]
        assert kernel.configs(kernel.MANY, 32, 8, head_dim, torch.bfloat16, cache, 120)
