"""The prefix cache against a naive model that compares whole token lists and knows no keys."""

from array import array

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from headrace.core.blocks import BlockPool
from headrace.core.prefix import MAX_CANDIDATES, PrefixCache, _common
from headrace.protocol.errors import InvariantError

# Few tokens, so that prefixes meet often.
tokens_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14)
salts = st.sampled_from(["", "tenant"])


class Held:
    """A sequence: a salt, its tokens, its blocks, and the keys it has worked out."""

    def __init__(self, salt, tokens, keys, table):
        self.salt, self.tokens, self.keys, self.table = salt, tokens, keys, table
        self.num_published = 0


class PrefixMachine(RuleBasedStateMachine):
    """The model: `known` maps (salt, all tokens up to the block's end) to a block."""

    held = Bundle("held")
    cache_class = PrefixCache

    @initialize(num_blocks=st.integers(1, 16), size=st.integers(1, 4))
    def start(self, num_blocks, size):
        self.pool = BlockPool(num_blocks, size)
        self.cache = self.cache_class(self.pool, b"secret", b"model")
        self.size = size
        self.known = {}
        self.live = []
        forget = self.pool.on_evict

        def evict(block):
            name = next(name for name, other in self.known.items() if other == block)
            # A leaf goes before its parent: no known block continues the one that is evicted.
            assert not any(other[0] == name[0] and other[1][:-size] == name[1] for other in self.known)
            del self.known[name]
            forget(block)

        self.pool.on_evict = evict

    def best(self, salt, tokens, limit):
        """The longest beginning of `tokens`, at most `limit`, that known blocks hold."""
        size, num = self.size, 0
        while num + size <= limit and (salt, tuple(tokens[: num + size])) in self.known:
            num += size
        best = num
        for other_salt, other in self.known:
            if other_salt == salt and len(other) == num + size and list(other[:num]) == tokens[:num]:
                common = 0
                while common < size and num + common < limit and other[num + common] == tokens[num + common]:
                    common += 1
                best = max(best, num + common)
        return best

    @rule(target=held, salt=salts, tokens=tokens_lists)
    def begin(self, salt, tokens):
        """Match, take, allocate the rest; a half-matching block is replaced by a copy."""
        keys = [self.cache.root(salt)]
        blocks, num = self.cache.match(tokens, keys, len(tokens) - 1)
        assert num <= max(0, len(tokens) - 1)
        assert len(blocks) == -(-num // self.size)
        # With two tokens and blocks of 4 there can be more children with one first token than are looked at.
        if 2 ** (self.size - 1) <= MAX_CANDIDATES:
            assert num == self.best(salt, tokens, len(tokens) - 1)
        whole = num // self.size
        for index, block in enumerate(blocks):
            end = min(num, (index + 1) * self.size)
            name = next(name for name, other in self.known.items() if other == block)
            assert (name[0], list(name[1][:end])) == (salt, tokens[:end])
        self.pool.take(blocks)
        rest = self.pool.allocate(self.pool.blocks_for(len(tokens)) - whole)
        if rest is None:
            self.pool.release(blocks)
            return multiple()
        self.pool.release(blocks[whole:])
        new = Held(salt, tokens, keys, blocks[:whole] + rest)
        new.num_published = whole
        self.live.append(new)
        return new

    @rule(seq=held)
    def publish(self, seq):
        last = len(seq.tokens) // self.size
        if seq.num_published < 0:
            return
        table = list(seq.table)
        assert self.cache.publish(seq.tokens, seq.keys, seq.table, seq.num_published, last)
        for index in range(seq.num_published, last):
            name = seq.salt, tuple(seq.tokens[: (index + 1) * self.size])
            assert seq.table[index] == self.known.setdefault(name, table[index])
        seq.num_published = last

    @rule(seq=consumes(held))
    def end(self, seq):
        self.live.remove(seq)
        self.pool.release(seq.table)

    @rule(salt=salts, tokens=tokens_lists, num=st.integers(1, 3))
    def come_and_go(self, salt, tokens, num):
        """Sequences with the same tokens at the same time, that leave their blocks cached behind."""
        twins = [seq for seq in (self.begin(salt=salt, tokens=tokens) for _ in range(num)) if isinstance(seq, Held)]
        for seq in twins:
            self.publish(seq=seq)
        for seq in twins:
            self.end(seq=seq)

    @rule()
    def reset(self):
        self.cache.reset()
        self.known.clear()
        for seq in self.live:
            seq.num_published = -1

    @invariant()
    def I_5_and_the_pool_agree_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(seq.table for seq in self.live)
        self.cache.check({self.cache.root(""), self.cache.root("tenant")})
        assert sorted(self.cache.blocks.values()) == sorted(self.known.values())


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class Saltless(PrefixCache):
    def root(self, salt):
        return super().root("")


class WholeBlocksOnly(PrefixCache):
    def _best_child(self, parent, tokens):
        return -1, 0


class FirstChildOnly(PrefixCache):
    def _best_child(self, parent, tokens):
        best, common = super()._best_child(parent, tokens)
        return (best, 1) if common else (best, 0)


class Parentless(PrefixCache):
    def child_key(self, parent, content):
        return super().child_key(b"", content)


class KeepsItsOwn(PrefixCache):
    def publish(self, tokens, keys, table, first, last):
        return super().publish(tokens, keys, list(table), first, last)


@pytest.mark.parametrize("cache_class", [Saltless, WholeBlocksOnly, FirstChildOnly, Parentless, KeepsItsOwn])
def test_the_machine_finds_a_broken_cache(cache_class):
    machine = type("Machine", (PrefixMachine,), {"cache_class": cache_class})
    broken = settings(
        max_examples=2000,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,
    )
    with pytest.raises((AssertionError, InvariantError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=broken)


def filled(tokens, size=4, num_blocks=8, **kwargs):
    """A cache in which `tokens` were published, and their table was let go."""
    pool = BlockPool(num_blocks, size)
    cache = PrefixCache(pool, **kwargs)
    keys = [cache.root("")]
    table = pool.allocate(pool.blocks_for(len(tokens)))
    cache.publish(tokens, keys, table, 0, len(tokens) // size)
    pool.release(table)
    return pool, cache, table


def test_a_match_is_by_token_and_leaves_the_rest():
    _, cache, table = filled([1, 2, 3, 4, 5, 6, 7, 8])
    match = cache.match([1, 2, 3, 4, 5, 6, 9, 9], [cache.root("")], 7)
    assert match == (table, 6)
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8], [cache.root("")], 7) == (table, 7)
    assert cache.match([2, 2, 3, 4], [cache.root("")], 3) == ([], 0)
    assert cache.match([1, 2, 3, 4], [cache.root("other")], 3) == ([], 0)


def test_the_longest_of_several_children_is_found():
    pool = BlockPool(8, 4)
    cache = PrefixCache(pool)
    for tokens in ([1, 2, 9, 9], [1, 2, 3, 9], [1, 8, 8, 8]):
        table = pool.allocate(1)
        cache.publish(tokens, [cache.root("")], table, 0, 1)
    blocks, num = cache.match([1, 2, 3, 4, 5], [cache.root("")], 4)
    assert num == 3
    assert cache.entries[blocks[0]].content == array("q", [1, 2, 3, 9]).tobytes()


def test_S_23_every_part_of_the_key_changes_it():
    pool = BlockPool(2, 4)
    base = PrefixCache(pool, b"key", b"model")
    roots = [
        base.root("a"),
        base.root("b"),
        # The lengths of the parts separate them.
        base.root("ab"),
        PrefixCache(pool, b"key", b"bmodel").root("a"),
        PrefixCache(pool, b"other", b"model").root("a"),
        PrefixCache(pool, b"key", b"model 2").root("a"),
    ]
    content = array("q", [1, 2, 3, 4]).tobytes()
    children = [base.child_key(root, content) for root in roots]
    children += [base.child_key(roots[0], array("q", [1, 2, 3, 5]).tobytes())]
    families = [base.family_key(roots[0], "g", [1]), base.family_key(roots[0], "g", [2])]
    families += [base.family_key(roots[0], "h", [1]), base.family_key(roots[1], "g", [1])]
    assert len({*roots, *children, *families}) == len(roots) + len(children) + len(families)
    assert base.root("a") == PrefixCache(pool, b"key", b"model").root("a")


def test_S_23_a_key_of_other_tokens_is_no_hit():
    _, cache, table = filled([1, 2, 3, 4])
    entry = cache.entries[table[0]]
    cache.entries[table[0]] = entry._replace(content=array("q", [9, 2, 3, 4]).tobytes())
    assert cache.match([1, 2, 3, 4, 5], [cache.root("")], 4) == ([], 0)


def test_a_key_that_is_taken_stops_publishing():
    pool = BlockPool(4, 2)
    cache = PrefixCache(pool)
    cache.child_key = lambda parent, content: b"same"
    first, second = pool.allocate(1), pool.allocate(1)
    assert cache.publish([1, 2], [b"root"], first, 0, 1)
    assert not cache.publish([3, 4], [b"root"], second, 0, 1)
    assert cache.blocks == {b"same": first[0]}
    pool.check([first, second])


def test_salts_with_lone_surrogates_are_keys_too():
    cache = PrefixCache(BlockPool(1, 1))
    assert cache.root("\ud800") != cache.root("\ud801")


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, 4))
def test_common_items_are_counted(left, right, shared):
    right = left[:shared] + right
    num = 0
    while num < min(len(left), len(right)) and left[num] == right[num]:
        num += 1
    assert _common(array("q", left).tobytes(), array("q", right).tobytes()) == num


