"""Problems of mixtures of experts: each rule of routing, each form of an expert, and each form of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.problems import PROGRAMS, Problem, Tensors, book_codes, normal, poisoned, sizes
from bench.gpu.weights import random_codes
from headrace.backends.base import Activation, Routing
from headrace.backends.cuda.kernels import experts, experts_codes, linear_8bit, linear_codes
from headrace.backends.cuda.kernels.experts import Mixture, Stack
from headrace.backends.cuda.kernels.linear_8bit import EightBits
from headrace.backends.cuda.kernels.linear_codes import PackedCodes
from headrace.backends.cuda.kernels.routing import route
from headrace.backends.cuda.launch import Config, Launch
from headrace.quant.schemes import Scheme


def bias(num: int) -> Tensor:
    return normal(num, seed=9) / 4


ROUTINGS: dict[str, tuple[int, Routing]] = {
    "softmax": (512, Routing(10)),
    "all": (64, Routing(8, renormalise=False)),
    "softmax bias": (64, Routing(6, bias=bias(64))),
    "factors": (128, Routing(4, factors=bias(128).abs())),
    "sigmoid": (16, Routing(1, "sigmoid", renormalise=False, scale_input=True)),
    "sigmoid bias": (512, Routing(22, "sigmoid", bias(512), scale=5.0)),
    "top 2 of groups": (256, Routing(8, "sigmoid", bias(256), (8, 4, 2), scale=2.5)),
    "top 1 of groups": (160, Routing(6, groups=(8, 3, 1), renormalise=False, scale=16.0)),
}


def route_exactly(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return weights and ids [R, top_k] in float64, ids ascending."""
    wide = logits.double()
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    choice = scores if routing.bias is None else scores + routing.bias.double()
    if routing.groups is not None:
        num, chosen, top = routing.groups
        by_group = choice.unflatten(1, (num, -1))
        best = by_group.topk(top, -1).values.sum(-1).topk(chosen, -1).indices
        stays = torch.zeros(len(choice), num, dtype=torch.bool).scatter_(1, best, True)
        choice = by_group.masked_fill(~stays[:, :, None], -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k, -1).indices.sort(-1).values
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * routing.scale
    return (weights if routing.factors is None else weights * routing.factors.double()[ids]), ids


def routing_problem(num_rows: int, name: str) -> Problem:
    """`name`: one of ROUTINGS."""
    num_experts, routing = ROUTINGS[name]
    logits = normal(num_rows, num_experts)
    weights, ids = route_exactly(logits, routing)
    tensors = {
        "logits": logits, "sizes": sizes(num_rows),
        "weights": poisoned(num_rows + 1, routing.top_k, dtype=torch.float32),
        "ids": poisoned(num_rows + 1, routing.top_k, dtype=torch.int32),
    }  # fmt: skip
    parts = {"bias": routing.bias, "factors": routing.factors}
    tensors |= {part: tensor for part, tensor in parts.items() if tensor is not None}

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        here = routing._replace(bias=t.get("bias"), factors=t.get("factors"))
        return [route(t["logits"], here, t["weights"], t["ids"], t["sizes"], 0, num_rows + 1)]

    return Problem(tensors, ("weights", "ids"), make, {"weights": weights, "ids": ids.int()})


def tensors_of(name: str, stack: Stack) -> Tensors:
    data = stack.data
    parts: dict[str, Tensor | None] = {f"{name} bias": stack.bias, f"{name} codes": stack.codes}
    if not isinstance(data, Tensor):
        parts[f"{name} scales"] = data.scales
    if isinstance(data, PackedCodes):
        parts[f"{name} mins"] = data.mins
    return {part: tensor for part, tensor in parts.items() if tensor is not None}


def stack_of(name: str, stack: Stack, t: Tensors) -> Stack:
    """The stack with the tensors of some device."""
    codes, data = t[f"{name} codes"], stack.data
    if isinstance(data, PackedCodes):
        data = replace(data, codes=codes, scales=t[f"{name} scales"], mins=t.get(f"{name} mins"))
    elif isinstance(data, EightBits):
        data = EightBits(codes, t[f"{name} scales"])
    else:
        data = codes
    return Stack(data, stack.num_experts, t.get(f"{name} bias"))


def gated_exactly(v: Tensor, kind: Activation, has_gate: bool) -> Tensor:
    if kind == "relu2":
        return v.relu().square()
    gate, up = v.chunk(2, -1) if has_gate else (v, torch.ones(()))
    if kind == "clamped_swiglu":
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
    return F.silu(gate) * up


