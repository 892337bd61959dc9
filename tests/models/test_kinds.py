"""Kinds of cache in a program: layers with a window have blocks of their own, and do not read what lies behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.harness import load, random_ids, save_random

from headrace import models
from headrace.backends import make_backend
from headrace.backends.base import LayerShape
from headrace.backends.cpu.cache import KVCache, block_bytes
from headrace.backends.step import Chunks
from headrace.protocol.kinds import CacheKind

WINDOW, BLOCK, LENGTH = 29, 8, 150
FORMS: dict[str, dict[str, Any]] = {
    "cpu": {"backend": "cpu"},
    "cpu, cache of int8": {"backend": "cpu", "kv_cache_dtype": "int8"},
    "torch_ref": {"backend": "torch_ref"},
    "cuda": {"backend": "cuda", "device": "cpu"},
}
SIZES = [40, 1, 30, 7] + [1] * 8 + [64]
F32 = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma3")
    save_random(models.find("gemma3_text").TINY, directory)
    return directory


@pytest.fixture(scope="module", params=FORMS)
def program(request: pytest.FixtureRequest, directory: Path) -> Iterator[Any]:
    program = load(directory, block_size=BLOCK, **FORMS[request.param]).program
    yield program
    program.close()


def tables_of(seed: int, program: Any) -> list[list[int]]:
    """A table for each kind, scattered, and other blocks in each."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(size)[: -(-LENGTH // BLOCK)].tolist() for size in program.pool_sizes]


def fill(program: Any, kind: int, block: int) -> None:
    """Write NaN over a block, in the layers of a kind."""
    for layer in program.caches if hasattr(program, "caches") else program.cache.layers:
        if layer.kind == kind and hasattr(layer, "by_slot"):
            at = np.divmod(block * BLOCK + np.arange(BLOCK), 16)
            for array in layer.by_slot():
                array[at] = np.nan if array.dtype.kind == "f" else 77
        elif layer.kind == kind:
            layer.keys[block], layer.values[block] = np.nan, np.nan


def logits(program: Any, tables: list[list[int]], *, frees: bool, num_visible: int = 0) -> list[F32]:
    """The last logits of each chunk. frees: blocks behind the window are not named, and are overwritten once the
    sequence has passed them; `num_visible`: so many more, which are still seen."""
    tokens, start, result = random_ids(LENGTH, program.vocab_size, 3), 0, []
    named = [list(table) for table in tables]
    for size in SIZES:
        num_free = max(0, start - WINDOW + 1) // BLOCK if frees else 0
        named[1][:num_free] = [-1] * num_free
        for block in tables[1][: num_free and num_free + num_visible]:
            fill(program, 1, block)
        chunks = Chunks([start], [tokens[start : start + size]], named[:1], more_tables=[named[1:]])
        result.append(program.forward(chunks, [size - 1])[1].fetch().copy())
        start += size
    return result


def same(a: list[F32], b: list[F32]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_kinds_are_those_of_the_layers(program: Any) -> None:
    assert program.kinds == (CacheKind(), CacheKind(WINDOW))
    assert [shape.kind for shape in program.model.cache_shapes] == [1, 1, 0, 1]
    assert program.pool_sizes == (program.num_blocks, program.num_blocks)


def test_blocks_behind_a_window_are_not_read(program: Any) -> None:
    """Nor does it matter which blocks a kind has: without a table of its own it has those of kind 0."""
    tables = tables_of(1, program)
    whole = logits(program, [tables[0], tables[0]], frees=False)
    assert same(logits(program, tables, frees=False), whole)
    assert same(logits(program, tables_of(2, program), frees=True), whole)


def test_control_a_block_within_the_window_is_read(program: Any) -> None:
    tables = tables_of(1, program)
    whole = logits(program, tables, frees=False)
    assert not same(logits(program, tables, frees=True, num_visible=1), whole)


def test_control_the_other_kinds_table_is_noticed(program: Any) -> None:
    tables = tables_of(1, program)
    whole = logits(program, tables, frees=False)
    fill(program, 0, tables[0][0])
    last = LENGTH - 1
    token = random_ids(LENGTH, program.vocab_size, 3)[last:]
    result = program.forward(Chunks([last], [token], tables[:1], more_tables=[tables[1:]]), [0])[1].fetch().copy()
    assert not same([result], whole[-1:])


def test_tables_of_other_kinds_than_the_models_are_refused(program: Any) -> None:
    with pytest.raises(ValueError, match="tables of 3 kinds for 2 block kinds"):
        program.forward(Chunks([0], [[1]], [[0]], more_tables=[[[0]], [[0]]]), [])


@pytest.mark.parametrize("form", FORMS)
def test_a_block_of_a_kind_has_the_bytes_of_its_layers(form: str, directory: Path) -> None:
    runner = load(directory, block_size=BLOCK, **FORMS[form])
    program: Any = runner.program
    backend = make_backend(FORMS[form]["backend"], "cpu", "float32")
    kv_dtype = FORMS[form].get("kv_cache_dtype", "float32")
    memory = getattr(program, "cache", program)
    for kind, num_layers in enumerate((1, 3)):
        each = backend.block_bytes(program.model, kind, BLOCK, kv_dtype)
        assert each == len(memory.read_block(0, kind))
        if form == "cpu":
            assert each == num_layers * BLOCK * 2 * 16 * 4


def test_a_window_of_the_whole_context_is_no_kind_of_its_own(directory: Path) -> None:
    for length, kinds in ((WINDOW, (CacheKind(),)), (WINDOW + 1, (CacheKind(), CacheKind(WINDOW)))):
        assert load(directory, max_model_len=length, backend="cpu").program.kinds == kinds


def test_a_cache_of_shapes_by_layer_and_of_shared_ones() -> None:
    shapes = [LayerShape(2, 20, 9), LayerShape(1, 24, 16, kind=1, shares_key=True), LayerShape(2, 20, 9, source=0)]
    for dtype in ("float32", "int8", "int4", "bfloat16"):
        cache = KVCache(shapes, [3, 5], BLOCK, dtype)
        assert cache.layers[2] is cache.layers[0]
        assert cache.layers[1].values is None
        for kind in (0, 1):
            assert len(cache.read_block(1, kind)) == block_bytes(shapes, kind, BLOCK, dtype)
    assert block_bytes(shapes, 0, BLOCK, "float32") == BLOCK * 2 * 29 * 4
    assert block_bytes(shapes, 1, BLOCK, "float32") == BLOCK * 24 * 4
