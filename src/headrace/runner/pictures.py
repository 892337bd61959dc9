"""The rows of pictures among a step's rows: they take the places of embedded tokens (`models.towers.take_pictures`).

Knows no tower. Called by `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.pictures import Picture, end_of
from headrace.protocol.step import ScheduledBatch
from headrace.runner.pieces import Piece

F32 = NDArray[np.float32]


class PictureSource(Protocol):
    """The rows that a model's tower makes of pictures."""

    blank: F32
    """[F]: the features of a token's row."""
    side_of_row: int
    """Pixels of a side of a row's square, where rows turn by their line and column; else 0."""

    def features(self, picture: Picture) -> F32:
        """Return the features [N, F] of a picture's rows. Raises ValueError for a picture that the tower does not
        take."""
        ...

    def close(self) -> None: ...


def picture_rows(batch: ScheduledBatch, pieces: list[Piece], source: PictureSource) -> F32 | None:
    """Return the features [R, F] of the pieces' rows; None where no row is a picture's."""
    rows: list[tuple[int, F32]] = []
    at = 0
    for piece in pieces:
        size = len(piece.token_ids)
        pictures = batch.pictures.get(piece.chunk_id, [])
        for picture in pictures if piece.start < end_of(pictures) else ():
            begin = 0
            for first, num in picture.spans:
                low, high = max(first, piece.start), min(first + num, piece.start + size)
                if low < high:
                    part = source.features(picture)[begin + low - first : begin + high - first]
                    rows.append((at + low - piece.start, part))
                begin += num
        at += size
    if not rows:
        return None
    features = np.repeat(source.blank[None], at, axis=0)
    for place, part in rows:
        features[place : place + len(part)] = part
    return features


def places_of(batch: ScheduledBatch, pieces: list[Piece], side: int) -> NDArray[np.int64] | None:
    """Return the positions [R, 3] by which the pieces' rows turn; None where no row is of a sequence with pictures, or
    rows turn by their positions in the cache (`side` 0)."""
    if not side or not any(piece.chunk_id in batch.pictures for piece in pieces):
        return None
    parts = []
    for piece in pieces:
        positions = np.arange(piece.start, piece.start + len(piece.token_ids))
        parts.append(turned(positions, batch.pictures.get(piece.chunk_id, ()), side))
    return np.concatenate(parts)


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
