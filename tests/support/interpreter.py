"""Triton's interpreter, mended: bfloat16 and fp8 round as on the GPU, and programs run in any order.

As released (3.6 to 3.9), the interpreter multiplies the bit patterns of bfloat16 as integers, truncates where the GPU
rounds, and flushes fp8's subnormal numbers. Here conversions are torch's, and `tl.dot` widens its operands first.
Arithmetic on bfloat16 stays wrong, so kernels widen after every load; inline assembly never runs. The kernels' tests
call it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from headrace.backends.cuda.launch import Launch

E4M3_MOST = 448.0

DEPTH = 16
"""Products that a tensor core sums before it rounds."""

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
STORED = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32, "fp8e4nv": np.uint8, "fp8e5": np.uint8}
"""What the interpreter's arrays hold for each type."""

_convert_float = interpreter._convert_float
_numpy_dtype_of = interpreter._get_np_dtype
_type_of_values = core._type_for_tuple_values
_without_constexpr = core._unwrap_shape


def run_interpreted(launch: Launch, order: Callable[[int], list[int]] | None = None) -> None:
    """Run a launch in the interpreter, on the CPU, without inline assembly. `order`: of the programs, from their
    number."""
    tiles = {name: 0 if name == "ASM" else value for name, value in launch.config.tiles.items()}
    interpret(launch.kernel.jit, launch.grid, dict(launch.arguments) | tiles, order)


def interpret(
    jit: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], order: Callable[[int], list[int]] | None = None
) -> None:
    """Run the kernel `jit` over `grid` on the CPU, whatever TRITON_INTERPRET says.

    `order` gives the order in which the programs run, from their number; the default is ascending. Not for use by two
    threads at once.
    """
    with mended(), _program_order(grid, order):
        interpreter.InterpretedFunction(jit.fn)[grid](**arguments)


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Mend the interpreter while the context lasts. The compiler is left alone, so one process may do both.

    The language is patched here, once, and not at each call of a function; types of shapes, which each operation makes
    anew, are kept. The rest computes the same without it, three times as long.
    """
    patched = [
        (interpreter, "_convert_float", convert_float),
        (interpreter, "_get_np_dtype", _numpy_dtype),
        (interpreter.InterpreterBuilder, "create_dot", dot),
        (JITFunction, "__call__", _call),
        (tl, "map_elementwise", lambda function, *x: function(*x)),
        (core, "_type_for_tuple_values", _type_of),
        (core, "_unwrap_shape", _shape),
    ]
    before = [getattr(owner, name) for owner, name, _ in patched]
    index = interpreter._patch_lang_tensor
    try:
        for owner, name, value in patched:
            setattr(owner, name, value)
        interpreter._patch_lang_tensor = _with_index(index)
        # Kernels name the language `tl`, and the functions of its library `core`.
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
        try:
            yield
        finally:
            scope.restore()
    finally:
        for (owner, name, _), value in zip(patched, before, strict=True):
            setattr(owner, name, value)
        interpreter._patch_lang_tensor = index


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function that a kernel calls."""
    rewritten = interpreter.InterpretedFunction.rewritten_fn.get(self.fn)
    return (rewritten or interpreter.InterpretedFunction(self.fn).rewrite())(*args, **kwargs)


def _numpy_dtype(dtype: Any) -> Any:
    scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    if scalar.name not in _numpy_dtypes:
        _numpy_dtypes[scalar.name] = _numpy_dtype_of(dtype)
    return _numpy_dtypes[scalar.name]


def _type_of(values: Sequence[Any], fields: Sequence[str] | None = None) -> Any:
    if fields is not None or not _are_ints(values):
        return _type_of_values(values, fields)
    shape = tuple(values)
    if shape not in _types:
        _types[shape] = _type_of_values(values)
    return _types[shape]


def _shape(shape: Any) -> list[int]:
    values = shape.values if isinstance(shape, core.tuple) else shape
    return list(values) if _are_ints(values) else _without_constexpr(shape)


def _are_ints(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int for value in values)


_numpy_dtypes: dict[str, Any] = {}
_types: dict[tuple[int, ...], Any] = {}


def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert stored numbers as the GPU does: to the nearest, ties to even; to fp8 e4m3 within its largest number."""
    if source.name not in DTYPES or target.name not in DTYPES or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        return _convert_float(data, source, target, rounding)
    numbers = widened(data, source.name)
    if target.name == "fp8e4nv":
        numbers = np.clip(numbers, -E4M3_MOST, E4M3_MOST)
    rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(DTYPES[target.name])
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[rounded.element_size()]
    return rounded.view(bits).numpy().reshape(data.shape)


def dot(self: Any, a: Any, b: Any, c: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """`tl.dot`: products of widened numbers, DEPTH of them added to the accumulator before each rounding.

    So tiles of other sizes give the same bits, as they are believed to do on the GPU (MMA-Sim, arXiv 2511.10909).
    """
    left, right = (widened(x.data, x.dtype.scalar.name) for x in (a, b))
    total = c.data
    if total.dtype != np.float32 or left.shape[-1] % DEPTH:
        return interpreter.TensorHandle(np.matmul(left, right, dtype=total.dtype) + total, c.dtype.scalar)
    for first in range(0, left.shape[-1], DEPTH):
        piece = slice(first, first + DEPTH)
        # Products are exact in float64, and so in effect is their sum, whatever its order.
        sums = np.matmul(left[..., piece], right[..., piece, :], dtype=np.float64)
        total = (total + sums).astype(np.float32)
    return interpreter.TensorHandle(total, c.dtype.scalar)


def widened(data: Any, name: str) -> Any:
    """Return stored numbers of the floating type `name` as float32; arrays of other types as they are."""
    if name not in DTYPES:
        return data
    if name in ("fp16", "fp32"):
        return np.ascontiguousarray(data).view(STORED[name]).astype(np.float32)
    stored = np.ascontiguousarray(data).view(STORED[name])
    return torch.from_numpy(stored.copy()).view(DTYPES[name]).float().numpy().reshape(data.shape)


def _with_index(patch: Callable[..., Any]) -> Callable[..., Any]:
    """numpy 2.4 refuses int() of an array of one element, which loops with bounds from memory need."""

    def patch_tensor(tensor: Any, *rest: Any) -> Any:
        result = patch(tensor, *rest)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        return result

    return patch_tensor


@contextlib.contextmanager
def _program_order(grid: tuple[int, ...], order: Callable[[int], list[int]] | None) -> Iterator[None]:
    if order is None:
        yield
        return
    places = list(itertools.product(*(range(size) for size in (*grid, 1, 1)[:3])))
    turns = iter([places[i] for i in order(len(places))])
    builder = interpreter.InterpreterBuilder
    set_place = builder.set_grid_idx
    builder.set_grid_idx = lambda self, x, y, z: set_place(self, *next(turns))
    try:
        yield
    finally:
        builder.set_grid_idx = set_place
