"""From a `ScheduledBatch` to the rows of forward passes: pieces of chunks, with their drafts, in portions that fit.

A chain of draft tokens follows its chunk's tokens as more rows of one piece. So does the first path of a tree; every
other node is a piece of one row, with the block table of a path through it. Rows that several paths share are computed
once and written to the blocks of each (`Piece.copies`). Knows ints; called by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headrace.protocol.pictures import fit_wholes, wholes_of
from headrace.protocol.step import Draft, ScheduledBatch


@dataclass(slots=True)
class Piece:
    """Rows of chunk `chunk_id` that are computed together, from position `start` on, in the blocks of `table`.

    No pass may end inside one of `wholes`, (first, stop) positions.
    The last rows are the draft tokens `nodes`. `last`: the row before those is the chunk's last. `copies` are (row,
    slot) pairs in the rows' order: further places for the keys and values of a row.
    """

    chunk_id: int
    start: int
    token_ids: list[int]
    table: list[int]
    last: bool = True
    nodes: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    wholes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        return len(self.token_ids) - len(self.nodes)

    def without_draft(self) -> Piece:
        known = self.token_ids[: self.num_known]
        return Piece(self.chunk_id, self.start, known, self.table, self.last, wholes=self.wholes)


def make_pieces(batch: ScheduledBatch, chunk_id: int, token_ids: list[int], block_size: int) -> list[Piece]:
    """Return the pieces of a chunk whose known tokens are `token_ids`."""
    start, table = batch.starts[chunk_id], batch.block_tables[chunk_id]
    draft = batch.drafts.get(chunk_id)
    if draft is None:
        pieces = [Piece(chunk_id, start, token_ids, table)]
    elif not draft.parents:
        nodes = list(range(len(draft.token_ids)))
        pieces = [Piece(chunk_id, start, token_ids + draft.token_ids, table, nodes=nodes)]
    else:
        pieces = _tree(chunk_id, start, token_ids, table, draft, block_size)
    if chunk_id in batch.pictures:
        pieces[0].wholes = wholes_of(batch.pictures[chunk_id])
    return pieces


def _tree(
    chunk_id: int, start: int, token_ids: list[int], table: list[int], draft: Draft, block_size: int
) -> list[Piece]:
    stop = start + len(token_ids)
    num_whole = stop // block_size
    tables = [table, *(table[:num_whole] + tail for tail in draft.tails)]
    paths = draft.paths()
    trunk = paths[0]
    users: dict[int, list[int]] = {}
    for path_id, path in enumerate(paths):
        for node in path:
            users.setdefault(node, []).append(path_id)

    def slot(path_id: int, position: int) -> int:
        return tables[path_id][position // block_size] * block_size + position % block_size

    first = Piece(chunk_id, start, token_ids + [draft.token_ids[node] for node in trunk], table, nodes=list(trunk))
    # Positions of this step in a block that holds a draft token too.
    for position in range(max(start, num_whole * block_size), stop):
        first.copies += [(position - start, slot(path_id, position)) for path_id in range(1, len(paths))]
    for depth, node in enumerate(trunk):
        row, position = len(token_ids) + depth, stop + depth
        first.copies += [(row, slot(path_id, position)) for path_id in users[node] if path_id]
    pieces = [first]
    for node in sorted(users.keys() - set(trunk)):
        home, *others = users[node]
        position = stop + paths[home].index(node)
        copies = [(0, slot(path_id, position)) for path_id in others]
        pieces.append(
            Piece(chunk_id, position, [draft.token_ids[node]], tables[home], last=False, nodes=[node], copies=copies)
        )
    return pieces


def states_of(batch: ScheduledBatch, pieces: list[Piece]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the slots from which the pieces read a state, and the (row, slot) pairs that they write. A chunk that is
    cut keeps its state in between where the batch wants it after the last known token."""
    if not batch.state_reads:
        return [], []
    slots = dict(batch.state_writes)
    firsts, row = [], 0
    for i, length in enumerate(batch.lens):
        firsts.append(row)
        row += length + (len(batch.drafts[i].token_ids) if i in batch.drafts else 0)
    reads: list[int] = []
    writes: list[tuple[int, int]] = []
    row = 0
    for piece in pieces:
        i, size = piece.chunk_id, len(piece.token_ids)
        last = slots[firsts[i] + batch.lens[i] - 1]
        first = firsts[i] + piece.start - batch.starts[i]
        reads.append(batch.state_reads[i] if first == firsts[i] else last)
        ends = [(row + k, slots[first + k]) for k in range(size) if first + k in slots]
        writes += ends or [(row + size - 1, last)]
        row += size
    return reads, writes


def make_portions(groups: list[list[Piece]], max_rows: int, max_pieces: int, whole: bool = False) -> list[list[Piece]]:
    """Cut the step where a program takes no more at once; the cut changes no bits. `groups` are the pieces of one chunk
    each; a chunk's last row and its draft stay together. `whole`: no chunk is cut."""
    # One list: a generator's turns count in every step.
    pieces = [piece for group in groups for piece in group]
    if sum([len(piece.token_ids) for piece in pieces]) <= max_rows and len(pieces) <= max_pieces:
        return [pieces] if pieces else []
    portions: list[list[Piece]] = [[]]
    room = max_rows
    for group in groups:
        while num_rows(group) > room or len(portions[-1]) + len(group) > max_pieces:
            loose = 0 if whole else min(room, group[0].num_known - 1)
            loose = fit_wholes(group[0].wholes, group[0].start, loose, loose) if group[0].wholes else loose
            if loose and len(portions[-1]) < max_pieces:
                head, rest = _split(group[0], loose)
                portions[-1].append(head)
                group = [rest, *group[1:]]
                room -= loose
            elif portions[-1]:
                portions.append([])
                room = max_rows
            else:
                raise ValueError(f"{num_rows(group)} rows in {len(group)} pieces are more than one pass takes")
        portions[-1] += group
        room -= num_rows(group)
    return portions


def num_rows(group: list[Piece]) -> int:
    return sum(len(piece.token_ids) for piece in group)


def _split(piece: Piece, size: int) -> tuple[Piece, Piece]:
    """Split into the first `size` rows, which are known tokens, and the others."""
    copies = [copy for copy in piece.copies if copy[0] < size]
    head = replace(piece, token_ids=piece.token_ids[:size], last=False, nodes=[], copies=copies)
    copies = [(row - size, slot) for row, slot in piece.copies if row >= size]
    return head, replace(piece, start=piece.start + size, token_ids=piece.token_ids[size:], copies=copies)
