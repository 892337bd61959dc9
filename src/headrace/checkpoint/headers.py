"""The headers of safetensors files, and the index of a model that has several: which tensors there are, and where.

`parse` checks all of a header (S-28): lengths, types, shapes and offsets must agree with each other and with the file,
leave no hole and not overlap. Imports no numpy, so that a model can be listed without it. Called by
`checkpoint.mapped`, and by `engine.library.model_facts`.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace import foreign, hub
from headrace.protocol.errors import CheckpointError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
MAX_DIMENSIONS = 16
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes of a number of each type that is read."""


class Entry(NamedTuple):
    """One tensor: its type as the file names it, and the bytes begin ... end - 1 of the file that hold it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A checked header. data: its bytes."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data: bytes


def read(path: Path) -> Header:
    """Return the header of a file. Raises `CheckpointError`."""
    with foreign.open_regular(path) as file:
        try:
            return parse(lambda begin, end: _read(file, begin, end), path.stat().st_size, path)
        except OSError as error:
            raise CheckpointError(f"{path} can not be read: {error}") from error


def parse(data: Callable[[int, int], bytes], size: int, path: Path) -> Header:
    """Return the header of a file of `size` bytes. data: returns its bytes from one place to another. Raises
    `CheckpointError` for a file that does not match its header exactly."""
    length = int.from_bytes(data(0, 8), "little")
    if size < 8 or length > min(foreign.HEADER.num_bytes, size - 8):
        raise _broken(path, f"its header says {length} bytes, the file has {size}")
    header = data(8, 8 + length)
    values = foreign.parse_object(
        header, f"{path} is not a readable safetensors file: its header", foreign.HEADER, _once
    )
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _broken(path, "its metadata are not texts by name")
    entries = {name: _entry(name, value, 8 + length, path) for name, value in values.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != end:
            raise _broken(path, f"{name:.80} begins at byte {entry.begin}, expected {end}: a hole or an overlap")
        end = entry.end
    if end != size:
        raise _broken(path, f"its tensors end at byte {end}, the file has {size}")
    return Header(entries, metadata, header)


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index of a model says. Raises `CheckpointError`."""
    file_of = hub.read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name, file in file_of.items():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise CheckpointError(
                f"{index}: {name:.80} is said to be in {file!r:.80}; only *.safetensors beside the index are read"
            )
    return file_of


def files_without_index(directory: Path) -> list[str]:
    """Return the names of the files that hold the weights of a directory without an index."""
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    return [WHOLE] if WHOLE in present else present


def _read(file: Any, begin: int, end: int) -> bytes:
    file.seek(begin)
    data: bytes = file.read(end - begin)
    return data


def _entry(name: str, value: Any, base: int, path: Path) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"{name:.80} does not have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise _broken(path, f"{name:.80} has dtype {dtype!r:.80}, expected one of {', '.join(SIZES)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _broken(path, f"{name:.80} has shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}")
    begin, end = offsets
    num_bytes = math.prod(shape) * SIZES[dtype]
    if end - begin != num_bytes:
        raise _broken(path, f"{name:.80} has {end - begin} bytes, its shape makes them {num_bytes}")
    return Entry(dtype, tuple(shape), base + begin, base + end)


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a readable safetensors file: {why}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name comes twice")
    return values


def _is_sizes(value: Any) -> bool:
    """Return whether `value` is a list of some integers from 0 to 2^63 - 1."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )
