"""Viewers get a snapshot and then each step; late ones a fresh snapshot; and nothing is watched without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.insight.test_journal import state_of
from tests.support.journal import notes_of_life, recorded

from headrace.core.journal import Step
from headrace.insight.live import MAX_PENDING, MAX_VIEWERS, BlockMap, Feed
from headrace.protocol.errors import QueueFullError


def test_a_snapshot_and_the_steps_after_it_give_the_state_of_the_pool(tmp_path: Path) -> None:
    core = recorded(tmp_path / "log")
    assert core.journal is not None
    feed = Feed(core.journal.watch)
    early = feed.subscribe()
    late: Any = None
    blocks = BlockMap()
    for index, note in enumerate(notes_of_life(core)):
        feed.follow(note.step)
        if index == 30:
            late = feed.subscribe()
            [first] = map(json.loads, late.take())
            blocks.apply(first["snapshot"]["blocks"])
        elif index > 30:
            for message in map(json.loads, late.take()):
                blocks.apply(message["step"]["blocks"])
            holders, cached = state_of(core)
            assert blocks.cached == cached
            assert blocks.holders == holders
            for seq in core.scheduler.running:
                assert list(blocks.tables.get(seq.arrival, ())) == seq.block_table
    # The early one never read: it gets the present state, not the steps that it missed.
    [message] = map(json.loads, early.take())
    assert set(message) == {"snapshot"}
    feed.unsubscribe(early)
    assert core.scheduler.pool.log is not None
    feed.unsubscribe(late)
    assert core.scheduler.pool.log is None


def test_a_viewer_that_is_too_late_gets_a_snapshot() -> None:
    feed = Feed(lambda is_watched: None)
    viewer, step = feed.subscribe(), Step(1, (0.0, 0.0, 0.0, 0.0), [], [], [])
    viewer.take()
    for num in (MAX_PENDING, MAX_PENDING + 1):
        for _ in range(num):
            feed.follow(step)
        messages = [json.loads(message) for message in viewer.take()]
        assert len(messages) == (num if num <= MAX_PENDING else 1)
        assert ("snapshot" in messages[0]) == (num > MAX_PENDING)


def test_viewers_are_bounded() -> None:
    feed = Feed(lambda is_watched: None)
    for _ in range(MAX_VIEWERS):
        feed.subscribe()
    with pytest.raises(QueueFullError):
        feed.subscribe()
