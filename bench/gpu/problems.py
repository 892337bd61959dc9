"""Small problems for the kernels, with ragged shapes: tensors, the launches over them, and the result in float64.

Tensors are made on the CPU from a fixed seed and moved, so the GPU and the twin compute the same. Outputs begin as NaN
(integers as their largest number), so what is not written shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.weights import random_codes
from headrace.backends.base import Activation, Routing
from headrace.backends.cuda.kernels import best, experts, linear, linear_8bit, linear_codes, linear_ws, norm, rows
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
        tensors["bias"] = normal(num_out, seed=3)
        exact = exact + tensors["bias"].double()
    if is_gated:
        exact = gated(exact)
    if extras:
        tensors["residual"] = normal(num_rows, width, seed=4, dtype=dtype)
        exact = exact + tensors["residual"].double()

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        chosen = config or linear.default(t["w"], num_rows + 1, is_gated)
        needed = linear.scratch_numbers(t["w"], num_rows + 1, chosen)
        options: dict[str, Any] = {"gated": is_gated, "activation": "silu" if is_gated else None}
        options |= {name: t.get(name) for name in ("bias", "residual")}
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


def specialised(w: Tensor, is_gated: bool) -> tuple[Config, ...]:
    """Return the configs of `linear_ws` that suit the weights; none on a GPU that is not Hopper."""
    if not linear_ws.can_load(w) or (torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)):
        return ()
    return tuple(c for c in linear_ws.KERNEL.configs if linear_ws.suits(c, w, is_gated))


def linear_ws_problem(
    num_rows: int, num_out: int, num_in: int, dtype: torch.dtype, is_gated: bool = False, extras: bool = False
) -> Problem:
    """The same as `linear_problem`, first in the kernel for many rows: all configs of both must give its bits."""
    usual = linear_problem(num_rows, num_out, num_in, dtype, is_gated, extras)
    configs = specialised(usual.tensors["w"], is_gated)

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        chosen = config or configs[0]
        if not linear_ws.is_config(chosen):
            return usual.make(t, chosen)
        options: dict[str, Any] = {"gated": is_gated, "activation": "silu" if is_gated else None}
        options |= {name: t.get(name) for name in ("bias", "residual")}
        rest = t["sizes"], 0, num_rows + 1
        return [linear_ws.linear_ws(t["x"], t["w"], t["out"], *rest, num_programs=PROGRAMS, config=chosen, **options)]

    return replace(usual, make=make, configs=(*configs, *usual.configs))


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
    suited = [c for c in linear_codes.KERNEL.configs if linear_codes.suits(c, packed, False)]
    configs = () if wide else tuple(suited if dtype == torch.bfloat16 else suited[:2])
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
        chosen = config or linear_8bit.default(codes, num_rows + 1, False, grouped)
        needed = linear.scratch_numbers(codes, num_rows + 1, chosen)
        shared = scratch(needed, t["x"].device) if any(needed) else None
        x, weight, out, counts = t["rounded"], t["weight"], t["out"], t["sizes"]
        scales: dict[str, Any] = {"x_scales": t["x_scales"], "w_scales": t["w_scales"]}
        options: dict[str, Any] = {"num_programs": PROGRAMS, "scratch": shared, "config": chosen}
        rounded = linear_8bit.round_rows(t["x"], x, t["x_scales"], counts, 0, num_rows + 1, grouped=grouped)
        if linear_ws.is_config(chosen):
            return [rounded, linear_ws.linear_ws(x, weight, out, counts, 0, num_rows + 1, **scales, **options)]
        options |= scales | {"x": x, "weight": weight, "out": out, "sizes": counts}
        return [rounded, linear_8bit.linear_8bit(dim=0, num_rows=num_rows + 1, **options)]

    group = linear_8bit.PIECE if grouped else num_in
    wide = codes.double() * w_scales.double().repeat_interleave(group, 1)[:, :num_in]
    configs = tuple(c for c in linear_8bit.KERNEL.configs if linear_8bit.suits(c, codes, False, grouped))
    configs += () if grouped else specialised(codes, False)
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
        stacks = experts.Stack(t["gate_up"], num_experts), experts.Stack(t["down"], num_experts)
        mixture = experts.Mixture(Routing(top_k), *stacks, "silu")
        shared = experts.make_scratch(num_rows + 1, mixture, dtype)
        return experts.experts(
            t["x"], t["logits"], mixture, t["out"], shared, t["sizes"], 0, num_rows + 1, num_programs=PROGRAMS,
            config=config,
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
    logits[1, 7] = logits[1, width - 2] = 9.0  # The lowest of equal tokens wins.
    exact = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf)
    tensors = {"logits": logits, "sizes": sizes(num_rows), "values": poisoned(num_rows, dtype=torch.float32)}
    tensors |= {name: poisoned(num_rows, dtype=torch.int32) for name in ("ids", "finite")}

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        space = best.make_space(num_rows, t["logits"].device)
        return [best.best(t["logits"], space, t["ids"], t["values"], t["finite"], t["sizes"], 0, config)]

    highest = {"ids": exact.argmax(1).int(), "values": exact.amax(1), "finite": logits.isfinite().all(1).int()}
    return Problem(tensors, ("ids", "values", "finite"), make, highest, best.KERNEL.configs)
