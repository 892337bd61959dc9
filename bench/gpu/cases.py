"""The list of problems that the stage `prove` checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.cache_problems import attention_problem, rope_problem
from bench.gpu.drawing import carry_problem, report_problem
from bench.gpu.problems import (
    HALVES,
    ROWS,
    Problem,
    best_problem,
    codes_problem,
    eight_problem,
    experts_problem,
    linear_problem,
    norm_problem,
    rows_problem,
)
from headrace.backends.base import Heads
from headrace.backends.cuda.cache import STORED
from headrace.quant.schemes import Scheme


def shown(value: Any) -> str:
    """An argument in the name of a problem."""
    if isinstance(value, Heads):
        return f"{value.num_heads}/{value.num_kv_heads}x{value.head_dim}"
    if isinstance(value, Scheme):
        return f"{value.kind}{value.book}-g{value.group}{'-min' * value.has_min}"
    if isinstance(value, list):
        return ",".join(f"{first}+{count}" for first, count in value)
    return str(value).removeprefix("torch.")


def case(make: Callable[..., Problem], *arguments: Any, **options: Any) -> tuple[str, Callable[[], Problem]]:
    """Return a problem's name and what makes it."""
    words = [shown(value) for value in arguments]
    words += [f"{name}={value}" for name, value in options.items() if value]
    return f"{make.__name__.removesuffix('_problem')} {' '.join(words)}", functools.partial(make, *arguments, **options)


def problems(toy: bool) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """The names of all problems, with what makes them; few and small ones if `toy`."""
    for dtype in (*HALVES, torch.float32):
        yield case(linear_problem, 5, 80, 600, dtype)
        yield case(linear_problem, 3, 96, 200, dtype, is_gated=True, extras=True)
    yield case(linear_problem, 5, 64, 1100, torch.bfloat16)
    if not toy:
        for num_rows in (1, 17, 130, 700):
            yield case(linear_problem, num_rows, 192, 4096, torch.bfloat16, extras=True)
            yield case(linear_problem, num_rows, 1024, 2048, torch.bfloat16, is_gated=True)
    schemes = [Scheme("i4", 64), Scheme("i4", 32), Scheme("i4", 128, True), Scheme("i4", 64, book="nf4")]
    schemes += [Scheme("i4", 32, book="e2m1"), Scheme("i8"), Scheme("i8", 128)]
    shape = (5, 80, 640) if toy else (37, 400, 2176)
    for scheme in schemes:
        for wide in (False, True):
            yield case(codes_problem, *shape, scheme, torch.bfloat16, wide)
        yield case(codes_problem, *shape, scheme, torch.float16, False)
    for grouped in (False, True):
        yield case(eight_problem, 5, 130, 400, grouped)
        if not toy:
            yield case(eight_problem, 150, 384, 4096, grouped)
    for dtype in (torch.bfloat16, torch.float32):
        for width in (72, 1000) if toy else (72, 4096, 5376):
            yield case(norm_problem, 5, width, dtype, False, False)
            yield case(norm_problem, 5, width, dtype, True, True)
        for name in ROWS:
            yield case(rows_problem, name, 5, 200 if toy else 3000, dtype)
    for stored, as_stored in STORED.items():
        dtype = as_stored if as_stored in (torch.float16, torch.float32) else torch.bfloat16
        yield case(rope_problem, 21, Heads(6, 2, 24), stored, dtype)
        yield case(rope_problem, 21, Heads(4, 2, 16), stored, dtype, whole=True)
        yield case(attention_problem, [(500, 30), (60, 1), (5, 18)], Heads(4, 2, 16), stored, dtype)
    if not toy:
        mixed = [(0, 200), (1700, 1), (1022, 5), (511, 1), (512, 1), (900, 33)]
        for heads in (Heads(32, 8, 128), Heads(32, 8, 64), Heads(8, 8, 256), Heads(12, 2, 80)):
            yield case(attention_problem, mixed, heads, "bfloat16", torch.bfloat16)
        yield case(attention_problem, mixed, Heads(8, 4, 128), "bfloat16", torch.bfloat16, 600, 30.0)
        yield case(attention_problem, mixed, Heads(8, 2, 128), "int8", torch.bfloat16, partials=0)
    yield case(attention_problem, [(40, 30), (130, 1)], Heads(4, 2, 16), "bfloat16", torch.bfloat16, 40, 3.0)
    yield case(experts_problem, 9, 6, 2, 64, 48)
    if not toy:
        yield case(experts_problem, 200, 32, 4, 512, 384)
    yield case(best_problem, 5, 1000 if toy else 128256)
    for num_rows in (5, 300):
        yield case(carry_problem, num_rows)
        yield case(report_problem, num_rows)
