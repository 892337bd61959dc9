"""Writes a GGUF file: metadata and a directory of tensors first, then the tensors' bytes as they come, in that order.

Layout: the GGUF specification, version 3, little endian. The file appears under its name when it is whole. Knows no
model and no tokenizer. Called by `quantize.gguf_writer`; `headrace.gguf` reads what it writes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CheckpointError
from headrace.gguf import TENSOR_TYPES

U8 = NDArray[np.uint8]
Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]

ALIGNMENT = 32
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


def write(path: Path, fields: Mapping[str, Value], tensors: Sequence[Tensor], data: Iterable[tuple[int, U8]]) -> None:
    """Write `path`. data: (index of the tensor, some of its bytes), in the order of `tensors` and of their bytes.

    Raises `CheckpointError` if bytes are missing or too many; then no file is left.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(header(fields, tensors))
            _write_data(file, tensors, data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_data(file: BinaryIO, tensors: Sequence[Tensor], data: Iterable[tuple[int, U8]]) -> None:
    at, written = 0, 0
    for index, piece in data:
        while at < index:
            _end(file, tensors[at], written)
            at, written = at + 1, 0
        file.write(np.ascontiguousarray(piece).data)
        written += piece.nbytes
    for tensor in tensors[at:]:
        _end(file, tensor, written)
        written = 0


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
