"""Chunks that could not be sampled yet: all but their last token counts, and the step is tried again."""

from __future__ import annotations

import pytest
from tests.programs.sim.bench import Bench

from headrace.protocol.step import RowResult


def deferring_step(bench: Bench, deferred: set[int]) -> dict[str, tuple[int, int]]:
    """One step whose chunks in `deferred` come back without a token. Returns (start, length) by request."""
    batch = bench.scheduler.schedule()
    bench.scheduler.check()
    result = bench.executor.run(batch)
    for i in deferred:
        result.token_ids[i] = -1
        result.rows[i] = RowResult(is_deferred=True)
    names = {seq.seq_id: name for name, seq in bench.scheduler.sequences.items()}
    ran = {names[s]: (a, n) for s, a, n in zip(batch.seq_ids, batch.starts, batch.lens, strict=True)}
    bench.commit(batch, result)
    bench.scheduler.check()
    return ran


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8])
def test_a_deferred_chunk_computes_its_last_token_again(num_prompt: int) -> None:
    bench = Bench()
    _, expected = bench.add("a", num_prompt, max_tokens=6)
    assert deferring_step(bench, {0}) == {"a": (0, num_prompt)}
    for _ in range(3):
        assert deferring_step(bench, {0}) == {"a": (num_prompt - 1, 1)}
    bench.drain()
    assert bench.tokens["a"] == expected
    assert "a" in bench.finished


def test_others_go_on_beside_it() -> None:
    bench = Bench()
    _, first = bench.add("a", 6, max_tokens=6)
    _, second = bench.add("b", 7, max_tokens=6)
    bench.step()
    for _ in range(4):
        deferring_step(bench, {0})
    assert len(bench.tokens["a"]) == 1
    assert len(bench.tokens["b"]) == 5
    bench.drain()
    assert (bench.tokens["a"], bench.tokens["b"]) == (first, second)


def test_a_block_is_not_given_for_each_try() -> None:
    """At the edge of a block, where each try asks for one more."""
    bench = Bench()
    seq, _ = bench.add("a", 4, max_tokens=6)
    bench.step()
    for _ in range(4):
        deferring_step(bench, {0})
        assert len(seq.block_table) <= 2
