"""Which blocks sequences share, when, and what it costs; and the log-probabilities that must not be shared."""

import pytest
from tests.programs.sim.bench import Bench

from headrace.protocol.step import TokenLogprob


def test_a_prefix_is_reused_by_token_with_a_copy():
    bench = Bench()
    bench.add("a", 16)
    bench.drain()
    _, expected = bench.add("b", [*range(1, 11), 50, 51])
    # Two whole blocks, and two of the third's tokens.
    assert bench.step() == {"b": (10, 2)}
    assert len(bench.copies) == 1
    bench.drain()
    assert bench.tokens["b"] == expected
    assert bench.started == {"a": 0, "b": 10}
    stats = bench.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (28, 10)


def test_the_same_prompt_computes_one_token():
    bench = Bench()
    bench.add("a", 16)
    bench.drain()
    bench.add("b", 16)
    assert bench.step() == {"b": (15, 1)}


def test_S_24_another_salt_finds_nothing():
    bench = Bench()
    bench.add("a", 16, cache_salt="one")
    bench.drain()
    bench.add("b", 16, cache_salt="two")
    assert bench.step() == {"b": (0, 16)}
    bench.add("c", 16, cache_salt="one")
    assert bench.step()["c"] == (15, 1)


def test_without_prefix_caching_nothing_is_kept():
    bench = Bench(enable_prefix_caching=False)
    for name in "ab":
        bench.add(name, 16)
        assert bench.step() == {name: (0, 16)}
        bench.drain()
    stats = bench.scheduler.stats()
    assert stats.num_blocks_cached == stats.prefix_cache_queries == 0


def test_a_pool_without_room_for_the_copy_computes_again():
    bench = Bench(num_blocks=1)
    bench.add("a", 4, max_tokens=1)
    bench.drain()
    assert len(bench.scheduler.cache) == 1
    bench.add("b", [1, 2, 3], max_tokens=1)
    # Three of the cached tokens match, but the only block can not be both read and written anew.
    assert bench.step() == {"b": (0, 3)}
    assert bench.copies == []


def test_two_that_compute_the_same_end_up_in_one_block():
    bench = Bench()
    a, _ = bench.add("a", 9)
    b, _ = bench.add("b", 9)
    assert bench.step() == {"a": (0, 9), "b": (0, 9)}
    assert a.block_table[:2] == b.block_table[:2]
    assert a.block_table[2] != b.block_table[2]


def test_a_reset_forgets_and_running_sequences_go_on_unpublished():
    bench = Bench()
    _, expected = bench.add("a", 9, max_tokens=12)
    bench.step()
    assert len(bench.scheduler.cache) == 2
    bench.scheduler.reset_prefix_cache()
    bench.drain()
    assert bench.tokens["a"] == expected
    assert len(bench.scheduler.cache) == 0
    bench.add("b", 9)
    assert bench.step() == {"b": (0, 9)}


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_for_the_prompt_and_fork_it(caching):
    bench = Bench(max_num_batched_tokens=6, enable_prefix_caching=caching)
    expected = {}
    for index in range(3):
        name = f"g{index}"
        _, expected[name] = bench.add(name, 10, group="g", seed=index)
    _, expected["other"] = bench.add("other", [90, 91])
    assert bench.step() == {"g0": (0, 6)}
    # The siblings wait; who is behind them does not.
    assert bench.step() == {"g0": (6, 4), "other": (0, 2)}
    assert bench.step() == {"g0": (10, 1), "other": (2, 1), "g1": (9, 1), "g2": (9, 1)}
    assert len(bench.copies) == 2
    bench.drain()
    assert bench.tokens == expected
    assert bench.started == {"g0": 0, "g1": 9, "g2": 9, "other": 0}


def test_a_sibling_computes_the_prompt_itself_if_the_leader_is_gone():
    bench = Bench(max_num_batched_tokens=6, enable_prefix_caching=False)
    bench.add("g0", 10, group="g")
    _, expected = bench.add("g1", 10, group="g", seed=2)
    bench.step()
    bench.scheduler.abort("g0")
    assert bench.step() == {"g1": (0, 6)}
    bench.drain()
    assert bench.tokens == {"g1": expected}


def test_a_group_with_another_prompt_or_salt_is_no_family():
    bench = Bench(enable_prefix_caching=False)
    bench.add("a", 10, group="g")
    bench.add("b", [5] * 10, group="g")
    bench.add("c", 10, group="g", cache_salt="tenant")
    assert bench.step() == {"a": (0, 10), "b": (0, 10), "c": (0, 10)}


def test_log_probabilities_are_passed_on():
    bench = Bench()
    bench.add("a", 4, logprobs=2)
    bench.add("b", [9, 9])
    bench.step()
    assert list(bench.output.logprobs) == ["a"]
    assert [entry.token_id for entry in bench.output.logprobs["a"]] == bench.tokens["a"]


def test_I_12_prompt_log_probabilities_come_once_in_order_whatever_happens():
    bench = Bench(max_num_batched_tokens=4)
    bench.add("cached", 14, max_tokens=1)
    bench.drain()
    bench.add("a", 14, prompt_logprobs=1, max_tokens=6)
    for _ in range(3):
        bench.step()
    assert bench.started["a"] == 0
    # Twelve rows are computed and reported; then all is lost and done again.
    assert bench.scheduler.preempt("a")
    bench.drain()
    assert [entry.token_id for entry in bench.prompt_logprobs["a"]] == list(range(2, 15))
    assert all(isinstance(entry, TokenLogprob) for entry in bench.prompt_logprobs["a"])
