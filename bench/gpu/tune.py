"""The stage `tune`: the fastest config of each kernel, by shape and bucket of rows, into the backend's own file.

A config whose bits differ from the others' is never written: it is a fault. The file is written again after each item.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu import shapes
from bench.gpu.compiling import compile_all
from bench.gpu.device import Call, Device
from bench.gpu.problems import scratch, sizes
from bench.gpu.report import Report
from bench.gpu.weights import BLOCK, random_codes
from headrace.backends.base import Heads
from headrace.backends.cuda import tuned
from headrace.backends.cuda.cache import LayerCache
from headrace.backends.cuda.kernels import attention, linear, linear_8bit, linear_codes, linear_ws, spans
from headrace.backends.cuda.launch import Config, Launch
from headrace.quant.schemes import parse

Result = dict[str, Any]

BUCKETS = (1, 8, 16, 32, 64, 128, 256, 1024, 2048, 8192)
GAIN = 0.02
"""A config replaces the default one if it is faster by at least this share: less is noise."""


@dataclass(frozen=True)
class Choice:
    """One entry of the file: what is launched with each config, and what it writes.

    make: returns a set of launches on operands of its own for each of `copies`. outputs: of the first set.
    """

    kernel: str
    shape: str
    rows: int
    configs: Sequence[Config]
    default: Config
    num_bytes: int
    make: Callable[[Config, int], tuple[list[Launch], Tensor]]

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape} x{self.rows}"


def run(report: Report, device: Device) -> None:
    choices = [choice for choice in listed(device) if report.wants(choice.name)]
    if device.is_gpu:
        report.run("compile", lambda: compile_all(
            launch for choice in choices for config in choice.configs for launch in choice.make(config, 1)[0]
        ))  # fmt: skip
    path = tuned.FOLDER / f"{tuned.gpu_name(torch.device('cuda'))}.json" if device.is_gpu else None
    # Not while it is measured on a GPU at toy size: those shapes are nobody's.
    path = report.path.with_name("tuned.json") if path is None or device.toy else path
    for choice in choices:
        item = report.run(choice.name, lambda choice=choice: measure(choice, device))  # type: ignore[misc]
        if item is not None and item.get("best"):
            write(path, choice, item["best"], device)
            if path.parent != report.path.parent:
                shutil.copy(path, report.path.with_name(f"tuned-{path.name}"))


def write(path: Path, choice: Choice, best: str, device: Device) -> None:
    """Put an entry into the file; the others stay."""
    record = json.loads(path.read_text()) if path.exists() else {}
    record |= {"measured on": device.describe()}
    kernels = record.setdefault("kernels", {})
    kernels.setdefault(choice.kernel, {}).setdefault(choice.shape, {})[str(choice.rows)] = best
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def measure(choice: Choice, device: Device) -> Result:
    """Time all configs on operands that lie in memory, not in the cache; compare what they write."""
    times: dict[str, float] = {}
    faults: list[str] = []
    expected: Tensor | None = None
    for config in [choice.default, *(c for c in choice.configs if c is not choice.default)]:
        try:
            sets = [choice.make(config, i) for i in range(device.copies(choice.num_bytes))]
            device.run(sets[0][0])
        except Exception as error:
            if "CUDA" in str(error):
                raise
            faults.append(f"{config.name}: {type(error).__name__} {str(error)[:80]}")
            continue
        out = sets[0][1].clone()
        if expected is None:
            expected = out
        if not torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):
            faults.append(f"{config.name}: other bits")
            continue
        calls: list[Call] = [device.call(launches) for launches, _ in sets]
        times[config.name] = device.seconds(calls)
    usual = times.get(choice.default.name, float("inf"))
    best = min(times, key=lambda name: times[name])
    best = best if times[best] < usual * (1 - GAIN) else choice.default.name
    gain = usual / times[best] if best in times else 1.0
    micro = {name: round(1e6 * seconds, 2) for name, seconds in times.items()}
    return {"best": best, "us": micro[best], "gain": gain, "times": micro, "fault": "; ".join(faults)}


def listed(device: Device) -> Iterator[Choice]:
    """All choices, those of decoding first."""
    models = shapes.models(device.toy)
    buckets = (1, 70) if device.toy else BUCKETS
    matrices = [layer for model in models.values() for layer in shapes.layers(model)]
    for rows in buckets:
        for layer in matrices:
            if rows <= 256 or not layer.head:
                yield plain(device, layer, rows)
            if rows <= linear_codes.MOST_ROWS:
                yield codes(device, layer, rows)
            if not layer.head:
                yield eight(device, layer, rows)
    for model in models.values():
        heads = Heads(model["num_attention_heads"], model["num_key_value_heads"], shapes.head_size(model))
        yield from attend(device, heads)


def fits(config: Config, rows: int, capability: int) -> bool:
    """Whether a config suits the GPU, and its tiles the rows: those of more than twice the rows waste most work."""
    suited = not config.capabilities or capability in config.capabilities
    return suited and config.tiles["BR"] <= max(2 * rows, 16) and (rows <= 256 or config.tiles["BR"] >= 64)


class Operands:
    """Tensors of a choice, made when first used, a set for each copy; all choices of a shape share them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sets: dict[tuple[Any, ...], Any] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.sets:
            if sum(1 for other in self.sets if other[:-1] != key[:-1]):
                self.sets = {k: v for k, v in self.sets.items() if k[:-1] == key[:-1]}
            self.sets[key] = make()
        return self.sets[key]


