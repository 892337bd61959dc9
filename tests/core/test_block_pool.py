"""The block pool against a naive model: sets of holders, and a list in order of last use."""

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.core import blocks
from headrace.core.blocks import BlockPool
from headrace.protocol.errors import InvariantError


class PoolMachine(RuleBasedStateMachine):
    """The model: `tables` holds every table there is, `cached` the marked blocks, `lru` idle cached ones in order."""

    handles = Bundle("tables")
    pool_class = BlockPool

    @initialize(num_blocks=st.integers(1, 5), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.pool = self.pool_class(num_blocks, block_size)
        self.evicted = []
        self.pool.on_evict = self.evicted.append
        self.tables = {}
        self.pins = []
        self.cached = set()
        self.lru = []
        self.num = 0

    def holders(self, block):
        return sum(block in table for table in self.tables.values()) + self.pins.count(block)

    def idle(self):
        return {block for block in range(self.pool.num_blocks) if not self.holders(block)}

    def keep(self, table):
        self.num += 1
        self.tables[self.num] = table
        return self.num

    @rule(target=handles, num=st.integers(0, 4), fails=st.sampled_from([False, False, False, True]))
    def allocate(self, num, fails):
        idle = self.idle()
        self.evicted.clear()
        self.pool.fail_at = self.pool.num_allocations + 1 if fails else 0
        table = self.pool.allocate(num)
        if fails or num > len(idle):
            assert table is None
            assert self.evicted == []
            return multiple()
        assert len(set(table)) == num
        assert set(table) <= idle
        num_free = len(idle) - len(self.lru)
        # I-6 and LRU: exactly as many are evicted as free ones are missing, the least recently used first.
        assert self.evicted == self.lru[: max(0, num - num_free)]
        self.lru = self.lru[len(self.evicted) :]
        self.cached -= set(self.evicted)
        return self.keep(table)

    @rule(num=st.integers(1, 3))
    def come_and_go(self, num):
        """A sequence that leaves its blocks cached behind."""
        handle = self.allocate(num=num, fails=False)
        if isinstance(handle, int):
            self.release(handle=handle, marked=True)

    @rule(target=handles, source=handles, end=st.integers(0, 5))
    def share(self, source, end):
        table = self.tables[source][:end]
        self.pool.take(table)
        return self.keep(table)

    @precondition(lambda self: self.lru)
    @rule(target=handles, index=st.integers(0, 3))
    def revive(self, index):
        """Take a cached block that nobody holds."""
        block = self.lru[index % len(self.lru)]
        self.pool.take([block])
        self.lru.remove(block)
        return self.keep([block])

    @rule(handle=consumes(handles), marked=st.sampled_from([True, True, False]))
    def release(self, handle, marked):
        if marked:
            self.mark(handle)
        table = self.tables.pop(handle)
        self.pool.release(table)
        self.lru += [block for block in reversed(table) if not self.holders(block) and block in self.cached]

    @rule(handle=consumes(handles))
    def pin_one(self, handle):
        """The last block of a table becomes a pin, the rest is released."""
        table = self.tables.pop(handle)
        if table:
            self.pool.pin(table[-1])
            self.pins.append(table[-1])
        self.pool.release(table[:-1])
        self.lru += [block for block in reversed(table[:-1]) if not self.holders(block) and block in self.cached]

    @precondition(lambda self: self.pins)
    @rule()
    def retire(self):
        self.pool.unpin()
        # One by one, the last first: a block that is pinned twice goes when its last pin does.
        while self.pins:
            block = self.pins.pop()
            if not self.holders(block) and block in self.cached:
                self.lru.append(block)

    def mark(self, handle):
        for block in self.tables[handle]:
            self.pool.mark_cached(block)
            self.cached.add(block)

    @rule(really=st.sampled_from([False, False, False, True]))
    def forget(self, really):
        idle, free = self.idle(), self.idle() - set(self.lru)
        if idle:
            with pytest.raises(InvariantError, match="I-2"):
                self.pool.release([min(idle)])
        if free:
            with pytest.raises(InvariantError, match="I-3"):
                self.pool.take([min(free)])
        if not really:
            return
        self.pool.forget_cached()
        self.cached.clear()
        self.lru.clear()

    @invariant()
    def I_1_I_2_I_3_agree_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.tables.values())
        assert self.pool.num_held == self.pool.num_blocks - len(self.idle())
        assert self.pool.num_available == len(self.idle())
        assert list(self.pool.evictable) == self.lru
        assert self.pool.refs == [self.holders(block) for block in range(self.pool.num_blocks)]


