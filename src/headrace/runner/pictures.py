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
    has_places: bool
    """Whether rows of sequences with pictures turn by other positions than those in the cache."""

    def features(self, picture: Picture) -> F32:
        """Return the features [N, F] of a picture's rows. Raises ValueError for a picture that the tower does not
        take."""
        ...

    def places(self, positions: NDArray[np.int64], pictures: Sequence[Picture]) -> NDArray[np.int64]:
        """Positions [R] in the cache of a sequence with these pictures -> those [R, axes] by which its rows turn."""
        ...

    def close(self) -> None: ...


def whole_rows(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Return the rows (first, stop) of the pieces that see each other: those of pictures that are seen whole. Raises
    ValueError for a piece that ends inside one."""
    rows: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        end = piece.start + len(piece.token_ids)
        for first, stop in piece.wholes:
            low = max(first, piece.start)
            if low < end < stop:
                raise ValueError(f"rows up to {end - 1} of a picture at {first} ... {stop - 1}, which is seen whole")
            if low < stop and first < end:
                rows.append((at + low - piece.start, at + stop - piece.start))
        at += len(piece.token_ids)
    return rows


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


def places_of(batch: ScheduledBatch, pieces: list[Piece], source: PictureSource) -> NDArray[np.int64] | None:
    """Return the positions [R, axes] by which the pieces' rows turn; None where all turn by those in the cache."""
    if not source.has_places or not batch.pictures:
        return None
    ends = [(piece.start, piece.start + len(piece.token_ids)) for piece in pieces]
    of_pieces = [batch.pictures.get(piece.chunk_id, ()) for piece in pieces]
    return np.concatenate([source.places(np.arange(*end), each) for end, each in zip(ends, of_pieces, strict=True)])
