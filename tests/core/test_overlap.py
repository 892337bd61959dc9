"""A step beside another one: what runs ahead, what waits, and that nothing is freed under a running step."""

from functools import partial

import pytest
from tests.programs.sim.bench import Bench
from tests.programs.sim.planting import Bugs, expect_caught, register

from headrace.core.sequence import Status
from headrace.protocol.errors import HeadraceError
from headrace.protocol.step import UNDRAWN, Finish

BUGS: Bugs = {}
bug = partial(register, BUGS, overlapping=True)


def make_bench(**numbers):
    return Bench(runs_ahead=lambda params: params.logprobs is None, **numbers)


class Pair:
    """Drives a bench with one step in flight."""

    def __init__(self, bench):
        self.bench, self.flight = bench, []

    def start(self, batch):
        self.bench.scheduler.check()
        self.flight.append((batch, self.bench.executor.start(batch)))
        return batch

    def finish(self):
        batch, ticket = self.flight.pop(0)
        self.bench.commit(batch, self.bench.executor.finish(ticket))

    def drain(self):
        scheduler = self.bench.scheduler
        while scheduler.has_work():
            if not self.flight:
                self.start(scheduler.schedule())
            ahead = scheduler.schedule_ahead()
            if ahead is not None:
                self.start(ahead)
            self.finish()
        assert scheduler.stats().num_blocks_held == 0


def test_a_sequence_runs_ahead_of_its_token_and_one_that_needs_the_host_waits():
    bench = make_bench()
    _, fast = bench.add("fast", 3, max_tokens=5, ignore_eos=True)
    _, slow = bench.add("slow", 4, max_tokens=5, ignore_eos=True, logprobs=0)
    pair = Pair(bench)
    pair.start(bench.scheduler.schedule())
    with pytest.raises(HeadraceError, match="in flight"):
        bench.scheduler.schedule()
    ahead = pair.start(bench.scheduler.schedule_ahead())
    assert (ahead.token_ids, ahead.starts) == ([UNDRAWN], [3])
    assert bench.scheduler.schedule_ahead() is None, "two steps are in flight"
    pair.finish()
    assert bench.tokens == {"fast": fast[:1], "slow": slow[:1]}
    both = pair.start(bench.scheduler.schedule_ahead())
    assert (both.token_ids, both.starts) == ([UNDRAWN, slow[0]], [4, 4])
    pair.drain()
    assert bench.tokens == {"fast": fast, "slow": slow}


def test_nothing_runs_ahead_of_a_certain_end_and_a_chunk_of_a_prompt_does():
    bench = make_bench(max_num_batched_tokens=4)
    _, stream = bench.add("a", 10, max_tokens=2, ignore_eos=True)
    pair = Pair(bench)
    batches = [pair.start(bench.scheduler.schedule()), pair.start(bench.scheduler.schedule_ahead())]
    assert [(b.starts, b.lens, b.samples) for b in batches] == [([0], [4], [False]), ([4], [4], [False])]
    pair.finish()
    assert pair.start(bench.scheduler.schedule_ahead()).starts == [8]
    pair.finish()
    assert pair.start(bench.scheduler.schedule_ahead()).token_ids == [UNDRAWN]
    pair.finish()
    assert bench.scheduler.schedule_ahead() is None, "the second token ends it"
    pair.drain()
    assert bench.tokens["a"] == stream


@pytest.mark.parametrize("how", ["stop", "abort", "failure"])
def test_the_blocks_of_a_sequence_that_ends_are_held_until_the_step_ahead_is_retired(how):
    failing = []
    bench = make_bench(fail=lambda step_id, index: step_id in failing)
    # The first token of the same request, drawn by another bench.
    stop = make_bench().add("a", 7, max_tokens=20, ignore_eos=True)[1][0]
    seq, _ = bench.add("a", 7, max_tokens=20, ignore_eos=True, stop_token_ids=[stop] if how == "stop" else None)
    pair = Pair(bench)
    failing += [1] if how == "failure" else []
    pair.start(bench.scheduler.schedule())
    ahead = pair.start(bench.scheduler.schedule_ahead())
    if how == "abort":
        assert bench.scheduler.abort("a")
    blocks = {block for table in ahead.block_tables for block in table}
    pair.finish()
    assert bench.finished["a"].reason == {"stop": "stop", "abort": "abort", "failure": "error"}[how]
    assert seq.status is Status.FINISHED
    assert all(bench.scheduler.pool.refs[block] for block in blocks)
    assert bench.scheduler.has_work(), "a step is in flight"
    pair.finish()
    assert bench.output.request_ids == []
    assert not bench.scheduler.has_work()
    assert bench.scheduler.pool.num_held == 0


def test_a_step_in_flight_is_not_preempted_and_the_step_after_it_is_chosen_without():
    bench = make_bench(num_blocks=6, max_num_seqs=2)
    prompts = {"a": list(range(1, 9)), "b": list(range(11, 19))}
    streams = {name: bench.add(name, ids, max_tokens=9, ignore_eos=True)[1] for name, ids in prompts.items()}
    Pair(bench).drain()
    assert bench.tokens == streams
    assert bench.scheduler.stats().num_preemptions > 0


def test_a_retracted_pair_of_steps_is_computed_again():
    bench = make_bench()
    streams = {name: bench.add(name, 6, max_tokens=6, ignore_eos=True, seed=i)[1] for i, name in enumerate("abc")}
    pair = Pair(bench)
    pair.start(bench.scheduler.schedule())
    pair.start(bench.scheduler.schedule_ahead())
    bench.scheduler.retract()
    bench.scheduler.check()
    assert bench.scheduler.pool.num_held == 0
    pair.flight.clear()
    pair.drain()
    assert bench.tokens == streams
    assert set(bench.finished.values()) == {Finish("length")}


@bug("I-7", "I-2")
def blocks_freed_under_the_step_ahead(s, _):
    s.steps.hold = lambda seq: False


@bug("I-7")
def block_freed_that_another_replaces_in_the_table(s, _):
    s.pool.give_up = s.pool.release


@bug("I-12", "I-13", "I-8")
def row_after_a_token_that_was_not_drawn_counted(s, _):
    s.steps.make_void = lambda seq: None


@bug("I-12", "I-13", "I-8", "I-19")
def sequence_scheduled_beyond_its_length(s, _):
    def beyond(schedule):
        lens = {seq: seq.max_len for seq in s.running}
        for seq in s.running:
            seq.max_len += 1
        try:
            return schedule()
        finally:
            for seq, length in lens.items():
                seq.max_len = length

    s.schedule, s.schedule_ahead = partial(beyond, s.schedule), partial(beyond, s.schedule_ahead)


@bug("I-7", "I-8", "I-10")
def sequence_preempted_under_a_step(s, _):
    grow = s.tables.grow

    def growing(seq, length):
        while not grow(seq, length):
            victims = [other for other in s.running if other is not seq and other.num_preemptions < 2]
            if not victims:
                return False
            steps, s.steps = s.steps, []
            s.preempt(victims[-1].request_id)
            s.steps = steps
        return True

    s.tables.grow = growing


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    expect_caught(BUGS[name], monkeypatch)
