"""The ints of a step: what stands for a freed block names a block, since a kernel may look there."""

from __future__ import annotations

import numpy as np

from headrace.backends.step import MAX_DEPTH, Chunks, StepSizes, make_step_rows
from headrace.protocol.kinds import CacheKind


def test_freed_blocks_name_some_block_and_rows_go_to_their_own() -> None:
    rows = make_step_rows(lambda n: np.full(n, -7, np.int32), (CacheKind(), CacheKind(4)), 4, StepSizes(8, 2, 8))
    chunks = Chunks([9, 3], [[1], [2, 3]], [[5, 6, 7], [8, 9]], more_tables=[[[-1, 2, 3], [0, 4]]])
    assert rows.fill(chunks) == 3
    assert rows.blocks[0][:5].tolist() == [5, 6, 7, 8, 9]
    assert rows.blocks[1][:5].tolist() == [0, 2, 3, 0, 4]
    assert rows.slots[0][:3].tolist() == [7 * 4 + 1, 8 * 4 + 3, 9 * 4]
    assert rows.slots[1][:3].tolist() == [3 * 4 + 1, 0 * 4 + 3, 4 * 4]


def test_further_slots_lie_last_with_states_and_without() -> None:
    """A program may leave out the last array when it sends a step's ints to a device."""
    for kinds in ((CacheKind(),), (CacheKind(), CacheKind(is_state=True))):
        sizes: list[int] = []
        make_step_rows(sizes.append, kinds, 4, StepSizes(8, 2, 8))
        assert sizes[-1] == 8 * (MAX_DEPTH + 4)
