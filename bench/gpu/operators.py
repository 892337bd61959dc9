"""Each operator beside its floor and its yardsticks: linear layers, attention, norm, rope, experts, the draw.

A floor is the bytes that must be read and written over the bandwidth of the same run, or the multiplications over the
measured rate of torch's product, whichever is longer; a share is the floor over the time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import mixtures, shapes, tune, yardsticks
from bench.gpu.compiling import compile_all
from bench.gpu.device import Call, Device
from bench.gpu.problems import sizes
from bench.gpu.prove import distance
from bench.gpu.report import Report, Result
from bench.gpu.state_problems import OPS, inputs_of, launches_of, state_of, step_of
from bench.gpu.weights import BLOCK
from headrace.backends.base import HeadForm, Heads, RopeTable, Routing
from headrace.backends.cuda import tuned
from headrace.backends.cuda.cache import LayerCache
from headrace.backends.cuda.kernels import choose, experts, norm, rope_store
from headrace.backends.cuda.launch import Launch
from headrace.backends.states import StateHeads
from headrace.backends.step import Draw

Item = tuple[str, Callable[[], Result]]

ROWS = (1, 8, 64, 256, 2048, 8192)
PRICED = {"decode": 64, "prefill": 2048}
"""Rows of the linear layers that the price of the law is taken of."""
PRICED_TOY = {"decode": 1, "prefill": 70}
ALIKE = 0.02
"""How far a yardstick's result may lie from the kernel's, relative to the largest number: else it computes something
else."""


@dataclass(frozen=True)
class Work:
    """What is timed: sets of launches that do the same on operands of their own.

    num_bytes, flops: what one set reads and writes, and multiplies and adds. calls: the yardstick's, on as many
    operands; None where torch has no such operator. is_eight: its products are of 8 bits.
    """

    sets: list[list[Launch]]
    num_bytes: float
    flops: float
    calls: Callable[[], list[Call]] | None = None
    config: str = ""
    is_eight: bool = False


@dataclass(frozen=True)
class Operator:
    """make: returns the work, on at most so many sets of operands."""

    name: str
    make: Callable[[int], Work]


class Operators:
    """All operators of the models that are measured."""

    def __init__(self, report: Report, device: Device) -> None:
        self.report, self.device = report, device
        self.models = shapes.models(device.toy)

    def priced_items(self, model: str) -> Iterator[Item]:
        """The linear layers that the price of the law is taken of, and the price."""
        priced = [operator for operator in self.listed() if operator.name in self.priced(model)]
        yield from self.compiled("compile priced layers", priced)
        for operator in priced:
            yield operator.name, functools.partial(self.measure, operator)
        yield f"price of the law {model}", functools.partial(self.price, model)

    def other_items(self, model: str) -> Iterator[Item]:
        """All others; attention is followed by FlashInfer's."""
        others = [operator for operator in self.listed() if operator.name not in self.priced(model)]
        yield from self.compiled("compile operators", others)
        beside = {
            f"attention {name} {kind}": (
                f"flashinfer {name} {kind}", functools.partial(self.flashinfer, name, heads_of(config), kind)
            )
            for name, config in self.models.items() for kind in tune.attention_steps(self.device.toy)
        }  # fmt: skip
        for operator in others:
            yield operator.name, functools.partial(self.measure, operator)
            if operator.name in beside:
                yield beside[operator.name]

    def compiled(self, name: str, operators: Sequence[Operator]) -> Iterator[Item]:
        """What compiles those operators that are to run, on a GPU."""
        selected = [operator for operator in operators if self.report.wants(operator.name)]
        if self.device.is_gpu and selected:
            yield name, lambda: compile_all(launch for each in selected for launch in each.make(1).sets[0])

    def floor(self, num_bytes: float, flops: float, is_eight: bool = False) -> float:
        ceilings = self.report.result_of("ceilings")
        rate = ceilings.get("fp8", 2 * ceilings["bf16"]) if is_eight else ceilings["bf16"]
        return max(num_bytes / float(ceilings["bandwidth"]), flops / float(rate))

    def measure(self, operator: Operator) -> Result:
        device, work = self.device, operator.make(16)
        seconds = device.seconds([device.call(launches) for launches in work.sets])
        share = self.floor(work.num_bytes, work.flops, work.is_eight) / seconds
        result: Result = {"us": 1e6 * seconds, "share": share, "config": work.config}
        if work.calls is None:
            return result | {"yardstick": "none: torch has no such operator"}
        return result | yardsticks.yardstick(device, work.calls, seconds)

    def listed(self) -> Iterator[Operator]:
        toy = self.device.toy
        for model, config in self.models.items():
            heads = heads_of(config)
            for kind in tune.attention_steps(toy):
                yield Operator(f"attention {model} {kind}", functools.partial(self.attention, heads, kind))
            for rows in (1, 70) if toy else ROWS:
                for layer in shapes.layers(config):
                    if layer.head and rows > 256:
                        continue
                    name = f"{model} {layer.name} x{rows}"
                    yield Operator(f"linear bf16 {name}", functools.partial(self.linear, "plain", layer, rows))
                    if rows <= 64:
                        yield Operator(f"linear int4 {name}", functools.partial(self.linear, "codes", layer, rows))
                    if not layer.head:
                        yield Operator(f"linear fp8 {name}", functools.partial(self.linear, "eight", layer, rows))
            for rows in (3,) if toy else (64, 8192):
                yield Operator(f"norm {model} x{rows}", functools.partial(self.norm, rows, config["hidden_size"]))
                yield Operator(f"rope_store {model} x{rows}", functools.partial(self.rope_store, rows, heads))
        yield Operator("experts", self.experts)
        for op in OPS:
            for lens in ([1] * 3, [9]) if toy else ([1] * 64, [2048]):
                yield Operator(f"{op} {len(lens)} chunks of {lens[0]}", functools.partial(self.state, op, lens))
        for name, mixture in mixtures.layers(toy).items():
            for rows in (3,) if toy else mixtures.ROWS:
                yield Operator(f"experts {name} x{rows}", functools.partial(self.mixture, mixture, rows))

    def set_count(self, num_bytes: int, most: int) -> int:
        return min(self.device.copies(num_bytes), most)

    def linear(self, kind: str, layer: shapes.Layer, rows: int, most: int) -> Work:
        """One layer as the backend launches it."""
        device = self.device
        choice = {"plain": tune.plain, "codes": tune.codes, "eight": tune.eight}[kind](device, layer, rows)
        config = tuned.choose(
            torch.device(device.name), choice.kernel, choice.shape, rows, choice.configs, choice.default
        )
        count = self.set_count(choice.num_bytes, most)
        num_bytes = choice.num_bytes + 2 * rows * (layer.num_in + layer.num_out // (1 + layer.gated))
        return Work(
            [choice.make(config, i)[0] for i in range(count)], num_bytes, 2 * rows * layer.num_out * layer.num_in,
            lambda: yardsticks.products(device, kind, layer, rows, count), config.name, kind == "eight",
        )  # fmt: skip

    def attention_sets(self, heads: Heads, kind: str, most: int) -> tuple[str, int, list[tuple[list[Launch], Tensor]]]:
        """Return the config's name, the bytes of keys and values, and sets of launches with their outputs."""
        device = self.device
        choice = dict(zip(tune.attention_steps(device.toy), tune.attend(device, heads), strict=True))[kind]
        config = tuned.choose(torch.device(device.name), choice.kernel, choice.shape, 1, choice.configs, choice.default)
        count = self.set_count(choice.num_bytes, most)
        return config.name, choice.num_bytes, [choice.make(config, i) for i in range(count)]

    def attention(self, heads: Heads, kind: str, most: int) -> Work:
        """Decode of 64 sequences at 2k, or a prefill of 4k."""
        device, step = self.device, tune.attention_steps(self.device.toy)[kind]
        name, num_bytes, sets = self.attention_sets(heads, kind, most)
        pairs = sum(n * first + n * (n + 1) // 2 for first, n in zip(step.starts, step.lens, strict=True))
        flops = 4 * pairs * heads.num_heads * heads.head_dim
        return Work(
            [launches for launches, _ in sets], num_bytes, flops,
            lambda: yardsticks.sdpa(device, heads, step, len(sets)), name,
        )  # fmt: skip

    def flashinfer(self, model: str, heads: Heads, kind: str) -> Result:
        """FlashInfer's attention over the same queries and blocks: its time, and whether its numbers are the same."""
        device, step = self.device, tune.attention_steps(self.device.toy)[kind]
        version = yardsticks.flashinfer_version()
        if version is None:
            return {"yardstick": yardsticks.NOT_CARRIED}
        ours = self.report.result_of(f"attention {model} {kind}")
        _, _, sets = self.attention_sets(heads, kind, 16)
        query = tune.operands(device, "query").sets[(heads.num_heads * heads.head_dim, sum(step.lens), 0)]
        shape = step.cache_shape(heads)
        caches = [tune.operands(device, "cache").sets[(shape, i)] for i in range(len(sets))]
        calls = yardsticks.flashinfer_attention(device, heads, step, query, caches)
        device.run(sets[0][0])
        error = distance(calls[0]().flatten(1), sets[0][1])
        result: Result = {"version": version, "distance": error, "yardstick_us": 1e6 * device.seconds(calls)}
        if "us" in ours:
            result["times_yardstick"] = result["yardstick_us"] / ours["us"]
        return result | {"fault": "" if error <= ALIKE else f"its attention differs by {error:.3g}"}

    def norm(self, rows: int, width: int, most: int) -> Work:
        device = self.device
        weight, counts = device.random(width), sizes(rows).to(device.name)
        pairs = [
            (device.random(rows, width), device.random(rows, width))
            for _ in range(self.set_count(4 * rows * width, most))
        ]

        def calls() -> list[Call]:
            return [lambda x=x: F.rms_norm(x, (width,), weight, 1e-5) for x, _ in pairs]  # type: ignore[misc]

        sets = [[norm.norm(x, weight, out, counts, 0, rows, eps=1e-5)] for x, out in pairs]
        return Work(sets, 4 * rows * width, 0, calls)

    def rope_store(self, rows: int, heads: Heads, most: int) -> Work:
        """Queries and keys turned, keys and values stored in blocks."""
        device, num_blocks = self.device, -(-rows // BLOCK)
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        angles = device.random(8192, heads.head_dim // 2, dtype=torch.float32)
        slots = torch.arange(rows, dtype=torch.int32, device=device.name)
        counts, shape = sizes(rows).to(device.name), (2, num_blocks, heads.num_kv_heads, BLOCK, heads.head_dim)
        sets = []
        for _ in range(self.set_count(4 * rows * width, most)):
            cache = LayerCache("bfloat16", *device.random(*shape))
            table = RopeTable(angles.cos(), angles.sin())
            sets.append([
                rope_store.rope_store(
                    device.random(rows, width), heads, cache, slots, slots, counts, rows, HeadForm(table)
                )
            ])  # fmt: skip
        return Work(sets, 4 * rows * width, 0)

    def experts(self, most: int) -> Work:
        """256 rows of a mixture of 32 experts, 4 to a row, beside torch's two products."""
        device = self.device
        num_rows, count, top_k, hidden, inner = (6, 4, 2, 64, 48) if device.toy else (256, 32, 4, 2048, 1024)
        gate_up = device.random(count, 2 * inner, hidden, scale=hidden**-0.5)
        down = device.random(count, hidden, inner, scale=inner**-0.5)
        x, logits = device.random(num_rows, hidden), device.random(num_rows, count)
        out, counts = torch.full_like(x, torch.nan), sizes(num_rows).to(device.name)
        mixture = experts.Mixture(Routing(top_k), experts.Stack(gate_up, count), experts.Stack(down, count), "silu")
        shared = experts.make_scratch(num_rows, mixture, torch.bfloat16)
        launches = experts.experts(
            x, logits, mixture, out, shared, counts, 0, num_rows, num_programs=device.num_programs
        )
        pairs = num_rows * top_k
        return Work(
            [list(launches)], 2 * (gate_up.numel() + down.numel() + 2 * x.numel()), 6 * pairs * hidden * inner,
            lambda: yardsticks.grouped(device, pairs, gate_up, down),
        )  # fmt: skip

    def state(self, op: str, lens: list[int], most: int) -> Work:
        """A layer with a state of Qwen3-Next's shape. Each chunk reads a state and writes one."""
        device, num = self.device, len(lens)
        heads = StateHeads(2, 1, 8, 8) if device.toy else StateHeads(32, 16, 128, 128)
        ends = itertools.accumulate(lens)
        tensors = inputs_of(op, sum(lens), heads, torch.bfloat16) | {"state": state_of(op, heads, 2 * num)}
        tensors["out"] = torch.zeros(sum(lens), heads.num_heads * heads.value_dim, dtype=torch.bfloat16)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        tensors |= step_of(lens, range(num), {end - 1: num + i for i, end in enumerate(ends)})
        here = {name: tensor.to(device.name) for name, tensor in tensors.items()}
        return Work([launches_of(op, here, heads, num)], num_bytes, 0)

    def mixture(self, layer: mixtures.Layer, rows: int, most: int) -> Work:
        """One layer's experts in codes: the floor is the reading of those that rows chose."""
        work = mixtures.mixture_work(layer, rows, self.device, most)
        return Work(work.sets, work.num_bytes, work.flops, config=work.config)

    def priced(self, model: str) -> dict[str, str]:
        """The items that the price of the law is taken of, with what each is part of."""
        layers = [layer for layer in shapes.layers(self.models[model]) if not layer.head]
        rows_of = PRICED_TOY if self.device.toy else PRICED
        return {f"linear bf16 {model} {layer.name} x{rows}": kind for kind, rows in rows_of.items() for layer in layers}

    def price(self, model: str) -> Result:
        """The law costs what fixed orders of summation cost: time of the linear layers of a block above torch's, which
        chooses its order by the number of rows."""
        result: Result = {}
        for kind in PRICED:
            items = [self.report.result_of(name) for name, part in self.priced(model).items() if part == kind]
            if all("yardstick_us" in item for item in items):
                result[kind] = sum(item["us"] for item in items) / sum(item["yardstick_us"] for item in items) - 1
        return result if len(result) == len(PRICED) else result | {"fault": "not all linear layers were measured"}

    def draw(self, num_rows: int, width: int) -> Result:
        """The launches of `choose` on random logits, for three kinds of cuts; `ms` is that of the slowest."""
        device = self.device
        logits, counts = 3 * device.random(num_rows, width, dtype=torch.float32), sizes(num_rows).to(device.name)
        values = logits.amax(-1)
        space = choose.make_space(num_rows, width, device.name)
        times: dict[str, float] = {}
        for name, cut in DRAWN.items():
            reals, wholes = torch.zeros(num_rows, 3, dtype=torch.float64), torch.zeros(num_rows, 4, dtype=torch.int64)
            masks = torch.zeros(num_rows, -(-width // 32), dtype=torch.int32)
            draws = [Draw(temperature=0.8, seed=i, position=i, **cut) for i in range(num_rows)]
            choose.pack(list(range(num_rows)), draws, reals.numpy(), wholes.numpy(), masks.numpy())
            packed = choose.Packed(*(tensor.to(device.name) for tensor in (reals, wholes, masks)))
            ids = torch.zeros(num_rows, dtype=torch.int32, device=device.name)
            margins = torch.zeros(num_rows, dtype=torch.float64, device=device.name)
            launches = choose.choose(logits, packed, values, space, ids, margins, counts, 0)
            # The first one is for masks alone.
            times[f"{name}_ms"] = 1e3 * device.seconds([device.call(launches[1:])])
            for launch in launches[1:]:
                times[f"{name} {launch.kernel.name[1:]}_ms"] = 1e3 * device.seconds([device.call([launch])])
        slowest = max(times[f"{name}_ms"] for name in DRAWN)
        return {"ms": slowest, "share": 1e3 * self.floor(4 * num_rows * width, 0) / slowest} | times


DRAWN: dict[str, dict[str, Any]] = {"temperature": {}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.9}}
"""The cuts of which the draw is measured."""


def heads_of(config: dict[str, Any]) -> Heads:
    return Heads(config["num_attention_heads"], config["num_key_value_heads"], shapes.head_size(config))