KEPT: dict[str, Operands] = {}


def operands(device: Device, kind: str) -> Operands:
    return KEPT.setdefault(kind, Operands(device))


def step(device: Device, layer: shapes.Layer, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of inputs, an output full of NaN, and the sizes."""
    width = layer.num_out // 2 if layer.gated else layer.num_out
    dtype = torch.float32 if layer.head else torch.bfloat16
    out = torch.full((rows, width), torch.nan, dtype=dtype, device=device.name)
    x = operands(device, "rows").get((layer.num_in, rows), lambda: device.random(rows, layer.num_in))
    return x, out, sizes(rows).to(device.name)


def options(layer: shapes.Layer, out: Tensor) -> dict[str, Any]:
    return {
        "gated": layer.gated, "activation": "silu" if layer.gated else None,
        "residual": out.nan_to_num(0.5) if layer.residual else None,
    }  # fmt: skip


def plain(device: Device, layer: shapes.Layer, rows: int) -> Choice:
    meta = torch.empty(layer.num_out, layer.num_in, dtype=torch.bfloat16, device="meta")

    def make(config: Config, copy: int) -> tuple[list[Launch], Tensor]:
        w = operands(device, "plain").get(
            (layer, copy), lambda: device.random(layer.num_out, layer.num_in, scale=layer.num_in**-0.5)
        )
        x, out, counts = step(device, layer, rows)
        needed = linear.scratch_numbers(w, rows, config)
        shared = scratch(needed, w.device) if any(needed) else None
        product = linear_ws.linear_ws if linear_ws.is_config(config) else linear.linear
        launch = product(
            x, w, out, counts, 0, rows, num_programs=device.num_programs, scratch=shared, config=config,
            **options(layer, out),
        )  # fmt: skip
        return [launch], out

    suited = [c for c in linear.KERNEL.configs if fits(c, rows, device.capability) and linear.suits(c, meta)]
    shape = tuned.matrix_shape(layer.num_out, layer.num_in, "bfloat16", layer.gated)
    usual = Choice(
        linear.KERNEL.name, shape, rows, suited, linear.default(meta, rows, layer.gated), 2 * meta.numel(), make
    )
    return with_specialised(usual, device, layer, meta)


def with_specialised(usual: Choice, device: Device, layer: shapes.Layer, meta: Tensor) -> Choice:
    """Return the choice among the configs of a kernel and of the one that stands for it where rows are many."""
    if usual.rows <= linear_ws.MOST_FEW or device.capability != 90:
        return usual
    configs = [
        c for c in linear_ws.KERNEL.configs
        if fits(c, usual.rows, device.capability) and linear_ws.suits(c, meta, layer.gated)
    ]  # fmt: skip
    default = linear_ws.default(meta, usual.rows, layer.gated) or usual.default
    return replace(usual, kernel=linear_ws.KERNEL.name, configs=[*configs, *usual.configs], default=default)


def codes(device: Device, layer: shapes.Layer, rows: int) -> Choice:
    quantization = parse("int4")
    scheme = quantization.head if layer.head else quantization.layer
    small = linear_codes.pack(random_codes(64, layer.num_in, scheme, "cpu"), scheme, torch.bfloat16)
    default = linear_codes.default(small, rows, layer.gated)

    def make(config: Config, copy: int) -> tuple[list[Launch], Tensor]:
        w = operands(device, "codes").get((layer, copy), lambda: packed(device, layer, scheme))
        x, out, counts = step(device, layer, rows)
        needed = linear_codes.scratch_numbers(w, rows, config)
        shared = scratch(needed, x.device) if any(needed) else None
        launches = linear_codes.linear_codes(
            x, w, out, counts, 0, rows, num_programs=device.num_programs, scratch=shared, config=config,
            **options(layer, out),
        )  # fmt: skip
        return launches, out

    suited = [
        c
        for c in linear_codes.KERNEL.configs
        if fits(c, rows, device.capability) and linear_codes.suits(c, small, layer.gated)
    ]
    shape = tuned.matrix_shape(layer.num_out, layer.num_in, tuned.scheme_key(scheme), layer.gated)
    return Choice(linear_codes.KERNEL.name, shape, rows, suited, default, layer.num_out * layer.num_in // 2, make)


def packed(device: Device, layer: shapes.Layer, scheme: Any) -> linear_codes.PackedCodes:
    """Return random codes, packed some rows at a time: the head's would take many GB at once."""
    parts = [
        linear_codes.pack(random_codes(min(8192, layer.num_out - first), layer.num_in, scheme, device.name), scheme,
                          torch.bfloat16)
        for first in range(0, layer.num_out, 8192)
    ]  # fmt: skip
    joined = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts], 1)
    return replace(parts[0], codes=joined[0], scales=joined[1])


