"""`PictureRows`: the rows that a tower makes of pictures, computed when a step first needs them.

The tower runs on the model's backend, on one picture or tile at a time: its rows depend on its pixels alone. Knows
pixels and programs; must not know requests. Made by `engine.library.towers`, called by the runner.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Backend, Program, SetUp
from headrace.backends.step import Chunks
from headrace.models.towers.base import F32, MAX_PATCHES, Tower
from headrace.protocol.pictures import Picture

BLOCK = 256
"""Patches of a block of the tower's cache, which lasts for one call."""
MAX_READ = 128
"""Rows that are read at once."""
MAX_ROWS = 512
"""Rows of the connector that are computed at once."""
MAX_KEPT = 256 * 2**20
"""Bytes of rows that are kept: a long prompt's chunks, and other questions, need them again."""


class Norm(Protocol):
    """The numbers of pixels: (pixel * scale - mean) / deviation, by channel. rounds: each step rounds to bfloat16."""

    @property
    def scale(self) -> float: ...
    @property
    def mean(self) -> Sequence[float]: ...
    @property
    def deviation(self) -> Sequence[float]: ...
    @property
    def rounds(self) -> bool: ...


class PictureRows:
    """The rows that `tower` makes of pictures, with the features that the text's program reads them in."""

    def __init__(self, tower: Tower, backend: Backend, norm: Norm, blank: F32, num_threads: int) -> None:
        self.blank, self.has_places = blank, tower.side_of_row > 0
        self.tower, self._norm = tower, norm
        num_blocks = -(-MAX_PATCHES // BLOCK)
        whole = SetUp((num_blocks,), BLOCK, backend.dtype, MAX_READ, MAX_PATCHES, num_blocks, num_threads)
        by_window = SetUp((MAX_READ,), BLOCK, backend.dtype, MAX_READ, MAX_ROWS, 1, num_threads)
        layers = [layer for layer, _ in tower.further]
        self._programs = [backend.program(tower, by_window if tower.is_windowed else whole, layers)]
        self._programs += [backend.program(part, by_window if part.is_windowed else whole) for part in tower.parts]
        connecting = SetUp((1,), MAX_ROWS, backend.dtype, MAX_READ, MAX_ROWS, 1, num_threads)
        connectors = [tower.connector, *(connector for _, connector in tower.further)]
        self._connectors = [backend.program(connector, connecting) for connector in connectors]
        self._known: OrderedDict[str, F32] = OrderedDict()
        self._num_bytes = 0
        self.num_computed = 0

    def features(self, picture: Picture) -> F32:
        known = self._known.pop(picture.digest, None)
        if known is None:
            known = self._computed(picture)
            self.num_computed += 1
            self._num_bytes += known.nbytes
        self._known[picture.digest] = known
        while self._num_bytes > MAX_KEPT and len(self._known) > 1:
            self._num_bytes -= self._known.popitem(last=False)[1].nbytes
        return known

    def places(self, positions: NDArray[np.int64], pictures: Sequence[Picture]) -> NDArray[np.int64]:
        return turned(positions, pictures, self.tower.side_of_row)

    def _computed(self, picture: Picture) -> F32:
        size, tower = (picture.height, picture.width), self.tower
        if tower.num_rows(*size) != picture.num_rows:
            raise ValueError(f"a picture of {size[0]} x {size[1]} pixels for {picture.num_rows} rows")
        pixels = np.frombuffer(picture.pixels, np.uint8).reshape(*size, 3)
        rows = tower.patches(normalised(pixels, self._norm))
        if len(rows) > MAX_PATCHES:
            raise ValueError(f"a picture of {len(rows)} patches, expected at most {MAX_PATCHES}")
        for program in self._programs:
            rows = self._through(program, rows, size)
        layers = [rows]
        if num_further := len(tower.further):
            layers += np.split(self._programs[0].features(list(range(len(rows)))), num_further, axis=1)
        numbers = []
        for program, hidden in zip(self._connectors, layers, strict=True):
            merged = tower.merged(hidden[tower.num_extra :], *size)
            parts = [merged[i : i + MAX_ROWS] for i in range(0, len(merged), MAX_ROWS)]
            numbers.append(np.concatenate([self._connected(program, part) for part in parts]))
        return np.concatenate([*numbers, np.zeros((picture.num_rows, 1), np.float32)], axis=1)

    def _through(self, program: Program, rows: F32, size: tuple[int, int]) -> F32:
        """Return the rows [R, H] behind the layers of a program, of which each sees all others, or its window's."""
        places, turns, out, at = self.tower.places(*size), self.tower.turns(*size), [], 0
        windows = self.tower.windows(*size) if program.model.is_windowed else [len(places)]
        for sizes in portions(windows, MAX_READ, MAX_ROWS):
            ends = list(itertools.accumulate(sizes, initial=at))
            num_blocks = [-(-each // BLOCK) for each in sizes]
            firsts = itertools.accumulate(num_blocks, initial=0)
            chunks = Chunks(
                [0] * len(sizes),
                [places[begin:end] for begin, end in itertools.pairwise(ends)],
                [list(range(first, first + num)) for first, num in zip(firsts, num_blocks, strict=False)],
                later=range(ends[-1] - at),
                observed=range(ends[-1] - at) if self.tower.further else (),
                places=None if turns is None else turns[at : ends[-1]],
            )
            out.append(hidden_states(program, chunks, rows[at : ends[-1]]))
            at = ends[-1]
        return np.concatenate(out)

    def _connected(self, program: Program, merged: F32) -> F32:
        return hidden_states(program, Chunks([0], [[0] * len(merged)], [[0]], later=range(len(merged))), merged)

    def close(self) -> None:
        """Free the memory of the programs. May be called twice."""
        for program in (*self._programs, *self._connectors):
            program.close()


def portions(sizes: Sequence[int], most: int, most_rows: int) -> Iterator[list[int]]:
    """Yield windows, `most` at once, with `most_rows` rows in all where each has fewer."""
    portion: list[int] = []
    for size in sizes:
        if portion and (len(portion) == most or sum(portion) + size > most_rows):
            yield portion
            portion = []
        portion.append(size)
    yield portion


def hidden_states(program: Program, chunks: Chunks, features: F32) -> F32:
    """Return the hidden states [R, H] of all rows."""
    rows = list(chunks.later)
    program.forward(chunks, [], features)
    return np.concatenate([program.hidden_states(rows[i : i + MAX_READ]).copy() for i in range(0, len(rows), MAX_READ)])


def normalised(pixels: NDArray[np.uint8], norm: Norm) -> F32:
    """pixels [height, width, 3] -> (pixels * scale - mean) / deviation, as the processors compute them."""
    mean, deviation = (np.array(numbers, np.float32) for numbers in (norm.mean, norm.deviation))
    if norm.rounds:
        scaled = rounded(pixels.astype(np.float32) * np.float32(norm.scale))
        return rounded(rounded(scaled - rounded(mean)) / rounded(deviation))
    scaled = (pixels.astype(np.float64) * norm.scale).astype(np.float32)
    return (scaled - mean) / deviation


def rounded(numbers: F32) -> F32:
    """Return the nearest numbers of bfloat16, of equally near ones the even one."""
    words = np.ascontiguousarray(numbers).view(np.uint32)
    return (words + (0x7FFF + (words >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def turned(positions: NDArray[np.int64], pictures: Sequence[Picture], side: int) -> NDArray[np.int64]:
    """Positions [R] of a sequence in the cache -> those [R, 3] by which its rows turn: time, line and column (M-RoPE).

    The rows of a picture have its first one's time, and lines and columns from there on; the text behind it begins
    after the greatest of them. Raises ValueError for a picture whose rows are not one run.
    """
    places = np.repeat(positions[:, None], 3, axis=1)
    for picture in pictures:
        if len(picture.spans) != 1:
            raise ValueError(f"a picture's rows in {len(picture.spans)} runs, expected one")
        [(first, num)] = picture.spans
        lines, columns = picture.height // side, picture.width // side
        inside, behind = (positions >= first) & (positions < first + num), positions >= first + num
        rows = positions[inside] - first
        places[inside] += np.stack([-rows, rows // columns - rows, rows % columns - rows], axis=1)
        places[behind] += max(lines, columns) - num
    return places
