"""`PrefixCache`: finds the blocks that already hold the beginning of a token list, and publishes new ones.

A full block is known by a keyed BLAKE2b of (key of all before it, its token ids); the root key covers the
salt and the fingerprint of model and cache. Knows ints and bytes: no requests, no model. The secret key is an argument,
since the core draws no randomness. Whole blocks are found by walking keys, the next block by its first token; that one
is reused as far as it agrees, so that reuse is by token, as in a radix tree (SGLang, arXiv:2312.07104, section 3).

A model with several kinds of cache needs something of each where a sequence begins. A key is known while its block of
kind 0 is cached; the other kinds' blocks and states are known by the same key, and are forgotten with it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from headrace.core.blocks import BlockPool
from headrace.core.kinds import Kind
from headrace.protocol.errors import InvariantError

MAX_CANDIDATES = 8
MAX_EVICTED = 16384
NUM_SHOWN = 8
"""Token ids that a verdict has of each side, before and after the first that differs."""
_ITEM = array("q").itemsize


class CachedBlock(NamedTuple):
    """A cached block: its key, its parent's key, and its token ids as native 64-bit integers."""

    key: bytes
    parent: bytes
    content: bytes


class Miss(IntEnum):
    """Why a lookup returned no more tokens: it lacks none; nothing follows the root; the cached tokens differ; the
    block was evicted; the tokens after the last whole block were not published; the request needs every row computed
    (as for `prompt_logprobs`); caching is off; more tokens are cached, but another kind of layers lacks its blocks of a
    window, or its state, there."""

    NONE, EMPTY, DIVERGED, EVICTED, PART_OF_A_BLOCK, EVERY_ROW, OFF, OTHER_KIND = range(8)


class Verdict(NamedTuple):
    """The result of one lookup: why it ended, and `at` which token. An evicted block was evicted at `time`, to make
    room for the sequence `by`. `ours` and `theirs` are the token ids around `at` in the request and in the newest
    cached block there."""

    miss: Miss
    at: int
    time: int = 0
    by: int = 0
    ours: Sequence[int] = ()
    theirs: Sequence[int] = ()


def digest(key: bytes, person: bytes, *parts: bytes) -> bytes:
    """Return the BLAKE2b of `parts` under a secret key, for one purpose."""
    hasher = blake2b(key=key, digest_size=32, person=person)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def root_key(key: bytes, salt: str, adapter: str, fingerprint: bytes) -> bytes:
    """Return the key before the first block of a prompt."""
    parts = salt.encode("utf-8", "surrogatepass"), fingerprint
    return digest(key, b"adapted root", *parts, adapter.encode()) if adapter else digest(key, b"root", *parts)


