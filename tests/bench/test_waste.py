"""The waste of blocks on a trace: the slots behind the last token, at each token of each answer."""

from __future__ import annotations

import pytest
from bench.waste import waste

from headrace.fleet.traces import Call


def test_the_last_block_of_a_sequence_is_filled_in_part() -> None:
    # With blocks of 4: lengths 3, 4 and 5 have 1, 0 and 3 empty slots of 4, 4 and 8.
    assert waste([Call(0.0, 3, 3)], 4) == pytest.approx(4 / 16)
    assert waste([Call(0.0, 3, 3)], 1) == 0
    assert waste([], 16) == 0
