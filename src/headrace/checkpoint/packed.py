"""Packed files: weights in the backend's layouts, written once beside the model and mapped at later starts.

The file is a safetensors container whose tensors begin at pages (large ones) or cache lines: matrices in the layout of
the native formats, biases, orders of inputs, norms, and embedding tables that the checkpoint has in another form. Other
tables stay mapped in the checkpoint, whose fingerprint the file holds. The header has a digest of itself and a CRC-32
of each tensor: they reveal damage, not forgery, for whatever can write the file can write its sums. A file that does
not fit or is damaged is logged and not used, and the checkpoint is read instead. Imports no torch. Called by
`checkpoint.source` and `packed_weights`; the readers of checkpoints fill it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import mmap
import os
import secrets
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace import foreign
from headrace.checkpoint.mapped import DTYPE_NAMES, MappedFile
from headrace.checkpoint.packing import Origin, Packable, PackedBackend
from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import type_name
from headrace.quant.schemes import METHOD, Scheme, native_flag, scheme_of_flag

logger = logging.getLogger(__name__)

CONTAINER = 3
"""Version of this file format. The matrices' layouts are not part of it: they have names."""

PAGE, LINE = 4096, 64
TABLE = "table/"
DIGEST = "digest"
LEFTOVER_SECONDS = 3600
"""The age at which a temporary file must be from a process that was killed."""
PIECE_BYTES = 16 * 2**20
READERS = 4
"""Threads that read: more than two do not copy faster, but burden the disk."""
NO_WAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Flag for reads from the page cache only, without the disk; Linux alone has it."""


class Form(NamedTuple):
    """What distinguishes the packed files of one checkpoint. quantization: its name, or "" for plain weights."""

    quantization: str
    dtype: str
    layouts: dict[str, str]

    @property
    def name(self) -> str:
        return self.quantization or self.dtype


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A mapped matrix, read-only; data begins at a page."""

    name: str
    scheme: Scheme
    data: NDArray[np.uint8]
    num_in: int
    num_out: int
    bias: NDArray[np.float32] | None
    permutation: NDArray[np.int32] | None = None


def fingerprint(checkpoint: Origin) -> dict[str, Any]:
    """Return values that change with the checkpoint: its files' names, sizes and times, and the hash of config.json."""
    files = {}
    for path in checkpoint.files:
        facts = path.stat()
        files[path.name] = [facts.st_size, facts.st_mtime_ns]
    config = hashlib.sha256(checkpoint.config()).hexdigest()
    return {"files": files, "config.json": config}


def cache_directory(directory: Path) -> Path:
    """Return the directory for the packed files of a model whose own directory cannot be written to."""
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]
    return Path.home() / ".cache" / "headrace" / "packed" / name


def losses_path(path: Path) -> Path:
    """Return the path of the file of measurements that belongs to a packed file."""
    return path.with_name(f"{path.name}.measured")


def file_name(checkpoint: Origin, form: Form) -> str:
    # Not *.safetensors: other software reads every such file of a directory as a part of the checkpoint.
    text = json.dumps(fingerprint(checkpoint), sort_keys=True)
    return f"{_stem(checkpoint, form)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.packed"


def _stem(checkpoint: Origin, form: Form) -> str:
    return f"headrace-{checkpoint.mark}{form.name}"


def find(checkpoint: Origin, form: Form, backend: PackedBackend) -> PackedFile | None:
    """Return the packed file that fits, beside the model or in the cache. Log why others of this form do not fit."""
    current = file_name(checkpoint, form)
    for directory in (checkpoint.directory, cache_directory(checkpoint.directory)):
        pattern = f"{glob.escape(_stem(checkpoint, form))}-*.packed"
        for path in sorted(directory.glob(pattern), key=lambda path: path.name != current):
            try:
                return PackedFile(path, checkpoint, form, backend)
            except CheckpointError as error:
                logger.warning("%s is not used, the weights are read from the checkpoint: %s", path, error)
    return None


