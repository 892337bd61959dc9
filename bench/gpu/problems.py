"""Small problems for every kernel, with ragged shapes: tensors, the launches over them, and the result in float64.

Tensors are made on the CPU from a fixed seed and moved, so the GPU and the twin compute the same. Outputs begin as NaN
(integers as their largest number), so what is not written shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.weights import random_codes
from headrace.backends.base import Activation, Heads, RopeTable
from headrace.backends.cuda.cache import STORED, LayerCache
from headrace.backends.cuda.kernels import attention as paged
from headrace.backends.cuda.kernels import (
    best,
    experts,
    linear,
    linear_8bit,
    linear_codes,
    norm,
    rope_store,
    rows,
    spans,
)
from headrace.backends.cuda.launch import Config, Launch
from headrace.quant.base import QWeight
from headrace.quant.schemes import BOOKS, Scheme

Tensors = dict[str, Tensor]
PROGRAMS = 132
HALVES = (torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of the largest number: sums in another order, and one rounding to the dtype."""


@dataclass(frozen=True)
class Problem:
    """make: returns the launches over tensors on any device, of a config or the default one.

    outputs: names of the tensors that are written. exact: the results in float64, of those that have one.
    configs: all that suit the problem; each gives the same bits.
    """

    tensors: Tensors
    outputs: tuple[str, ...]
    make: Callable[[Tensors, Config | None], Sequence[Launch]]
    exact: Tensors = field(default_factory=dict)
    configs: tuple[Config, ...] = ()
    tolerance: float | None = None

    def fresh(self, device: str) -> Tensors:
        """Return copies of the tensors on a device."""
        return {name: tensor.to(device, copy=True) for name, tensor in self.tensors.items()}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype)


def sizes(num_rows: int) -> Tensor:
    return torch.full((3,), num_rows, dtype=torch.int32)


def gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def scratch(needed: tuple[int, int], device: torch.device) -> linear.Scratch:
    partial, arrived = (torch.zeros(max(n, 1), device=device) for n in needed)
    return linear.Scratch(partial.fill_(torch.nan), arrived.int())


def linear_problem(
    num_rows: int, num_out: int, num_in: int, dtype: torch.dtype, is_gated: bool = False, extras: bool = False
) -> Problem:
    """extras: with bias, residual and the scales of rows."""
    x, w = normal(num_rows, num_in, dtype=dtype), normal(num_out, num_in, seed=1, dtype=dtype)
    width = num_out // 2 if is_gated else num_out
    tensors = {"x": x, "w": w, "sizes": sizes(num_rows), "out": poisoned(num_rows + 1, width, dtype=dtype)}
    exact = x.double() @ w.double().t()
    if extras:
        tensors |= {"scale": normal(num_rows, seed=2).abs(), "bias": normal(num_out, seed=3)}
        exact = exact * tensors["scale"].double()[:, None] + tensors["bias"].double()
    if is_gated:
        exact = gated(exact)
    if extras:
        tensors["residual"] = normal(num_rows, width, seed=4, dtype=dtype)
        exact = exact + tensors["residual"].double()

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        chosen = config or linear.default(t["w"], num_rows + 1, is_gated)
        needed = linear.scratch_numbers(t["w"], num_rows + 1, chosen)
        options: dict[str, Any] = {"gated": is_gated, "activation": "silu" if is_gated else None}
        options |= {name: t.get(name) for name in ("scale", "bias", "residual")}
        shared = scratch(needed, t["x"].device) if any(needed) else None
        return [
            linear.linear(
                t["x"], t["w"], t["out"], t["sizes"], 0, num_rows + 1, num_programs=PROGRAMS, scratch=shared,
                config=chosen, **options,
            )
        ]  # fmt: skip

    configs = tuple(
        c for c in linear.KERNEL.configs
        if linear.suits(c, w) and (not c.capabilities or 90 in c.capabilities)
    )  # fmt: skip
    return Problem(tensors, ("out",), make, {"out": exact}, configs)


def book_codes(num_out: int, num_in: int, scheme: Scheme) -> QWeight:
    weight = random_codes(num_out, num_in, scheme, "cpu")
    book = torch.tensor(BOOKS[scheme.book], dtype=torch.float32)
    return replace(weight, zeros=None, codebook=book, scales=None if weight.scales is None else weight.scales / 16)


