"""Reads GGUF files: metadata by key, and where each tensor lies. Converts and dequantises nothing.

Every count and size in the file is compared with the file's own size before anything is allocated, and a value is
decoded only on request, with the type and range that the caller expects. So a hostile file costs little more than its
length. A model may be split into several files, NAME-00001-of-00003.gguf and so on: `read` gives them as one. Knows no
model and no tokenizer; called by `text.tokenizer_gguf` and by the readers of weights. Layout: the GGUF specification,
versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from headrace import foreign
from headrace.protocol.errors import CheckpointError

MAX_ENTRIES = 65_536
"""Most metadata entries, and most tensors."""
MAX_KEY_BYTES = 65_536
MAX_NAME_BYTES = 64
MAX_ALIGNMENT = 65_536
MAX_TOKENS = 2**20
"""Most tokens of a vocabulary."""
MAX_TOKEN_BYTES = 4096

MAX_STRINGS = 2**22
"""Most strings in all arrays of the metadata: each is looked at when a file is opened."""

MAX_FILES = 1024
"""Most files of a model."""
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)")

_STRING, _ARRAY = 8, 9
_INTEGERS, _FLOATS = (0, 1, 2, 3, 4, 5, 10, 11), (6, 12)
# By the type's number: its name, and its letter for `struct` and `array`.
_TYPES = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "B"),
    _STRING: ("string", ""),
    _ARRAY: ("array", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
"""By ggml's number: the type's name, elements in a block, bytes of a block."""
I2_S = 36
"""The number of ternary weights in bitnet.cpp's files, whose form ggml does not have."""


class Field(NamedTuple):
    """Where a metadata value lies: `length` elements of one type in bytes `start` to `end` of the file."""

    type: int
    is_array: bool
    length: int
    start: int
    end: int

    @property
    def type_name(self) -> str:
        name = _TYPES[self.type][0]
        return f"an array of {name}" if self.is_array else f"a {name}"


class TensorInfo(NamedTuple):
    """A tensor's directory entry. `shape` is in the file's order, the fastest dimension first; `start` is absolute.

    file: the index of the file that holds it, of a split model."""

    type: str
    shape: tuple[int, ...]
    start: int
    size: int
    file: int = 0