class PackedFile:
    """A packed file, mapped. Raises `CheckpointError` with the reason for a file that does not fit the checkpoint."""

    def __init__(self, path: Path, checkpoint: Origin, form: Form, backend: PackedBackend) -> None:
        self.path = path
        self._file = MappedFile(path)
        facts = _facts_in(self._file)
        for name, value in _facts(checkpoint, form).items():
            if facts.get(name) != value:
                raise CheckpointError(_difference(name, facts.get(name), value))
        matrices = facts.get("matrices")
        if not isinstance(matrices, dict):
            raise CheckpointError("it lists no matrices")
        self.matrices = {name: self._matrix(name, values, form, backend) for name, values in matrices.items()}
        self.tensors = {
            name.removeprefix("tensor/"): self._floats(name)
            for name in self._file.entries
            if name.startswith("tensor/")
        }
        self.tables = {name for name in self._file.entries if name.startswith(TABLE)}
        self._sums = _sums_in(self._file, facts)
        self._memory: memoryview | None = None

    def table(self, name: str) -> NDArray[Any]:
        """Return an embedding table, mapped."""
        self._file.advise(TABLE + name, mmap.MADV_RANDOM)
        return self._file.array(TABLE + name)

    def read(self, allocate: Callable[[int], NDArray[np.uint8]]) -> None:
        """Copy all but the tables into memory of `allocate`, by several threads: the mapping's small pages are slower
        to read. Cached pages are read first, before the memory that is filled pushes them out of the page cache.

        Raises MemoryError, and `CheckpointError` for a file that ends early.
        """
        size = self.path.stat().st_size
        memory = allocate(size)
        view = memory.data

        def copy(pieces: Iterator[tuple[int, int]], flags: int) -> list[tuple[int, int]]:
            """Copy pieces, each thread the next one; return the pieces that are not in the page cache."""
            late = []
            for begin, end in pieces:
                while begin < end:
                    try:
                        num_read = os.preadv(descriptor, [view[begin:end]], begin, flags)
                    except BlockingIOError:
                        late.append((begin, end))
                        break
                    if num_read == 0:
                        raise CheckpointError("it ends early")
                    begin += num_read
            return late

        def share(threads: ThreadPoolExecutor, pieces: list[tuple[int, int]], flags: int) -> list[tuple[int, int]]:
            each = iter(pieces)
            done = [threads.submit(copy, each, flags) for _ in range(READERS)]
            return sorted(piece for late in done for piece in late.result())

        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(READERS) as threads:
                pieces = [
                    (at, min(at + PIECE_BYTES, end))
                    for begin, end in self._beside_tables(size)
                    for at in range(begin, end, PIECE_BYTES)
                ]
                if NO_WAIT:
                    pieces = share(threads, pieces, NO_WAIT)
                share(threads, pieces, 0)
        except OSError as error:
            raise CheckpointError(f"it can not be read: {error}") from error
        finally:
            os.close(descriptor)
        for name, matrix in self.matrices.items():
            begin = self._file.entries[f"matrix/{name}"].begin
            self.matrices[name] = replace(matrix, data=memory[begin : begin + matrix.data.nbytes])
        self._memory = view
        self._file.release()

    def verify(self) -> None:
        """Compare all tensors with their sums, those that `read` has copied in their memory. Raises `CheckpointError`
        naming the first one that has changed since it was written."""
        for name, (now, then) in _sums(self._file, self._sums, self._memory, self.tables).items():
            raise CheckpointError(f"{name} is damaged: its CRC-32 is {now:08x}, and {then:08x} was written")
        self._file.release()

    def _beside_tables(self, size: int) -> Iterator[tuple[int, int]]:
        begin = 0
        for entry in sorted((self._file.entries[name] for name in self.tables), key=lambda entry: entry.begin):
            yield begin, entry.begin
            begin = entry.end
        yield begin, size

    def _matrix(self, name: str, values: Any, form: Form, backend: PackedBackend) -> PackedMatrix:
        entry = self._file.entries.get(f"matrix/{name}")
        if entry is None or not isinstance(values, list) or len(values) != 5:
            raise CheckpointError(f"it lacks the matrix {name}")
        kind, num_in, num_out, group, flag = values
        is_sound = all(type(size) is int and 0 <= size < 2**31 for size in values[1:]) and num_in > 0 and num_out > 0
        scheme = scheme_of_flag(kind, group, flag) if is_sound and isinstance(kind, str) else None
        if scheme is None or kind not in form.layouts:
            raise CheckpointError(f"matrix {name} is said to be {values}")
        # The kernels read so many bytes without a check.
        num_bytes = backend.packed_bytes(scheme, num_out, num_in)
        if entry.dtype != "U8" or entry.shape != (num_bytes,) or entry.begin % LINE:
            raise CheckpointError(f"matrix {name} has {entry.end - entry.begin} bytes, expected {num_bytes}")
        bias = self._floats(f"bias/{name}") if f"bias/{name}" in self._file.entries else None
        if bias is not None and bias.shape != (num_out,):
            raise CheckpointError(f"bias {name} has shape {list(bias.shape)}, expected [{num_out}]")
        order = self._permutation(f"permutation/{name}", num_in)
        return PackedMatrix(name, scheme, self._file.array(f"matrix/{name}"), num_in, num_out, bias, order)

    def _permutation(self, name: str, num_in: int) -> NDArray[np.int32] | None:
        entry = self._file.entries.get(name)
        if entry is None:
            return None
        if (entry.dtype, entry.shape) != ("I32", (num_in,)):
            raise CheckpointError(f"{name} is {entry.dtype} {list(entry.shape)}, expected I32 [{num_in}]")
        order = self._file.array(name)
        if not np.array_equal(np.sort(order), np.arange(num_in)):
            raise CheckpointError(f"{name} does not have each of the {num_in} inputs once")
        return order

    def _floats(self, name: str) -> NDArray[np.float32]:
        if self._file.entries[name].dtype != "F32":
            raise CheckpointError(f"{name} is {self._file.entries[name].dtype}, expected F32")
        return self._file.array(name)


