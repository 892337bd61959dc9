"""`python -m headrace.quantize.samples SECONDS`: reads single groups of weights from a model's files, rounds them to
fewer bits, and measures the machine's limits: for the inspector, in a separate process (`text.bounded`).

The server's process imports no numpy and never maps the weights. Rounding is the same as in the engine and in `headrace
quantize`: bfloat16, int8 and int4 as `--quantization` makes them, and GGUF's Q2_K. Replies are plain dicts in the form
of `insight.numbers`.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace import gguf, hub
from headrace.backends.native import native
from headrace.checkpoint.gguf_parts import FLOATS, Part, float_rows, raw_rows
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.quant import rtn
from headrace.quant.arrays import PLAIN, bits_of, cast, floats, type_name
from headrace.quant.base import QWeight, find_format
from headrace.quant.formats import gguf_blocks
from headrace.quant.schemes import K_BLOCK, Scheme
from headrace.quant.threads import num_cores
from headrace.quantize.gguf_encode import encode
from headrace.text.bounded import serve

GROUP = 128
MAX_NAMES = 48
MAX_MEMORY = 2**41
"""Bytes of address space: mapped files count in it. The memory that is used is some rows, or one layer's codes."""
PROBE_BYTES = 2**28
PROBE_SECONDS = 0.02
F32 = NDArray[np.float32]

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk)\.(\d+)\.")
PARTS = re.compile(r"(.*)\.(?:weight|qweight|weight_packed)")


class Job(msgspec.Struct, frozen=True):
    """A request: the names of some weights, or group number `group` of the weight `name`; without a `path`, the limits
    of the machine."""

    path: str = ""
    name: str = ""
    group: int = 0