class PrefixCache:
    """Cached blocks of one pool, and of the pools of the other `kinds` (all of them; `pool` is the first's).

    `key` is secret to the process (at most 64 bytes); `fingerprint` names the model and the form of its cache, so that
    blocks of another never match. `evicted` has the keys that were evicted last, with `now`, a time that the caller
    sets, and the sequence that needed the room. `hits` has the blocks at which lookups of admitted sequences ended: how
    many, and when the last one did. The hits of an evicted block go to its parent. `on_change` is called with each key
    that comes or goes, and whether it is cached now; not at a reset, of which there were `num_resets`.
    """

    def __init__(self, pool: BlockPool, key: bytes = b"", fingerprint: bytes = b"", kinds: Sequence[Kind] = ()) -> None:
        self.pool = pool
        self.others = kinds[1:]
        # Kind 0, if it has a window: then a block is evicted before the blocks that follow it.
        self.window = kinds[0] if kinds and kinds[0].window else None
        self.blocks: dict[bytes, int] = kinds[0].known if kinds else {}
        self.entries: dict[int, CachedBlock] = {}
        # By parent and first token. The values are used as ordered sets: the newest child is last.
        self.children: dict[bytes, dict[int, dict[int, None]]] = {}
        self.evicted: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.hits: dict[int, tuple[int, int]] = {}
        self.now = 0
        self.num_resets = 0
        self.on_change: Callable[[bytes, bool], None] = lambda key, is_cached: None
        self._key = key
        self._fingerprint = fingerprint
        pool.on_evict = self._forget
        for kind in self.others:
            kind.pool.on_evict = partial(_forget_in, kind)

    def __len__(self) -> int:
        return len(self.blocks)

    def rekey(self, key: bytes) -> None:
        """Use another secret key, which others have too, from now on. The cache must be empty, and no sequence live."""
        self._key, self._fingerprint = key, b""

    def root(self, salt: str, adapter: str = "") -> bytes:
        """Return the key before the first block, for a salt and the digest of an adapter."""
        return root_key(self._key, salt, adapter, self._fingerprint)

    def family_key(self, root: bytes, group: str, tokens: list[int]) -> bytes:
        """Return the key of the requests of one group with one prompt under one root."""
        return digest(self._key, b"family", root, group.encode("utf-8", "surrogatepass"), array("q", tokens).tobytes())

    def child_key(self, parent: bytes, content: bytes) -> bytes:
        """Return the key of the tokens in `content` after all tokens of the key `parent`."""
        return blake2b(parent + content, key=self._key, digest_size=32).digest()

    def match(self, tokens: list[int], keys: list[bytes], limit: int) -> tuple[list[int], int]:
        """Return the blocks of the longest cached prefix of `tokens`, and how many tokens they hold (at most `limit`).

        If that is not a multiple of the block size, the last block agrees in part only: it may be read up to
        there, and must be copied before it is written. Extends `keys` (see `Sequence`) as far as it walks, and
        changes nothing else; the caller takes the blocks. With several kinds, the longest prefix after which every kind
        has its blocks or state. A block that no later row sees may be missing, and is -1.
        """
        size = self.pool.block_size
        blocks: list[int] = []
        num = 0
        while num + size <= limit:
            content = array("q", tokens[num : num + size]).tobytes()
            if len(keys) == len(blocks) + 1:
                keys.append(self.child_key(keys[-1], content))
            block = self.blocks.get(keys[len(blocks) + 1])
            if block is None or self.entries[block] != (keys[len(blocks) + 1], keys[len(blocks)], content):
                if self.window is None:
                    break
                block = -1
            blocks.append(block)
            num += size
        while blocks and blocks[-1] < 0:
            blocks.pop()
            num -= size
        if num < limit:
            block, common = self._best_child(keys[len(blocks)], tokens[num : min(limit, num + size)])
            if common:
                blocks.append(block)
                num += common
        return self._fit(keys, blocks, num) if self.others or self.window else (blocks, num)

    def _fit(self, keys: list[bytes], blocks: list[int], num: int) -> tuple[list[int], int]:
        """Shorten a prefix until every kind has the blocks or the state that a row after it needs."""
        size, path = self.pool.block_size, self._path(keys, blocks, num)
        kinds = self.others if self.window is None else (self.window, *self.others)
        while num:
            lack = max(kind.lacks(path, num, size) for kind in kinds)
            if lack < 0:
                break
            # Whatever is longer needs that block too.
            num, path = lack * size, keys[1 : lack + 1]
        return blocks[: self.pool.blocks_for(num)], num

    def _path(self, keys: list[bytes], blocks: list[int], num: int) -> list[bytes]:
        """Return the keys of `blocks`, which hold `num` tokens: the last may agree in part only."""
        path = keys[1 : len(blocks) + 1]
        return path if not num % self.pool.block_size else [*keys[1 : len(blocks)], self.entries[blocks[-1]].key]

    def in_other_kinds(self, keys: list[bytes], blocks: list[int], num: int) -> tuple[list[list[int]], int]:
        """Return, for a prefix that `match` returned, the table of blocks of each further kind, and the slot of the
        state after it (-1: none)."""
        path, slot = self._path(keys, blocks, num), -1
        tables = []
        for kind in self.others:
            if kind.is_state:
                slot = kind.known[path[-1]] if path else -1
            else:
                behind = kind.behind(num)
                tables.append([-1] * behind + [kind.known[key] for key in path[behind:]])
        return tables, slot

    def num_known(self, keys: list[bytes]) -> int:
        """Return how many of the first whole blocks with these `keys` are cached."""
        return next((index for index, key in enumerate(keys[1:]) if key not in self.blocks), len(keys) - 1)

    def _best_child(self, parent: bytes, tokens: list[int]) -> tuple[int, int]:
        """Return the child of `parent` that agrees longest with `tokens`, and the number of tokens that agree.

        Compares at most `MAX_CANDIDATES` children with the same first token, newest first.
        """
        best, longest = -1, 0
        content = array("q", tokens).tobytes()
        children = self.children.get(parent, {}).get(tokens[0], {})
        for block, _ in zip(reversed(children), range(MAX_CANDIDATES), strict=False):
            common = _common(content, self.entries[block].content)
            if common > longest:
                best, longest = block, common
        return best, longest

    def verdict(self, tokens: list[int], keys: list[bytes], num: int) -> Verdict:
        """Return why `match` returned only `num` of `tokens`, fewer than its limit. `keys` are as it left them."""
        index, size = num // self.pool.block_size, self.pool.block_size
        if len(keys) > index + 1 and keys[index + 1] in self.evicted:
            return Verdict(Miss.EVICTED, num, *self.evicted[keys[index + 1]])
        if len(keys) > index + 1 and keys[index + 1] in self.blocks:
            return Verdict(Miss.OTHER_KIND, num)
        children = self.children.get(keys[index])
        if not children:
            return Verdict(Miss.PART_OF_A_BLOCK if index else Miss.EMPTY, num)
        block, _ = self._best_child(keys[index], tokens[index * size : num + 1])
        newest = block if block >= 0 else next(reversed(next(reversed(children.values()))))
        start, content = max(0, num - NUM_SHOWN), array("q", self.entries[newest].content).tolist()
        theirs = [
            *tokens[start : index * size],
            *content[max(0, start - index * size) : num + NUM_SHOWN - index * size],
        ]
        return Verdict(Miss.DIVERGED, num, ours=tokens[start : num + NUM_SHOWN], theirs=theirs)

    def count_hits(self, block: int | None, num: int, when: int) -> None:
        """Add hits of a block; of one that is not cached they are forgotten."""
        if block in self.entries:
            before, last = self.hits.get(block, (0, 0))
            self.hits[block] = before + num, max(last, when)

    def publish(
        self, tokens: list[int], keys: list[bytes], table: list[int], first: int, last: int, *more: list[int]
    ) -> bool:
        """Cache blocks first ... last - 1 of `table`, full and computed, under their keys (which are extended). `more`
        are the tables of the other kinds of blocks.

        Where another block is cached under the same key, `table` gets that one, with a reference, and the sequence's
        block is released: so the parent of a cached block is cached, and held for as long as its child is. Returns
        False if a key has different tokens; then nothing from there on is published.
        """
        pool, size = self.pool, self.pool.block_size
        content_of_all = array("q", tokens[first * size : last * size]).tobytes()
        width = size * _ITEM
        for index in range(first, last):
            content = content_of_all[(index - first) * width : (index - first + 1) * width]
            parent = keys[index]
            if len(keys) == index + 1:
                keys.append(self.child_key(parent, content))
            key, block = keys[index + 1], table[index]
            other = self.blocks.get(key)
            if other is None:
                self.blocks[key] = block
                self.on_change(key, True)
                self.entries[block] = CachedBlock(key, parent, content)
                children = self.children.setdefault(parent, {})
                siblings = children.pop(tokens[index * size], {})
                siblings[block] = None
                children[tokens[index * size]] = siblings
                pool.mark_cached(block)
            elif self.entries[other] != (key, parent, content):
                return False
            elif other != block:
                pool.take((other,))
                table[index] = other
                pool.give_up((block,))
            for kind, blocks in zip(self.others, more, strict=False):
                _publish_in(kind, key, blocks, index)
        return True

    def publish_state(self, kind: Kind, key: bytes, slot: int) -> None:
        """Cache the state in `slot` after the tokens of `key`, unless one is cached. It is never written again."""
        if key in self.blocks and key not in kind.known:
            _mark(kind, key, slot)

    def reset(self) -> None:
        """Forget all keys. Blocks that are held stay held, uncached."""
        self.num_resets += 1
        self.blocks.clear()
        self.entries.clear()
        self.children.clear()
        self.hits.clear()
        self.evicted.clear()
        self.pool.forget_cached()
        for kind in self.others:
            kind.known.clear()
            kind.names.clear()
            kind.pool.forget_cached()

    def _forget(self, block: int) -> None:
        key, parent, content = self.entries.pop(block)
        del self.blocks[key]
        self.on_change(key, False)
        for kind in self.others:
            other = kind.known.pop(key, None)
            if other is not None:
                del kind.names[other]
                kind.pool.forget(other)
        self.count_hits(self.blocks.get(parent), *self.hits.pop(block, (0, 0)))
        children, first = self.children[parent], _first_token(content)
        del children[first][block]
        if not children[first]:
            del children[first]
        if not children:
            del self.children[parent]
        self.evicted.pop(key, None)
        self.evicted[key] = self.now, next(iter(self.pool.users))
        if len(self.evicted) > MAX_EVICTED:
            self.evicted.popitem(last=False)

    def check(self, roots: set[bytes] | None = None) -> None:
        """Compare the maps with one another and with the pool. Raises `InvariantError` I-5.

        With `roots`, the parent of each block must be a root or the key of a cached block.
        """
        blocks = self.blocks
        if len(blocks) != len(self.entries) or sum(self.pool.cached) != len(self.blocks):
            raise InvariantError("I-5", "keys, blocks and the pool's marks differ in number")
        for key, block in self.blocks.items():
            entry = self.entries.get(block)
            if entry is None or entry.key != key or not self.pool.cached[block]:
                raise InvariantError("I-5", f"key and block {block} do not agree")
            if entry.key != self.child_key(entry.parent, entry.content):
                raise InvariantError("I-5", f"block {block} is known by a key that is not its tokens'")
            if len(entry.content) != self.pool.block_size * _ITEM:
                raise InvariantError("I-5", f"block {block} was published before it was full")
            if block not in self.children.get(entry.parent, {}).get(_first_token(entry.content), {}):
                raise InvariantError("I-5", f"block {block} is not among the children of its parent")
            if roots is not None and entry.parent not in roots and entry.parent not in self.blocks:
                raise InvariantError("I-5", f"the parent of block {block} is not known")
        if sum(len(group) for groups in self.children.values() for group in groups.values()) != len(self.blocks):
            raise InvariantError("I-5", "a child is listed that is not known")
        for kind in self.others:
            if {
                block: key for key, block in kind.known.items()
            } != kind.names or not kind.known.keys() <= blocks.keys():
                raise InvariantError("I-5", f"keys and blocks of kind {kind.index} do not agree")
            if [block in kind.names for block in range(len(kind.pool.cached))] != kind.pool.cached:
                raise InvariantError("I-5", f"the marks of kind {kind.index}'s pool are not those of its keys")


def _publish_in(kind: Kind, key: bytes, table: list[int], index: int) -> None:
    """Cache a block of another kind, or put the one in its place that is cached already."""
    block, other = table[index], kind.known.get(key)
    if other is None:
        _mark(kind, key, block)
    elif other != block:
        kind.pool.take((other,))
        table[index] = other
        kind.pool.give_up((block,))


def _mark(kind: Kind, key: bytes, block: int) -> None:
    kind.known[key] = block
    kind.names[block] = key
    kind.pool.mark_cached(block)


def _forget_in(kind: Kind, block: int) -> None:
    del kind.known[kind.names.pop(block)]


def _first_token(content: bytes) -> int:
    return array("q", content[:_ITEM])[0]


def _common(left: bytes, right: bytes) -> int:
    """Return the number of equal items at the beginning of two arrays of 64-bit integers."""
    size = min(len(left), len(right))
    differ = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differ:
        return size // _ITEM
    lowest_bit = (differ & -differ).bit_length() - 1
    return lowest_bit // (8 * _ITEM)