class PackedWriter:
    """Writes a packed file while the model is loaded. Use it in `with`: at the end there is a whole file or none.

    Where the disk cannot be written, a warning is logged, `path` stays None and calls do nothing.
    """

    def __init__(self, checkpoint: Origin, form: Form) -> None:
        self.path: Path | None = None
        self._checkpoint, self._form = checkpoint, form
        self._name = file_name(checkpoint, form)
        self._facts = _facts(checkpoint, form) | {"matrices": {}}
        self._header: dict[str, Any] = {}
        self._sums: list[int] = []
        # Room for the header: every tensor has at most a matrix, a bias, a pad and a line of facts.
        room = 2**16 + sum(1000 + 6 * len(name) for name in checkpoint.names)
        self._data_begin = room + -room % PAGE
        self._end = self._data_begin
        self._temporary = Path()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> PackedWriter:
        cache = cache_directory(self._checkpoint.directory)
        reasons = []
        for directory in (self._checkpoint.directory, cache):
            try:
                if directory == cache:
                    directory.mkdir(parents=True, exist_ok=True)
                self._temporary = directory / f"{self._name}.{secrets.token_hex(4)}.tmp"
                self._file = self._temporary.open("xb")
                return self
            except OSError as error:
                reasons.append(str(error))
        logger.warning("the packed weights can not be saved: %s", "; ".join(reasons))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writing() as file:
            if kind is None and file is not None:
                self._commit(file)
        self._drop()
        if self.path is not None:
            self._remove_old(self.path)

    def matrix(self, name: str, matrix: Packable, bias: NDArray[np.float32] | None = None) -> None:
        """Add a matrix under the name of its layer(s). bias: [num_out]."""
        scheme = matrix.scheme
        facts = [scheme.kind, matrix.num_in, matrix.num_out, scheme.group, native_flag(scheme)]
        self._facts["matrices"][name] = facts
        self._put(f"matrix/{name}", "U8", matrix.packed.reshape(-1), PAGE)
        if bias is not None:
            self._put(f"bias/{name}", "F32", np.asarray(bias, np.float32), LINE)
        if matrix.permutation is not None:
            self._put(f"permutation/{name}", "I32", matrix.permutation, LINE)

    def give_up(self, why: str) -> None:
        """Leave no file, because the model has something that a packed file cannot hold."""
        if self._file is not None:
            logger.warning("the packed weights are not saved: %s", why)
            self._drop()

    def tensor(self, name: str, values: NDArray[np.float32]) -> None:
        """Add a small tensor."""
        self._put(f"tensor/{name}", "F32", np.asarray(values, np.float32), LINE)

    def table(self, name: str, values: NDArray[Any]) -> None:
        """Add an embedding table [V, H] of float16, bfloat16 or float32."""
        names = {stated: code for code, stated in DTYPE_NAMES.items()}
        self._put(TABLE + name, names[type_name(values)], values, PAGE)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[IO[bytes] | None]:
        """Yield the file, or None if there is none. An error of the disk is logged, and leaves no file."""
        try:
            yield self._file
        except OSError as error:
            logger.warning("the packed weights can not be saved: %s", error)
            self._drop()

    def _put(self, name: str, dtype: str, values: NDArray[Any], alignment: int) -> None:
        """Append a tensor, once; before it a pad, because the format allows no holes."""
        with self._writing() as file:
            if file is None or name in self._header:
                return
            if gap := -self._end % alignment:
                self._append(file, f"pad/{len(self._header)}", "U8", np.zeros(gap, np.uint8))
            self._append(file, name, dtype, np.ascontiguousarray(values).reshape(values.shape))

    def _append(self, file: IO[bytes], name: str, dtype: str, values: NDArray[Any]) -> None:
        data = values.reshape(-1).view(np.uint8).data
        file.seek(self._end)
        file.write(data)
        self._sums.append(zlib.crc32(data))
        begin = self._end - self._data_begin
        offsets = [begin, begin + values.nbytes]
        self._header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        self._end += values.nbytes

    def _commit(self, file: IO[bytes]) -> None:
        """Write header and digest, then give the file its name, so that no process ever reads a part of it."""
        begin = self._end - self._data_begin
        self._header[DIGEST] = {"dtype": "U8", "shape": [32], "data_offsets": [begin, begin + 32]}
        self._header["__metadata__"] = {"headrace": json.dumps(self._facts | {"sums": self._sums})}
        text = json.dumps(self._header, separators=(",", ":")).encode()
        room = self._data_begin - 8
        if len(text) > room:
            raise OSError(f"the header of {len(text)} bytes does not fit the {room} that were kept for it")
        text = text.ljust(room)
        file.seek(self._end)
        file.write(hashlib.sha256(text).digest())
        file.seek(0)
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        target = self._temporary.with_name(self._name)
        self._temporary.replace(target)
        _sync_directory(target.parent)
        self.path = target
        logger.info("the packed weights are in %s (%d MiB)", target, self._end >> 20)

    def _remove_old(self, target: Path) -> None:
        """Remove packed files of this form that no longer fit their checkpoint, and temporary files of killed
        processes."""
        for path in target.parent.glob(f"{glob.escape(_stem(self._checkpoint, self._form))}-*.packed*"):
            try:
                is_stale = path.suffix in (".packed", ".measured") and not path.name.startswith(self._name)
                is_leftover = path.suffix == ".tmp" and time.time() - path.stat().st_mtime > LEFTOVER_SECONDS
                if is_stale or is_leftover:
                    path.unlink(missing_ok=True)
            except OSError as error:
                logger.info("%s is of no use any more and can not be removed: %s", path, error)

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()  # may flush, to a full disk
        except OSError as error:
            logger.debug("%s: %s", self._temporary, error)
        self._temporary.unlink(missing_ok=True)


