"""`Kind`: one kind of the model's cache, with its pool. How much of it a sequence needs, and where, is answered here.

A kind of blocks keeps all positions, or those that a window sees; the state kind keeps slots, each the state after some
number of tokens. A slot is a block of one position, so that pool, promises and claims are the same for all. Knows ints
and the numbers of one sequence; must not know the queue. Called by the tables, the prefix cache and the searches.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from headrace.core.blocks import BlockPool
from headrace.core.sequence import NEVER, Sequence
from headrace.protocol.kinds import CacheKind


class Kind:
    """Kind `index` of the cache. `most` is the number of blocks (or slots) that one sequence holds at once at most.

    `known` and `names` map the keys of the prefix cache to this kind's blocks, and back; kind 0 has `known` alone.
    """

    def __init__(self, index: int, kind: CacheKind, pool: BlockPool) -> None:
        self.index = index
        self.window = kind.window
        self.is_state = kind.is_state
        self.pool = pool
        # While a step is computed, its sequences hold two states, the one read and the one written.
        self.most = 2 if kind.is_state else NEVER
        self.known: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Blocks of the pool, positions of a block, and the most blocks of a sequence."""
        return self.pool.num_blocks, self.pool.block_size, self.most

    def behind(self, num: int) -> int:
        """Return the number of blocks wholly behind the window of the row at position `num`: no later row sees them."""
        return max(0, num + 1 - self.window) // self.pool.block_size if self.window else 0

    def lacks(self, path: list[bytes], num: int, block_size: int) -> int:
        """Return the last block, of those before position `num`, that a row there needs and that is not cached; -1 if
        there is none. `path` are the keys of the blocks. A state is needed after exactly `num` tokens."""
        if self.is_state:
            return -1 if not num % block_size and path[num // block_size - 1] in self.known else (num - 1) // block_size
        known = self.known
        return next((i for i in range(len(path) - 1, self.behind(num) - 1, -1) if path[i] not in known), -1)

    def num_held(self, seq: Sequence) -> int:
        if self.is_state:
            return len(seq.states)
        table = seq.tables[self.index]
        return len(table) - (self.behind(seq.num_computed) if table else 0)

    def peak(self, seq: Sequence, num: int) -> int:
        """Return the most blocks that `seq` holds at once on its way from `num` computed tokens to all its known."""
        return min(self.pool.blocks_for(len(seq.tokens)) - self.behind(num), self.most)

    def worst_case(self, seq: Sequence) -> int:
        """Return the most blocks that `seq` holds at once at any length. Its last token is never computed."""
        return min(self.pool.blocks_for(seq.max_len - 1), self.most)

    def claim(self, width: int, num_prompt: int, max_len: int) -> int:
        """Return the most blocks that `width` beams hold at once, if they share only the prompt's whole blocks."""
        return min(num_beam_blocks(width, num_prompt, max_len, self.pool.block_size), width * self.most)


def make_kinds(kinds: Several[CacheKind], sizes: Several[int], block_size: int) -> list[Kind]:
    """Return the kinds of a cache with pools of `sizes`. Raises `ValueError` for kinds that make no cache."""
    if len(kinds) != len(sizes) or not kinds or any(kind.is_state for kind in kinds[:-1] or kinds):
        raise ValueError(f"kinds must be blocks, and at most one state after them, got {kinds} of sizes {sizes}")
    if any(kind.window < 1 and not kind.is_state for kind in kinds[1:]) or kinds[0].window < 0:
        raise ValueError(f"the first kind alone may see all positions, got {kinds}")
    if kinds[-1].is_state and sizes[-1] < 2:
        raise ValueError(f"a sequence needs 2 slots, to read and to write, got {sizes[-1]}")
    pools = [BlockPool(size, 1 if kind.is_state else block_size) for kind, size in zip(kinds, sizes, strict=True)]
    return [Kind(index, kind, pool) for index, (kind, pool) in enumerate(zip(kinds, pools, strict=True))]


def num_beam_blocks(width: int, num_prompt: int, max_len: int, block_size: int) -> int:
    """Return the blocks of `width` beams of at most `max_len` tokens that share the prompt's whole blocks. The last
    token of a beam is never computed."""
    shared = num_prompt // block_size
    return shared + width * (-(-(max_len - 1) // block_size) - shared)


def fit_windows(kinds: list[Kind], max_chunk: int) -> tuple[int, int]:
    """Set how much one sequence may hold of each kind. Returns the longest sequence that fits the pools alone, in
    positions, and the most rows of it that a step may compute: at most `max_chunk`.

    A window of W positions and a chunk of n rows span W - 1 + n positions. Where a pool has no room for that and one
    row, or a prompt must be computed at once (`max_chunk` is NEVER), it has to hold a sequence whole.
    """
    longest = NEVER
    sliding = []
    for kind in kinds:
        size, num = kind.pool.block_size, kind.pool.num_blocks
        room = (num - 1) * size + 2 - kind.window
        if kind.window and room > 0 and max_chunk < NEVER:
            sliding.append(kind)
            max_chunk = min(max_chunk, room)
        elif not kind.is_state:
            longest = min(longest, num * size)
    for kind in sliding:
        size = kind.pool.block_size
        kind.most = (kind.window - 1 + max_chunk + size - 2) // size + 1
    return longest, max_chunk
