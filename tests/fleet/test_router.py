"""The router's policies, and the keys of a prompt's prefixes."""

from __future__ import annotations

import pytest

from headrace.fleet.router import OPEN_TOKENS, Router, prefix_keys


def test_round_robin_takes_turns() -> None:
    router = Router("round-robin", 3, 16, 10)
    assert [router.route([], 5) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_counts_prompts_to_compute_and_open_requests() -> None:
    router = Router("least-loaded", 2, 16, 10)
    assert router.route([], 1000) == 0
    assert [router.route([], 100) for _ in range(3)] == [1, 1, 1]
    router.computed(0, 1000)
    assert router.replicas[0].load == OPEN_TOKENS
    assert router.route([], 100) == 0
    for _ in range(3):
        router.computed(1, 100)
        router.ended(1)
    assert router.replicas[1].load == 0
    assert router.route([], 100) == 1


def test_prefix_prefers_the_replica_that_has_the_prompt_until_it_is_too_loaded() -> None:
    router = Router("prefix", 2, 100, 10)
    first = router.route([1, 2, 3], 300)
    other = router.route([7, 8, 9], 300)
    assert {first, other} == {0, 1}
    for index in (first, other):
        router.computed(index, 300)
    assert router.route([7, 8, 10], 300) == other
    router.computed(other, 300)
    assert router.route([1, 2, 3, 4], 400) == first
    # 400 tokens to compute outweigh the 200 that are known there.
    assert router.route([1, 2, 11], 300) == other


def test_prefix_forgets_what_a_cache_has_no_room_for() -> None:
    router = Router("prefix", 1, 100, 2)
    router.route([1, 2, 3], 300)
    assert list(router.replicas[0].keys) == [2, 3]
    # The walk ends at the first key that is not known.
    assert router._num_known(router.replicas[0], [1, 2, 3], 300) == 0
    assert router._num_known(router.replicas[0], [2, 3], 150) == 149


def test_keys_stand_for_all_tokens_before() -> None:
    keys = prefix_keys(list(range(40)), 16)
    assert len(keys) == 2
    assert prefix_keys(list(range(33)), 16) == keys
    changed = prefix_keys([9, *range(1, 40)], 16)
    assert changed[0] != keys[0]
    assert changed[1] != keys[1]
    assert prefix_keys(list(range(40)), 16, b"secret") != keys


@pytest.mark.parametrize(
    "words", [("random", 2, 16, 1), ("prefix", 0, 16, 1), ("prefix", 2, 0, 1), ("prefix", 2, 1, 0)]
)
def test_numbers_out_of_range_are_refused(words: tuple[str, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected one of|at least 1"):
        Router(*words)
