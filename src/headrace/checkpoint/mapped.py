"""Mapped safetensors files: names, shapes and read-only numpy views, without a copy.

`MappedFile` maps a file whose header `checkpoint.headers` has checked. `MappedCheckpoint` finds the files of a
directory and opens no others. Knows no models and imports no torch. Called by the readers of weights, by
`engine.library.load` and by `drafters`.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import foreign, hub
from headrace.checkpoint import headers
from headrace.checkpoint.headers import Entry
from headrace.checkpoint.names import Place, places, text_config
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import BF16, E4M3, E5M2, PLAIN, cast, type_name

logger = logging.getLogger(__name__)

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STATED_DTYPES = (*DTYPE_NAMES.values(), "float64", "float8_e4m3fn", "float8_e5m2", "auto")
"""Types of weights that a config.json may state."""

VIEWS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BF16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"), "F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": np.dtype("u1"),
}  # fmt: skip
"""The type of arrays for each type of a file. Scales of type E8M0 are bytes."""


class MappedFile:
    """One mapped file. Raises `CheckpointError` for a file that does not match its header exactly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.buffer = foreign.Mapped(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        self.entries, self.metadata, self.header = headers.parse(self.buffer.part, len(self.buffer), path)

    def array(self, name: str) -> NDArray[Any]:
        """Return a read-only view of the mapping, of the type in `VIEWS`; a copy where it is not aligned."""
        entry = self.entries[name]
        count = math.prod(entry.shape)
        if not count:
            return np.zeros(entry.shape, VIEWS[entry.dtype])
        values = np.frombuffer(self.buffer, VIEWS[entry.dtype], count, entry.begin).reshape(entry.shape)
        # The kernels read aligned numbers. Other addresses are legal in the format, but writers avoid them.
        return values.copy() if entry.begin % values.itemsize else values

    def release(self) -> None:
        """Take the file's pages out of this process's memory. They come back when they are read."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def advise(self, name: str, advice: int) -> None:
        """Advise the system how a tensor will be read (mmap's MADV_ constants). If it refuses, nothing is lost."""
        entry = self.entries[name]
        begin = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self.buffer.madvise(advice, begin, entry.end - begin)
        except OSError as error:
            logger.debug("%s: madvise %d: %s", self.path, advice, error)


class MappedCheckpoint:
    """The tensors of a directory by name. A file is mapped when the first of its tensors is read.

    Raises `CheckpointError` if there are none, or if an index and the files beside it disagree.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, MappedFile] = {}
        self._file_of = self._index()
        self._places = self.places_of({n: self._open(file).entries[n].shape for n, file in self._file_of.items()})

    @staticmethod
    def places_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Place]:
        """Return the place of each tensor of the model, by its name there."""
        return places(shapes, shapes)

    @property
    def names(self) -> list[str]:
        """The names of the text model's tensors (`checkpoint.names`)."""
        return list(self._places)

    @property
    def files(self) -> list[Path]:
        """The safetensors files that hold the tensors."""
        return [self.directory / file for file in sorted(set(self._file_of.values()))]

    @property
    def mark(self) -> str:
        """A part of the names of packed files; it differs between the checkpoints of one directory."""
        return ""

    def config(self) -> bytes:
        """Return the contents of the files that state how the weights are meant."""
        paths = [self.directory / name for name in ("config.json", *hub.QUANTIZATION_FILES)]
        return b"".join(foreign.read_bytes(path, foreign.CONFIG.num_bytes) for path in paths if path.is_file())

    def table(self, name: str, shape: tuple[int, int]) -> NDArray[Any]:
        """Return an embedding table [V, H], mapped. Raises `CheckpointError` for another shape or no floats."""
        if name not in self._places:
            raise self.missing(name)
        entry, file = self.entry(name), self.file(name)
        verify_shape(name, entry.shape, shape)
        values = self.array(name)
        if entry.dtype == "F64":
            return cast(values, "float32")
        if entry.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} is stored as {entry.dtype}, expected plain floats")
        file.advise(self._places[name].name, mmap.MADV_RANDOM)
        return values

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return the numbers of a small tensor. Raises `CheckpointError` for another shape or no floats."""
        if name not in self._places:
            raise self.missing(name)
        verify_shape(name, self.entry(name).shape, shape)
        values = self.array(name)
        if type_name(values) not in PLAIN:
            raise CheckpointError(f"{name} is stored as {type_name(values)}, expected plain floats")
        return cast(values, "float32")

    def missing(self, name: str) -> CheckpointError:
        """Return the error of a tensor that no file has. It names the files that were searched."""
        files = self.files
        others = f" and from the {len(files) - 1} files beside it" if files[1:] else ""
        return CheckpointError(f"{name} is missing from {files[0]}{others}")

    def entry(self, name: str) -> Entry:
        """Return the entry of tensor `name`, which may be a part of one of the file's tensors."""
        place = self._places[name]
        entry = self.file(name).entries[place.name]
        if place.part is None:
            return entry
        size = (entry.end - entry.begin) // entry.shape[0]
        begin = entry.begin + place.part * size
        return Entry(entry.dtype, entry.shape[1:], begin, begin + size)

    def array(self, name: str) -> NDArray[Any]:
        place = self._places[name]
        values = self.file(name).array(place.name)
        return values if place.part is None else values[place.part]

    def file(self, name: str) -> MappedFile:
        """Return the file that holds tensor `name`."""
        return self._open(self._file_of[self._places[name].name])

    def release(self) -> None:
        """Take the pages that were read out of this process's memory; see `MappedFile.release`."""
        for file in self._files.values():
            file.release()

    def _open(self, file: str) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile(self.directory / file)
        return self._files[file]

    def _index(self) -> dict[str, str]:
        index = self.directory / headers.INDEX
        if index.is_file():
            return self._sharded(index)
        present = headers.files_without_index(self.directory)
        if not present:
            raise CheckpointError(self._why_nothing())
        file_of: dict[str, str] = {}
        for file in present:
            for name in self._open(file).entries:
                if name in file_of:
                    raise CheckpointError(
                        f"{name} is in {file_of[name]} and in {file}, and there is no index to choose by"
                    )
                file_of[name] = file
        return file_of

    def _sharded(self, index: Path) -> dict[str, str]:
        file_of = headers.read_index(index)
        names_of: dict[str, set[str]] = {}
        for name, file in file_of.items():
            names_of.setdefault(file, set()).add(name)
        for file in sorted(names_of):
            if not (self.directory / file).is_file():
                raise CheckpointError(f"{self.directory / file} is missing; {index.name} names it")
            missing = names_of[file] - self._open(file).entries.keys()
            if missing:
                raise CheckpointError(f"{file} lacks {min(missing)}, which {index.name} says is in it")
        return file_of

    def _why_nothing(self) -> str:
        pickled = sorted(p.name for p in self.directory.iterdir() if p.suffix in PICKLED)
        if pickled:
            return (
                f"{self.directory} has its weights in {pickled[0]}, a pickle. Reading a pickle can run any code, so "
                "headrace does not; convert it: model.save_pretrained(directory, safe_serialization=True)"
            )
        return f"{self.directory} has no *.safetensors"


def read_config(directory: Path, known: Sequence[str]) -> dict[str, Any]:
    """Return the config.json. Raises `CheckpointError`, also for a model_type that is not among `known`."""
    config = hub.read_config(directory)
    for field in ("dtype", "torch_dtype"):
        stated = config.get(field)
        if stated is not None and str(stated).removeprefix("torch.") not in STATED_DTYPES:
            raise CheckpointError(
                f"{directory / 'config.json'}: {field} is {stated!r:.80}, expected one of {', '.join(STATED_DTYPES)}"
            )
    config = text_config(config, known)
    model_type = config.get("model_type")
    if model_type in known:
        if "auto_map" in config:
            logger.info("config.json has auto_map; headrace runs its own %s and no code of the checkpoint", model_type)
        return config
    reason = f"config.json: model_type {model_type!r:.80} is not supported; supported are {', '.join(known)}"
    if "auto_map" in config:
        reason += ". The checkpoint brings code of its own (auto_map), and headrace never runs a checkpoint's code"
    raise CheckpointError(reason)


def choose_dtype(dtype: str, checkpoint: MappedCheckpoint, config: dict[str, Any] | None = None) -> str:
    """Return `dtype`, or for "auto" the dtype of most of the checkpoint's tensors (float32 for other kinds).

    Most tensors of a quantised checkpoint are codes and scales, so there the dtype that `config` states comes first.
    """
    if dtype != "auto":
        return dtype
    if config is not None and config.get("quantization_config") is not None:
        stated = config.get("dtype", config.get("torch_dtype"))
        if stated in DTYPE_NAMES.values():
            return str(stated)
    counts = Counter(checkpoint.entry(name).dtype for name in checkpoint.names)
    return DTYPE_NAMES.get(counts.most_common(1)[0][0], "float32") if counts else "float32"


def verify_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise `CheckpointError` if the tensor `name` does not have the shape that follows from the model's config."""
    if shape != expected:
        raise CheckpointError(f"{name} has shape {list(shape)}, the config makes it {list(expected)}")


def stacked_name(names: Sequence[str]) -> str:
    """Return one name for stacked linear layers: their common path, and their last parts joined by "+"."""
    path = names[0].rpartition(".")[0]
    if any(name.rpartition(".")[0] != path for name in names):
        return "+".join(names)
    tail = "+".join(name.rpartition(".")[2] for name in names)
    return f"{path}.{tail}" if path else tail
