"""`BlockTables`: which blocks each sequence holds. Allocates, shares, copies on write, publishes and releases them.

Joins the pools of all kinds, the prefix cache and the families of siblings, so that sharing is one mechanism whatever
its reason: take a reference, start in the middle, and copy the one block that would be written. A state is never
copied: a step reads one slot and writes another. Decides nothing about which sequence runs. Called by the scheduler,
the drafts and the beam searches.

A family is a group of requests with equal prompt and salt (`n` > 1). The first to run computes the prompt; its siblings
wait for that and then share its blocks. If the first has ended, another running sibling is the source, or else the next
sibling computes the prompt itself.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.kinds import Kind
from headrace.core.prefix import Miss, PrefixCache, Verdict
from headrace.core.sequence import NEVER, Sequence, Status

SNAPSHOT_EVERY = 2048
"""Tokens from one snapshot of a state to the next. There are further snapshots at the ends of prompts and of known
prefixes."""


class Prefix(NamedTuple):
    """The memory that holds the first `num` tokens of a sequence: a table for each kind of blocks, and the slot of the
    state after them (-1: there is none). `publish`: whether later blocks may be published."""

    tables: list[list[int]]
    num: int
    publish: bool
    slot: int = -1


class BlockTables:
    """The block tables of all running sequences. `copies` are, for each kind of blocks, the (source, target) pairs that
    the next step copies before it writes. `families` are the running sequences of each family, in the order in which
    they started. No step computes more than `max_chunk` rows of a sequence. `is_plain`: all layers see all positions.
    """

    def __init__(self, kinds: list[Kind], cache: PrefixCache, enable_prefix_caching: bool, max_chunk: int) -> None:
        self.all_kinds = kinds
        self.kinds = [kind for kind in kinds if not kind.is_state]
        self.windows = [kind for kind in self.kinds if kind.window]
        self.state = kinds[-1] if kinds[-1].is_state else None
        self.has_state = self.state is not None
        self.is_plain = len(kinds) == 1 and not self.windows
        self.pool = kinds[0].pool
        self.cache = cache
        self.enable_prefix_caching = enable_prefix_caching
        self.max_chunk = max_chunk
        self.copies: list[list[tuple[int, int]]] = [[] for _ in self.kinds]
        self.families: dict[bytes, list[Sequence]] = {}
        size = self.pool.block_size
        self._snapshot_every = max(size, SNAPSHOT_EVERY // size * size)

    def enter_family(self, seq: Sequence) -> None:
        """Note that `seq` runs."""
        if seq.family:
            self.families.setdefault(seq.family, []).append(seq)

    def leave_family(self, seq: Sequence) -> None:
        """Note that `seq` does not run any more."""
        if seq.family:
            members = self.families[seq.family]
            members.remove(seq)
            if not members:
                del self.families[seq.family]

    def source(self, seq: Sequence, num: int) -> Sequence | None:
        """Return a running sibling that has computed the first `num` tokens and holds all blocks that a row after them
        sees, or None. A sibling that went on may have released blocks behind its window, and its state has changed."""
        for sibling in self.families.get(seq.family, ()):
            done = sibling.num_computed
            if (
                done >= num
                and all(kind.behind(done) == kind.behind(num) for kind in self.windows)
                and (self.state is None or num in sibling.states)
            ):
                return sibling
        return None

    def awaits_sibling(self, seq: Sequence) -> bool:
        """Whether a running sibling is still computing the prompt, so that `seq` waits to share its blocks."""
        if seq.family not in self.families or not seq.may_share:
            return False
        num = shareable(seq)
        return all(sibling.num_computed < num for sibling in self.families[seq.family])

    # -- how many blocks of each kind are left, and who still needs them ------------------------------------------

    def rooms(self, promised: list[int]) -> list[int]:
        """Return the number of blocks of each kind that are available and not promised."""
        return [kind.pool.num_available - num for kind, num in zip(self.all_kinds, promised, strict=True)]

    def promise(self, promised: list[int], seq: Sequence) -> None:
        """Add to `promised` the blocks of each kind that the running `seq` still needs to compute all its known
        tokens."""
        for kind in self.all_kinds:
            promised[kind.index] += max(0, kind.peak(seq, seq.num_computed) - kind.num_held(seq))

    def has_room(self, seqs: list[Sequence]) -> bool:
        """Whether there are blocks and slots for the next tokens of all `seqs`, of each as many as a step may have."""
        stops = [seq.num_computed + seq.num_ahead + min(seq.gap, self.max_chunk) for seq in seqs]
        num = sum(self.pool.blocks_for(stop) - len(seq.tables[0]) for seq, stop in zip(seqs, stops, strict=True))
        return all(kind.pool.num_available >= (len(seqs) if kind.is_state else num) for kind in self.all_kinds)

    def holds(self, seq: Sequence, num: int) -> bool:
        """Whether `seq` has blocks for `num` positions, and a slot for the state after them."""
        return len(seq.tables[0]) * self.pool.block_size >= num and (self.state is None or num in seq.states)

    def reach(self, seq: Sequence, start: int) -> int:
        """Return the most rows of `seq` from position `start` on that a step may compute: no more than windows have
        room for, and none behind a position at which the state is kept."""
        num = min(self.max_chunk, seq.stop_at - start)
        if self.state is not None and self.enable_prefix_caching and self.max_chunk < NEVER:
            num = min(num, self._next_snapshot(seq, start) - start)
        return num

    def _next_snapshot(self, seq: Sequence, start: int) -> int:
        """Return the first position after `start` at which the state of `seq` is kept; a block ends there."""
        size = self.pool.block_size
        marks = ((seq.num_prompt - 1) // size * size, seq.num_matched)
        later = (start // self._snapshot_every + 1) * self._snapshot_every
        return min([later, *(mark for mark in marks if mark > start)])

    # -- where sequences begin ------------------------------------------------------------------------------------

    def find_shared(self, seq: Sequence, limit: int = NEVER) -> Prefix:
        """Return the memory that holds the beginning of `seq`, at most `limit` tokens: a sibling's, or cached blocks.
        At least one token remains to compute, for its logits."""
        caching = self.enable_prefix_caching
        nothing = Prefix([[] for _ in self.kinds], 0, caching)
        if not seq.may_share:
            return nothing
        if not self.is_plain:
            # Pending beams fork where they differ, so the first of them must compute a token up to there.
            limit = min(limit, seq.stop_at - 1)
        num = min(shareable(seq), limit)
        source = self.source(seq, num)
        if source is not None:
            seq.keys = max(seq.keys, source.keys[: num // self.pool.block_size + 1], key=len)
            tables = [table[: self.pool.blocks_for(num)] for table in source.tables]
            # A sibling that outlived a reset of the cache holds blocks that must not be published.
            return Prefix(tables, num, source.publish_at < NEVER, source.states.get(num, -1))
        if not caching:
            return nothing
        blocks, num = self.cache.match(seq.named, seq.keys, min(limit, len(seq.tokens) - 1))
        if self.is_plain:
            return Prefix([blocks], num, True)
        seq.num_matched = self.cache.num_known(seq.keys) * self.pool.block_size
        more, slot = self.cache.in_other_kinds(seq.keys, blocks, num)
        return Prefix([blocks, *more], num, True, slot)

    def verdict(self, seq: Sequence, num: int) -> Verdict:
        """Return why `find_shared` returned no more than `num` tokens of `seq`. It was called with the same pool."""
        if num >= len(seq.tokens) - 1 or (seq.may_share and self.source(seq, shareable(seq)) is not None):
            return Verdict(Miss.NONE, num)
        if not self.enable_prefix_caching:
            return Verdict(Miss.OFF, num)
        if not seq.may_share:
            return Verdict(Miss.EVERY_ROW, num)
        return self.cache.verdict(seq.named, seq.keys, num)

    def start(self, seq: Sequence, prefix: Prefix, length: int, promised: list[int]) -> bool:
        """Build the tables of a new `seq` on `prefix`, for `length` more tokens.

        Returns False, with nothing changed, unless all known tokens fit in addition to the blocks that are promised to
        others. A last block that is shared in part is copied before this step writes: the pair goes to `copies`, and
        the source stays pinned until the step is retired.
        """
        num, size = prefix.num, self.pool.block_size
        num_whole, copied = num // size, num % size > 0
        shared = [table[kind.behind(num) :] for kind, table in zip(self.kinds, prefix.tables, strict=True)]
        if self.state is not None:
            shared.append([prefix.slot] if prefix.slot >= 0 else [])
        fits = True
        for kind, part, others in zip(self.all_kinds, shared, promised, strict=True):
            kind.pool.users = (seq.arrival,)
            kind.pool.take(part)
            num_kept = len(part) - (copied and not kind.is_state)
            fits = fits and kind.peak(seq, num) - num_kept <= kind.pool.num_available - others
        blocks = self._allocate(self.pool.blocks_for(num + length) - num_whole, 1) if fits else None
        if blocks is None:
            for kind, part in zip(self.all_kinds, shared, strict=True):
                kind.pool.release(part)
            return False
        seq.tables = []
        for kind, table, new in zip(self.kinds, prefix.tables, blocks, strict=False):
            if copied:
                kind.pool.pin(table[-1])
                self.copies[kind.index].append((table[-1], new[0]))
            behind = kind.behind(num)
            seq.tables.append([-1] * behind + table[behind:num_whole] + new)
        if self.state is not None:
            seq.states = {num: prefix.slot} if prefix.slot >= 0 else {}
            seq.states[num + length] = blocks[-1][0]
        seq.num_computed = num
        seq.num_published = num_whole
        seq.publish_at = (num_whole + 1) * size if prefix.publish else NEVER
        return True

    # -- as they grow ---------------------------------------------------------------------------------------------

    def _allocate(self, num_blocks: int, num_slots: int) -> list[list[int]] | None:
        """Return so many blocks of each kind of blocks, and slots; or None, with nothing held, if there are not
        enough."""
        return self._allocate_each([num_blocks] * len(self.kinds) + [num_slots] * (self.state is not None))

    def _allocate_each(self, nums: list[int]) -> list[list[int]] | None:
        if len(nums) > 1 and any(n > kind.pool.num_available for n, kind in zip(nums, self.all_kinds, strict=True)):
            return None
        blocks: list[list[int]] = []
        for kind, num in zip(self.all_kinds, nums, strict=True):
            new = kind.pool.allocate(num)
            if new is None:
                for other, part in zip(self.all_kinds, blocks, strict=False):
                    other.pool.release(part)
                return None
            blocks.append(new)
        return blocks

    def grow(self, seq: Sequence, length: int, num_guesses: int = 0) -> bool:
        """Add blocks for `length` more tokens, the last `num_guesses` of them draft tokens, and copy the partly filled
        block if others hold it too. Returns False, with nothing changed, if there are not enough."""
        stop = seq.num_computed + seq.num_ahead + length
        copied = [seq.is_beam and self.shares_tail(seq, kind) for kind in self.kinds]
        num = self.pool.blocks_for(stop) - len(seq.tables[0])
        nums = [max(0, num) + copy for copy in copied]
        ends: list[int] = []
        if self.state is not None:
            ends = [end for end in range(stop - num_guesses, stop + 1) if end not in seq.states]
            nums.append(len(ends))
        for kind in self.all_kinds:
            kind.pool.users = (seq.arrival,)
        if not any(nums):
            return True
        blocks = self._allocate_each(nums)
        if blocks is None:
            return False
        for kind, new in zip(self.kinds, blocks, strict=False):
            table = seq.tables[kind.index]
            if copied[kind.index]:
                # Its other holders may release it before the step that copies it is retired.
                kind.pool.pin(table[-1])
                self.copies[kind.index].append((table[-1], new[0]))
                table[-1] = new.pop(0)
            table.extend(new)
        if ends:
            seq.states.update(zip(ends, blocks[-1], strict=True))
        return True

    def grow_by_one(self, seqs: list[Sequence]) -> bool:
        """Add the blocks that one more token needs to the table of each sequence. False, with nothing changed, if there
        is not enough."""
        size = self.pool.block_size
        edge = seqs if self.state is None else [s for s in seqs if not (s.num_computed + s.num_ahead) % size]
        for kind in self.all_kinds:
            kind.pool.users = [seq.arrival for seq in (seqs if kind.is_state else edge)]
        blocks = self._allocate(len(edge), len(seqs))
        if blocks is None:
            return False
        for kind, new in zip(self.kinds, blocks, strict=False):
            for seq, block in zip(edge, new, strict=True):
                seq.tables[kind.index].append(block)
        if self.state is not None:
            for seq, slot in zip(seqs, blocks[-1], strict=True):
                seq.states[seq.num_computed + seq.num_ahead + 1] = slot
        return True

    def trim(self, seq: Sequence) -> None:
        """Release the blocks that hold no computed token, after a chunk was shortened by its result."""
        num = self.pool.blocks_for(seq.num_computed)
        for kind in self.kinds:
            table = seq.tables[kind.index]
            kind.pool.users = (seq.arrival,)
            kind.pool.give_up(table[num:])
            # A new list, since the old one may still be lent to a step in flight.
            seq.tables[kind.index] = table[:num]

    def settle(self, seqs: list[Sequence], lens: list[int], deferred: set[int]) -> None:
        """After a step of `lens` tokens of `seqs`, release all that no later row reads: blocks behind a window, and
        states after fewer tokens or after rejected ones. States that others may begin with are kept for them. The
        chunks `deferred` are computed again."""
        if self.is_plain:
            return
        for seq in seqs:
            if seq.status is Status.RUNNING:
                self._slide(seq)
                if self.state is not None:
                    self._settle_states(self.state, seq)
        for index in deferred if self.has_state else ():
            seqs[index].set_back(lens[index])

    def _slide(self, seq: Sequence) -> None:
        done = seq.num_computed
        for kind in self.windows:
            table, stop = seq.tables[kind.index], kind.behind(done)
            first = stop
            while first and table[first - 1] >= 0:
                first -= 1
            if first < stop:
                kind.pool.users = (seq.arrival,)
                # Steps in flight begin at `done` or later, and do not read these.
                kind.pool.release(table[first:stop])
                table[first:stop] = [-1] * (stop - first)

    def _settle_states(self, kind: Kind, seq: Sequence) -> None:
        done, size = seq.num_computed, self.pool.block_size
        if seq.publish_at < NEVER:
            for num, slot in seq.states.items():
                if 0 < num <= done and self._next_snapshot(seq, num - 1) == num:
                    self.cache.publish_state(kind, seq.keys[num // size], slot)
        needed = {done, done + seq.num_ahead}
        kind.pool.users = (seq.arrival,)
        kind.pool.give_up([slot for num, slot in seq.states.items() if num not in needed])
        seq.states = {num: slot for num, slot in seq.states.items() if num in needed}

    def adopt(self, seq: Sequence, num_whole: int, path: int) -> None:
        """Keep the blocks of one `path` of a draft tree, from block `num_whole` on, and release the blocks of the other
        paths."""
        tails, seq.tails = seq.tails, []
        self.pool.users = (seq.arrival,)
        if path:
            tail, tails[path - 1] = tails[path - 1], seq.block_table[num_whole:]
            # A new list, since the old one may still be lent to the step's batch.
            seq.block_table = seq.block_table[:num_whole] + tail
        for tail in tails:
            self.pool.release(tail)

    def shares_tail(self, seq: Sequence, kind: Kind | None = None) -> bool:
        """Whether the block that `seq` writes next, of one kind or of any, is partly filled and also cached or held by
        others."""
        if not seq.num_computed % self.pool.block_size:
            return False
        for each in self.kinds if kind is None else (kind,):
            tail, pool = seq.tables[each.index][-1], each.pool
            if pool.refs[tail] - pool.pins.count(tail) > 1 or pool.cached[tail]:
                return True
        return False

    def fork(self, source: Sequence, seq: Sequence, num: int) -> None:
        """Let `seq`, which holds no blocks, share the blocks of the first `num` tokens that `source` has computed. If
        `num` ends within the last block, the first sequence that writes there copies it."""
        size = self.pool.block_size
        seq.tables = []
        for kind, table in zip(self.kinds, source.tables, strict=True):
            shared = table[kind.behind(num) : self.pool.blocks_for(num)]
            kind.pool.users = (seq.arrival,)
            kind.pool.take(shared)
            seq.tables.append([-1] * (self.pool.blocks_for(num) - len(shared)) + shared)
        if self.state is not None:
            self.state.pool.users = (seq.arrival,)
            self.state.pool.take((source.states[num],))
            seq.states = {num: source.states[num]}
        seq.num_computed = num
        seq.num_published = num // size
        seq.publish_at = NEVER if source.publish_at == NEVER else (seq.num_published + 1) * size
        seq.keys = max(seq.keys, source.keys[: seq.num_published + 1], key=len)

    # -- and when they are filled ---------------------------------------------------------------------------------

    def publish(self, seq: Sequence) -> None:
        """Publish the blocks that `seq` has filled in the prefix cache."""
        size = self.pool.block_size
        last = seq.num_computed // size
        for kind in self.kinds:
            kind.pool.users = (seq.arrival,)
        if self.cache.publish(seq.named, seq.keys, seq.tables[0], seq.num_published, last, *seq.tables[1:]):
            seq.num_published = last
            seq.publish_at = (last + 1) * size
        else:
            seq.publish_at = NEVER

    def accept(self, seq: Sequence) -> None:
        """Count all known tokens but the last as computed: draft tokens before it were accepted."""
        seq.num_computed = len(seq.tokens) - 1
        if seq.num_computed >= seq.publish_at:
            self.publish(seq)

    def release(self, seq: Sequence) -> None:
        """Release all blocks of `seq`, which then has computed nothing, and cancel the copies that were due for it."""
        if not seq.tables[0]:
            return
        for kind, copies in zip(self.kinds, self.copies, strict=True):
            table = seq.tables[kind.index]
            for source, target in [copy for copy in copies if copy[1] in table]:
                copies.remove((source, target))
                kind.pool.pins.remove(source)
                kind.pool.users = (0,)
                kind.pool.release((source,))
            kind.pool.users = (seq.arrival,)
            kind.pool.release([block for block in table if block >= 0] if kind.window else table)
        for tail in seq.tails:
            self.pool.release(tail)
        if self.state is not None:
            self.state.pool.users = (seq.arrival,)
            self.state.pool.release(list(seq.states.values()))
            seq.states = {}
        seq.draft, seq.tails = None, []
        # New lists, since the old ones may still be lent to the step's batch.
        seq.tables = [[] for _ in self.kinds]
        seq.num_computed = 0
        seq.num_published = 0
        seq.publish_at = NEVER

    def take_copies(self) -> list[list[tuple[int, int]]]:
        copies, self.copies = self.copies, [[] for _ in self.kinds]
        return copies


def shareable(seq: Sequence) -> int:
    """Return the number of tokens that `seq` can share with a sibling: the prompt, less one if nothing follows it, so
    that one token remains to compute."""
    return min(seq.num_prompt, len(seq.tokens) - 1)
