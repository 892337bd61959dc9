"""Reads the pictures of a request: `PictureReader` decodes and cuts them in the process of `sandbox`, and `place` finds
their rows' places in the prompt. Held by `ServedModel` and by `LLM`.
"""

from __future__ import annotations

import base64
import binascii
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.pictures import Picture, digest_of
from headrace.text.bounded import BoundedProcess
from headrace.text.pictures.forms import SEEN_WHOLE, Grid, PictureForm
from headrace.text.pictures.marks import PictureInput, replaced

MAX_BYTES = 32 * 2**20
"""Bytes of a picture's file."""
MAX_PIXELS = 2**26
"""Pixels of a picture before it is cut."""
MAX_PICTURES = 64
"""Pictures of a request."""
MAX_CUT_BYTES = 64 * 2**20
"""Bytes of all inputs that are made of a request's pictures."""
MAX_CPU_SECONDS = 10.0
MAX_MEMORY = 2**30
"""Bytes that decoding and cutting may take."""
SANDBOX = "headrace.text.pictures.sandbox"


class Job(msgspec.Struct):
    """A picture's file, and the rules by which it is cut."""

    data: bytes
    family: str
    settings: dict[str, Any]


class View(msgspec.Struct, array_like=True):
    """One input of the tower: uint8 [height, width, 3]."""

    height: int
    width: int
    pixels: bytes


class Cut(msgspec.Struct):
    """The inputs made of a picture, or in `error` the form that a picture must have."""

    views: list[View] = []
    lines: int = 0
    columns: int = 0
    error: str = ""

    @property
    def grid(self) -> Grid:
        return Grid([(view.height, view.width) for view in self.views], self.lines, self.columns)


class PictureReader:
    """Reads the pictures of one model's requests. `process` decodes them."""

    def __init__(self, form: PictureForm, limits: Mapping[str, int] | None = None) -> None:
        """`limits`: the config's limit_mm_per_prompt."""
        self.form, self._most = form, min((limits or {}).get("image", MAX_PICTURES), MAX_PICTURES)
        self.process = BoundedProcess(SANDBOX, MAX_CPU_SECONDS)

    def check_number(self, num: int, field: str) -> None:
        """Raise `RequestError` for more pictures than a request may have."""
        if num > self._most:
            raise RequestError(field, f"{num} pictures", f"at most {self._most} pictures (--limit-mm-per-prompt)")

    def cut(self, data: bytes, field: str) -> Cut:
        """Decode one picture. Raises `RequestError` naming `field`, and `ChildFailedError`."""
        if len(data) > MAX_BYTES:
            raise RequestError(field, f"{len(data)} bytes", f"at most {MAX_BYTES} bytes large")
        reply = self.process.run(Job(data, self.form.family, self.form.settings), Cut)
        error = reply if isinstance(reply, str) else reply.error
        if isinstance(reply, str) or error:
            value = f"a picture of {len(data)} bytes"
            raise RequestError(field, value, f"one within the bounds: {error}" if isinstance(reply, str) else error)
        return reply

    def read(self, picture: PictureInput) -> Cut:
        """Decode the picture of a request. Raises as `cut`."""
        source, field = picture.source, picture.field
        if picture.is_address:
            raise RequestError(field, source[:80], "a data URL, data:image/png;base64,...: nothing is fetched here")
        is_url = source.startswith("data:") or picture.kind in ("image_url", "input_image")
        return self.cut(from_data_url(source, field) if is_url else from_base64(source, field), field)

    def text(self, prompt: str, cuts: Sequence[Cut], field: str = "messages") -> str:
        """Return the prompt with each picture's mark replaced by the text that stands for it. Raises `RequestError`
        for another number of marks than pictures: a text of the user's has one."""
        num_bytes = sum(len(view.pixels) for cut in cuts for view in cut.views)
        if num_bytes > MAX_CUT_BYTES:
            raise RequestError(
                field, f"{len(cuts)} pictures", f"fewer or smaller: cut, {num_bytes} bytes of at most {MAX_CUT_BYTES}"
            )
        mark = self.form.words.mark
        prompt = replaced(prompt, lambda _: mark)
        parts = prompt.split(mark)
        if len(parts) != len(cuts) + 1:
            bound = f"as many as pictures, {len(cuts)}: no text may have {mark!r}, which stands for one"
            raise RequestError(field, f"{len(parts) - 1} times {mark!r}", bound)
        texts = [self.form.text(cut.grid) for cut in cuts]
        return "".join(part + text for part, text in zip(parts, [*texts, ""], strict=True))

    def place(
        self, token_ids: Sequence[int], row_id: int, cuts: Sequence[Cut], field: str = "messages"
    ) -> list[Picture]:
        """Return the inputs of all pictures with their places, those of the token `row_id`. Raises `RequestError`."""
        places = [place for place, token_id in enumerate(token_ids) if token_id == row_id]
        views = [view for cut in cuts for view in cut.views]
        nums = [self.form.rows_of(view.height, view.width) for view in views]
        if len(places) != sum(nums):
            token = self.form.words.token
            bound = f"{sum(nums)}, the rows of its pictures: no text may have {token!r}, which stands for one"
            raise RequestError(field, f"{len(places)} times {token!r}", bound)
        pictures, at = [], 0
        for view, num in zip(views, nums, strict=True):
            digest = digest_of(view.pixels, view.height, view.width)
            spans = spans_of(places[at : at + num])
            is_whole = self.form.family in SEEN_WHOLE
            pictures.append(Picture(digest, view.pixels, view.height, view.width, spans, is_whole))
            at += num
        return pictures


def spans_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending places as runs (first, num)."""
    spans: list[tuple[int, int]] = []
    for place in places:
        if spans and place == sum(spans[-1]):
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((place, 1))
    return spans


def from_data_url(url: str, field: str) -> bytes:
    """Return the bytes of a data URL of a picture (RFC 2397). Raises `RequestError`."""
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:"):
        raise RequestError(field, url[:40], "a data URL: data:image/png;base64,...")
    if not head.removesuffix(";base64").startswith("data:image/"):
        raise RequestError(field, head[:60], "a picture, of image/png, image/jpeg, image/webp or image/gif")
    return from_base64(body, field) if head.endswith(";base64") else urllib.parse.unquote_to_bytes(body)


def from_base64(text: str, field: str) -> bytes:
    """Return the bytes of a picture in base64. Raises `RequestError`."""
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise RequestError(field, f"{len(text)} characters", f"a picture of at most {MAX_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(field, f"{text[:20]}...", f"a picture in base64: {error}") from error
