"""Writes a GGUF file: metadata and a directory of tensors first, then the tensors' bytes as they come, in that order.

Layout: the GGUF specification, version 3, little endian. The file appears under its name when it is whole; a run that
was broken off is gone on with. Knows no model and no tokenizer. Called by `quantize.gguf_writer`; `headrace.gguf` reads
what it writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.gguf import TENSOR_TYPES
from headrace.protocol.errors import CheckpointError
from headrace.quantize import shards

U8 = NDArray[np.uint8]
Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]

ALIGNMENT = 32
NOTED_BYTES = 32 * 2**20
"""Bytes that a run which is broken off may have to write again, and one tensor."""
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
    """All that lies before the tensors' bytes, padded to where the first of them begins."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(fields))]
    for key, value in fields.items():
        parts += [_text(key), _value(key, value)]
    at = 0
    for tensor in tensors:
        number = _NUMBERS[tensor.kind][0]
        parts.append(_text(tensor.name) + struct.pack("<I", len(tensor.shape)))
        parts.append(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)) + struct.pack("<IQ", number, at))
        at += _padded(tensor.num_bytes)
    made = b"".join(parts)
    return made + bytes(_padded(len(made)) - len(made))


def write(
    path: Path,
    fields: Mapping[str, Value],
    tensors: Sequence[Tensor],
    data: Callable[[int], Iterable[tuple[int, U8]]],
    stamp: str = "",
) -> None:
    """Write `path`. data: (index of the tensor, some of its bytes), in the order of `tensors` and of their bytes, from
    the tensor on that it is given.

    What was written by a run that was broken off is gone on with, if header and `stamp` (of all that the bytes depend
    on) are the same. Raises `CheckpointError` if bytes are missing or too many; then no file is left.
    """
    begin = header(fields, tensors)
    part = path.with_name(path.name + ".part")
    notes = Notes(path, hashlib.sha256(begin + stamp.encode()).hexdigest())
    done = notes.read().get("num_tensors", 0)
    size = len(begin) + sum(_padded(tensor.num_bytes) for tensor in tensors[:done])
    if not part.is_file() or part.stat().st_size < size:
        done, size = 0, len(begin)
    try:
        with part.open("r+b" if done else "wb") as file:
            if not done:
                file.write(begin)
            file.truncate(size)
            file.seek(size)
            _write_data(file, tensors, data(done), done, notes)
            _to_disk(file)
        os.replace(part, path)
    except CheckpointError:
        part.unlink(missing_ok=True)
        raise
    finally:
        if not part.is_file():
            notes.remove()


class Notes:
    """What a run leaves beside the file it makes, for one that goes on: JSON, of use to whoever has the same stamp."""

    def __init__(self, path: Path, stamp: str, ending: str = ".part.json") -> None:
        self._path, self._stamp = path.with_name(path.name + ending), stamp

    def read(self) -> dict[str, Any]:
        """Empty if there is nothing of this stamp."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and found.get("stamp") == self._stamp else {}

    def write(self, told: Mapping[str, Any]) -> None:
        shards.write_json(self._path, {"stamp": self._stamp, **told})

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _write_data(
    file: BinaryIO, tensors: Sequence[Tensor], data: Iterable[tuple[int, U8]], first: int, notes: Notes
) -> None:
    at, written, pending = first, 0, 0
    for index, piece in data:
        while at < index:
            _end(file, tensors[at], written)
            at, written = at + 1, 0
            if pending >= NOTED_BYTES:
                _to_disk(file)
                notes.write({"num_tensors": at})
                pending = 0
        file.write(np.ascontiguousarray(piece).data)
        written += piece.nbytes
        pending += piece.nbytes
    for tensor in tensors[at:]:
        _end(file, tensor, written)
        written = 0


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _end(file: BinaryIO, tensor: Tensor, written: int) -> None:
    if written != tensor.num_bytes:
        raise CheckpointError(f"{tensor.name} has {written} bytes, expected {tensor.num_bytes} of {tensor.kind}")
    file.write(bytes(_padded(written) - written))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Value) -> bytes:
    """The value's type and itself."""
    if isinstance(value, (bool, int, float, str)):
        number, data = _scalar(key, value)
        return struct.pack("<I", number) + data
    if not value:
        raise CheckpointError(f"{key} is an empty array, expected one element at least")
    if isinstance(value[0], str):
        number, data = _STRING, b"".join(_text(str(text)) for text in value)
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