def names_of(path: Path) -> list[str]:
    """Return the names of the matrices in the first, middle and last layer, and of those outside of layers."""
    if path.is_file():
        shapes = {name: len(info.shape) for name, info in gguf.read(path).tensors.items()}
    else:
        checkpoint = MappedCheckpoint(path)
        shapes = {name: len(checkpoint.entry(name).shape) for name in checkpoint.names}
    matrices = [
        (match[1], name) for name, num in sorted(shapes.items()) if num == 2 and (match := PARTS.fullmatch(name))
    ]
    numbers = sorted({int(match[1]) for _, name in matrices if (match := LAYER.search(name))})
    layers = {numbers[i] for i in (0, len(numbers) // 2, -1)} if numbers else set()
    stems = [stem for stem, name in matrices if not (match := LAYER.search(name)) or int(match[1]) in layers]
    return stems[:MAX_NAMES]


def rows_of(path: Path, name: str) -> tuple[QWeight, str]:
    """Return the matrix `name`, of which little is in memory yet, and the form in which it is stored."""
    if path.is_file():
        file = gguf.read(path)
        info = file.tensors.get(f"{name}.weight")
        if info is None or len(info.shape) != 2:
            raise RequestError("name", name, "one of the names that this path lists")
        raw = raw_rows(file, Part(info, tuple(info.shape)))
        return _GGUFRows(raw, info.type), info.type
    values = hub.read_config(path)
    config, checkpoint = values.get("quantization_config"), MappedCheckpoint(path)
    tensors = _Tensors(checkpoint)
    plain = f"{name}.weight"
    if tensors.has(plain) and type_name(tensors(plain)) in PLAIN and tensors(plain).ndim == 2:
        return QWeight(tensors(plain)), type_name(tensors(plain))
    if not any(tensors.has(f"{name}.{part}") for part in ("weight", "qweight", "weight_packed", "_weight_qdata")):
        raise RequestError("name", name, "one of the names that this path lists")
    weight = find_format(config).read(tensors, name, config or {})
    return weight, f"{(config or {}).get('quant_method')}, {weight.bits} bits"


class _Tensors:
    """`quant.base.Tensors` of a checkpoint."""

    def __init__(self, checkpoint: MappedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._names = frozenset(checkpoint.names)

    def __call__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise RequestError("name", name, "that of a tensor in the checkpoint")
        return self._checkpoint.array(name)

    def has(self, name: str) -> bool:
        return name in self._names

    def notes(self, name: str) -> Mapping[str, str]:
        return self._checkpoint.file(name).metadata


class _GGUFRows(QWeight):
    """Rows of blocks or floats of a GGUF file, read when they are taken."""

    def __init__(self, raw: NDArray[np.uint8], kind: str) -> None:
        object.__setattr__(self, "codes", raw)
        object.__setattr__(self, "bits", kind)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self._read(0, 1).shape[1]

    def rows(self, first: int, last: int) -> QWeight:
        return self._read(first, last)

    def _read(self, first: int, last: int) -> QWeight:
        raw, kind = self.codes[first:last], str(self.bits)
        return QWeight(float_rows(raw, kind)) if kind in FLOATS else gguf_blocks.decode(kind, raw)


def group_of(path: Path, name: str, group: int) -> dict[str, Any]:
    """Return `GROUP` weights of one row, exact as float32, and their values in fewer bits.

    Raises `RequestError` for a name or a group that there is not, `CheckpointError` for damaged files.
    """
    matrix, stored = rows_of(path, name)
    num_rows, num_in = matrix.shape
    num_each = max(1, num_in // GROUP)
    if not 0 <= group < num_rows * num_each:
        raise RequestError("group", group, f"from 0 to {num_rows * num_each - 1}, for {name}")
    row, first = group // num_each, group % num_each * GROUP
    weights: F32 = floats(matrix.rows(row, row + 1).dequantize())
    values = weights[:, first : first + GROUP]
    return {
        "name": name,
        "group": group,
        "num_groups": num_rows * num_each,
        "row": row,
        "column": first,
        "stored": stored,
        "is_plain": stored in PLAIN or stored in FLOATS,
        "values": values[0].tolist(),
        "roundings": [
            _rounded("bfloat16", 16, values, bits_of(cast(values, "bfloat16")), floats(cast(values, "bfloat16"))),
            _by_codes("int8-g128", 8, values, rtn.quantise(values, Scheme("i8", GROUP), name)),
            _by_codes("int4-g64", 4, values, rtn.quantise(values, Scheme("i4", 64), name)),
            _by_codes("Q2_K", 2, values, _q2_k(weights, first, name)),
        ],
    }


def _q2_k(weights: F32, first: int, name: str) -> QWeight:
    """Return the weights from `first` on as they are in their block of Q2_K; a short row is filled up with zeros."""
    begin = first // K_BLOCK * K_BLOCK
    block = np.zeros((1, K_BLOCK), np.float32)
    part = weights[:, begin : begin + K_BLOCK]
    block[:, : part.shape[1]] = part
    weight = gguf_blocks.decode("Q2_K", encode("Q2_K", block, name))
    groups = slice((first - begin) // weight.group, (first - begin + GROUP) // weight.group)
    scales, mins = weight.scales, weight.mins
    return QWeight(
        weight.codes[:, first - begin : min(first - begin + GROUP, part.shape[1])],
        None if scales is None else scales[:, groups][:, : -(-min(GROUP, part.shape[1]) // weight.group)],
        mins=None if mins is None else mins[:, groups][:, : -(-min(GROUP, part.shape[1]) // weight.group)],
        group=weight.group,
        bits=2,
    )


def _by_codes(form: str, bits: int, values: F32, weight: QWeight) -> dict[str, Any]:
    about = _rounded(form, bits, values, weight.codes, weight.dequantize())
    scales = [] if weight.scales is None else weight.scales[0].tolist()
    zeros = [] if weight.zeros is None else np.asarray(weight.zeros)[0].tolist()
    mins = [] if weight.mins is None else weight.mins[0].tolist()
    return about | {"group_size": weight.group, "scales": scales, "zeros": zeros, "minima": mins}


def _rounded(form: str, bits: int, values: F32, codes: NDArray[Any], numbers: F32) -> dict[str, Any]:
    error = math.sqrt(float(np.mean((values.astype(np.float64) - numbers) ** 2)))
    size = math.sqrt(float(np.mean(values.astype(np.float64) ** 2)))
    return {
        "bits": bits,
        "format": form,
        "codes": codes[0].tolist(),
        "values": numbers[0].tolist(),
        "rms_error": error,
        "relative_error": error / size if size else 0.0,
    }


def limits_of_machine(num_bytes: int = PROBE_BYTES, seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """Return bytes a second that all cores read, best of some passes over `num_bytes`, and operations a second of the
    native kernels' inner loops, for about `seconds` each; none of these where the native core is missing."""
    buffer = np.ones(num_bytes // 8, np.int64)
    pieces = np.array_split(buffer, num_cores())
    best = math.inf
    with ThreadPoolExecutor(len(pieces)) as pool:
        for _ in range(4):
            start = time.perf_counter()
            list(pool.map(np.ndarray.max, pieces))
            best = min(best, time.perf_counter() - start)
    library, _ = native()
    peaks: dict[str, float] = {}
    for row in library.limits(0, seconds, 2**20) if library is not None else ():
        if row["what"] != "read":
            peaks[row["what"]] = max(peaks.get(row["what"], 0.0), row["most"])
    return {"bandwidth": buffer.nbytes / best, "peaks": peaks}


def answer(body: bytes) -> bytes:
    """Do one job. A mistake of the caller comes back as {"error": [field, bound]}."""
    job = msgspec.msgpack.decode(body, type=Job)
    reply: dict[str, Any]
    try:
        if not job.path:
            reply = limits_of_machine()
        elif not job.name:
            reply = {"names": names_of(Path(job.path))}
        else:
            reply = group_of(Path(job.path), job.name, job.group)
    except RequestError as error:
        reply = {"error": [error.field, error.bound]}
    except (HeadraceError, OSError, ValueError) as error:
        reply = {"error": ["name", f"a weight that can be read: {error}"]}
    return msgspec.msgpack.encode(reply)


if __name__ == "__main__":
    serve(answer, float(sys.argv[1]), MAX_MEMORY)
