"""`Draft`: the shape of chains and trees."""

from __future__ import annotations

import msgspec
import pytest

from headrace.protocol.step import Draft

CHAIN = Draft([7, 8, 9])
#      -1
#     /  \
#    0    1
#   / \    \
#  2   3    4
#  |
#  5
TREE = Draft([10, 11, 12, 13, 14, 15], [-1, -1, 0, 0, 1, 2])


def test_a_chain_is_a_tree_with_one_path() -> None:
    same = Draft([7, 8, 9], [-1, 0, 1])
    for draft in (CHAIN, same):
        assert draft.depths() == [1, 2, 3]
        assert draft.depth == 3
        assert draft.paths() == [[0, 1, 2]]
        assert [draft.children(node) for node in (-1, 0, 2)] == [[0], [1], []]
        assert draft.path(1) == [0, 1]
    assert same.subset([0, 1, 2]) == CHAIN
    assert Draft([]).depth == 0
    assert Draft([]).paths() == [[]]


def test_a_tree_has_a_path_to_each_leaf_first_children_first() -> None:
    assert TREE.depths() == [1, 1, 2, 2, 2, 3]
    assert TREE.depth == 3
    assert TREE.paths() == [[0, 2, 5], [0, 3], [1, 4]]
    assert TREE.children(-1) == [0, 1]
    assert TREE.children(0) == [2, 3]
    assert [TREE.path_id(nodes) for nodes in ([], [0], [0, 3], [1], [4])] == [0, 0, 1, 2, 0]


@pytest.mark.parametrize("draft", [CHAIN, TREE])
def test_a_cut_keeps_what_is_shallow_and_first(draft: Draft) -> None:
    for max_depth in range(-1, 5):
        for max_nodes in range(-1, 8):
            cut = draft.cut(max_depth, max_nodes)
            assert not cut.flaw()
            assert cut.depth <= max(0, max_depth)
            assert len(cut.token_ids) == min(max(0, max_nodes), sum(d <= max_depth for d in draft.depths()))
            whole = {tuple(draft.token_ids[node] for node in draft.path(leaf)) for leaf in range(len(draft.token_ids))}
            for node in range(len(cut.token_ids)):
                assert tuple(cut.token_ids[each] for each in cut.path(node)) in whole


def test_a_subset_that_is_a_chain_is_written_as_one() -> None:
    assert TREE.subset([1, 4]) == Draft([11, 14])
    assert TREE.subset([0, 1]) == Draft([10, 11], [-1, -1])


@pytest.mark.parametrize(
    ("draft", "flaw"),
    [
        (CHAIN, ""),
        (TREE, ""),
        (Draft([1, 2], [-1]), "make no tree"),
        (Draft([1, 2], [1, -1]), "make no tree"),
        (Draft([1, 2], [-1, -2]), "make no tree"),
        (Draft([1, 1], [-1, -1]), "two children"),
    ],
)
def test_a_flaw_is_seen(draft: Draft, flaw: str) -> None:
    assert flaw in draft.flaw()
    assert bool(flaw) == bool(draft.flaw())


def test_the_wire_form_is_lists_alone() -> None:
    data = msgspec.msgpack.encode(Draft([1, 2], [-1, -1], [[5]]))
    assert msgspec.msgpack.decode(data) == [[1, 2], [-1, -1], [[5]]]
    assert msgspec.msgpack.decode(data, type=Draft).tails == [[5]]
