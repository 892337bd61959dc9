"""A step at the border of a program: `Chunks` go in, `Logits` come out, and `StepRows` are the ints in between.

A recorded program reads its inputs at fixed addresses: the arrays of `StepRows` keep their place and size from step to
step, and `fill` writes the next step's ints there. Knows chunks, block tables and rows of numbers; must not know
requests, models, operators or devices. Called by backends, whose programs make and fill the rows, and by `runner`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.backends.tiles import fill_tiles
from headrace.protocol.kinds import CacheKind

Ints: TypeAlias = Any
"""An array of int32, in the backend's own form."""

MAX_DEPTH = 64
"""Draft tokens on a path of a tree; tokens that several paths share are copied to the blocks of each."""


class Chunks(NamedTuple):
    """The input of one call: chunk c is `token_ids[c]` from position starts[c] on, in the blocks tables[c].

    `copies` are (row, slot) pairs in the rows' order: further slots to which the row's keys and values are written, in
    all kinds. tables[c] has the blocks of kind 0, more_tables[k - 1][c] the blocks of kind k; without `more_tables`
    all kinds have the same. Entry i covers block i, or is -1: behind the window of the chunk's first row, never read.
    states_in: for each chunk the slot of the state before its first row; -1: its sequence begins. states_out: (row,
    slot) in the rows' order: the state after that row goes to the slot. No chunk writes a slot that another one reads.
    later: rows whose logits or hidden states are read after the call, besides the rows of its own logits.
    observed: rows whose features will be. Of other rows there are perhaps none (`reads.ReadRows`).
    adapters: the slot of each chunk's adapter (`backends.adapters`), -1 for none; empty: no chunk has one.
    places: [R, axes] of numpy: the positions by which rows turn, of a table with `base.Axes`; None: those in the cache.
    wholes: (first, stop) rows of one chunk that see each other, later ones too, for models that see pictures whole.
    """

    starts: list[int]
    token_ids: list[list[int]]
    tables: list[list[int]]
    copies: Sequence[tuple[int, int]] = ()
    more_tables: Sequence[Sequence[list[int]]] = ()
    states_in: Sequence[int] = ()
    states_out: Sequence[tuple[int, int]] = ()
    later: Sequence[int] = ()
    observed: Sequence[int] = ()
    adapters: Sequence[int] = ()
    places: Any = None
    wholes: Sequence[tuple[int, int]] = ()

    def all_read(self) -> Chunks:
        """Return the same chunks, of which all rows are read."""
        return self._replace(later=range(sum(map(len, self.token_ids))))


class Draw(NamedTuple):
    """How a token is drawn from a row: the fields of a `sampling.filters.Cut`, the noise's key, and the allowed tokens.

    temperature 0: the likeliest, without noise. mask: bit t % 32 of word t // 32 is set if token t is allowed; None for
    all.
    """

    temperature: float
    floor: float = -math.inf
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    position: int = 0
    mask: NDArray[np.uint32] | None = None


class Logits(Protocol):
    """Logits of the chosen rows [S], valid until the next call of the program. The numbers of a row may lie on a device
    until they are fetched."""

    @property
    def finite(self) -> list[bool]:
        """finite[i]: no NaN and no +inf in row i, and not -inf alone."""
        ...

    @property
    def best(self) -> list[int]:
        """best[i]: the likeliest token id, the lowest of equals."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether `fetch` of rows that follow each other costs nothing, so that all may be fetched."""
        ...

    def fetch(self, indices: list[int] | None = None) -> NDArray[np.float32]:
        """Return rows of logits [n, V] in host memory, for reading; all of them without `indices`."""
        ...

    def draw(self, indices: list[int], draws: list[Draw]) -> list[int]:
        """Draw a token from each of these rows where they lie: the sampler's token, or -1 if the host must draw it."""
        ...


