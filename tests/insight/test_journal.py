"""The journal: what the head of the queue lacks, which blocks are whose, and that noting changes nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import fake
from tests.support.journal import live_through, notes_of_life, recorded, request

from headrace.core.journal import Journal, Step, Wait, decode_note
from headrace.engine.core import EngineCore
from headrace.engine.records.recording import StepPlan
from headrace.engine.records.replay import read
from headrace.insight.live import BlockMap
from headrace.protocol.config import EngineConfig


def engine(**options: Any) -> EngineCore:
    fields = {"num_gpu_blocks_override": 16, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    core = fake.build(EngineConfig(model="fake", **(fields | options)))
    ticks = itertools.count(100)
    core.clock = lambda: next(ticks) / 64
    core.journal = Journal(core.scheduler, core.clock)
    return core


def step_of(core: EngineCore) -> Step:
    return decode_note(core.step().note).step


def state_of(core: EngineCore) -> tuple[dict[int, Counter[int]], set[int]]:
    scheduler, holders = core.scheduler, dict[int, Counter[int]]()
    tables = [(s.arrival, t) for s in scheduler.running for t in (s.block_table, *s.tails)]
    for holder, table in [*tables, (0, scheduler.pool.pins)]:
        for block in table:
            holders.setdefault(block, Counter())[holder] += 1
    return holders, {block for block, is_cached in enumerate(scheduler.pool.cached) if is_cached}


@pytest.mark.parametrize("begin", [0, 30])
def test_the_events_of_blocks_give_the_state_of_the_pool(tmp_path: Path, begin: int) -> None:
    core = recorded(tmp_path / "log")
    blocks, num_shared = BlockMap(), 0
    assert core.journal is not None
    for index, note in enumerate(notes_of_life(core)):
        if index == begin:
            core.journal.watch(True)
        elif index > begin:
            blocks.apply(note.step.blocks or [])
            holders, cached = state_of(core)
            assert blocks.holders == holders
            assert blocks.cached == cached
            num_shared += any(holder.total() > 1 for holder in holders.values())
    assert num_shared > 10


def test_control_a_lost_event_gives_another_state(tmp_path: Path) -> None:
    core = recorded(tmp_path / "log")
    blocks = BlockMap()
    assert core.journal is not None
    core.journal.watch(True)
    differs = []
    for note in notes_of_life(core):
        blocks.apply([event for event in note.step.blocks or [] if event[0] != 1])
        differs.append(blocks.holders != state_of(core)[0])
    assert differs[-1]


def test_the_times_of_a_step_are_in_order_and_follow_the_arrivals(tmp_path: Path) -> None:
    last = 0.0
    for note in notes_of_life(recorded(tmp_path / "log")):
        step = note.step
        for arrival in step.arrivals:
            assert arrival.times == sorted(arrival.times)
            assert last < arrival.times[3] < step.times[0]
        assert last < step.times[0] < step.times[1] < step.times[2] < step.times[3]
        last = step.times[3]


@pytest.mark.parametrize(
    ("options", "prompts", "wait"),
    [
        ({"max_num_seqs": 2}, [5, 5, 5], Wait.PLACES),
        ({}, [14, 5], Wait.NONE),
        ({}, [16, 5], Wait.TOKENS),
        ({}, [8, 8, 9], Wait.TOKENS),
        ({"num_gpu_blocks_override": 4}, [8, 7], Wait.NONE),
        ({"num_gpu_blocks_override": 4}, [8, 6, 1], Wait.BLOCKS),
    ],
)
def test_what_the_head_of_the_queue_lacks(options: dict[str, Any], prompts: list[int], wait: Wait) -> None:
    core = engine(**options)
    for index, num in enumerate(prompts):
        core.add(request(f"r{index}", [index * 50 + j for j in range(num)]))
    step = step_of(core)
    assert step.head[1] == wait
    assert step.head[0] == (0 if wait is Wait.NONE else step.arrivals[-1].seq_id)
    assert [arrival.num_prompt for arrival in step.arrivals] == prompts


def test_a_sibling_waits_for_the_prompt_of_the_first() -> None:
    core = engine()
    for index in range(2):
        core.add(request(f"r{index}", list(range(20)), group="g"))
    step = step_of(core)
    assert step.head == (step.arrivals[1].seq_id, Wait.SIBLING)


def test_a_protected_sequence_waits_for_room_at_its_longest() -> None:
    core = engine(num_gpu_blocks_override=6)
    for index in range(2):
        core.add(request(f"r{index}", [index * 50 + j for j in range(4)], 12))
    core.step()
    for seq in core.scheduler.sequences.values():
        seq.num_preemptions = 2
    assert core.scheduler.preempt(core.scheduler.running[1].request_id)
    step = step_of(core)
    assert step.preemptions == [(step.head[0], 0)]
    assert step.head[1] == Wait.PROTECTION


def test_a_preemption_names_the_one_that_needed_the_room(tmp_path: Path) -> None:
    steps = [note.step for note in notes_of_life(recorded(tmp_path / "log"))]
    alive: set[int] = set()
    pairs = []
    for step in steps:
        alive |= {arrival.seq_id for arrival in step.arrivals}
        for victim, other in step.preemptions:
            assert {victim, other} <= alive
            pairs.append((victim, other))
        alive -= {seq_id for seq_id, _ in step.ends}
    assert pairs
    assert not alive


def test_the_schedule_and_the_tokens_are_the_same_without_a_journal(tmp_path: Path) -> None:
    lives, plans = [], []
    for name in ("watched", "bare"):
        core = recorded(tmp_path / name)
        if name == "watched":
            core.journal.watch(True)  # type: ignore[union-attr]
        else:
            core.journal = None
        untimed = {"note": b"", "start_time": 0.0, "end_time": 0.0}
        lives.append([msgspec.structs.replace(output, **untimed) for output in live_through(core)])
        core.close()
        plans.append([record for record in read(tmp_path / name) if isinstance(record, StepPlan)])
    assert lives[0] == lives[1]
    assert plans[0] == plans[1]
