"""The router's policies, by turns, by work and by prefix."""

from __future__ import annotations

import pytest

from headrace.fleet.router import OPEN_TOKENS, Route, Router
from headrace.protocol.step import CacheKeys

KEYS = [bytes([i]) * 16 for i in range(16)]


def routed(router: Router, num_prompt: int, keys: list[bytes] | None = None, rooms: set[int] | None = None) -> Route:
    route = router.route(keys or [], num_prompt, rooms=rooms)
    assert route is not None
    return route


def test_round_robin_takes_turns() -> None:
    router = Router("round-robin", 3, 16)
    assert [routed(router, 5).index for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [routed(router, 5, rooms={0, 2}).index for _ in range(3)] == [2, 0, 2]
    assert router.route([], 5, among=[]) is None


def test_least_work_counts_prompts_to_compute_and_open_requests() -> None:
    router = Router("least-work", 2, 16)
    first = routed(router, 1000)
    assert first.index == 0
    others = [routed(router, 100) for _ in range(3)]
    assert [each.index for each in others] == [1, 1, 1]
    router.measure(0, 600, 1.0)
    assert (router.loads[0].num_pending, first.num_pending) == (400, 400)
    router.computed(first)
    assert (router.loads[0].num_pending, router.loads[0].num_open) == (0, 1)
    assert routed(router, OPEN_TOKENS).index == 0
    for each in others:
        router.ended(each)
    assert (router.loads[1].num_pending, router.loads[1].num_open) == (0, 0)
    assert routed(router, 100).index == 1


def test_a_faster_replica_gets_more() -> None:
    router = Router("least-work", 2, 16)
    router.measure(0, 1000, 1.0)
    router.measure(1, 1000, 0.25)
    # A short step says nothing of the speed, nor does one that is not full.
    router.measure(1, 10, 10.0)
    router.measure(1, 400, 10.0)
    assert [routed(router, 1000).index for _ in range(5)] == [1, 1, 1, 0, 1]


def test_prefix_prefers_the_replica_that_has_the_prompt_until_it_is_too_loaded() -> None:
    router = Router("prefix", 2, 100)
    first = routed(router, 300, KEYS[1:4])
    other = routed(router, 300, KEYS[7:10])
    assert {first.index, other.index} == {0, 1}
    # Prompts on their way count at once.
    assert routed(router, 300, [*KEYS[7:9], KEYS[10]]).index == other.index
    assert routed(router, 400, KEYS[1:5]).index == first.index
    # The tokens to compute outweigh those that are known there.
    router.loads[first.index].enter(Route(first.index, [], 1000))
    assert routed(router, 300, [*KEYS[1:3], KEYS[11]]).index == other.index


def test_prefix_knows_what_replicas_report_and_forgets_what_was_on_its_way() -> None:
    router = Router("prefix", 2, 100)
    route = routed(router, 300, KEYS[:3])
    router.ended(route)
    assert router.index.depths(KEYS[:3]) == [0, 0]
    assert router.index.update(1, CacheKeys(5, 1, True, b"".join(KEYS[:2])))
    assert router.index.depths(KEYS[:3]) == [0, 2]
    assert routed(router, 300, KEYS[:3]).num_pending == 100


def test_by_prefix_a_request_may_wait_for_a_better_replica() -> None:
    router = Router("prefix", 2, 100)
    router.index.update(0, CacheKeys(1, 1, True, b"".join(KEYS)))
    assert routed(router, 1600, KEYS, rooms={1}).index == 0
    router = Router("least-work", 2, 100)
    assert routed(router, 1600, KEYS, rooms={1}).index == 1


@pytest.mark.parametrize("words", [("random", 2, 16), ("prefix", -1, 16), ("prefix", 2, 0)])
def test_numbers_out_of_range_are_refused(words: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match="expected one of|at least"):
        Router(*words)
