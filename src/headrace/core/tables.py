"""`BlockTables`: which blocks each sequence holds. Allocates, shares, copies on write, publishes and releases them.

Joins the pool, the prefix cache and the families of siblings, so that sharing is one mechanism whatever its reason:
take a reference, start in the middle, and copy the one block that would be written. Decides nothing about which
sequence runs. Called by the scheduler, the drafts and the beam searches.

A family is a group of requests with equal prompt and salt (`n` > 1). The first to run computes the prompt; its siblings
wait for that and then share its blocks. If the first has ended, another running sibling is the source, or else the next
sibling computes the prompt itself.
"""

from __future__ import annotations

from headrace.core.blocks import BlockPool
from headrace.core.prefix import Miss, PrefixCache, Verdict
from headrace.core.sequence import NEVER, Sequence


class BlockTables:
    """The block tables of all running sequences. `copies` are the (source, target) pairs that the next step copies
    before it writes. `families` are the running sequences of each family, in the order in which they started."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.cache = cache
        self.enable_prefix_caching = enable_prefix_caching
        self.copies: list[tuple[int, int]] = []
        self.families: dict[bytes, list[Sequence]] = {}

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

    def source(self, seq: Sequence) -> Sequence | None:
        """Return a running sibling that has computed all tokens that `seq` can share, or None."""
        num_shareable = shareable(seq)
        siblings = self.families.get(seq.family, ())
        return next((sibling for sibling in siblings if sibling.num_computed >= num_shareable), None)

    def awaits_sibling(self, seq: Sequence) -> bool:
        """Whether a running sibling is still computing the prompt, so that `seq` waits to share its blocks."""
        return seq.family in self.families and seq.may_share and self.source(seq) is None

    def worst_case(self, seq: Sequence) -> int:
        """Return the blocks that `seq` holds at its greatest length. Its last token is never computed."""
        return self.pool.blocks_for(seq.max_len - 1)

    def missing(self, seq: Sequence) -> int:
        """Return the number of blocks that `seq` lacks to compute all its known tokens."""
        return self.pool.blocks_for(len(seq.tokens)) - len(seq.block_table)

    def find_shared(self, seq: Sequence) -> tuple[list[int], int, bool]:
        """Return blocks that hold the beginning of `seq`, how many tokens they hold, and whether later blocks may be
        published. They are a sibling's, or cached. At least one token remains to compute, for its logits."""
        caching = self.enable_prefix_caching
        if not seq.may_share:
            return [], 0, caching
        source = self.source(seq)
        if source is not None:
            num = shareable(seq)
            seq.keys = max(seq.keys, source.keys[: num // self.pool.block_size + 1], key=len)
            # A sibling that outlived a reset of the cache holds blocks that must not be published.
            return source.block_table[: self.pool.blocks_for(num)], num, source.publish_at < NEVER
        if not caching:
            return [], 0, False
        return *self.cache.match(seq.tokens, seq.keys, len(seq.tokens) - 1), True

    def verdict(self, seq: Sequence, num: int) -> Verdict:
        """Return why `find_shared` returned no more than `num` tokens of `seq`. It was called with the same pool."""
        if num >= len(seq.tokens) - 1 or (seq.may_share and self.source(seq) is not None):
            return Verdict(Miss.NONE, num)
        if not self.enable_prefix_caching:
            return Verdict(Miss.OFF, num)
        if not seq.may_share:
            return Verdict(Miss.EVERY_ROW, num)
        return self.cache.verdict(seq.tokens, seq.keys, num)

    def start(self, seq: Sequence, shared: list[int], num_shared: int, publish: bool, length: int, spare: int) -> bool:
        """Build the table of a new `seq` on `shared` blocks that hold `num_shared` tokens, for `length` more.

        Returns False, with nothing changed, unless all known tokens fit beside `spare` blocks that are promised to
        others. A last shared block that is shared in part is copied before this step writes: the pair goes to
        `copies`, and the source stays pinned until the step is retired.
        """
        pool, size = self.pool, self.pool.block_size
        copied = num_shared % size > 0
        num_whole = len(shared) - copied
        pool.users = (seq.arrival,)
        pool.take(shared)
        blocks = None
        if pool.blocks_for(len(seq.tokens)) - num_whole <= pool.num_available - spare:
            blocks = pool.allocate(pool.blocks_for(num_shared + length) - num_whole)
        if blocks is None:
            pool.release(shared)
            return False
        if copied:
            pool.pin(shared[-1])
            self.copies.append((shared[-1], blocks[0]))
        seq.block_table = shared[:num_whole] + blocks
        seq.num_computed = num_shared
        seq.num_published = num_whole
        seq.publish_at = (num_whole + 1) * size if publish else NEVER
        return True

    def grow(self, seq: Sequence, length: int) -> bool:
        """Add blocks for `length` more tokens, and copy the partly filled block if others hold it too. Returns False,
        with nothing changed, if there are not enough."""
        table = seq.block_table
        copied = seq.is_beam and self.shares_tail(seq)
        num = self.pool.blocks_for(seq.num_computed + seq.num_ahead + length) - len(table) + copied
        self.pool.users = (seq.arrival,)
        if num <= 0:
            return True
        blocks = self.pool.allocate(num)
        if blocks is None:
            return False
        if copied:
            # Its other holders may release it before the step that copies it is retired.
            self.pool.pin(table[-1])
            self.copies.append((table[-1], blocks[0]))
            table[-1] = blocks.pop(0)
        table.extend(blocks)
        return True

    def grow_by_one(self, seqs: list[Sequence]) -> bool:
        """Add one block to the table of each. False, with nothing changed, if there are not enough."""
        self.pool.users = [seq.arrival for seq in seqs]
        blocks = self.pool.allocate(len(seqs))
        if blocks is None:
            return False
        for seq, block in zip(seqs, blocks, strict=True):
            seq.block_table.append(block)
        return True

    def trim(self, seq: Sequence) -> None:
        """Release the blocks that hold no computed token, after a chunk was shortened by its result."""
        num = self.pool.blocks_for(seq.num_computed)
        self.pool.users = (seq.arrival,)
        self.pool.give_up(seq.block_table[num:])
        # A new list, since the old one may still be lent to a step in flight.
        seq.block_table = seq.block_table[:num]

    def adopt(self, seq: Sequence, num_whole: int, path: int) -> None:
        """Keep the blocks of one `path` of a draft tree, from block `num_whole` on, and release those of the others."""
        tails, seq.tails = seq.tails, []
        self.pool.users = (seq.arrival,)
        if path:
            tail, tails[path - 1] = tails[path - 1], seq.block_table[num_whole:]
            # A new list, since the old one may still be lent to the step's batch.
            seq.block_table = seq.block_table[:num_whole] + tail
        for tail in tails:
            self.pool.release(tail)

    def shares_tail(self, seq: Sequence) -> bool:
        """Whether the block that `seq` writes next is partly filled and also cached or held by others."""
        if not seq.num_computed % self.pool.block_size:
            return False
        tail = seq.block_table[-1]
        return self.pool.refs[tail] - self.pool.pins.count(tail) > 1 or self.pool.cached[tail]

    def fork(self, source: Sequence, seq: Sequence, num: int) -> None:
        """Let `seq`, which holds no blocks, share the blocks of the first `num` tokens that `source` has computed. If
        `num` ends within the last block, the first sequence that writes there copies it."""
        pool = self.pool
        pool.users = (seq.arrival,)
        seq.block_table = source.block_table[: pool.blocks_for(num)]
        pool.take(seq.block_table)
        seq.num_computed = num
        seq.num_published = num // pool.block_size
        seq.publish_at = NEVER if source.publish_at == NEVER else (seq.num_published + 1) * pool.block_size
        seq.keys = max(seq.keys, source.keys[: seq.num_published + 1], key=len)

    def publish(self, seq: Sequence) -> None:
        """Publish the blocks that `seq` has filled in the prefix cache."""
        last = seq.num_computed // self.pool.block_size
        self.pool.users = (seq.arrival,)
        if self.cache.publish(seq.tokens, seq.keys, seq.block_table, seq.num_published, last):
            seq.num_published = last
            seq.publish_at = (last + 1) * self.pool.block_size
        else:
            seq.publish_at = NEVER

    def accept(self, seq: Sequence) -> None:
        """Count all known tokens but the last as computed: draft tokens before it were accepted."""
        seq.num_computed = len(seq.tokens) - 1
        if seq.num_computed >= seq.publish_at:
            self.publish(seq)

    def release(self, seq: Sequence) -> None:
        """Release all blocks of `seq`, which then has computed nothing, and cancel the copies that were due for it."""
        for source, target in [copy for copy in self.copies if copy[1] in seq.block_table]:
            self.copies.remove((source, target))
            self.pool.pins.remove(source)
            self.pool.users = (0,)
            self.pool.release((source,))
        self.pool.users = (seq.arrival,)
        self.pool.release(seq.block_table)
        for tail in seq.tails:
            self.pool.release(tail)
        seq.draft, seq.tails = None, []
        # A new list, since the old one may still be lent to the step's batch.
        seq.block_table = []
        seq.num_computed = 0
        seq.num_published = 0
        seq.publish_at = NEVER

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self.copies = self.copies, []
        return copies


def shareable(seq: Sequence) -> int:
    """Return the number of tokens that `seq` can share with a sibling: the prompt, less one if nothing follows it, so
    that one token remains to compute."""
    return min(seq.num_prompt, len(seq.tokens) - 1)
