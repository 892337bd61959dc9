"""One layer's experts in codes, at the shapes of two models: the launches of a step, and the bytes that it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.device import Device
from bench.gpu.problems import sizes
from bench.gpu.weights import random_codes
from headrace.backends.base import Activation, Routing
from headrace.backends.cuda.kernels import experts, linear_codes
from headrace.backends.cuda.kernels.experts import Mixture, Stack
from headrace.backends.cuda.kernels.linear_codes import PackedCodes
from headrace.backends.cuda.launch import Launch
from headrace.quant.schemes import BOOKS, Scheme


class Layer(NamedTuple):
    """A model's mixture: widths, experts, experts of a row, the activation and the scheme."""

    hidden: int
    inner: int
    num: int
    top_k: int
    kind: Activation
    scheme: Scheme


LAYERS = {
    "gpt-oss-20b mxfp4": Layer(2880, 2880, 32, 4, "clamped_swiglu", Scheme("i4", 32, book="e2m1")),
    "Qwen3-30B-A3B int4": Layer(2048, 768, 128, 8, "silu", Scheme("i4", 64)),
}
TOY = {"toy mxfp4": Layer(64, 48, 6, 2, "clamped_swiglu", Scheme("i4", 32, book="e2m1"))}
ROWS = (1, 64, 2048)


class MixtureWork(NamedTuple):
    """sets: launches over the same weights, whose rows choose other experts. num_bytes, flops: of one set, of the
    experts that are chosen."""

    sets: list[list[Launch]]
    num_bytes: float
    flops: float
    config: str


def layers(toy: bool) -> dict[str, Layer]:
    return TOY if toy else LAYERS


def stack(layer: Layer, num_out: int, num_in: int, device: Device) -> tuple[Stack, int]:
    """Return random codes of all experts, and the bytes of one. They are packed expert by expert."""
    parts: list[PackedCodes] = []
    for _ in range(layer.num):
        weight = random_codes(num_out, num_in, layer.scheme, device.name)
        if layer.scheme.book:
            book = torch.tensor(BOOKS[layer.scheme.book], dtype=torch.float32, device=device.name)
            scales = weight.scales / 4 if isinstance(weight.scales, Tensor) else None
            weight = replace(weight, zeros=None, codebook=book, scales=scales)
        parts.append(linear_codes.pack(weight, layer.scheme, torch.bfloat16))
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts], 1)
    whole = replace(parts[0], codes=codes, scales=scales)
    return Stack(whole, layer.num), whole.num_bytes // layer.num


def mixture_work(layer: Layer, num_rows: int, device: Device, most: int) -> MixtureWork:
    """A step of `num_rows` rows, whose router's logits are random."""
    (gate_up, first_bytes), (down, second_bytes) = (
        stack(layer, num_out, num_in, device)
        for num_out, num_in in ((2 * layer.inner, layer.hidden), (layer.hidden, layer.inner))
    )
    mixture = Mixture(Routing(layer.top_k), gate_up, down, layer.kind)
    scratch = experts.make_scratch(num_rows, mixture, torch.bfloat16)
    counts, x = sizes(num_rows).to(device.name), device.random(num_rows, layer.hidden)
    sets, chosen = [], []
    for _ in range(max(min(most, 16), 1)):
        logits, out = device.random(num_rows, layer.num), torch.full_like(x, torch.nan)
        chosen.append(len(set(logits.topk(layer.top_k, -1).indices.flatten().tolist())))
        sets.append(experts.experts(
            x, logits, mixture, out, scratch, counts, 0, num_rows, num_programs=device.num_programs
        ))  # fmt: skip
    num_bytes = sum(chosen) / len(chosen) * (first_bytes + second_bytes) + 4 * x.numel()
    config = next(launch.config.name for launch in sets[0] if launch.kernel.name == "_grouped_codes")
    return MixtureWork(sets, num_bytes, 6 * num_rows * layer.top_k * layer.hidden * layer.inner, config)
