"""How memory is divided among the pools of the kinds: each gets what it works with, and a share of what is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.harness import save_random

from headrace import models
from headrace.core.kinds import fit_windows, make_kinds
from headrace.engine.library.load import build_runner
from headrace.engine.library.pools import LEAST_CHUNK, MAX_EMPTY_BLOCKS, bounds_of, divide, longest_table
from headrace.protocol.config import EngineConfig
from headrace.protocol.kinds import CacheKind

ALL, STATE = CacheKind(), CacheKind(is_state=True)
CONFIG = EngineConfig(block_size=16, max_num_seqs=4, max_num_batched_tokens=512)


def test_a_kind_has_bounds() -> None:
    assert bounds_of(ALL, CONFIG, 1000) == (63, 4 * 63)
    # Two for each step; more for what is kept beside, every 2048 tokens.
    assert bounds_of(STATE, CONFIG, 5000) == (2, 4 * (3 + 3))
    # A window of 64 positions lies in 5 blocks.
    assert bounds_of(CacheKind(64), CONFIG, 4096) == (5 + 256 // 16, 2 * 4 * 5 + 512 // 16)
    whole = EngineConfig(block_size=16, max_num_seqs=4, max_num_batched_tokens=4096, enable_chunked_prefill=False)
    assert bounds_of(CacheKind(64), whole, 4096) == (256, 4 * 256)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 300])
def test_the_least_pool_of_a_window_has_room_for_a_chunk(window: int) -> None:
    least, _ = bounds_of(CacheKind(window), CONFIG, 4096)
    assert fit_windows(make_kinds([CacheKind(window)], [least], 16), 512)[1] >= LEAST_CHUNK
    with pytest.raises(ValueError, match="2 slots"):
        make_kinds([ALL, STATE], [least, bounds_of(STATE, CONFIG, 4096)[0] - 1], 16)


@pytest.mark.parametrize(
    ("room", "sizes"),
    [
        (0, [2, 21]),
        (2 * 100 + 21 * 10, [2, 21]),
        # Half of the 400 bytes beside the least of each are a quarter of the 800 that are of use.
        (2 * 100 + 21 * 10 + 400, [3, 31]),
        (10_000, [6, 61]),
    ],
)
def test_half_of_what_is_left_goes_to_the_further_pools(room: int, sizes: list[int]) -> None:
    assert divide(room, [(2, 6), (21, 61)], [100, 10]) == sizes
    assert divide(room, [], []) == []


def test_a_table_is_longer_than_a_pool_whose_blocks_are_given_back() -> None:
    assert longest_table([ALL, STATE], 10, 1000, 16) == 10
    assert longest_table([ALL, STATE], 100, 1000, 16) == 63
    assert longest_table([CacheKind(64)], 10, 1000, 16) == 63


def test_blocks_without_bytes_are_bounded(tmp_path: Path) -> None:
    """Of a model whose layers keep states alone: all of the memory is for the states."""
    tiny = models.find("qwen3_5_text").TINY
    save_random(tiny | {"layer_types": ["linear_attention"] * len(tiny["layer_types"])}, tmp_path)
    config = EngineConfig(model=str(tmp_path), kv_cache_memory_bytes=2**20)
    runner, info = build_runner(config)
    runner.close()
    assert info.kinds == (ALL, STATE)
    assert info.kv_token_bytes == 0
    assert info.num_blocks == min(MAX_EMPTY_BLOCKS, config.max_num_seqs * -(-info.max_model_len // config.block_size))
    assert info.more_blocks[0] > 2
