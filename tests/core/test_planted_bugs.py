"""Negative controls: each planted bug must be caught by the simulation, and by the invariant that forbids it.

A control with `checking=False` turns the scheduler's own `check()` off, so that the oracle and the ledger are shown
to catch it alone. That the same seeds pass without a bug is what test_simulation shows.
"""

import random
from functools import partial

import msgspec
import pytest
from tests.programs.sim.planting import NUM_STEPS, Bugs, expect_caught, register
from tests.programs.sim.simulation import Simulation

import headrace.core.scheduler as scheduler_module
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence
from headrace.core.steps import make_batch
from headrace.protocol.step import Finish

BUGS: Bugs = {}
bug = partial(register, BUGS)


def every(nth):
    """True at each nth call."""
    count = 0

    def tick():
        nonlocal count
        count += 1
        return count % nth == 0

    return tick


def scheduled_with(s, bound, changed):
    """Have steps chosen under another bound: `changed` makes it of the right one."""
    schedule = s.schedule

    def scheduled():
        right = getattr(s, bound)
        setattr(s, bound, changed(right))
        try:
            return schedule()
        finally:
            setattr(s, bound, right)

    s.schedule = scheduled


@bug("I-1", "I-2")
def leaked_block(s, _):
    release, now = s.pool.release, every(9)
    s.pool.release = lambda blocks: release(blocks[:-1] if now() else blocks)


@bug("I-1", "I-17", checking=False)
def leaked_block_seen_by_the_ledger(s, _):
    release, now = s.pool.release, every(9)
    s.pool.release = lambda blocks: release(blocks[:-1] if now() else blocks)


@bug("I-8", "I-13", checking=False)
def swapped_slot(s, _):
    schedule, now = s.schedule, every(5)

    def swapped():
        batch = schedule()
        for index, table in enumerate(batch.block_tables):
            if len(table) > 1 and now():
                batch.block_tables[index] = [table[1], table[0], *table[2:]]
        return batch

    s.schedule = swapped


@bug("I-2", "I-3")
def missed_reference(s, _):
    take, now = s.pool.take, every(3)
    s.pool.take = lambda blocks: take(blocks[1:] if now() else blocks)


@bug("I-2", "I-3", "I-4", "I-7", "I-8", "I-13", checking=False)
def missed_reference_seen_from_outside(s, _):
    take, now = s.pool.take, every(3)
    s.pool.take = lambda blocks: take(blocks[1:] if now() else blocks)


@bug("I-2")
def double_free(s, _):
    release, now = s.pool.release, every(9)

    def twice(blocks):
        release(blocks)
        if blocks and now():
            release(blocks[:1])

    s.pool.release = twice


@bug("I-1", "I-3")
def block_twice_in_the_free_list(s, _):
    release, now = s.pool.release, every(9)

    def doubled(blocks):
        release(blocks)
        if s.pool.free and now():
            s.pool.free.append(s.pool.free[0])

    s.pool.release = doubled


@bug("I-2")
def allocation_not_rolled_back(s, _):
    allocate = s.pool.allocate

    def partial(num):
        blocks = allocate(num)
        if blocks is None and s.pool.free:
            s.pool.refs[s.pool.free.pop()] = 1
        return blocks

    s.pool.allocate = partial


@bug("I-11", "I-12", "I-13", checking=False)
def lost_token(s, _):
    commit, now = s.commit, every(7)

    def losing(batch, result):
        output = commit(batch, result)
        if output.request_ids and now():
            output.request_ids.pop()
            output.token_ids.pop()
        return output

    s.commit = losing


@bug("I-13", "I-8", "I-11", checking=False)
def token_known_twice(s, _):
    commit, now = s.commit, every(7)

    def doubling(batch, result):
        output = commit(batch, result)
        for seq in s.running[:1]:
            if now() and len(seq.tokens) + 1 < seq.max_len:
                seq.tokens.append(seq.tokens[-1])
        return output

    s.commit = doubling


@bug("I-9", checking=False)
def end_told_twice(s, _):
    commit, message = s.commit, {}

    def repeating(batch, result):
        output = commit(batch, result)
        output.finished.update(message)
        message.update({name: Finish("abort") for name in output.finished})
        return output

    s.commit = repeating


@bug("I-8", "I-12", "I-13", checking=False)
def failed_chunk_published(s, _):
    commit = s.commit

    def publishing(batch, result):
        for index in result.column("error"):
            seq, length = s.steps.oldest(batch, result).seqs[index], batch.lens[index]
            if seq.block_table and seq.num_computed + length >= seq.publish_at:
                seq.num_computed += length
                s.tables.publish(seq)
        return commit(batch, result)

    s.commit = publishing


@bug("I-8", "I-13", checking=False)
def copy_not_made(s, _):
    take_copies = s.tables.take_copies
    s.tables.take_copies = lambda: [pairs[1:] for pairs in take_copies()]


@bug("I-4")
def shared_block_written(s, _):
    start = s.tables.start

    def in_place(seq, *args):
        started = start(seq, *args)
        if started and s.tables.copies[0] and s.tables.copies[0][-1][1] in seq.block_table:
            source, target = s.tables.copies[0].pop()
            seq.block_table[seq.block_table.index(target)] = source
            s.pool.pins.remove(source)
            s.pool.release([target])
        return started

    s.tables.start = in_place


@bug("I-7", checking=False)
def source_of_a_copy_not_pinned(s, _):
    s.pool.pin = lambda block: s.pool.release([block])