# No time is spent on making a failure small that is wanted.
BROKEN = settings(
    max_examples=2000,
    stateful_step_count=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    print_blob=False,
    derandomize=True,
)
TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class NewestFirst(BlockPool):
    """Evicts the most recently used."""

    def allocate(self, num):
        self.evictable = type(self.evictable)(reversed(self.evictable.items()))
        blocks = super().allocate(num)
        self.evictable = type(self.evictable)(reversed(self.evictable.items()))
        return blocks


class HeadFirst(BlockPool):
    """Releases parents before their leaves."""

    def release(self, blocks):
        super().release(list(reversed(blocks)))


class NoRollback(BlockPool):
    """Evicts before it knows whether that is enough."""

    def allocate(self, num):
        if num > self.num_available and self.evictable:
            super().allocate(len(self.free) + 1)
        return super().allocate(num)


class Forgetful(BlockPool):
    """Frees a block at once that is cached."""

    def release(self, blocks):
        for block in blocks:
            if self.refs[block] == 1:
                self.cached[block] = False
        super().release(blocks)


@pytest.mark.parametrize("pool_class", [NewestFirst, HeadFirst, NoRollback, Forgetful])
def test_the_machine_finds_a_broken_pool(pool_class):
    machine = type("Machine", (PoolMachine,), {"pool_class": pool_class})
    with pytest.raises((AssertionError, InvariantError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=BROKEN)


def test_a_pool_needs_blocks():
    for numbers in ((0, 16), (4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            BlockPool(*numbers)


def test_I_6_allocation_is_all_or_nothing():
    pool = BlockPool(4, 16)
    table = pool.allocate(3)
    before = list(pool.free), dict(pool.evictable), list(pool.refs)
    assert pool.allocate(2) is None
    assert (pool.free, dict(pool.evictable), pool.refs) == before
    pool.check([table])


def history(num_blocks, seed):
    """The blocks that a pool gives and evicts in a thousand random calls, and the pool."""
    rng, pool, evicted, tables, outcomes = random.Random(seed), BlockPool(num_blocks, 16), [], [], []
    pool.on_evict = evicted.append
    for _ in range(1000):
        action = rng.choice(["allocate", "allocate", "release", "mark", "forget"])
        if action == "allocate":
            table = pool.allocate(rng.randint(1, 9))
            outcomes.append(table)
            tables += [table] if table else []
        elif action == "forget" and rng.random() < 0.02:
            pool.forget_cached()
        elif tables and action == "release":
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif tables and action == "mark":
            for block in rng.choice(tables):
                pool.mark_cached(block)
        pool.check(tables)
    return outcomes, evicted, pool


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_that_is_laid_out_by_need_gives_the_same_blocks(seed, monkeypatch):
    whole = history(120, seed)
    monkeypatch.setattr(blocks, "LAID_OUT", 3)
    outcomes, evicted, pool = history(120, seed)
    assert (outcomes, evicted) == whole[:2]
    assert None in outcomes
    assert evicted
    assert pool.num_available == whole[2].num_available
    # The control: fresh blocks in another order are other blocks.
    monkeypatch.setattr(BlockPool, "lay_out", lambda pool, num: lay_out_at_the_top(pool, num))
    assert history(120, seed)[0] != outcomes


def lay_out_at_the_top(pool, num):
    """Puts fresh blocks above those that were used before."""
    first, num = len(pool.refs), min(pool.num_fresh, max(num, 3))
    pool.num_fresh -= num
    pool.refs += [0] * num
    pool.cached += [False] * num
    pool.free += range(first + num - 1, first - 1, -1)


def test_a_pool_takes_memory_for_the_blocks_in_use():
    pool = BlockPool(10**9, 16)
    table = pool.allocate(3000)
    assert (table[0], table[-1], pool.num_held, pool.num_available) == (0, 2999, 3000, 10**9 - 3000)
    assert len(pool.refs) == len(pool.cached) == 3000
    assert pool.allocate(10**9 - 2999) is None
    pool.release(table)
    assert pool.allocate(3000) == table
    assert len(pool.refs) == 3000


def test_I_1_to_I_3_check_finds_each_kind_of_damage():
    def damaged(damage):
        pool = BlockPool(4, 16)
        table = pool.allocate(2)
        damage(pool, table)
        with pytest.raises(InvariantError) as caught:
            pool.check([table])
        return caught.value.invariant

    assert damaged(lambda pool, table: pool.free.pop()) == "I-1"
    assert damaged(lambda pool, table: table.append(table[0])) == "I-2"
    assert damaged(lambda pool, table: pool.pins.append(table[0])) == "I-2"
    assert damaged(lambda pool, table: pool.free.__setitem__(0, pool.free[1])) == "I-3"
    assert damaged(lambda pool, table: pool.free.__setitem__(0, table[0])) == "I-3"
    assert damaged(lambda pool, table: pool.evictable.update({pool.free.pop(): None})) == "I-3"