def mixture_problem(
    num_rows: int, mixture: Mixture, configs: tuple[Config, ...], tolerance: float | None = None
) -> Problem:
    dtype, routing, num = torch.bfloat16, mixture.routing, mixture.down.num_experts
    hidden = mixture.down.num_out
    x, logits = normal(num_rows, hidden, dtype=dtype), normal(num_rows, num, seed=1)
    tensors = {"x": x, "logits": logits, "sizes": sizes(num_rows), "out": poisoned(num_rows + 1, hidden, dtype=dtype)}
    tensors |= tensors_of("gate_up", mixture.gate_up) | tensors_of("down", mixture.down)
    of_choice = {"bias": routing.bias, "factors": routing.factors}
    tensors |= {name: tensor for name, tensor in of_choice.items() if tensor is not None}

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        stacks = stack_of("gate_up", mixture.gate_up, t), stack_of("down", mixture.down, t)
        of_device = routing._replace(bias=t.get("bias"), factors=t.get("factors"))
        here = mixture._replace(routing=of_device, gate_up=stacks[0], down=stacks[1])
        shared = experts.make_scratch(num_rows + 1, here, dtype)
        return experts.experts(
            t["x"], t["logits"], here, t["out"], shared, t["sizes"], 0, num_rows + 1, num_programs=PROGRAMS,
            config=config,
        )  # fmt: skip

    def matrices(stack: Stack) -> tuple[Tensor, Tensor]:
        wide = (
            (stack.data if isinstance(stack.data, Tensor) else stack.data.dense()).double().view(num, -1, stack.num_in)
        )
        biases = torch.zeros(num * stack.num_out) if stack.bias is None else stack.bias
        return wide.double().view(num, -1, stack.num_in), biases.double().view(num, -1)

    first, second = matrices(mixture.gate_up), matrices(mixture.down)
    exact = torch.zeros(num_rows, hidden, dtype=torch.float64)
    weights, ids = route_exactly(logits, routing)
    for row in range(num_rows):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            v = x[row].double() * (weight if routing.scale_input else 1.0)
            inside = gated_exactly(first[0][expert] @ v + first[1][expert], mixture.kind, mixture.has_gate)
            exact[row] += (second[0][expert] @ inside + second[1][expert]) * (1.0 if routing.scale_input else weight)
    return Problem(tensors, ("out",), make, {"out": exact}, configs, tolerance)


class Form(NamedTuple):
    kind: Activation
    has_gate: bool
    routing: Routing


FORMS = {
    "gpt-oss": Form("clamped_swiglu", True, Routing(4)),
    "nemotron": Form("relu2", False, Routing(3, "sigmoid", bias(6), scale=2.5)),
    "llama4": Form("silu", True, Routing(1, "sigmoid", renormalise=False, scale_input=True)),
}


def form_problem(num_rows: int, name: str, hidden: int, inner: int) -> Problem:
    """Experts with biases of a form in FORMS."""
    form, num, dtype = FORMS[name], 6, torch.bfloat16
    width = inner * (1 + form.has_gate)
    gate_up = normal(num, width, hidden, seed=2, dtype=dtype) * hidden**-0.5
    down = normal(num, hidden, inner, seed=3, dtype=dtype) * inner**-0.5
    stacks = Stack(gate_up, num, normal(num * width, seed=4)), Stack(down, num, normal(num * hidden, seed=5))
    configs = tuple(c for c in experts.GROUPED.configs if not c.capabilities or 90 in c.capabilities)
    return mixture_problem(num_rows, Mixture(form.routing, *stacks, form.kind), configs)


def codes_stack(num: int, num_out: int, num_in: int, scheme: Scheme) -> Stack:
    size = num * num_out, num_in, scheme
    weight = book_codes(*size) if scheme.book else random_codes(*size, "cpu")
    return Stack(linear_codes.pack(weight, scheme, torch.bfloat16), num)


def expert_codes_problem(num_rows: int, scheme: Scheme, hidden: int, inner: int) -> Problem:
    torch.manual_seed(1)
    num = 6
    gate_up, down = codes_stack(num, 2 * inner, hidden, scheme), codes_stack(num, hidden, inner, scheme)
    # Each half of a gated tile has the 64 outputs of an instruction.
    suited = [c for c in experts_codes.GROUPED_CODES.configs if c.tiles["BN"] >= 128]
    return mixture_problem(num_rows, Mixture(Routing(3), gate_up, down, "silu"), tuple(suited))


def expert_8bit_problem(num_rows: int, grouped: bool, hidden: int, inner: int) -> Problem:
    num, piece = 6, linear_8bit.PIECE

    def stack(num_out: int, num_in: int, seed: int) -> Stack:
        codes = (normal(num * num_out, num_in, seed=seed) * 16).to(torch.float8_e4m3fn)
        pieces = -(-num_in // piece) if grouped else 1
        scales = (normal(num * num_out, pieces, seed=seed + 9).abs() + 0.5) * (num_in**-0.5 / 16)
        return Stack(EightBits(codes, scales), num)

    suited = tuple(c for c in experts_codes.GROUPED_8BIT.configs if experts_codes.suits_8bit(c, gated=True))
    stacks = stack(2 * inner, hidden, 2), stack(hidden, inner, 3)
    # Rows are rounded to fp8 before both products.
    return mixture_problem(num_rows, Mixture(Routing(3), *stacks, "silu"), suited, 0.1)