@bug("I-7", checking=False)
def blocks_of_a_step_in_flight_freed_by_abort(s, _):
    abort = s.abort

    def at_once(name):
        seq = s.sequences.get(name)
        aborted = abort(name)
        if aborted and s.steps.zombies():
            for step in s.steps.steps:
                step.zombies.clear()
            s.tables.release(seq)
        return aborted

    s.abort = at_once


@bug("I-5")
def block_published_before_it_is_full(s, _):
    publish = s.cache.publish
    s.cache.publish = lambda tokens, keys, table, first, last: publish(
        tokens, keys, table, first, min(last + 1, len(table), len(tokens) // s.block_size)
    )


@bug("I-5")
def evicted_block_still_known(s, _):
    s.pool.on_evict = lambda block: None


@bug("I-3", "I-4", "I-8", "I-13", checking=False)
def evicted_block_still_known_seen_from_outside(s, _):
    s.pool.on_evict = lambda block: None


@bug("I-5")
def own_block_kept_beside_the_known_one(s, _):
    publish = s.cache.publish

    def stubborn(tokens, keys, table, first, last):
        blocks = list(table)
        s.pool.take(blocks)
        published = publish(tokens, keys, table, first, last)
        s.pool.release(list(table))
        table[:] = blocks
        return published

    s.cache.publish = stubborn


@bug("I-13", checking=False)
def salt_left_out_of_the_key(s, _):
    root = s.cache.root
    s.cache.root = lambda salt, adapter: root("", adapter)


@bug("I-8")
def block_too_many(s, _):
    grow, now = s.tables.grow, every(5)
    s.tables.grow = lambda seq, length, *more: grow(seq, length + s.block_size * now(), *more)


@bug("I-2", "I-10")
def preempted_and_still_running(s, _):
    leave, now = s.tables.leave_family, every(5)

    def staying(seq):
        leave(seq)
        if now():
            s.running.append(seq)
            s.tables.enter_family(seq)

    s.tables.leave_family = staying


@bug("I-12", checking=False)
def prompt_logprobs_from_the_cache(s, monkeypatch):
    monkeypatch.setattr(Sequence, "may_share", True)


@bug("I-15")
def budget_ignored(s, _):
    scheduled_with(s, "max_num_batched_tokens", lambda num: 2 * num)


@bug("I-16")
def empty_step_while_some_wait(s, _):
    now = every(3)
    scheduled_with(s, "max_num_seqs", lambda num: 0 if now() else num)


@bug("I-17")
def preempted_without_end(s, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_PREEMPTIONS", 10**9)


@bug("I-17", "R-11", checking=False)
def protected_although_they_do_not_fit(s, monkeypatch):
    # Nobody is ever a victim, so those who need blocks wait for one another for ever.
    monkeypatch.setattr(scheduler_module, "MAX_PREEMPTIONS", 0)
    s.tables.all_kinds[0].worst_case = lambda seq: 0


@bug("I-18")
def overtaken_without_end(s, _):
    s.waiting.max_overtaking, real = 10**9, s.waiting.max_overtaking
    check = s.check

    def with_the_real_bound():
        s.waiting.max_overtaking = real
        try:
            check()
        finally:
            s.waiting.max_overtaking = 10**9

    s.check = with_the_real_bound


@bug("I-18", checking=False)
def last_come_first_served(s, _):
    add = s.waiting.add

    def backwards(seq):
        seq.rank = -seq.seq_id
        add(seq)

    if s.ranks.policy == "fcfs":
        s.waiting.add = backwards


@bug("I-19", "I-17", checking=False)
def too_long_a_request_accepted(s, _):
    s.max_model_len += 100


@bug("I-19")
def more_promised_than_the_pool_has(s, _):
    add = s.add

    def generous(request):
        add(request)
        s.sequences[request.request_id].max_len += s.pool.num_blocks * s.block_size

    s.add = generous


@bug("R-11", checking=False)
def decode_left_out_of_a_step(s, monkeypatch):
    def without_the_first(step_id, ready, chunks, *more):
        return make_batch(step_id, ready[1:] if chunks else ready, chunks, *more)

    monkeypatch.setattr(scheduler_module, "make_batch", without_the_first)


@bug("I-11", checking=False)
def ended_too_early(s, _):
    add = s.add

    def stingy(request):
        add(request)
        seq = s.sequences[request.request_id]
        seq.max_len = max(seq.num_prompt + 1, len(seq.tokens), seq.max_len - 1)

    s.add = stingy


@bug("I-11", "I-13", checking=False)
def stop_tokens_ignored(s, _):
    add = s.add

    def deaf(request):
        add(msgspec.structs.replace(request))
        s.sequences[request.request_id].stop_ids = frozenset()

    s.add = deaf


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    expect_caught(BUGS[name], monkeypatch)


def test_colliding_keys_do_no_harm():
    def make_scheduler(options):
        scheduler = Scheduler(options)
        scheduler.cache.child_key = lambda parent, content: content[:1].ljust(32)
        return scheduler

    for seed in range(20):
        Simulation(seed, make_scheduler=make_scheduler).run(NUM_STEPS)


def test_I_20_a_hidden_source_of_randomness_is_caught():
    def make_scheduler(options):
        scheduler = Scheduler(options)
        schedule = scheduler.schedule

        def shuffled():
            random.SystemRandom().shuffle(scheduler.running)
            return schedule()

        scheduler.schedule = shuffled
        return scheduler

    digests = {Simulation(4, make_scheduler=make_scheduler).run(NUM_STEPS).digest for _ in range(4)}
    assert len(digests) > 1