def test_I_5_check_finds_each_kind_of_damage():
    def damaged(damage):
        _, cache, table = filled([1, 2, 3, 4, 5, 6, 7, 8])
        cache.check({cache.root("")})
        damage(cache, table)
        with pytest.raises(InvariantError, match="I-5"):
            cache.check({cache.root("")})

    def rename(cache, table):
        cache.blocks[b"x"] = cache.blocks.pop(cache.entries[table[1]].key)

    def alter(**parts):
        def damage(cache, table):
            cache.entries[table[1]] = cache.entries[table[1]]._replace(**parts)

        return damage

    def orphan(cache, table):
        entry = cache.entries[table[0]]
        cache._forget(table[0])
        cache.pool.cached[table[0]] = False
        assert entry.key not in cache.blocks

    damaged(rename)
    damaged(orphan)
    damaged(alter(content=array("q", [5, 6, 7, 9]).tobytes()))
    damaged(alter(content=array("q", [5, 6, 7]).tobytes()))
    damaged(alter(parent=b"nobody"))
    damaged(lambda cache, table: cache.blocks.update({b"y": table[0]}))
    damaged(lambda cache, table: cache.pool.cached.__setitem__(table[0], False))
    damaged(lambda cache, table: cache.children.clear())
    damaged(lambda cache, table: cache.children.update({b"z": {1: {table[0]: None}}}))
