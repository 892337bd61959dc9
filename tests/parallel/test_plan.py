"""How ranks share out columns and heads: every column once, in order, whatever the sizes."""

from __future__ import annotations

import pytest

from headrace.backends.shares import UNITS, Layout, Part, Plan
from headrace.protocol.errors import RequestError

WORLDS = (2, 3, 4, 5, 8)


def covered(layout: Layout, world: int) -> list[int]:
    """Whole columns that the ranks give, in the order of ranks."""
    return [at + i for rank in range(world) for _, at, num in layout.spans(rank) for i in range(num)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("width", [8, 48, 64, 96, 512, 1408, 2048, 2049, 32000])
def test_columns_are_shared_out_once_and_evenly(world: int, width: int) -> None:
    part = Plan(0, world).part(width)
    assert part is not None
    assert covered(Layout((part,)), world) == list(range(width))
    nums = [part.num(rank) for rank in range(world)]
    unit = next(unit for unit in UNITS if all(begin % unit == 0 for begin, _ in part.bounds))
    assert max(nums) - min(nums) <= max(unit, width // world // 8 + 1)


def test_large_matrices_are_cut_at_groups_and_small_ones_not_at_all() -> None:
    part = Plan(0, 2).part(2048)
    assert part is not None
    assert part.bounds == ((0, 1024), (1024, 2048))
    assert Layout((part,)).is_grouped(128)
    assert Plan(0, 3).part(2) is None
    odd = Plan(0, 3).part(96)
    assert odd is not None
    assert not Layout((odd,)).is_grouped(128)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("heads", "kv"), [(8, 2), (8, 8), (16, 4), (24, 3), (32, 8), (8, 1), (48, 6)])
def test_each_query_goes_with_its_own_keys(world: int, heads: int, kv: int) -> None:
    each, seen = heads // kv, []
    for rank in range(world):
        plan = Plan(rank, world)
        share = plan.share(heads, kv)
        assert share.num > 0
        assert share.num % share.num_kv == 0
        local = share.num // share.num_kv
        for head in range(share.num):
            assert (share.first + head) // each == share.first_kv + head // local
            seen.append(share.first + head)
        assert plan.cached_heads(kv) == (share.first_kv, share.first_kv + share.num_kv)
    assert seen == list(range(heads))


def test_three_ranks_have_three_three_and_two_of_eight_kv_heads() -> None:
    assert [Plan(rank, 3).share(32, 8).num_kv for rank in range(3)] == [2, 3, 3]


@pytest.mark.parametrize("world", WORLDS)
def test_a_row_of_heads_comes_together_from_all_ranks(world: int) -> None:
    layout = Plan(0, world).heads(8, 2, 4, 6)
    assert layout.width == 8 * 4 + 2 * 4 + 2 * 6
    assert sorted(covered(layout, world)) == list(range(layout.width))
    for rank in range(world):
        assert layout.num(rank) == sum(end - begin for begin, end in layout.bounds(rank))
        share = Plan(rank, world).share(8, 2)
        assert layout.num(rank) == share.num * 4 + share.num_kv * 10


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(RequestError, match="tensor_parallel_size: 8 is not allowed; it must be at most 4"):
        Plan(0, 8).share(4, 2)


def test_a_layout_knows_columns_that_two_ranks_have() -> None:
    layout = Layout((Part(4, ((0, 4), (0, 4))), Part(2, ((0, 1), (1, 2)))))
    assert layout.spans(0) == [(0, 0, 4), (4, 4, 1)]
    assert layout.spans(1) == [(4, 5, 1)]