def codes_problem(num_rows: int, num_out: int, num_in: int, scheme: Scheme, dtype: torch.dtype, wide: bool) -> Problem:
    torch.manual_seed(1)
    weight = book_codes(num_out, num_in, scheme) if scheme.book else random_codes(num_out, num_in, scheme, "cpu")
    packed = linear_codes.pack(weight, scheme, dtype)
    x = normal(num_rows, num_in, dtype=dtype)
    tensors = {"x": x, "codes": packed.codes, "scales": packed.scales, "sizes": sizes(num_rows)}
    tensors |= {} if packed.mins is None else {"mins": packed.mins}
    tensors["out"] = poisoned(num_rows + 1, num_out, dtype=dtype)

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        here = replace(packed, codes=t["codes"], scales=t["scales"], mins=t.get("mins"))
        space = None
        if wide:
            space = torch.full((num_out * num_in,), torch.nan, dtype=dtype, device=t["x"].device)
            plain = space.view(num_out, num_in)
            chosen = config or linear.default(plain, num_rows + 1)
            needed = linear.scratch_numbers(plain, num_rows + 1, chosen)
        else:
            chosen = config or linear_codes.default(here, num_rows + 1, False)
            needed = linear_codes.scratch_numbers(here, num_rows + 1, chosen)
        shared = scratch(needed, t["x"].device) if any(needed) else None
        return linear_codes.linear_codes(
            t["x"], here, t["out"], t["sizes"], 0, num_rows + 1, num_programs=PROGRAMS, scratch=shared, wide=space,
            config=chosen,
        )  # fmt: skip

    exact = x.double() @ packed.dense().double().t()
    configs = () if wide else linear_codes.KERNEL.configs[: 6 if dtype == torch.bfloat16 else 2]
    return Problem(tensors, ("out",), make, {"out": exact}, configs)


