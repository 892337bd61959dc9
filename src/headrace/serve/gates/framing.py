"""Where a request ends: lines and lengths that two servers could read in two ways are refused (S-19).

A proxy in front of this server may cut the bytes of a connection elsewhere than h11, which reads bare line feeds and
takes `Content-Length: 5, 5` for 5; the rest of one request would then be a request that the proxy has not seen.
Knows bytes, and no routes. `connection` reads through `StrictBuffer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import h11
from h11._receivebuffer import ReceiveBuffer

RULES = "lines end with CR LF, no header is folded, and Content-Length is one number, not beside Transfer-Encoding"
_LOOSE = re.compile(rb"(?<!\r)\n|\n[ \t]")
_LENGTH = re.compile(rb"[ \t]*[0-9]+[ \t]*")


class StrictBuffer(ReceiveBuffer):
    """Passes on the lines of heads and trailers that have one meaning, and raises `h11.RemoteProtocolError` for
    others."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if self._data[:2] == b"\r\n":
            self._extract(2)
            return []
        end = self._data.find(b"\r\n\r\n", self._multiple_lines_search)
        if _LOOSE.search(self._data, self._multiple_lines_search, end + 2 if end >= 0 else len(self._data)):
            raise h11.RemoteProtocolError("a line that is folded, or does not end with CR LF")
        if end < 0:
            self._multiple_lines_search = max(0, len(self._data) - 3)
            return None
        lines: list[bytearray] = self._extract(end + 4)[:-4].split(b"\r\n")
        if not has_one_length(lines):
            raise h11.RemoteProtocolError("a length that can be read in two ways")
        return lines


def has_one_length(lines: Sequence[bytes | bytearray]) -> bool:
    """Return whether the headers give a body's length in one way at most: as one number, or as chunks, which HTTP/1.0
    does not have."""
    fields = [line.partition(b":") for line in lines]
    lengths = [value for name, _, value in fields if name.lower() == b"content-length"]
    num_encodings = sum(name.lower() == b"transfer-encoding" for name, _, _ in fields)
    if len(lengths) + num_encodings > 1 or not all(_LENGTH.fullmatch(each) for each in lengths):
        return False
    return not (num_encodings and lines[0].endswith(b"HTTP/1.0"))