def eight(device: Device, layer: shapes.Layer, rows: int) -> Choice:
    kind = torch.float8_e4m3fn
    meta = torch.empty(layer.num_out, layer.num_in, dtype=kind, device="meta")

    def make(config: Config, copy: int) -> tuple[list[Launch], Tensor]:
        w = operands(device, "eight").get((layer, copy), lambda: device.random(layer.num_out, layer.num_in, dtype=kind))
        x, out, counts = step(device, layer, rows)
        small, scales = x.to(kind), torch.ones(1, rows, device=x.device)
        needed = linear.scratch_numbers(w, rows, config)
        shared = scratch(needed, w.device) if any(needed) else None
        of_outputs = torch.full((layer.num_out, 1), layer.num_in**-0.5, device=x.device)
        more = options(layer, out) | {"num_programs": device.num_programs, "scratch": shared, "config": config}
        if linear_ws.is_config(config):
            more |= {"x_scales": scales, "w_scales": of_outputs}
            return [linear_ws.linear_ws(small, w, out, counts, 0, rows, **more)], out
        return [linear_8bit.linear_8bit(small, scales, w, of_outputs, out, counts, 0, rows, **more)], out

    suited = [
        c for c in linear_8bit.KERNEL.configs
        if fits(c, rows, device.capability) and linear_8bit.suits(c, meta, layer.gated, False)
    ]  # fmt: skip
    shape = tuned.matrix_shape(layer.num_out, layer.num_in, tuned.dtype_name(kind), layer.gated)
    default = linear_8bit.default(meta, rows, layer.gated, False)
    usual = Choice(linear_8bit.KERNEL.name, shape, rows, suited, default, meta.numel(), make)
    return with_specialised(usual, device, layer, meta)


class Chunked(NamedTuple):
    """A step of attention: first positions and rows of sequences, whose blocks lie in order."""

    starts: list[int]
    lens: list[int]

    @property
    def num_blocks(self) -> list[int]:
        return [-(-(first + rows) // BLOCK) for first, rows in zip(self.starts, self.lens, strict=True)]

    def cache_shape(self, heads: Heads) -> tuple[int, ...]:
        """Of keys and values."""
        return (2, sum(self.num_blocks), heads.num_kv_heads, BLOCK, heads.head_dim)


def attention_steps(toy: bool) -> dict[str, Chunked]:
    """Return a decode of 64 sequences at 2k, and a prefill of 4k."""
    batch, length = (3, 40) if toy else (64, 2048)
    return {"decode": Chunked([length - 1] * batch, [1] * batch), "prefill": Chunked([0], [2 * length])}


def attend(device: Device, heads: Heads) -> Iterator[Choice]:
    """Small tiles by the decode, large ones by the prefill."""
    kinds = (*heads[:3], torch.bfloat16, torch.bfloat16)
    usual = attention.default_configs(*kinds, device.capability)
    steps = attention_steps(device.toy)
    cases = {"few": (attention.FEW, steps["decode"]), "many": (attention.MANY, steps["prefill"])}
    for place, (name, (kernel, step)) in enumerate(cases.items()):
        (starts, lens), counts, shape = step, step.num_blocks, step.cache_shape(heads)
        begin = [sum(counts[:i]) for i in range(len(counts))]
        num_bytes = 4 * sum(counts) * heads.num_kv_heads * BLOCK * heads.head_dim
        programs, scale = 2 * device.num_programs, heads.head_dim**-0.5

        def make(
            config: Config, copy: int, place: int = place, starts: list[int] = starts, lens: list[int] = lens,
            begin: list[int] = begin, shape: tuple[int, ...] = shape, programs: int = programs, scale: float = scale,
        ) -> tuple[list[Launch], Tensor]:  # fmt: skip
            chosen = (config, usual[1]) if place == 0 else (usual[0], config)
            keys, values = operands(device, "cache").get((shape, copy), lambda: device.random(*shape))
            width = heads.num_heads * heads.head_dim
            query = operands(device, "query").get((width, sum(lens), 0), lambda: device.random(sum(lens), width))
            out = torch.full_like(query, torch.nan)
            tiles = attention.tile_rows(heads.num_heads, heads.num_kv_heads, chosen)
            items = torch.from_numpy(spans.work_list(starts, lens, begin, *tiles, 4096)).to(device.name)
            shared = spans.make_scratch(4096, *heads[:3], device.name)
            blocks = torch.arange(shape[1], dtype=torch.int32, device=device.name)
            launches = attention.attention(
                query, out, LayerCache("bfloat16", keys, values), blocks, items, shared, heads=heads.num_heads,
                kv_heads=heads.num_kv_heads, scale=scale, programs=programs, chosen=chosen,
            )  # fmt: skip
            return launches, out

        configs = attention.configs(kernel, *kinds, device.capability)
        yield Choice(f"attention {name}", tuned.heads_shape(*kinds), 1, configs, usual[place], num_bytes, make)
