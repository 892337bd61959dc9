"""Pictures among the texts of a conversation: each is a mark in the text where it stood, until the prompt is rendered.

A mark has a number that no client can guess, so that no text is taken for one. Called by `messages`, by the APIs'
readers of requests, and by `ServedModel`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headrace.protocol.errors import HeadraceError

_SECRET = secrets.token_hex(12)
_MARK = re.compile(rf"<picture {_SECRET}:(\d+)>")


class PictureInput(NamedTuple):
    """A picture of a request. source: a data URL, base64, or another URL. kind: the name of its part, for texts that
    stand in its place. refusal: the error for a model that reads none; None: a text stands in its place then."""

    field: str
    source: str
    kind: str = "image"
    refusal: HeadraceError | None = None

    @property
    def is_address(self) -> bool:
        """Whether the picture is to be fetched."""
        return self.source[:6].lower() in ("http:/", "https:")


class Pictures(list[PictureInput]):
    """The pictures of a request, in their order."""

    def mark(self, picture: PictureInput) -> str:
        """Add a picture and return the text that stands for it."""
        self.append(picture)
        return f"<picture {_SECRET}:{len(self) - 1}>"


def has_marks(text: str) -> bool:
    return _SECRET in text


def parts(text: str) -> Iterator[dict[str, Any]]:
    """Yield a text as the parts of a message, as templates read them."""
    for place, piece in enumerate(_MARK.split(text)):
        if place % 2:
            yield {"type": "image"}
        elif piece:
            yield {"type": "text", "text": piece}


def replaced(text: str, write: Callable[[int], str]) -> str:
    """Return a text in which `write` gives the text for each mark's picture, by its place."""
    return _MARK.sub(lambda match: write(int(match[1])), text) if has_marks(text) else text


def order(texts: Iterator[str]) -> list[int]:
    """Return the places of the pictures that stand in `texts`, in their order."""
    return [int(place) for text in texts if has_marks(text) for place in _MARK.findall(text)]
