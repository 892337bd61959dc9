"""Kinds of cache: windows that let go of what is behind them, states with snapshots, and prefixes that need all kinds.

The simulation runs with drawn kinds too, and each planted bug must be caught by it.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise

import pytest
from tests.programs.sim.bench import Bench
from tests.programs.sim.planting import Bugs, expect_caught, register
from tests.programs.sim.simulation import Simulation

from headrace.core.blocks import BlockPool
from headrace.core.kinds import Kind, fit_windows, make_kinds
from headrace.core.prefix import Miss
from headrace.core.sequence import NEVER
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.errors import InvariantError, RequestError
from headrace.protocol.kinds import CacheKind
from headrace.protocol.step import Draft

ALL, STATE = CacheKind(), CacheKind(is_state=True)
WINDOW = CacheKind(window=64)
NUM_SEEDS, NUM_STEPS = 40, 200

BUGS: Bugs = {}
bug = partial(register, BUGS, kinds=True)


@cache
def events(seed, overlapping=False):
    return Simulation(seed, overlapping=overlapping, kinds=True).run(NUM_STEPS).events


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 10))
def test_I_1_to_I_22_hold_with_drawn_kinds(first, overlapping):
    for seed in range(first, first + 10):
        events(seed, overlapping)


def test_the_slice_meets_windows_states_and_their_hits():
    missing = {"block behind a window", "state written", "hit at a state", "guess kept", "beams found", "copy"}
    for seed in range(NUM_SEEDS):
        missing -= {name for name, count in events(seed).items() if count}
        if not missing:
            break
    assert not missing


# -- windows -----------------------------------------------------------------------------------------------------


def windowed(**numbers):
    return Bench(
        **{"kinds": (WINDOW,), "block_size": 16, "max_model_len": 4000, "max_num_batched_tokens": 64} | numbers
    )


def test_a_window_of_64_holds_five_blocks_however_long_the_stream():
    bench = windowed(enable_prefix_caching=False)
    seq, _ = bench.add("a", 1, max_tokens=1000, ignore_eos=True)
    most = 0
    while bench.scheduler.has_work():
        bench.step()
        most = max(most, bench.scheduler.pool.num_held)
    assert (most, len(bench.tokens["a"])) == (5, 1000)
    assert seq.num_preemptions == 0


def test_a_context_longer_than_the_pool_is_served():
    bench = windowed(num_blocks=64, max_model_len=2000)
    assert bench.scheduler.max_model_len == 2000
    _, stream = bench.add("a", 1500, max_tokens=400, ignore_eos=True)
    bench.drain()
    assert bench.tokens["a"] == stream


def test_four_streams_of_five_blocks_each_run_in_twenty():
    bench = windowed(num_blocks=20, max_num_batched_tokens=4, max_num_seqs=4)
    streams = {name: bench.add(name, 40, max_tokens=300, ignore_eos=True)[1] for name in "abcd"}
    bench.drain()
    assert bench.tokens == streams
    assert bench.scheduler.counters.num_preemptions == 0


def test_a_chunk_is_no_longer_than_the_window_kinds_pool_has_room_for():
    bench = windowed(num_blocks=7, max_num_batched_tokens=1024)
    _, stream = bench.add("a", 1000, max_tokens=3, ignore_eos=True)
    # 7 blocks hold 64 - 1 + 34 positions wherever they begin.
    assert bench.step() == {"a": (0, 34)}
    bench.drain()
    assert bench.tokens["a"] == stream


def test_a_pool_smaller_than_the_window_bounds_the_context_as_before():
    assert windowed(num_blocks=3).scheduler.max_model_len == 3 * 16 + 1


def test_a_prefix_is_found_whose_first_blocks_are_gone():
    bench = windowed(kinds=(ALL, WINDOW), num_blocks=200, more_blocks=(12,))
    prompt = [7 + i % 90 for i in range(400)]
    bench.add("a", [*prompt, 1], max_tokens=1)
    bench.drain()
    kind = bench.scheduler.tables.kinds[1]
    assert len(kind.known) <= 12
    bench.add("b", [*prompt, 2], max_tokens=1)
    bench.drain()
    assert bench.started["b"] == 400


def test_a_prefix_without_its_window_is_cut_to_where_it_has_one():
    bench = windowed(kinds=(ALL, WINDOW), num_blocks=200, more_blocks=(12,))
    prompt = [7 + i % 90 for i in range(400)]
    bench.add("a", prompt, max_tokens=1)
    bench.drain()
    # Another prompt takes the room of the window's blocks, and of none else.
    bench.add("b", [5] * 300, max_tokens=1)
    bench.drain()
    bench.add("c", prompt, max_tokens=1)
    bench.step()
    assert bench.started["c"] == 0
    assert bench.scheduler.notes.admitted[-1][2].miss is Miss.OTHER_KIND


def test_a_draft_is_no_longer_than_the_window_kinds_pool_has_room_for():
    bench = windowed(num_blocks=5, speculates=True, enable_prefix_caching=False)
    guess = lambda step_id, index, next_token: Draft([next_token([])] * 4)  # noqa: E731
    bench.executor.behaviour = bench.executor.behaviour._replace(guess=guess)
    _, stream = bench.add("a", 90, max_tokens=40, ignore_eos=True)
    rows = set()
    while bench.scheduler.has_work():
        batch = bench.scheduler.schedule()
        rows |= {len(batch.token_ids) + len(draft.token_ids) for draft in batch.drafts.values()}
        bench.commit(batch, bench.executor.run(batch))
    assert rows == {2}  # 5 blocks hold 64 - 1 + 2 positions wherever they begin
    assert bench.tokens["a"] == stream


@pytest.mark.parametrize("window", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_sequence_holds_the_blocks_of_its_window_and_its_longest_chunk_at_most(window, size):
    def most_held(kind, chunk):
        return max(kind.pool.blocks_for(num + chunk) - kind.behind(num) for num in range(4 * size + window))

    for num_blocks in range(1, 3 + 80 // size):
        (kind,) = make_kinds([CacheKind(window)], [num_blocks], size)
        longest, chunk = fit_windows([kind], 48)
        if longest < NEVER:
            assert num_blocks < most_held(kind, 1)
            continue
        assert most_held(kind, chunk) == kind.most <= num_blocks
        assert chunk == 48 or most_held(kind, chunk + 1) > num_blocks


# -- states ------------------------------------------------------------------------------------------------------


def recurrent(**numbers):
    numbers = {"block_size": 16, "max_model_len": 8192, "num_blocks": 2048, "max_num_batched_tokens": 2048} | numbers
    return Bench(**{"kinds": (ALL, STATE), "more_blocks": (40,)} | numbers)


def test_requests_that_share_1500_tokens_hit_from_the_third_on():
    bench = recurrent(num_blocks=4096)
    shared = [3 + i % 500 for i in range(1500)]
    for number in range(16):
        suffix = [3 + (i * 31 + number) % 700 for i in range(700)]
        bench.add(f"{number}", [*shared, *suffix], max_tokens=2)
        bench.drain()
    hits = [num for num in bench.started.values() if num]
    assert len(hits) >= 14
    assert set(hits) == {1488}


@pytest.mark.parametrize("num", [300, 304])
def test_a_prefix_hits_at_the_last_block_boundary_after_which_a_token_remains(num):
    bench = recurrent()
    prompt = [3 + i % 200 for i in range(num)]
    for name in "ab":
        bench.add(name, prompt, max_tokens=2)
        bench.drain()
    assert bench.started == {"a": 0, "b": 288}


def test_a_long_prompt_leaves_a_state_every_2048_tokens():
    bench = recurrent()
    bench.add("a", 5000, max_tokens=1)
    bench.drain()
    keys = bench.scheduler.tables.state.known
    assert len(keys) == 3  # 2048, 4096, and 4992 where the prompt's last block ends


def test_a_step_reads_one_slot_and_writes_another():
    bench = recurrent()
    bench.add("a", 40, max_tokens=3, ignore_eos=True)
    reads, writes = [], []
    while bench.scheduler.has_work():
        batch = bench.scheduler.schedule()
        reads.append(batch.state_reads)
        writes.append(batch.state_writes)
        bench.commit(batch, bench.executor.run(batch))
    rows = [[row for row, _ in write] for write in writes]
    slots = [write[0][1] for write in writes]
    assert rows == [[31], [7], [0], [0]]
    assert reads == [[-1], *([slot] for slot in slots[:-1])]
    assert all(left != right for left, right in pairwise(slots))


def test_a_sequence_without_the_state_it_goes_on_from_is_an_error_and_does_not_begin_again():
    bench = recurrent(enable_prefix_caching=False)
    seq, _ = bench.add("a", 40, max_tokens=3, ignore_eos=True)
    bench.step()
    seq.states = {41: seq.states.pop(40)}
    with pytest.raises(InvariantError, match="I-22: a has no state after 40 tokens"):
        bench.scheduler.schedule()


def test_siblings_begin_with_the_state_at_the_prompts_last_block():
    bench = recurrent(block_size=4)
    streams = {f"{i}": bench.add(f"{i}", 10, group="g", seed=i, max_tokens=6, ignore_eos=True)[1] for i in range(3)}
    bench.drain()
    assert bench.tokens == streams
    assert bench.started == {"0": 0, "1": 8, "2": 8}


def full_of_snapshots(num_slots, **numbers):
    """A bench whose slots all hold a snapshot but one, of prompts of a token of their own each."""
    bench = recurrent(more_blocks=(num_slots,), **numbers)
    for number in range(num_slots + 2):
        bench.add(f"{number}", [20 + number] * 40, max_tokens=1)
        bench.drain()
    pool = bench.scheduler.tables.state.pool
    assert (len(pool.evictable), len(pool.free)) == (num_slots - 1, 1)
    return bench


def test_no_sequence_waits_for_a_slot_that_holds_a_snapshot():
    bench = full_of_snapshots(8, max_num_seqs=4)
    streams = {name: bench.add(name, [7] * 10, seed=5, max_tokens=30, ignore_eos=True)[1] for name in "abcd"}
    bench.step()
    assert len(bench.scheduler.running) == 4
    bench.drain()
    assert {name: bench.tokens[name] for name in "abcd"} == streams
    assert bench.scheduler.counters.num_preemptions == 0


def test_control_a_sequence_that_waits_for_slots_of_snapshots_is_noticed(monkeypatch):
    bench = full_of_snapshots(8, max_num_seqs=4)
    monkeypatch.setattr(BlockPool, "num_available", property(lambda pool: len(pool.free)))
    bench.add("a", 10, max_tokens=30, ignore_eos=True)
    with pytest.raises(InvariantError, match="I-16: an empty step, and 1 sequences could run"):
        bench.step()


@pytest.mark.parametrize("num_spare", [2, 1])
def test_a_running_sequence_evicts_no_snapshot_while_two_slots_are_left_and_control_with_one(num_spare):
    bench = recurrent(more_blocks=(3 + num_spare,))
    for number in range(3):
        bench.add(f"{number}", [20 + number] * 40, max_tokens=1)
        bench.drain()
    known = bench.scheduler.tables.state.known
    before = len(known)
    bench.add("a", 10, max_tokens=100, ignore_eos=True)
    bench.drain()
    assert (before, len(known)) == (3, 1 + num_spare)


def test_the_snapshot_that_was_used_least_recently_goes_first():
    bench = recurrent(more_blocks=(4,))
    for token in (20, 21, 20, 22, 23):
        bench.add(f"{len(bench.started)}", [token] * 40, max_tokens=1)
        bench.drain()
    for name, token in (("used", 20), ("old", 21)):
        bench.add(name, [token] * 40, max_tokens=1)
        bench.drain()
    assert (bench.started["old"], bench.started["used"]) == (0, 32)


def test_without_two_slots_nothing_could_run():
    with pytest.raises(ValueError, match="2 slots"):
        recurrent(more_blocks=(1,))
    for kinds in ((STATE,), (ALL, STATE, WINDOW), (ALL, ALL), (WINDOW, STATE, STATE)):
        with pytest.raises(ValueError, match="kind"):
            Bench(kinds=kinds, more_blocks=(8,) * (len(kinds) - 1))


def test_a_search_too_wide_for_the_slots_is_refused():
    bench = recurrent(more_blocks=(4,))
    with pytest.raises(RequestError, match="beam_width"):
        bench.add("a", 8, max_tokens=9, beam=BeamSearchParams(beam_width=3))
    bench.add("b", 8, max_tokens=9, beam=BeamSearchParams(beam_width=2))
    bench.drain()
    assert bench.finished["b"].reason == "length"


# -- planted bugs ------------------------------------------------------------------------------------------------


@bug("I-21")
def a_window_frees_one_block_too_early(s, _):
    behind = Kind.behind
    frees_behind(s, lambda kind, num: min(behind(kind, num) + 1, num // s.block_size))


def frees_behind(s, wrong):
    """Have steps free what is behind a window by a `wrong` count."""
    settle = s.tables.settle

    def settled(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Kind, "behind", wrong)
            settle(*args)

    s.tables.settle = settled


@bug("I-21", "I-13", checking=False)
def a_window_frees_one_block_too_early_seen_from_outside(s, monkeypatch):
    a_window_frees_one_block_too_early(s, monkeypatch)


@bug("I-21")
def a_window_frees_nothing(s, _):
    frees_behind(s, lambda kind, num: 0)


class Anything(dict):
    """Says that every key is known, by block 0."""

    def __missing__(self, key):
        return 0


def hit_without(s, monkeypatch, is_state):
    lacks = Kind.lacks
    monkeypatch.setattr(Kind, "lacks", lambda kind, *args: -1 if kind.is_state == is_state else lacks(kind, *args))
    for kind in s.cache.others:
        if kind.is_state == is_state:
            kind.known = Anything()


@bug("I-3", "I-8", "I-13", checking=False)
def a_hit_without_its_windows_blocks(s, monkeypatch):
    hit_without(s, monkeypatch, is_state=False)


@bug("I-1", "I-2", "I-3")
def a_block_goes_back_to_another_kinds_pool(s, _):
    if len(s.tables.kinds) > 1:
        first, second = (kind.pool for kind in s.tables.kinds[:2])
        release = first.release

        def swapped(blocks):
            if blocks and blocks[0] < second.num_blocks and second.refs[blocks[0]]:
                second.release(blocks[:1])
                release(blocks[1:])
            else:
                release(blocks)

        first.release = swapped


@bug("I-4", "I-22")
def a_published_state_is_written_again(s, _):
    grow_by_one = s.tables.grow_by_one

    def in_place(seqs):
        grown = grow_by_one(seqs)
        for seq in seqs if grown and s.tables.has_state else ():
            done = seq.num_computed
            if not seq.num_ahead and s.tables.state.pool.cached[seq.states.get(done, 0)]:
                s.tables.state.pool.release([seq.states[done + 1]])
                s.tables.state.pool.take([seq.states[done]])
                seq.states[done + 1] = seq.states[done]
        return grown

    s.tables.grow_by_one = in_place


@bug("I-3", "I-13", "I-22", checking=False)
def a_hit_where_there_is_no_state(s, monkeypatch):
    hit_without(s, monkeypatch, is_state=True)


@bug("I-13", "I-22", checking=False)
def the_state_of_a_rejected_guess_kept(s, _):
    settle = s.tables.settle

    def wrong(seqs, *more):
        for seq in seqs:
            later = [num for num in seq.states if num > seq.num_computed]
            if later and not seq.num_ahead and seq.num_computed in seq.states:
                done = seq.num_computed
                seq.states[done], seq.states[later[0]] = seq.states[later[0]], seq.states[done]
        settle(seqs, *more)

    s.tables.settle = wrong


@bug("I-1", "I-2")
def a_state_is_never_given_back(s, _):
    if s.tables.has_state:
        s.tables.state.pool.give_up = lambda slots: None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    expect_caught(BUGS[name], monkeypatch)