def eight_problem(num_rows: int, num_out: int, num_in: int, grouped: bool) -> Problem:
    kind = torch.float8_e4m3fn
    x, weight = normal(num_rows, num_in, dtype=torch.bfloat16), normal(num_out, num_in, seed=1)
    pieces = -(-num_in // linear_8bit.PIECE)
    shape = (num_out, pieces if grouped else 1, -1)
    padded = F.pad(weight, (0, -num_in % linear_8bit.PIECE)).view(shape)
    w_scales = padded.abs().amax(2) / linear_8bit.MOST
    codes = (padded / w_scales[:, :, None]).flatten(1)[:, :num_in].to(kind)
    tensors = {
        "x": x, "weight": codes, "w_scales": w_scales, "sizes": sizes(num_rows),
        "rounded": torch.zeros(num_rows + 1, num_in, dtype=kind),
        "x_scales": poisoned(pieces if grouped else 1, num_rows + 1, dtype=torch.float32),
        "out": poisoned(num_rows + 1, num_out, dtype=torch.bfloat16),
    }  # fmt: skip

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        chosen = config or linear_8bit.default(t["weight"], num_rows + 1, False, grouped)
        needed = linear.scratch_numbers(t["weight"], num_rows + 1, chosen)
        shared = scratch(needed, t["x"].device) if any(needed) else None
        return [
            linear_8bit.round_rows(
                t["x"], t["rounded"], t["x_scales"], t["sizes"], 0, num_rows + 1, grouped=grouped
            ),
            linear_8bit.linear_8bit(
                t["rounded"], t["x_scales"], t["weight"], t["w_scales"], t["out"], t["sizes"], 0, num_rows + 1,
                num_programs=PROGRAMS, scratch=shared, config=chosen,
            ),
        ]  # fmt: skip

    group = linear_8bit.PIECE if grouped else num_in
    wide = codes.double() * w_scales.double().repeat_interleave(group, 1)[:, :num_in]
    configs = tuple(c for c in linear_8bit.KERNEL.configs if linear_8bit.suits(c, codes, False, grouped))
    # Rows are rounded to fp8: each number by at most 1/16.
    return Problem(tensors, ("out",), make, {"out": x.double() @ wide.t()}, configs, 0.05)


def norm_problem(num_rows: int, width: int, dtype: torch.dtype, centred: bool, adds: bool) -> Problem:
    x, weight, bias = normal(num_rows, width, dtype=dtype), normal(width, seed=1), normal(width, seed=2)
    other = normal(num_rows, width, seed=3, dtype=dtype)
    tensors = {
        "x": x, "weight": weight.to(dtype), "bias": bias.to(dtype), "other": other, "sizes": sizes(num_rows),
        "out": poisoned(num_rows + 1, width, dtype=dtype), "total": poisoned(num_rows + 1, width, dtype=dtype),
    }  # fmt: skip
    v = (x.float() + other.float()).to(dtype).double() if adds else x.double()
    exact = {"total": v} if adds else {}
    v = v - v.mean(1, keepdim=True) if centred else v
    v = v / (v.square().mean(1, keepdim=True) + 1e-5).sqrt() * tensors["weight"].double()
    exact["out"] = v + tensors["bias"].double() if centred else v

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        more: dict[str, Any] = {"add": t["other"], "total": t["total"]} if adds else {}
        bias = t["bias"] if centred else None
        return [
            norm.norm(
                t["x"], t["weight"], t["out"], t["sizes"], 0, num_rows + 1, eps=1e-5, bias=bias, centred=centred, **more
            )
        ]

    return Problem(tensors, ("out", "total")[: 1 + adds], make, exact)


def rows_problems(num_rows: int, width: int, dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    x, y = normal(num_rows, width, dtype=dtype), normal(num_rows, width, seed=1, dtype=dtype)
    ids = torch.randint(0, num_rows, (num_rows,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    tensors = {"x": x, "y": y, "ids": ids, "sizes": sizes(num_rows)}
    out = poisoned(num_rows + 1, width, dtype=dtype)
    half = poisoned(num_rows + 1, width // 2, dtype=dtype)
    most = num_rows + 1
    wide = x.double()

    def problem(name: str, out: Tensor, exact: Tensor, launch: Callable[[Tensors], Launch]) -> tuple[str, Problem]:
        return name, Problem(tensors | {"out": out}, ("out",), lambda t, _: [launch(t)], {"out": exact})

    yield problem(
        "embedding", out, wide[ids.long()] * 2.0,
        lambda t: rows.embedding(t["ids"], t["x"], t["out"], t["sizes"], most, 2.0),
    )  # fmt: skip
    yield problem("select", out, wide[ids.long()], lambda t: rows.select(t["x"], t["ids"], t["out"], t["sizes"], most))
    yield problem("add", out, wide + y.double(), lambda t: rows.add(t["x"], t["y"], t["out"], t["sizes"], most))
    kinds: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "relu": F.relu
    }  # fmt: skip
    for kind, exactly in kinds.items():
        yield problem(
            kind, out, exactly(wide),
            lambda t, kind=kind: rows.activation(t["x"], kind, t["out"], t["sizes"], most),  # type: ignore[misc]
        )  # fmt: skip
    yield problem("gated", half, gated(wide), lambda t: rows.gated(t["x"], "silu", t["out"], t["sizes"], most))
    yield problem(
        "softcap", poisoned(num_rows + 1, width, dtype=torch.float32), 3 * torch.tanh(wide / 3),
        lambda t: rows.softcap(t["x"], 3.0, t["out"], t["sizes"], most),
    )  # fmt: skip
    yield problem(
        "finite", poisoned(num_rows + 1, dtype=torch.int32), torch.ones(num_rows, dtype=torch.int32),
        lambda t: rows.finite(t["x"], t["out"], t["sizes"], most),
    )  # fmt: skip


ROWS = ("embedding", "select", "add", "silu", "gelu", "gelu_tanh", "relu", "gated", "softcap", "finite")


def rows_problem(name: str, num_rows: int, width: int, dtype: torch.dtype) -> Problem:
    """`name`: one of ROWS."""
    return dict(rows_problems(num_rows, width, dtype))[name]


def make_cache(heads: Heads, num_blocks: int, block: int, kind: str) -> Tensors:
    """Return keys, values and their scales: normal numbers as the cache's type has them."""
    shape = (2, num_blocks, heads.num_kv_heads, block, heads.head_dim)
    numbers = normal(*shape, seed=7)
    scaled = kind in ("int8", "fp8_e4m3")
    scales = numbers.abs().amax(-1) / 100 + 0.001 if scaled else None
    numbers = numbers if scales is None else numbers / scales[..., None]
    codes = (numbers.round() if kind == "int8" else numbers).to(STORED[kind])
    # Bits: fp8 has few operators in torch.
    named = dict(zip(("keys", "values"), codes, strict=True))
    return named | ({} if scales is None else {"key_scales": scales[0], "value_scales": scales[1]})


def cache_of(t: Tensors, kind: str) -> LayerCache:
    return LayerCache(kind, t["keys"], t["values"], t.get("key_scales"), t.get("value_scales"))


def rope_problem(num_rows: int, heads: Heads, kind: str, dtype: torch.dtype) -> Problem:
    block, num_blocks = 16, num_rows // 16 + 2
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(heads.head_dim // 2) / (heads.head_dim // 2))
    slots = torch.randperm(num_blocks * block, generator=torch.Generator().manual_seed(4))[:num_rows].int()
    tensors = {
        "qkv": normal(num_rows + 1, width, dtype=dtype), "slots": slots, "cos": angles.cos().float(),
        "sin": angles.sin().float(), "positions": torch.arange(num_rows, dtype=torch.int32) * 3 % 512,
        "sizes": sizes(num_rows), **make_cache(heads, num_blocks, block, kind),
    }  # fmt: skip

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        table = RopeTable(t["cos"], t["sin"])
        return [
            rope_store.rope_store(
                t["qkv"], heads, cache_of(t, kind), t["slots"], t["positions"], t["sizes"], num_rows + 1,
                rope_table=table,
            )
        ]  # fmt: skip

    # In float64: queries turned in their columns, keys turned and values as they are at their slots.
    numbers = tensors["qkv"].double().view(num_rows + 1, -1, heads.head_dim).clone()
    cos, sin = (tensors[name].double()[tensors["positions"].long()][:, None] for name in ("cos", "sin"))
    left, right = numbers[:num_rows].chunk(2, -1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    last_key = heads.num_heads + heads.num_kv_heads
    exact = {}
    if STORED[kind].itemsize > 1:
        at = slots.long()
        for name, rows in (("keys", turned[:, heads.num_heads : last_key]), ("values", numbers[:num_rows, last_key:])):
            exact[name] = tensors[name].double()
            exact[name][at // block, :, at % block] = rows
    numbers[:num_rows, : heads.num_heads] = turned[:, : heads.num_heads]
    exact["qkv"] = numbers.flatten(1)
    outputs = ("qkv", "keys", "values", *(name for name in ("key_scales", "value_scales") if name in tensors))
    # Codes may differ by one where a number lies between two: by 1/14 of the number in e4m3, 1/7 in e5m2.
    steps = {"int8": 0.01, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15}
    return Problem(tensors, outputs, make, exact, (), steps.get(kind))


def attention_problem(
    chunks: Sequence[tuple[int, int]], heads: Heads, kind: str, dtype: torch.dtype, window: int = 0,
    softcap: float = 0.0, block: int = 16, partials: int = 4096,
) -> Problem:  # fmt: skip
    """chunks: (first position, rows) of sequences, each of its own."""
    starts, lens = [first for first, _ in chunks], [rows for _, rows in chunks]
    counts = [-(-(first + rows) // block) for first, rows in chunks]
    places = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)).int()
    begin = [sum(counts[:i]) for i in range(len(counts))]
    width = heads.num_heads * heads.head_dim
    tensors = {
        "query": 2 * normal(sum(lens), width, dtype=dtype), "blocks": places[: sum(counts)],
        "out": poisoned(sum(lens) + 1, width, dtype=dtype), **make_cache(heads, sum(counts) + 2, block, kind),
    }  # fmt: skip
    # Blocks of nobody, and what lies behind a sequence's end, are NaN: a read beyond shows.
    if STORED[kind].is_floating_point and STORED[kind].itemsize > 1:
        for name in ("keys", "values"):
            tensors[name][places[sum(counts) :].long()] = torch.nan
            for at, (first, num), count in zip(begin, chunks, counts, strict=True):
                tensors[name][places[at + count - 1].long(), :, (first + num - 1) % block + 1 :] = torch.nan
    scale = heads.head_dim**-0.5
    options: dict[str, Any] = {"heads": heads.num_heads, "kv_heads": heads.num_kv_heads, "scale": scale}
    options |= {"window": window, "softcap": softcap, "programs": 2 * PROGRAMS}
    kinds = (heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, STORED[kind])
    group = heads.num_heads, heads.num_kv_heads

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        chosen = paged.default_configs(*kinds)
        if config is not None:
            kernel = next(k for k in (paged.FEW, paged.MANY) if config in paged.configs(k, *kinds))
            chosen = (config, chosen[1]) if kernel is paged.FEW else (chosen[0], config)
        items = spans.work_list(starts, lens, begin, *paged.tile_rows(*group, chosen), partials)
        shared = spans.make_scratch(max(partials, 1), *group, heads.head_dim, t["query"].device)
        listed = torch.from_numpy(items).to(t["query"].device)
        return paged.attention(
            t["query"], t["out"], cache_of(t, kind), t["blocks"], listed, shared, chosen=chosen, **options
        )

    exact = torch.cat([
        exact_attention(tensors, kind, heads, sum(lens[:i]), *chunks[i], places[at : at + counts[i]].long(), window,
                        softcap, scale)
        for i, at in enumerate(begin)
    ])  # fmt: skip
    configs = paged.configs(paged.FEW, *kinds) + paged.configs(paged.MANY, *kinds)
    return Problem(tensors, ("out",), make, {"out": exact}, configs)


def exact_attention(
    t: Tensors, kind: str, heads: Heads, row: int, first: int, num: int, blocks: Tensor, window: int, softcap: float,
    scale: float,
) -> Tensor:  # fmt: skip
    end, group = first + num, heads.num_heads // heads.num_kv_heads

    def gathered(name: str) -> Tensor:
        numbers = t[name].double()[blocks]  # [blocks, kv_heads, block, D]
        if f"{name[:-1]}_scales" in t:
            numbers = numbers * t[f"{name[:-1]}_scales"].double()[blocks][..., None]
        return numbers.transpose(1, 2).flatten(0, 1)[:end].repeat_interleave(group, 1)

    query = t["query"][row : row + num].double().view(num, heads.num_heads, heads.head_dim)
    s = torch.einsum("rhd,nhd->hrn", query, gathered("keys")) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    position, at = torch.arange(first, end)[:, None], torch.arange(end)
    seen = (at <= position) & ((at > position - window) if window else torch.tensor(True))
    p = s.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hrn,nhd->rhd", p, gathered("values")).flatten(1)


def experts_problem(num_rows: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Problem:
    dtype = torch.bfloat16
    x, logits = normal(num_rows, hidden, dtype=dtype), normal(num_rows, num_experts, seed=1, dtype=dtype)
    gate_up = normal(num_experts, 2 * inner, hidden, seed=2, dtype=dtype) * hidden**-0.5
    down = normal(num_experts, hidden, inner, seed=3, dtype=dtype) * inner**-0.5
    tensors = {
        "x": x, "logits": logits, "gate_up": gate_up, "down": down, "sizes": sizes(num_rows),
        "out": poisoned(num_rows + 1, hidden, dtype=dtype),
    }  # fmt: skip

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        shared = experts.make_scratch(num_rows + 1, top_k, t["down"])
        return experts.experts(
            t["x"], t["logits"], t["gate_up"], t["down"], t["out"], shared, t["sizes"], 0, num_rows + 1, top_k=top_k,
            kind="silu", num_programs=PROGRAMS, config=config,
        )  # fmt: skip

    exact = torch.zeros(num_rows, hidden, dtype=torch.float64)
    best = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    weights = best.values[:, :top_k].softmax(-1)
    for row, each in enumerate(best.indices[:, :top_k].tolist()):
        for weight, expert in zip(weights[row], each, strict=True):
            inside = gated(gate_up[expert].double() @ x[row].double())
            exact[row] += weight * (down[expert].double() @ inside)
    configs = tuple(c for c in experts.GROUPED.configs if not c.capabilities or 90 in c.capabilities)
    return Problem(tensors, ("out",), make, {"out": exact}, configs)


def best_problem(num_rows: int, width: int) -> Problem:
    logits = normal(num_rows, width)
    logits[0, 3], logits[-1, 5] = torch.nan, torch.inf
    tensors = {"logits": logits, "sizes": sizes(num_rows), "values": poisoned(num_rows, dtype=torch.float32)}
    tensors |= {name: poisoned(num_rows, dtype=torch.int32) for name in ("ids", "finite")}

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        return [best.best(t["logits"], t["ids"], t["values"], t["finite"], t["sizes"], 0, config)]

    return Problem(tensors, ("ids", "values", "finite"), make, {}, best.KERNEL.configs)


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
