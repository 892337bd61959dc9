"""Reads files that strangers wrote, such as a model's: regular files only, up to a size, and JSON within limits.

JSON is measured before it is parsed, in a few passes over its bytes: what the parser costs is bounded by the number of
texts, lists and digits, not by the bytes alone. Knows no formats. Called by every reader of a model's files, and by
`serve.gates.limits` for the bodies of requests.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from headrace.protocol.errors import CheckpointError

MIB = 2**20
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class Limits(NamedTuple):
    """Bounds on one piece of JSON. texts: with the keys of objects. containers: lists and objects. digits: of a number,
    in a row. escapes: so many backslashes count as a text (0: none do)."""

    num_bytes: int
    texts: int
    containers: int
    values: int
    depth: int = 64
    digits: int = 128
    escapes: int = 0


CONFIG = Limits(8 * MIB, 2**18, 2**16, 2**20)
"""A config: settings that a person could read."""
TABLE = Limits(64 * MIB, 2**21, 2**20, 2**22)
"""A file with an entry for each token of a vocabulary, or for each tensor of a model."""
HEADER = Limits(100_000_000, 2**21, 2**20, 2**22, digits=20)
"""The header of a safetensors file, whose tensors have five texts and three containers each, and no number above
2^63. The bytes are those that the format allows."""


HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
"""Finds an escape of half of a surrogate pair; the other half is well there, in most files."""


class JSONSizeError(ValueError):
    """JSON that exceeds a limit. `value` says what it has, `bound` what it must be."""

    def __init__(self, value: str, bound: str) -> None:
        self.value, self.bound = value, bound
        super().__init__(f"it has {value}; it must be {bound}")


def check_size(data: bytes, limits: Limits) -> None:
    """Raise `JSONSizeError` for JSON with too many values, levels or digits, before anything is parsed.

    The parser holds the interpreter's lock while it makes texts and lists, for a time that their number bounds. Each
    call here is one pass over bytes, of some milliseconds. Bytes that are not JSON are left to the parser, which stops
    there.
    """
    # Each escape is a piece of its text to the parser.
    num_texts = data.count(b"\\") // limits.escapes if limits.escapes else 0
    counted = f"texts and keys ({limits.escapes} escapes count as one)" if num_texts else "texts and keys"
    _check_count(num_texts, limits.texts, counted)
    if b"\\" in data:
        # Without escaped quotes, every second piece between quotes is outside of texts.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_count(num_texts + data.count(b'"') // 2, limits.texts, counted)
    outside = b"".join(data.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    _check_count(num_containers, limits.containers, "lists and objects")
    _check_count(outside.count(b",") + num_containers, limits.values, "values")
    # Not a regex, which would read each run of digits from each of its digits.
    if b"0" * (limits.digits + 1) in outside.translate(_DIGITS):
        raise JSONSizeError(f"a number of more than {limits.digits} digits", f"JSON with at most {limits.digits}")
    brackets = outside.translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(limits.depth):
        # Each pass takes the innermost level of every branch away.
        brackets = brackets.replace(b"[]", b"")
    if b"[]" in brackets or brackets.count(b"[") > limits.depth:
        raise JSONSizeError("deeply nested JSON", f"JSON at most {limits.depth} levels deep")


def broken_text(value: Any) -> str | None:
    """Return a text or key in a JSON value that has half of a surrogate pair, which only an escape can spell and which
    can not be encoded; None if there is none."""
    items = [value]
    while items:
        item = items.pop()
        if isinstance(item, dict):
            items += item
            items += item.values()
        elif isinstance(item, list):
            items += item
        elif isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                return item
    return None


def _check_count(number: int, most: int, what: str) -> None:
    if number > most:
        raise JSONSizeError(f"{number} {what}", f"JSON with at most {most} {what}")


class Mapped(mmap.mmap):
    """A regular file's bytes, mapped, and its descriptor, by which a few bytes are read without a page of the mapping:
    that may be 2 MiB. Raises as `open_regular`, and OSError or ValueError for a file that can not be mapped."""

    descriptor: int

    def __new__(cls, path: Path) -> Mapped:
        with open_regular(path) as file:
            mapped = super().__new__(cls, file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.descriptor = os.dup(file.fileno())
        weakref.finalize(mapped, os.close, mapped.descriptor)
        return mapped

    def part(self, begin: int, end: int) -> bytes:
        """Return bytes, by a read of the file."""
        return os.pread(self.descriptor, end - begin, begin)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, without waiting for the other end of a pipe. Raises `CheckpointError` for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} can not be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no regular file")
    return open(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the contents of a regular file of at most `most` bytes. Raises `CheckpointError`."""
    with open_regular(path) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    if len(data) > most:
        raise CheckpointError(f"{path} has {max(path.stat().st_size, len(data))} bytes; at most {most} are read")
    return data


def parse_object(
    data: bytes,
    name: object,
    limits: Limits,
    pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises `CheckpointError`, which begins with `name`."""
    try:
        check_size(data, limits)
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs_hook)
    except JSONSizeError as error:
        raise CheckpointError(f"{name} has {error.value}; it must be {error.bound}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from error
    if HALVES.search(data) and (text := broken_text(value)) is not None:
        raise CheckpointError(f"{name} has half a surrogate pair in the text {text!r:.80}; it must be Unicode")
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} holds {type(value).__name__}, not an object")
    return value


def read_object(path: Path, limits: Limits) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `CheckpointError`."""
    return parse_object(read_bytes(path, limits.num_bytes), path, limits)