def damage_of(path: Path) -> dict[str, int]:
    """Return the sums of all tensors that are damaged, in all packed files of the model at `path`. Reads the files."""
    directory = path.parent if path.is_file() else path
    damaged: dict[str, int] = {}
    for folder in (directory, cache_directory(directory)):
        for each in sorted(folder.glob("headrace-*.packed")):
            try:
                file = MappedFile(each)
                sums = _sums(file, _sums_in(file, _facts_in(file)))
            except CheckpointError as error:
                logger.info("%s is not looked at: %s", each, error)
                continue
            damaged |= {f"{each.name} {name}": now for name, (now, _) in sums.items()}
    return damaged


def _facts_in(file: MappedFile) -> dict[str, Any]:
    """Return the facts in a header that has not changed. Raises `CheckpointError`."""
    entry = file.entries.get(DIGEST)
    if entry is None or (entry.dtype, entry.shape) != ("U8", (32,)):
        raise CheckpointError("it is no packed file of headrace")
    if file.array(DIGEST).tobytes() != hashlib.sha256(file.header).digest():
        raise CheckpointError("its header has been changed or damaged")
    return foreign.parse_object(file.metadata.get("headrace", "").encode(), "its metadata", foreign.HEADER)


def _sums_in(file: MappedFile, facts: dict[str, Any]) -> list[int]:
    """Return the sums that a header has, one for each tensor but the digest. Raises `CheckpointError`."""
    sums = facts.get("sums")
    if not isinstance(sums, list) or len(sums) != len(file.entries) - 1 or not all(type(each) is int for each in sums):
        raise CheckpointError("it has no sum for each tensor")
    return sums


def _sums(
    file: MappedFile, expected: list[int], memory: memoryview | None = None, mapped: Collection[str] = ()
) -> dict[str, tuple[int, int]]:
    """Return by name the sum of each tensor whose sum is another than expected, and the expected one. memory: a copy
    of the file without the tensors `mapped`."""
    entries = {name: entry for name, entry in file.entries.items() if name != DIGEST}

    def sum_of(name: str) -> int:
        data = memoryview(file.buffer) if memory is None or name in mapped else memory
        return zlib.crc32(data[entries[name].begin : entries[name].end])

    with ThreadPoolExecutor(READERS) as threads:
        sums = zip(entries, threads.map(sum_of, entries), expected, strict=True)
        return {name: (now, then) for name, now, then in sums if now != then}


def _facts(checkpoint: Origin, form: Form) -> dict[str, Any]:
    """Return the metadata that a packed file must have to be used."""
    return {
        "container": CONTAINER,
        "method": METHOD,
        "quantization": form.quantization,
        "dtype": form.dtype,
        "layouts": form.layouts,
        **fingerprint(checkpoint),
    }


def _difference(name: str, value: Any, expected: Any) -> str:
    if name in ("files", "config.json"):
        if isinstance(value, dict) and isinstance(expected, dict):
            changed = [file for file in sorted(value.keys() | expected.keys()) if value.get(file) != expected.get(file)]
            name = ", ".join(changed) or name
        return f"it was packed before {name} changed"
    return f"its {name} is {value!r:.80}, expected {expected!r:.80}"


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
