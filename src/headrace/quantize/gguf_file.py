"""Writes a GGUF file: metadata and a directory of tensors, then the tensors' bytes in that order.

Layout: the GGUF specification, version 3, little endian. The file gets its name when it is whole; an interrupted run
can be resumed. Knows no model and no tokenizer. Called by `quantize.gguf_writer`; `headrace.gguf` reads the files.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace import hub
from headrace.gguf import TENSOR_TYPES
from headrace.protocol.errors import CheckpointError
from headrace.quantize import shards

U8 = NDArray[np.uint8]
Value = bool | int | float | str | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]

ALIGNMENT = 32
NOTED_BYTES = 32 * 2**20
"""A resumed run writes at most so many bytes, and one tensor, again."""
_NUMBERS = {name: (number, elements, size) for number, (name, elements, size) in TENSOR_TYPES.items()}
_BOOL, _UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 7, 4, 5, 6, 8, 9


class Tensor(NamedTuple):
    """shape: the slowest dimension first. kind: a name of `gguf.TENSOR_TYPES`."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        _, elements, size = _NUMBERS[self.kind]
        return math.prod(self.shape) // elements * size


def header(fields: Mapping[str, Value], tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes before the tensors, padded to the place of the first of them."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(fields))]
    for key, value in fields.items():
        parts += [_text(key), _value(key, value)]
    offset = 0
    for tensor in tensors:
        number = _NUMBERS[tensor.kind][0]
        parts.append(_text(tensor.name) + struct.pack("<I", len(tensor.shape)))
        parts.append(
            struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)) + struct.pack("<IQ", number, offset)
        )
        offset += _padded(tensor.num_bytes)
    content = b"".join(parts)
    return content + bytes(_padded(len(content)) - len(content))


def write(
    path: Path,
    fields: Mapping[str, Value],
    tensors: Sequence[Tensor],
    data: Callable[[int], Iterable[tuple[int, U8]]],
    stamp: str = "",
) -> None:
    """Write `path`. data: called with the index of a tensor, gives pairs (index of a tensor, some of its bytes) from
    there on, in the order of `tensors` and of their bytes.

    Resumes an interrupted run if the header and `stamp` (of all that the bytes depend on) are the same. Raises
    `CheckpointError` if bytes are missing or too many; then there is no file.
    """
    begin = header(fields, tensors)
    part = path.with_name(path.name + ".part")
    notes = Notes(path, hashlib.sha256(begin + stamp.encode()).hexdigest())
    num_done = notes.read().get("num_tensors", 0)
    size = len(begin) + sum(_padded(tensor.num_bytes) for tensor in tensors[:num_done])
    if not part.is_file() or part.stat().st_size < size:
        num_done, size = 0, len(begin)
    try:
        with part.open("r+b" if num_done else "wb") as file:
            if not num_done:
                file.write(begin)
            file.truncate(size)
            file.seek(size)
            _write_data(file, tensors, data(num_done), num_done, notes)
            _to_disk(file)
        os.replace(part, path)
    except CheckpointError:
        part.unlink(missing_ok=True)
        raise
    finally:
        if not part.is_file():
            notes.remove()


class Notes:
    """The state that a run stores next to its file, so that it can be resumed: JSON, valid for one stamp."""

    def __init__(self, path: Path, stamp: str, ending: str = ".part.json") -> None:
        self._path, self._stamp = path.with_name(path.name + ending), stamp

    def read(self) -> dict[str, Any]:
        """Return the state, empty if there is none of this stamp."""
        try:
            values = hub.read_json(self._path)
        except CheckpointError:
            return {}
        return values if values.get("stamp") == self._stamp else {}

    def write(self, values: Mapping[str, Any]) -> None:
        shards.write_json(self._path, {"stamp": self._stamp, **values})

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _write_data(
    file: BinaryIO, tensors: Sequence[Tensor], data: Iterable[tuple[int, U8]], first: int, notes: Notes
) -> None:
    place, num_written, num_pending = first, 0, 0
    for index, piece in data:
        while place < index:
            _end(file, tensors[place], num_written)
            place, num_written = place + 1, 0
            if num_pending >= NOTED_BYTES:
                _to_disk(file)
                notes.write({"num_tensors": place})
                num_pending = 0
        file.write(np.ascontiguousarray(piece).data)
        num_written += piece.nbytes
        num_pending += piece.nbytes
    for tensor in tensors[place:]:
        _end(file, tensor, num_written)
        num_written = 0


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _end(file: BinaryIO, tensor: Tensor, num_written: int) -> None:
    if num_written != tensor.num_bytes:
        raise CheckpointError(f"{tensor.name} has {num_written} bytes, expected {tensor.num_bytes} of {tensor.kind}")
    file.write(bytes(_padded(num_written) - num_written))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Value) -> bytes:
    """Return the type of a value and its bytes."""
    if isinstance(value, (bool, int, float, str)):
        number, data = _scalar(key, value)
        return struct.pack("<I", number) + data
    if not value:
        raise CheckpointError(f"{key} is an empty array, expected one element at least")
    if isinstance(value[0], str):
        number, data = _STRING, b"".join(_text(str(text)) for text in value)
    elif isinstance(value[0], bool):
        number, data = _BOOL, np.asarray(value, np.uint8).tobytes()
    elif isinstance(value[0], float):
        number, data = _FLOAT32, np.asarray(value, "<f4").tobytes()
    else:
        number, data = _INT32, np.asarray(value, "<i4").tobytes()
    return struct.pack("<IIQ", _ARRAY, number, len(value)) + data


def _scalar(key: str, value: bool | int | float | str) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return _BOOL, bytes([value])
    if isinstance(value, str):
        return _STRING, _text(value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    if not 0 <= value < 2**32:
        raise CheckpointError(f"{key} is {value}, expected from 0 to {2**32 - 1}")
    return _UINT32, struct.pack("<I", value)
