"""`PrivateContext`: the program and the KV cache of a drafter with a model.

Holds blocks and tables (`Line`, one for each sequence and one for each branch of a tree), and runs all sequences of a
step in one call. The contents of a line's blocks depend on its tokens alone: rejected draft tokens are rewound, and
their slots are written again before they are read. Knows token ids and rows of numbers; must not know sequences'
parameters nor how tokens are chosen. Called by the drafters of this folder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Backend, SetUp
from headrace.backends.step import Chunks
from headrace.core.blocks import BlockPool
from headrace.drafters.base import F32, Target
from headrace.models import Model

MAX_CACHE_BYTES = 2**30
CACHE_SHARE = 0.1
"""Greatest share of the free memory at the start."""

MAX_ROWS = 512
MAX_LINES = 128
"""Most rows of one call; more take several calls."""


@dataclass(slots=True, eq=False)
class Line:
    """A piece of text in the cache: `tokens` at positions 0 ... of `table`, from token `start` of a sequence on."""

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


class LineRows(NamedTuple):
    """Tokens to compute after a line, with the features [len(token_ids), F] of a model that reads features."""

    line: Line
    token_ids: list[int]
    features: F32 | None = None


class Computed(NamedTuple):
    """Results of the last row of each job: logits [S, V] (valid until the next call), the program's features [S, F] if
    they were requested, and whether all numbers are finite."""

    logits: F32
    features: F32 | None
    finite: list[bool]

    def features_of(self, row: int) -> F32 | None:
        """The features of one row [1, F]."""
        return None if self.features is None else self.features[row : row + 1]

    def subset(self, rows: list[int]) -> Computed:
        features = None if self.features is None else self.features[rows]
        return Computed(self.logits[rows], features, [self.finite[row] for row in rows])


class DraftVocabulary:
    """The target's id of each of a model's tokens (None: they are the same, as far as both have them), and the size of
    the target's vocabulary."""

    def __init__(self, token_ids: NDArray[np.int64] | None, size: int) -> None:
        self._token_ids = token_ids
        self._wide = np.empty((0, size), np.float32)

    def widened(self, logits: F32) -> F32:
        """Return logits over the target's vocabulary, valid until the next call; tokens that the model does not have
        get -inf, tokens that the target does not have are left out."""
        num_common = min(logits.shape[1], self._wide.shape[1])
        if self._token_ids is None and num_common == self._wide.shape[1]:
            return logits[:, :num_common]
        if len(self._wide) < len(logits):
            self._wide = np.full((len(logits), self._wide.shape[1]), -np.inf, np.float32)
        wide = self._wide[: len(logits)]
        wide[:, slice(num_common) if self._token_ids is None else self._token_ids] = logits
        return wide


class PrivateContext:
    """A model over its own cache.

    Args:
        backend: the model's. The cache has the target's dtype if the backend has kernels for it, else the backend's.
        window: positions that a line may have.
        most_lines: most lines at a time, branches of trees included.
        feature_layers: features that the program keeps of the rows (`Backend.program`).
        token_ids: the target's id of each of the model's tokens; None if they are the same.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        target: Target,
        window: int,
        most_lines: int,
        feature_layers: Sequence[int] = (),
        token_ids: NDArray[np.int64] | None = None,
    ) -> None:
        size = target.block_size
        kv_dtype = target.kv_dtype if target.kv_dtype in backend.kv_dtypes else backend.dtype
        self.window = window
        per_line = -(-window // size)
        kinds = range(len(model.kinds))  # a line has the same blocks in all of them
        bytes_each = max(1, sum(backend.block_bytes(model, kind, size, kv_dtype) for kind in kinds))
        room = min(MAX_CACHE_BYTES, int(CACHE_SHARE * backend.available_memory())) // bytes_each
        needed = target.max_num_seqs * per_line + 2 * most_lines
        num_blocks = max(min(needed, room), per_line + 2)
        set_up = SetUp(
            pool_sizes=(num_blocks,) * len(kinds),
            block_size=size,
            kv_dtype=kv_dtype,
            max_num_seqs=min(most_lines, MAX_LINES),
            max_num_batched_tokens=MAX_ROWS,
            max_blocks_per_seq=per_line,
            num_threads=target.num_threads,
        )
        self.program = backend.program(model, set_up, feature_layers)
        self._most_lines = min(most_lines, MAX_LINES)
        self.pool = BlockPool(num_blocks, size)
        self.lines: OrderedDict[int, Line] = OrderedDict()
        self._vocabulary = DraftVocabulary(token_ids, target.vocab_size)

    def line(self, seq_id: int) -> Line:
        """Return the line of a sequence, and mark it as the last used; an empty one if it is unknown."""
        line = self.lines.setdefault(seq_id, Line())
        self.lines.move_to_end(seq_id)
        return line

    def drop(self, seq_id: int) -> None:
        line = self.lines.pop(seq_id, None)
        if line is not None:
            self.empty(line)

    def empty(self, line: Line, start: int = 0) -> None:
        """Release the line's blocks; it begins anew, at `start` of its sequence."""
        self.pool.release(line.table)
        line.start, line.tokens, line.table = start, [], []

    def rewind(self, line: Line, length: int) -> None:
        """Forget all but the first `length` tokens; the slots behind them are written again before they are read."""
        del line.tokens[length:]

    def reserve(self, line: Line, num: int, keep: Collection[int] = ()) -> bool:
        """Add blocks for `num` more tokens. Lines of sequences that are not in `keep` make room, the longest unused
        first. Return False, with this line unchanged, if that is not enough or the window ends."""
        length = len(line.tokens) + num
        if length > self.window:
            return False
        missing = self.pool.blocks_for(length) - len(line.table)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            victim = next((i for i, other in self.lines.items() if i not in keep and other.table), None)
            if victim is None:
                return False
            self.drop(victim)
        line.table += blocks
        return True

    def fork(self, line: Line) -> Line | None:
        """Return a second line with the same tokens: whole blocks are shared, the last is copied. None without room."""
        size = self.pool.block_size
        length = len(line.tokens)
        num_shared = length // size
        tail: list[int] = []
        if length % size:
            blocks = self.pool.allocate(1)
            if blocks is None:
                return None
            for kind in range(len(self.program.kinds)):
                self.program.copy_blocks([(line.table[num_shared], blocks[0])], kind)
            tail = blocks
        shared = line.table[:num_shared]
        self.pool.take(shared)
        return Line(line.start, list(line.tokens), shared + tail)

    def extend(self, jobs: Sequence[LineRows], keep_features: bool = False) -> Computed:
        """Compute the jobs' tokens, for which room is reserved; no two jobs have the same line."""
        results: list[tuple[Computed, list[int]]] = []
        most = self.program.max_rows
        portion: list[tuple[int, int, int]] = []  # job, first and last of its tokens
        room = most
        for i, job in enumerate(jobs):
            begin = 0
            while begin < len(job.token_ids):
                if not room or len(portion) == self._most_lines:
                    results.append(self._run(jobs, portion, keep_features))
                    portion, room = [], most
                end = min(len(job.token_ids), begin + room)
                portion.append((i, begin, end))
                room -= end - begin
                begin = end
        if portion:
            results.append(self._run(jobs, portion, keep_features, is_lent=not results))
        for job in jobs:
            job.line.tokens += job.token_ids
        if len(results) == 1:
            return results[0][0]
        finite = [True] * len(jobs)
        for part, owners in results:
            for i, right in zip(owners, part.finite, strict=True):
                finite[i] = finite[i] and right
        features = [part.features for part, _ in results if part.features is not None]
        logits = np.concatenate([part.logits for part, _ in results])
        return Computed(logits, np.concatenate(features) if keep_features else None, finite)

    def _run(
        self, jobs: Sequence[LineRows], portion: list[tuple[int, int, int]], keep_features: bool, is_lent: bool = False
    ) -> tuple[Computed, list[int]]:
        """Return logits and features of the jobs that end in this portion, and for each piece whether it is finite and
        its job."""
        starts, pieces, tables, rows, feature_parts = [], [], [], [], []
        row = 0
        ended = []
        for i, begin, end in portion:
            line, token_ids, features = jobs[i]
            starts.append(len(line.tokens) + begin)
            pieces.append(token_ids[begin:end])
            tables.append(line.table)
            if features is not None:
                feature_parts.append(features[begin:end])
            row += end - begin
            if end == len(token_ids):
                rows.append(row - 1)
                ended.append(i)
        numbers = (
            (feature_parts[0] if len(feature_parts) == 1 else np.concatenate(feature_parts)) if feature_parts else None
        )
        finite, logits = self.program.forward(Chunks(starts, pieces, tables), rows, numbers)
        if not all(logits.finite):
            broken = {i for i, right in zip(ended, logits.finite, strict=True) if not right}
            finite = [right and i not in broken for right, (i, _, _) in zip(finite, portion, strict=True)]
        row_features = self.program.features(rows) if keep_features else None
        wide = self._vocabulary.widened(logits.fetch())
        return Computed(wide if is_lent else wide.copy(), row_features, finite), [i for i, _, _ in portion]

    def check(self, others: Sequence[Line] = ()) -> None:
        """Check that each used block belongs to a line. Raises `InvariantError`."""
        self.pool.check([line.table for line in (*self.lines.values(), *others)])

    def close(self) -> None:
        self.program.close()
        self.lines.clear()