class GGUF:
    """A checked GGUF file: `fields` by key, `tensors` by name, and the file's bytes as `data`. `read`: keys looked up.
    files: the bytes of all files of a split model, whose metadata are in the first.

    The getters give None for a key that is absent, and raise `CheckpointError` for a value of another type, out of
    the range asked for, or with more elements than `most`.
    """

    def __init__(self, data: bytes | mmap.mmap, name: str = "GGUF") -> None:
        """Read the directory. Raises `CheckpointError` naming the field, its value and the bound."""
        self.data = data
        self.files = [data]
        self.name = name
        self.fields: dict[str, Field] = {}
        self.read = set[str]()
        self.tensors: dict[str, TensorInfo] = {}
        self._at = 0
        self._num_strings = 0
        if (magic := self._take(4, "magic")) != b"GGUF":
            raise self.fault("magic", magic, "b'GGUF'")
        self.version = self._number("I", "version")
        if self.version not in (2, 3):
            raise self.fault("version", self.version, "2 or 3, little endian")
        num_tensors = self._bounded("n_tensors", MAX_ENTRIES)
        for i in range(self._bounded("n_kv", MAX_ENTRIES)):
            self._read_field(f"key {i}")
        alignment = self.integer("general.alignment", 1, MAX_ALIGNMENT)
        self.alignment = 32 if alignment is None else alignment
        if self.alignment & (self.alignment - 1):
            raise self.fault("general.alignment", self.alignment, "a power of 2")
        directory = [self._read_entry(f"tensor {i}") for i in range(num_tensors)]
        self.data_start = -(-self._at // self.alignment) * self.alignment
        for name_, info in directory:
            self._add_tensor(name_, info)
        self._check_overlap()

    def fault(self, field: str, value: object, bound: str) -> CheckpointError:
        """Return the error to raise for a field of this file."""
        return CheckpointError(f"{self.name}: {field} is {repr(value)[:80]}; it must be {bound}")

    def add(self, other: GGUF) -> None:
        """Add the tensors of the next file of a split model."""
        for name, info in other.tensors.items():
            if name in self.tensors:
                raise other.fault("name of a tensor", name, f"a name that is not in another file of {self.name}")
            self.tensors[name] = info._replace(file=len(self.files))
        self.files.append(other.data)

    def text(self, key: str) -> str | None:
        field = self._field(key, (_STRING,), False, "a string")
        return None if field is None else self._decode(field.start, field.end, key)

    def integer(self, key: str, low: int = 0, high: int = 2**63 - 1) -> int | None:
        value: int | None = self._scalar(key, _INTEGERS, "an integer")
        if value is not None and not low <= value <= high:
            raise self.fault(key, value, f"from {low} to {high}")
        return value

    def real(self, key: str) -> float | None:
        value: float | None = self._scalar(key, _FLOATS, "a float")
        if value is not None and not math.isfinite(value):
            raise self.fault(key, value, "finite")
        return value

    def flag(self, key: str) -> bool | None:
        value: int | None = self._scalar(key, (7,), "a bool")
        if value is not None and value > 1:
            raise self.fault(key, value, "0 or 1")
        return None if value is None else bool(value)

    def texts(self, key: str, most: int, longest: int) -> list[str] | None:
        """Return an array of strings, of `longest` bytes each at most."""
        field = self._field(key, (_STRING,), True, "an array of strings", most)
        if field is None:
            return None
        texts = []
        at = field.start
        for i in range(field.length):
            size = struct.unpack_from("<Q", self.data, at)[0]
            if size > longest:
                raise self.fault(f"{key}[{i}]", f"{size} bytes", f"of at most {longest} bytes")
            texts.append(self._decode(at + 8, at + 8 + size, f"{key}[{i}]"))
            at += 8 + size
        return texts

    def integers(self, key: str, most: int) -> array[int] | None:
        values: array[int] | None = self._numbers(key, _INTEGERS, "an array of integers", most)
        return values

    def flags(self, key: str, most: int) -> list[bool] | None:
        values: array[int] | None = self._numbers(key, (7,), "an array of bools", most)
        return None if values is None else [bool(value) for value in values]

    def reals(self, key: str, most: int) -> array[float] | None:
        values: array[float] | None = self._numbers(key, _FLOATS, "an array of floats", most)
        if values is not None and not all(map(math.isfinite, values)):
            raise self.fault(key, next(v for v in values if not math.isfinite(v)), "finite throughout")
        return values

    def _field(self, key: str, types: tuple[int, ...], is_array: bool, bound: str, most: int = 1) -> Field | None:
        field = self.fields.get(key)
        self.read.add(key)
        if field is None:
            return None
        if field.type not in types or field.is_array != is_array:
            raise self.fault(key, field.type_name, bound)
        if is_array and field.length > most:
            raise self.fault(key, f"{field.length} elements", f"of at most {most} elements")
        return field

    def _scalar(self, key: str, types: tuple[int, ...], bound: str) -> Any:
        field = self._field(key, types, False, bound)
        return None if field is None else struct.unpack_from("<" + _TYPES[field.type][1], self.data, field.start)[0]

    def _numbers(self, key: str, types: tuple[int, ...], bound: str, most: int) -> Any:
        field = self._field(key, types, True, bound, most)
        if field is None:
            return None
        values = array(_TYPES[field.type][1], self.data[field.start : field.end])
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def _decode(self, start: int, end: int, what: str) -> str:
        try:
            return self.data[start:end].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(what, self.data[start : min(end, start + 20)], "UTF-8") from None

    # The rest reads the directory: `_at` is the position of the next number.

    def _skip(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they start."""
        num_left = len(self.data) - self._at
        if size > num_left:
            raise self.fault(what, f"{size} bytes at {self._at}", f"within the file, which has {num_left} bytes left")
        self._at += size
        return self._at - size

    def _take(self, size: int, what: str) -> bytes:
        start = self._skip(size, what)
        return self.data[start : self._at]

    def _number(self, letter: str, what: str) -> int:
        start = self._skip(struct.calcsize("<" + letter), what)
        number: int = struct.unpack_from("<" + letter, self.data, start)[0]
        return number

    def _bounded(self, what: str, high: int, letter: str = "Q") -> int:
        number = self._number(letter, what)
        if number > high:
            raise self.fault(what, number, f"at most {high}")
        return number

    def _read_field(self, what: str) -> None:
        raw = self._take(self._bounded(f"length of {what}", MAX_KEY_BYTES), what)
        if not raw or not raw.isascii():
            raise self.fault(what, raw[:80], "ASCII, and not empty")
        key = raw.decode("ascii")
        if key in self.fields:
            raise self.fault(what, key, "a key that was not there before")
        kind = self._type(f"type of {key[:80]}")
        is_array = kind == _ARRAY
        count = 1
        if is_array:
            kind = self._type(f"element type of {key[:80]}")
            if kind == _ARRAY:
                raise self.fault(f"element type of {key[:80]}", "array", "a scalar or string")
            count = self._number("Q", f"length of {key[:80]}")
        start = self._at
        if kind != _STRING:
            self._skip(count * struct.calcsize("<" + _TYPES[kind][1]), key[:80])
        elif is_array:
            self._skip_strings(count, key[:80])
        else:
            start += 8
            self._skip(self._number("Q", f"length of {key[:80]}"), key[:80])
        self.fields[key] = Field(kind, is_array, count, start, self._at)

    def _type(self, what: str) -> int:
        number = self._number("I", what)
        if number not in _TYPES:
            raise self.fault(what, number, "from 0 to 12")
        return number

    def _skip_strings(self, count: int, what: str) -> None:
        data, end, unpack = self.data, len(self.data), struct.Struct("<Q").unpack_from
        at = self._at
        if count > (end - at) // 8:
            raise self.fault(f"length of {what}", count, f"at most {(end - at) // 8}, for which the file has room")
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise self.fault(f"length of {what}", count, f"at most {MAX_STRINGS}, with the strings of other arrays")
        for i in range(count):
            if at + 8 > end:
                raise self.fault(f"{what}[{i}]", f"at {at}", f"within the file's {end} bytes")
            at += 8 + unpack(data, at)[0]
        self._at = min(at, end)
        self._skip(at - self._at, f"{what}[{count - 1}]")

    def _read_entry(self, what: str) -> tuple[str, TensorInfo]:
        """Read a tensor's entry, whose `start` still counts from the beginning of the tensors' data."""
        size = self._bounded(f"length of the name of {what}", MAX_NAME_BYTES)
        start = self._skip(size, f"name of {what}")
        name = self._decode(start, self._at, f"name of {what}")
        shape = tuple(self._number("Q", f"dimension of {name}") for _ in range(self._bounded("n_dims", 4, "I")))
        kind = self._number("I", f"type of {name}")
        if kind == I2_S:
            raise self.fault(f"type of {name}", "I2_S", "TQ1_0 or TQ2_0: bitnet.cpp alone reads that form")
        if kind not in TENSOR_TYPES:
            raise self.fault(f"type of {name}", kind, f"one of {', '.join(map(str, TENSOR_TYPES))}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if (shape or (1,))[0] % block:
            raise self.fault(f"shape of {name}", shape, f"in rows of a multiple of {block} elements")
        offset = self._number("Q", f"offset of {name}")
        return name, TensorInfo(type_name, shape, offset, math.prod(shape) // block * block_bytes)

    def _add_tensor(self, name: str, info: TensorInfo) -> None:
        if name in self.tensors:
            raise self.fault("name of a tensor", name, "a name that was not there before")
        if info.start % self.alignment:
            raise self.fault(f"offset of {name}", info.start, f"a multiple of {self.alignment}")
        start = self.data_start + info.start
        if start + info.size > len(self.data):
            raise self.fault(
                f"offset of {name}", info.start, f"within the file: {start} + {info.size} > {len(self.data)} bytes"
            )
        self.tensors[name] = info._replace(start=start)

    def _check_overlap(self) -> None:
        end, before = 0, ""
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise self.fault(f"offset of {name}", info.start, f"at least {end}, where {before} ends")
            end, before = info.start + info.size, name


def names_of_files(name: str) -> list[str]:
    """Return the names of all files of the model to which the file `name` belongs: `name` alone, or those of a split
    model, in order."""
    match = SPLIT_NAME.fullmatch(name)
    count = int(match[3]) if match else 0
    if match is None or not 1 <= int(match[2]) <= count <= MAX_FILES:
        return [name]
    return [f"{match[1]}-{i:05}-of-{match[3]}{match[4]}" for i in range(1, count + 1)]


def files_of(path: Path) -> list[Path]:
    """Return the paths of all files of the model to which the file at `path` belongs, whether they are there or not."""
    return [path.with_name(name) for name in names_of_files(path.name)]


def models_in(directory: Path) -> list[Path]:
    """Return the models in a directory: GGUF files, and the first file of each split model that has one there. Towers
    for pictures are no models."""
    return sorted({files_of(path)[0] for path in directory.glob("*.gguf") if not is_projector(path.name)})


def is_projector(name: str) -> bool:
    """Return whether a file is a tower for pictures by its name, such as mmproj-model-f16.gguf."""
    return "mmproj" in name.lower()


def projectors_in(directory: Path) -> list[Path]:
    """Return the towers for pictures in a directory, by their names."""
    return sorted(path for path in directory.glob("*.gguf") if is_projector(path.name))


def read(path: Path) -> GGUF:
    """Open the GGUF file at `path`, mapped and not read into memory. Any file of a split model stands for all of them.

    Raises `CheckpointError`, also if one of them is missing or is of another model."""
    paths = files_of(path)
    whole = _open(paths[0])
    for other in paths[1:]:
        if not other.is_file():
            raise CheckpointError(f"{other} is missing: the model is split into {len(paths)} files")
        part = _open(other)
        _check_split(part, len(whole.files), paths)
        whole.add(part)
    _check_split(whole, 0, paths)
    return whole


def _check_split(file: GGUF, number: int, paths: list[Path]) -> None:
    """Raise `CheckpointError` unless a file says that it is the one of this number among the files `paths`."""
    count = file.integer("split.count") or 1
    if count != len(paths):
        name = f"NAME-00001-of-{count:05}.gguf" if count > 1 else "a name without -00001-of-00002"
        raise file.fault("split.count", count, f"{len(paths)}, as its name says; a file of such a model has {name}")
    if len(paths) == 1:
        return
    if file.integer("split.no") != number:
        raise file.fault("split.no", file.integer("split.no"), f"{number}: is it a file of another place?")
    in_all = file.integer("split.tensors.count")
    if number == 0 and in_all is not None and in_all != len(file.tensors):
        bound = f"{len(file.tensors)}, the tensors found: are all files of one model?"
        raise file.fault("split.tensors.count", in_all, bound)


def _open(path: Path) -> GGUF:
    try:
        data: bytes | mmap.mmap = foreign.Mapped(path)
    except ValueError:
        data = b""  # an empty file can not be mapped
    except OSError as error:
        raise CheckpointError(f"{path} can not be opened: {error}") from error
    return GGUF(data, path.name)