class HostLogits(NamedTuple):
    """`Logits` that lie in host memory: rows [S, V] float32."""

    rows: NDArray[np.float32]
    finite: list[bool]
    best: list[int]
    on_host: bool = True

    def fetch(self, indices: list[int] | None = None) -> NDArray[np.float32]:
        if indices is None:
            return self.rows
        first = indices[0] if indices else 0
        stop = first + len(indices)
        return self.rows[first:stop] if indices == list(range(first, stop)) else self.rows[indices]

    def draw(self, indices: list[int], draws: list[Draw]) -> list[int]:
        return [-1] * len(indices)


@dataclass(frozen=True, slots=True)
class StepRows:
    """int32 arrays of R rows in C chunks, one behind the other; a program has room for max_rows and max_chunks.

    token_ids, positions [R]. rope_rows [R]: rows of the rope table; one array with `positions` where they are the same.
    slots[k] [R]: where keys and values go in block kind k, block * block_size + place in it.
    row_begin [C + 1]: first row of each chunk. start [C]: position of that row.
    table_begin [C + 1], blocks: the table of chunk c in kind k is blocks[k][table_begin[c]: table_begin[c + 1]]; the
    entry of a block that is freed names any block, and is not read.
    copy_begin [R + 1], copy_slots: further slots of row r are copy_slots[copy_begin[r]: copy_begin[r + 1]].
    state_in [C], state_out [R]: the slot of a chunk's state before its first row, and of the state after a row, or
    -1; None for a model without states.
    features: the rows' further inputs, as the backend's operators take them, or None.
    seen [R]: the last position that a row sees; None where that is its own in all steps.
    adapted, adapted_rows: the tiles of rows with adapters (`tiles.fill_tiles`); None where there are no adapters.
    """

    token_ids: Ints
    positions: Ints
    rope_rows: Ints
    slots: Sequence[Ints]
    row_begin: Ints
    start: Ints
    table_begin: Ints
    blocks: Sequence[Ints]
    copy_begin: Ints
    copy_slots: Ints
    state_in: Ints
    state_out: Ints
    block_size: int
    max_rows: int
    features: Ints = None
    adapted: Ints = None
    adapted_rows: Ints = None
    seen: Ints = None

    def fill(self, chunks: Chunks) -> int:
        """Write the ints of `chunks` and return the number of rows. The arrays must be numpy's; entries after the
        step's ints are left from earlier steps."""
        size, by_kind = self.block_size, tables_by_kind(chunks, len(self.slots))
        at = blocks_at = 0
        for i, (start, token_ids) in enumerate(zip(chunks.starts, chunks.token_ids, strict=True)):
            length = len(token_ids)
            stop = at + length
            needed = (start + length + size - 1) // size
            self.row_begin[i] = at
            self.start[i] = start
            self.table_begin[i] = blocks_at
            self.token_ids[at:stop] = token_ids
            positions = np.arange(start, start + length, dtype=np.int32) if length > 1 else start
            self.positions[at:stop] = positions
            for tables, slots, blocks in zip(by_kind, self.slots, self.blocks, strict=True):
                table, block_ids = tables[i], blocks[blocks_at : blocks_at + needed]
                block_ids[:] = table[:needed]
                if length == 1:
                    slots[at] = table[start // size] * size + start % size
                else:
                    slots[at:stop] = block_ids[positions // size] * size + positions % size
                if table[0] < 0:  # freed blocks are the first ones
                    np.maximum(block_ids, 0, out=block_ids)
            at = stop
            blocks_at += needed
        if self.rope_rows is not self.positions:
            self.rope_rows[:at] = self.positions[:at]
        self.row_begin[len(chunks.starts)] = at
        self.table_begin[len(chunks.starts)] = blocks_at
        self._fill_copies(chunks, at)
        self._fill_states(chunks, at)
        self._fill_seen(chunks, at)
        self.fill_adapters(chunks, self.row_begin)
        return at

    def fill_adapters(self, chunks: Chunks, begins: Any) -> None:
        """Write the tiles of the rows with adapters: chunk c has rows begins[c] ... begins[c + 1] - 1."""
        if self.adapted is not None:
            fill_tiles(chunks.adapters, begins, self.adapted, self.adapted_rows)
        elif any(slot >= 0 for slot in chunks.adapters):
            raise ValueError("chunks with adapters for a program that has none")

    def _fill_seen(self, chunks: Chunks, num_rows: int) -> None:
        if self.seen is not None:
            self.seen[:num_rows] = self.positions[:num_rows]
            for first, stop in chunks.wholes:
                self.seen[first:stop] = self.positions[stop - 1]
        elif chunks.wholes:
            raise ValueError("rows that see later ones for a program that has none")

    def _fill_states(self, chunks: Chunks, num_rows: int) -> None:
        if self.state_in is None:
            return
        if len(chunks.states_in) != len(chunks.starts):
            raise ValueError(f"states of {len(chunks.states_in)} chunks for {len(chunks.starts)}")
        self.state_in[: len(chunks.starts)] = chunks.states_in
        self.state_out[:num_rows] = -1
        for row, slot in chunks.states_out:
            self.state_out[row] = slot

    def _fill_copies(self, chunks: Chunks, num_rows: int) -> None:
        begin, copies = self.copy_begin, chunks.copies
        if copies:
            rows = np.array([row for row, _ in copies])
            begin[: num_rows + 1] = np.searchsorted(rows, np.arange(num_rows + 1))
            begin[num_rows + 1 :] = len(copies)
            self.copy_slots[: len(copies)] = [slot for _, slot in copies]
        elif begin[-1]:
            begin[:] = 0


def num_block_kinds(kinds: Sequence[CacheKind]) -> int:
    return sum(not kind.is_state for kind in kinds)


def tables_by_kind(chunks: Chunks, num_kinds: int) -> list[Sequence[list[int]]]:
    """Return the tables of each block kind. Raises ValueError if there are further tables, but not for each kind."""
    if not chunks.more_tables:
        return [chunks.tables] * num_kinds
    if len(chunks.more_tables) != num_kinds - 1:
        raise ValueError(f"tables of {1 + len(chunks.more_tables)} kinds for {num_kinds} block kinds")
    return [chunks.tables, *chunks.more_tables]


class StepSizes(NamedTuple):
    """The limits of one call of a program. max_chunks: pieces of sequences, and rows of logits. max_blocks: entries of
    all block tables of a kind together."""

    max_rows: int
    max_chunks: int
    max_blocks: int


def make_step_rows(
    zeros: Callable[[int], Ints],
    kinds: Sequence[CacheKind],
    block_size: int,
    sizes: StepSizes,
    features: Ints = None,
    *,
    has_adapters: bool = False,
    has_places: bool = False,
    sees_wholes: bool = False,
) -> StepRows:
    """Return the arrays of a call for the kinds of cache `kinds`. `zeros(n)` allocates n int32. sees_wholes: rows may
    see later ones (`Chunks.wholes`)."""
    max_rows, max_chunks, max_blocks = sizes
    has_states = any(kind.is_state for kind in kinds)
    positions = zeros(max_rows)
    return StepRows(
        token_ids=zeros(max_rows),
        positions=positions,
        rope_rows=zeros(max_rows) if has_places else positions,
        slots=[zeros(max_rows) for _ in range(num_block_kinds(kinds))],
        row_begin=zeros(max_chunks + 1),
        start=zeros(max_chunks),
        table_begin=zeros(max_chunks + 1),
        blocks=[zeros(max_blocks) for _ in range(num_block_kinds(kinds))],
        state_in=zeros(max_chunks) if has_states else None,
        state_out=zeros(max_rows) if has_states else None,
        block_size=block_size,
        max_rows=max_rows,
        features=features,
        adapted=zeros(1 + 3 * max_rows) if has_adapters else None,
        adapted_rows=zeros(max_rows) if has_adapters else None,
        seen=zeros(max_rows) if sees_wholes else None,
        copy_begin=zeros(max_rows + 1),
        copy_slots=zeros(max_rows * (MAX_DEPTH + block_size)),  # the last one, which `cuda.staging` may leave out
    )
