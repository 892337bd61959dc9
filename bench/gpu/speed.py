"""The stage `bench`: whole steps and each operator beside the floor, the yardsticks and the goals.

A floor is the bytes that must be read over the bandwidth measured in the same run, or the multiplications over the
measured rate of torch's product, whichever is longer; a share is the floor over the time. Yardsticks are torch's own
operators, where this torch has them.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu import serving, shapes, tune
from bench.gpu.compiling import compile_all
from bench.gpu.device import Call, Device, ceilings, elapsed
from bench.gpu.problems import sizes
from bench.gpu.report import Report
from bench.gpu.weights import BLOCK, make_program
from headrace.backends.base import Chunks, Draw, Heads
from headrace.backends.cuda import tuned
from headrace.backends.cuda.kernels import choose, experts, norm
from headrace.backends.cuda.program import CudaProgram

Result = dict[str, Any]
Item = tuple[str, Callable[[], Result]]

BATCHES = (1, 8, 64, 256)
CONTEXT = 2048
PREFILLS = (2048, 8192)
PROGRAMS = (("8b", ""), ("8b", "int4"), ("l1b", ""), ("l1b", "int4"))
ROWS = (1, 8, 64, 256, 2048, 8192)
TURNS = 15


def run(report: Report, device: Device) -> None:
    report.run("ceilings", lambda: ceilings(device), is_needed=True)
    bench = Bench(report, device)
    for name, measure in bench.items():
        report.run(name, measure)
    for goal in shapes.GOALS:
        report.run(f"goal: {goal.text}", lambda goal=goal: judged(report, goal), is_free=True)  # type: ignore[misc]


def judged(report: Report, goal: shapes.Goal) -> Result:
    item = result_of(report, goal.item)
    bound = f"{'at most' if goal.at_most else 'at least'} {goal.bound:g}"
    if goal.field not in item:
        return {"value": "not measured", "goal": bound}
    value = float(item[goal.field])
    met = value <= goal.bound if goal.at_most else value >= goal.bound
    return {"value": value, "goal": bound, "met": "yes" if met else "no"}


def result_of(report: Report, name: str) -> Result:
    """Return what an item of this stage measured; nothing if it failed or was left out."""
    return next((item for item in report.items if item["name"] == name and item["status"] == "ok"), {})


class Bench:
    """Owns the program that is measured: one at a time, since a GPU has no room for two."""

    def __init__(self, report: Report, device: Device) -> None:
        self.report, self.device = report, device
        self.key: tuple[str, str] = ("", "")
        self.program: CudaProgram | None = None
        self.weight_bytes = 0
        self.context = 40 if device.toy else CONTEXT
        self.batches = (1, 3) if device.toy else BATCHES
        self.prefills = (50,) if device.toy else PREFILLS

    def items(self) -> Iterator[Item]:
        toy = self.device.toy
        for model, quantization in (("toy", ""), ("toy", "int4")) if toy else PROGRAMS:
            form, key = f"{model} {quantization or 'bf16'}", (model, quantization)
            yield f"compile {form}", functools.partial(self.compile, *key)
            for batch in self.batches:
                yield f"decode {form} x{batch}", functools.partial(self.decode, *key, batch)
            for batch in self.batches if not quantization else ():
                yield f"engine {form} x{batch}", functools.partial(self.engine, *key, batch)
            for length in self.prefills if not quantization else ():
                yield f"prefill {form} {length}", functools.partial(self.prefill, *key, length)
        yield "release memory", self.release
        num_rows, width = (4, 300) if toy else (256, 128256)
        yield f"draw {num_rows} x {width}", lambda: draw(self.device, num_rows, width)
        yield from self.operators()
        yield f"price of the law{', toy' * toy}", self.price
        yield "experts", lambda: mixture(self.device)
        for batch in () if toy else (256, 1):
            yield f"transformers l1b x{batch}", functools.partial(self.transformers, "l1b", batch)

    def ceiling(self, name: str) -> float:
        """Return a rate of this run, so that a process that goes on need not measure it again."""
        return float(result_of(self.report, "ceilings")[name])

    def floor(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.ceiling("bandwidth"), flops / self.ceiling("bf16"))

    def release(self) -> Result:
        if self.program is not None:
            self.program.close()
        self.program, self.key = None, ("", "")
        tune.KEPT.clear()
        gc.collect()
        if self.device.is_gpu:
            torch.cuda.empty_cache()
        return {}

    def make(self, model: str, quantization: str) -> CudaProgram:
        if self.program is None or self.key != (model, quantization):
            self.release()
            config, most = shapes.models(self.device.toy)[model], max(self.batches)
            longest = max(*self.prefills, self.context + 8, 1)
            positions = max(most * (self.context + BLOCK), longest)
            self.program, backend = make_program(
                config, self.device.name, quantization, longest, most, longest, positions
            )
            self.key, self.weight_bytes = (model, quantization), backend.ops.weight_bytes
        return self.program

    def compile(self, model: str, quantization: str) -> Result:
        began = time.perf_counter()
        program = self.make(model, quantization)
        made = time.perf_counter() - began
        buckets = {program._whole.bucket(n) for n in (*self.batches, *self.prefills)}
        result: Result = {"making": made, "weights": self.weight_bytes}
        if self.device.is_gpu:
            result |= compile_all(launch for size in sorted(buckets) for launch in program._whole.launches(size))
            result["memory"] = torch.cuda.memory_allocated()
        return result

    def decode(self, model: str, quantization: str, batch: int) -> Result:
        program, config = self.make(model, quantization), shapes.models(self.device.toy)[model]
        per_seq = -(-(self.context + 1) // BLOCK)
        chunks = Chunks(
            [self.context - 1] * batch,
            [[3 + i % 100] for i in range(batch)],
            [list(range(i * per_seq, (i + 1) * per_seq)) for i in range(batch)],
        )
        read = self.weight_bytes + batch * self.context * shapes.cache_bytes(config)
        floor = self.floor(read, 2 * batch * sum(shapes.num_weights(config)))
        result = self.step(program, chunks, list(range(batch)), floor)
        result["tokens_per_second"] = batch / result["seconds_of_step"]
        plain = result_of(self.report, f"decode {model} bf16 x{batch}")
        if quantization and plain:
            result["times_bf16"] = result["tokens_per_second"] / plain["tokens_per_second"]
        return result

    def engine(self, model: str, quantization: str, batch: int) -> Result:
        return serving.decode(self.device, self.make(model, quantization), batch, self.context)

    def prefill(self, model: str, quantization: str, length: int) -> Result:
        program, config = self.make(model, quantization), shapes.models(self.device.toy)[model]
        chunks = Chunks([0], [[3 + i % 100 for i in range(length)]], [list(range(-(-length // BLOCK)))])
        blocks, head = shapes.num_weights(config)
        width = config["num_attention_heads"] * shapes.head_size(config)
        flops = 2 * length * blocks + 2 * head + 2 * config["num_hidden_layers"] * length**2 * width
        result = self.step(program, chunks, [length - 1], self.floor(self.weight_bytes, flops))
        result["tokens_per_second"] = length / result["seconds_of_step"]
        return result

    def step(self, program: CudaProgram, chunks: Chunks, rows: list[int], floor: float) -> Result:
        """Time whole steps from the host, and the bucket's graph alone."""
        num_rows = sum(map(len, chunks.token_ids))
        # The first run of a bucket captures its graph, perhaps behind a larger one.
        for _ in range(2 if self.device.is_gpu else 1):
            finite, _ = program.forward(chunks, rows)
        fault = "" if all(finite) else "hidden states are not finite"
        times = []
        for _ in range(TURNS if self.device.is_gpu else 1):
            began = time.perf_counter()
            _, logits = program.forward(chunks, rows)
            logits.best.copy()
            times.append(time.perf_counter() - began)
        seconds = sorted(times)[len(times) // 2]
        result: Result = {"seconds_of_step": seconds, "floor": floor, "share": floor / seconds, "fault": fault}
        if self.device.is_gpu:
            graph = program._whole._graphs[program._whole.bucket(num_rows)]
            busy = elapsed(graph.replay, 3)
            result |= {"seconds_of_gpu": busy, "idle": max(1 - busy / seconds, 0.0), "share_of_gpu": floor / busy}
        return result

    def operators(self) -> Iterator[Item]:
        device = self.device
        for model, config in shapes.models(device.toy).items():
            for rows in (1, 20) if device.toy else ROWS:
                for layer in shapes.layers(config):
                    if layer.head and rows > 256:
                        continue
                    name = f"{model} {layer.name} x{rows}"
                    yield f"linear bf16 {name}", functools.partial(self.linear, "plain", layer, rows)
                    if rows <= 64:
                        yield f"linear int4 {name}", functools.partial(self.linear, "codes", layer, rows)
                    if not layer.head:
                        yield f"linear fp8 {name}", functools.partial(self.linear, "eight", layer, rows)
            heads = Heads(config["num_attention_heads"], config["num_key_value_heads"], shapes.head_size(config))
            for place, kind in enumerate(("decode", "prefill")):
                yield f"attention {model} {kind}", functools.partial(self.attention, heads, place)
            for rows in (3,) if device.toy else (64, 8192):
                yield f"norm {model} x{rows}", functools.partial(self.norm, rows, config["hidden_size"])

    def linear(self, kind: str, layer: shapes.Layer, rows: int) -> Result:
        """One layer as the backend launches it, and torch's product of the same numbers."""
        device = self.device
        choice = {"plain": tune.plain, "codes": tune.codes, "eight": tune.eight}[kind](device, layer, rows)
        config = tuned.choose(
            torch.device(device.name), choice.kernel, choice.shape, rows, choice.configs, choice.default
        )
        sets = [choice.make(config, i) for i in range(device.copies(choice.num_bytes))]
        seconds = device.seconds([device.call(launches) for launches, _ in sets])
        flops = 2 * rows * layer.num_out * layer.num_in
        num_bytes = choice.num_bytes + 2 * rows * (layer.num_in + layer.num_out // (1 + layer.gated))
        # fp8 is multiplied at twice the rate.
        floor = self.floor(num_bytes, flops / (2 if kind == "eight" else 1))
        result = {"us": 1e6 * seconds, "share": floor / seconds, "config": config.name}
        return result | yardstick(device, lambda: products(device, kind, layer, rows, len(sets)), seconds)

    def attention(self, heads: Heads, place: int) -> Result:
        """Decode of 64 sequences at 2k, or a prefill of 4k, beside torch's attention, which has no blocks."""
        device = self.device
        choice = list(tune.attend(device, heads))[place]
        config = tuned.choose(torch.device(device.name), choice.kernel, choice.shape, 1, choice.configs, choice.default)
        sets = [choice.make(config, i) for i in range(device.copies(choice.num_bytes))]
        seconds = device.seconds([device.call(launches) for launches, _ in sets])
        batch, length = (3, 40) if device.toy else (64, 2048)
        batch, length = (batch, length) if place == 0 else (1, 2 * length)
        flops = 0 if place == 0 else 2 * length**2 * heads.num_heads * heads.head_dim
        floor = self.floor(choice.num_bytes, flops)

        def calls() -> list[Call]:
            queries = 1 if place == 0 else length
            q = device.random(batch, heads.num_heads, queries, heads.head_dim)
            listed: list[Call] = []
            for _ in sets:
                k, v = device.random(2, batch, heads.num_kv_heads, length, heads.head_dim)
                listed.append(
                    lambda k=k, v=v: F.scaled_dot_product_attention(  # type: ignore[misc]
                        q, k, v, is_causal=place == 1, enable_gqa=True
                    )
                )
            return listed

        result = {"us": 1e6 * seconds, "share": floor / seconds, "config": config.name}
        return result | yardstick(device, calls, seconds)

    def norm(self, rows: int, width: int) -> Result:
        device = self.device
        weight, counts = device.random(width), sizes(rows).to(device.name)
        pairs = [
            (device.random(rows, width), device.random(rows, width)) for _ in range(device.copies(4 * rows * width))
        ]
        launches = [norm.norm(x, weight, out, counts, 0, rows, eps=1e-5) for x, out in pairs]
        seconds = device.seconds([device.call([launch]) for launch in launches])
        result = {"us": 1e6 * seconds, "share": self.floor(4 * rows * width, 0) / seconds}

        def calls() -> list[Call]:
            return [lambda x=x: F.rms_norm(x, (width,), weight, 1e-5) for x, _ in pairs]  # type: ignore[misc]

        return result | yardstick(device, calls, seconds)

    def price(self) -> Result:
        """The law costs what fixed orders of summation cost: time of the linear layers of a block above torch's, which
        chooses its order by the number of rows. Decode: 64 rows; prefill: 2,048."""
        model = next(iter(shapes.models(self.device.toy)))
        result: Result = {}
        for name, rows in (("decode", 1), ("prefill", 20)) if self.device.toy else (("decode", 64), ("prefill", 2048)):
            layers = [x for x in shapes.layers(shapes.models(self.device.toy)[model]) if not x.head]
            items = [result_of(self.report, f"linear bf16 {model} {layer.name} x{rows}") for layer in layers]
            if all("yardstick_us" in item for item in items):
                result[name] = sum(item["us"] for item in items) / sum(item["yardstick_us"] for item in items) - 1
        return result or {"fault": "the linear layers were not measured"}

    def transformers(self, model: str, batch: int) -> Result:
        """transformers' `generate` with a static cache, on random weights of the same shape."""
        import transformers

        self.release()
        config = transformers.LlamaConfig(**shapes.MODELS[model])
        with torch.device("cuda"):
            made: Any = transformers.AutoModelForCausalLM
            network = made.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(3, 1000, (batch, self.context), device="cuda")

        def generate(count: int) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                cache_implementation="static", pad_token_id=0,
            )  # fmt: skip
            torch.cuda.synchronize()
            return time.perf_counter() - began

        # Lengths of the static cache differ, so each is run once before it is timed.
        generate(4)
        generate(36)
        per_token = (generate(36) - generate(4)) / 32
        result: Result = {"tokens_per_second": batch / per_token, "version": transformers.__version__}
        ours = result_of(self.report, f"decode {model} bf16 x{batch}")
        if ours:
            result["times"] = ours["tokens_per_second"] / result["tokens_per_second"]
        return result


def yardstick(device: Device, make: Callable[[], list[Call]], seconds: float) -> Result:
    """Time torch's operator; say why where this torch does not run it."""
    try:
        theirs = device.seconds(make())
    except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        return {"yardstick": f"none: {type(error).__name__} {str(error)[:100]}"}
    return {"yardstick_us": 1e6 * theirs, "times_yardstick": theirs / seconds}


def products(device: Device, kind: str, layer: shapes.Layer, rows: int, copies: int) -> list[Call]:
    """torch's products for a kind of weights: mm, _weight_int4pack_mm, _scaled_mm."""
    x = device.random(rows, layer.num_in)
    calls: list[Call] = []
    for i in range(copies):
        if kind == "plain":
            w = tune.operands(device, "plain").sets[(layer, i)]
            calls.append(lambda w=w: torch.mm(x, w.t()))  # type: ignore[misc]
        elif kind == "eight":
            small, scale = x.to(torch.float8_e4m3fn), torch.ones((), device=device.name)
            w = tune.operands(device, "eight").sets[(layer, i)]
            calls.append(
                lambda w=w, small=small, scale=scale: torch._scaled_mm(  # type: ignore[misc]
                    small, w.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
                )
            )
        else:
            codes = torch.randint(0, 256, (layer.num_out, layer.num_in // 2), device=device.name, dtype=torch.uint8)
            packed = torch._convert_weight_to_int4pack(codes, 8)
            scales = device.random(layer.num_in // 64, layer.num_out, 2)
            calls.append(lambda p=packed, s=scales: torch._weight_int4pack_mm(x, p, 64, s))  # type: ignore[misc]
    return calls


def draw(device: Device, num_rows: int, width: int) -> Result:
    """The kernel `choose` on random logits, for three kinds of cuts; `ms` is that of the slowest."""
    logits, counts = 3 * device.random(num_rows, width, dtype=torch.float32), sizes(num_rows).to(device.name)
    result: Result = {}
    kinds: dict[str, dict[str, Any]] = {"temperature": {}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.9}}
    for name, cut in kinds.items():
        reals, wholes = torch.zeros(num_rows, 3, dtype=torch.float64), torch.zeros(num_rows, 4, dtype=torch.int64)
        masks = torch.zeros(num_rows, -(-width // 32), dtype=torch.int32)
        draws = [Draw(temperature=0.8, seed=i, position=i, **cut) for i in range(num_rows)]
        choose.pack(list(range(num_rows)), draws, reals.numpy(), wholes.numpy(), masks.numpy())
        m, r, w = (tensor.to(device.name) for tensor in (masks, reals, wholes))
        space = torch.zeros(num_rows, 256, dtype=torch.int64, device=device.name)
        ids = torch.zeros(num_rows, dtype=torch.int32, device=device.name)
        margins = torch.zeros(num_rows, dtype=torch.float64, device=device.name)
        launch = choose.choose(logits, m, r, w, space, ids, margins, counts, 0)
        result[f"{name}_ms"] = 1e3 * device.seconds([device.call([launch])])
    return {"ms": max(result.values())} | result


def mixture(device: Device) -> Result:
    """256 rows of a mixture of 32 experts, 4 to a row, beside torch._grouped_mm of its two products."""
    num_rows, count, top_k, hidden, inner = (6, 4, 2, 64, 48) if device.toy else (256, 32, 4, 2048, 1024)
    gate_up = device.random(count, 2 * inner, hidden, scale=hidden**-0.5)
    down = device.random(count, hidden, inner, scale=inner**-0.5)
    x, logits = device.random(num_rows, hidden), device.random(num_rows, count)
    out, counts = torch.full_like(x, torch.nan), sizes(num_rows).to(device.name)
    shared = experts.make_scratch(num_rows, top_k, down)
    launches = experts.experts(
        x, logits, gate_up, down, out, shared, counts, 0, num_rows, top_k=top_k, kind="silu",
        num_programs=device.num_programs,
    )  # fmt: skip
    seconds = device.seconds([device.call(launches)])

    def calls() -> list[Call]:
        pairs = num_rows * top_k
        ends = torch.arange(1, count + 1, device=device.name, dtype=torch.int32) * (pairs // count)
        a, b = device.random(pairs, hidden), device.random(pairs, inner)

        def both() -> None:
            torch._grouped_mm(a, gate_up.transpose(1, 2), offs=ends)
            torch._grouped_mm(b, down.transpose(1, 2), offs=ends)

        return [both]

    return {"us": 1e6 * seconds} | yardstick(device, calls, seconds)
