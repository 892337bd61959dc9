"""The list of problems that the stage `prove` checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu import expert_problems
from bench.gpu.cache_problems import attention_problem, rope_problem
from bench.gpu.drawing import carry_problem, report_problem
from bench.gpu.head_problems import by_head_problem, latent_problem, pieces_problem, xielu_problem
from bench.gpu.problems import (
    HALVES,
    ROWS,
    Problem,
    best_problem,
    codes_problem,
    eight_problem,
    experts_problem,
    linear_problem,
    linear_ws_problem,
    norm_problem,
    rows_problem,
    specialised,
)
from bench.gpu.state_problems import OPS, softplus_problem, state_problem
from headrace.backends.base import Heads
from headrace.backends.cuda.cache import STORED
from headrace.backends.states import StateHeads
from headrace.quant.schemes import Scheme


def shown(value: Any) -> str:
    """An argument in the name of a problem."""
    if isinstance(value, Heads):
        return f"{value.num_heads}/{value.num_kv_heads}x{value.head_dim}{f':{value.value_dim}' * bool(value.value_dim)}"
    if isinstance(value, StateHeads):
        return f"{value.num_heads}/{value.num_key_heads}x{value.key_dim}x{value.value_dim}"
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


def of_many_rows(toy: bool) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """Both sides of tiles of 64 and 128 rows; spans nested and one; ends of K and of the outputs within tiles."""
    if specialised(torch.empty(8, 8, dtype=torch.bfloat16), False):
        # A matrix smaller than a tile, in each dimension.
        yield case(linear_ws_problem, 66, 24, 40, torch.bfloat16)
        for num_rows in (5,) if toy else (65, 100, 130, 256, 700, 2048):
            yield case(linear_ws_problem, num_rows, 200, 1808, torch.bfloat16, extras=True)
            yield case(linear_ws_problem, num_rows, 144, 600, torch.bfloat16, is_gated=True)
            if not toy:
                yield case(linear_ws_problem, num_rows, 660, 1800, torch.float16, is_gated=True, extras=True)
                yield case(linear_ws_problem, num_rows, 330, 4096, torch.bfloat16)


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
    yield from of_many_rows(toy)
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
    yield from of_heads(toy)
    yield case(experts_problem, 9, 6, 2, 64, 48)
    if not toy:
        yield case(experts_problem, 200, 32, 4, 512, 384)
    for op in OPS:
        yield case(state_problem, op, (1, 5, 8), StateHeads(4, 2, 20, 12), torch.float32)
        if not toy:
            for state_heads in (StateHeads(8, 4, 128, 128), StateHeads(8, 2, 256, 64)):
                yield case(state_problem, op, (1, 70, 300, 1), state_heads, torch.bfloat16)
    yield case(softplus_problem, 5, 300)
    widths = (64, 48) if toy else (512, 384)
    few, many = (5, 9) if toy else (7, 300)
    for name in expert_problems.ROUTINGS:
        yield case(expert_problems.routing_problem, few if toy else many, name)
    for name in expert_problems.FORMS:
        yield case(expert_problems.form_problem, few, name, *widths)
        if not toy:
            yield case(expert_problems.form_problem, many, name, *widths)
    for scheme in (*schemes, Scheme("i4", 64, True), Scheme("i4", 16, book="e2m1")):
        for num_rows in (few,) if toy else (few, many):
            yield case(expert_problems.expert_codes_problem, num_rows, scheme, *widths)
    for grouped in (False, True):
        for num_rows in (few,) if toy else (few, many):
            yield case(expert_problems.expert_8bit_problem, num_rows, grouped, *widths)
    yield case(best_problem, 5, 1000 if toy else 128256)
    for num_rows in (5, 300):
        yield case(carry_problem, num_rows)
        yield case(report_problem, num_rows)


def of_heads(toy: bool) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """Forms of attention beside the causal one over plain keys, and operators on pieces of a row."""
    bf16, steps = torch.bfloat16, [(40, 30), (130, 1)] if toy else [(0, 200), (1700, 1), (1022, 5), (900, 33), (512, 1)]
    sinks, values, latent = Heads(4, 2, 16), Heads(4, 2, 24, 40), Heads(20, 1, 40, 24)
    large = [(latent, "bfloat16", bf16), (latent, "int8", bf16), (latent, "float32", torch.float32)]
    if not toy:
        sinks, values, mla = Heads(64, 8, 64), Heads(8, 2, 128, 256), Heads(40, 1, 576, 512)
        large = [(mla, kind, bf16) for kind in ("bfloat16", "int8", "fp8_e4m3")]
        large += [(Heads(32, 1, 320, 256), "bfloat16", bf16), (Heads(20, 1, 576, 512), "float32", torch.float32)]
        yield case(attention_problem, steps, Heads(16, 2, 512), "bfloat16", bf16)
    yield case(attention_problem, steps, sinks, "bfloat16", bf16, 128, sinks=True)
    yield case(attention_problem, steps, sinks, "bfloat16", bf16, 0, 30.0, sinks=True)
    yield case(attention_problem, steps, sinks, "bfloat16", bf16, -60 if toy else -700)
    yield case(attention_problem, [(0, 70), (0, 9)] if toy else [(0, 700), (0, 13)], sinks, "bfloat16", bf16, ahead=600)
    yield case(attention_problem, steps, values, "bfloat16", bf16)
    for heads, kind, dtype in large:
        yield case(attention_problem, steps, heads, kind, dtype, shared=True)
        yield case(latent_problem, 21, heads, kind, dtype, True)
    yield case(latent_problem, 21, large[0][0], "bfloat16", bf16, False)
    for dtype in (bf16, torch.float32):
        for weights in range(3):
            yield case(pieces_problem, 5, 3 if toy else 32, 20 if toy else 128, dtype, weights)
        yield case(xielu_problem, 5, 200 if toy else 3000, dtype)
        yield case(by_head_problem, 5, 3, 40, 70, 9, dtype)
    if not toy:
        for num_rows in (5, 100):
            yield case(by_head_problem, num_rows, 16, 128, 512, 64, bf16)
            yield case(by_head_problem, num_rows, 16, 512, 128, 0, bf16)
