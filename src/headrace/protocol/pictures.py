"""`Picture`: what a request carries of a picture, and the ids by which the prefix cache knows its rows.

A prompt has placeholder tokens where a picture stands; the rows of the model's tower take their places. Placeholders of
all pictures are the same token, so the cache knows each row by an id of its own: a hash of the picture's numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b, shake_128

import msgspec

FIRST_ROW_ID = 2**62
"""Ids of rows begin here, beyond all token ids."""


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """One input of the tower: a picture, or a tile of one.

    digest: of its pixels. pixels: uint8 [height, width, 3], line after line. spans: (first, num) of the prompt's tokens
    whose places its rows take, in their order. sees_whole: rows of a span see all rows of it, later ones too, so that
    no step may end inside one.
    """

    digest: str
    pixels: bytes
    height: int
    width: int
    spans: list[tuple[int, int]]
    sees_whole: bool = False

    @property
    def num_rows(self) -> int:
        return sum(num for _, num in self.spans)


def digest_of(pixels: bytes, height: int, width: int) -> str:
    """Return the digest of a picture. The cache's root covers the model, and with it the tower."""
    return blake2b(pixels, digest_size=32, key=f"{height} {width}".encode()).hexdigest()


def row_ids(picture: Picture) -> array[int]:
    """Return the ids of a picture's rows, which no other picture has."""
    ids = array("Q", shake_128(picture.digest.encode()).digest(8 * picture.num_rows))
    return array("q", [FIRST_ROW_ID | number >> 2 for number in ids])


def end_of(pictures: Sequence[Picture]) -> int:
    """Return the place after the last row of any of the pictures, which are in their order; 0 without any."""
    return sum(pictures[-1].spans[-1]) if pictures else 0


def wholes_of(pictures: Sequence[Picture]) -> list[tuple[int, int]]:
    """Return the places (first, stop) inside which no step may end, ascending."""
    return [(first, first + num) for each in pictures if each.sees_whole for first, num in each.spans]


def fit_wholes(wholes: Sequence[tuple[int, int]], start: int, length: int, most: int) -> int:
    """Return how many rows from `start` on a step computes instead of `length`, at most `most`, so that it ends inside
    none of `wholes`: up to the one that it would cut, or to the end of one that it begins with; 0 where that is too
    far."""
    stop = start + length
    for first, end in wholes:
        if length and first < stop < end:
            return first - start if first > start else (end - start) * (end - start <= most)
    return length


def named(token_ids: list[int], pictures: Sequence[Picture]) -> list[int]:
    """Return the ids by which the prefix cache knows these tokens: those of rows in the pictures' places."""
    if not pictures:
        return token_ids
    ids = list(token_ids)
    for picture in pictures:
        rows, at = row_ids(picture).tolist(), 0
        for first, num in picture.spans:
            ids[first : first + num] = rows[at : at + num]
            at += num
    return ids


def unseen(pictures: Sequence[Picture]) -> list[Picture]:
    """Return the pictures without their pixels, as recordings have them."""
    return [msgspec.structs.replace(picture, pixels=b"", height=0, width=0) for picture in pictures]


def flaw(pictures: Sequence[Picture], num_prompt: int) -> str:
    """Return why pictures do not fit a prompt of `num_prompt` tokens, or ""."""
    end = 0
    for picture in pictures:
        if not picture.pixels and not picture.height:
            pass  # of a recording
        elif len(picture.pixels) != 3 * picture.height * picture.width:
            return f"{len(picture.pixels)} bytes of pixels for {picture.height} x {picture.width} of them"
        elif picture.digest != digest_of(picture.pixels, picture.height, picture.width):
            return f"the digest {picture.digest[:12]}, which is not that of its pixels"
        for first, num in picture.spans:
            if num < 1 or first < end:
                return f"rows at {first} ... {first + num - 1} behind {end}"
            end = first + num
    return f"rows up to {end - 1} in a prompt of {num_prompt} tokens" if end > num_prompt else ""
