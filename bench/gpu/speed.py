"""The stage `bench`: whole steps, serving, and each operator beside the floor, the yardsticks and the goals.

A floor is the bytes that must be read over the bandwidth measured in the same run, or the multiplications over the
measured rate of torch's product, whichever is longer; a share is the floor over the time.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu import mixture_engine, peers, serving, shapes, tune
from bench.gpu.compiling import compile_all
from bench.gpu.device import Device, ceilings, elapsed
from bench.gpu.operators import Item, Operators
from bench.gpu.report import Report, Result
from bench.gpu.weights import BLOCK, make_program
from bench.tied import tied
from headrace.backends.cuda import Cuda
from headrace.backends.cuda.launch import Launch
from headrace.backends.cuda.program import CudaProgram
from headrace.backends.step import Chunks

BATCHES = (1, 8, 64, 128, 256)
"""Those that fit are measured: 256 of 8B do on an H200, 128 on a GPU of 80 GB."""
CONTEXT = 2048
PREFILLS = (2048, 8192)
PROGRAMS = (("8b", ""), ("l1b", ""), ("8b", "int4"), ("l1b", "int4"))
TURNS = 15
JOB, TOY_JOB = peers.Job(256, 512, 128), peers.Job(3, 20, 6)
"""What transformers is measured by."""
SECONDS = {"start": 45.0, "trace": 60.0, "transformers generate_batch": 90.0, "transformers static": 60.0}
"""Of items that take long, by how their names begin: 48 and 39 were measured on an H100, generate_batch was not."""


def run(report: Report, device: Device) -> None:
    report.run("ceilings", lambda: ceilings(device), is_needed=True)
    bench = Bench(report, device)
    for name, measure in bench.items():
        # What is compiled by transformers takes long, and the trace lasts as long as it lasts.
        seconds = next((each for word, each in SECONDS.items() if name.startswith(word) and not device.toy), 0.0)
        report.run(name, measure, seconds=seconds)


class Bench:
    """Owns the program that is measured: one at a time, since a GPU has no room for two."""

    def __init__(self, report: Report, device: Device) -> None:
        self.report, self.device = report, device
        self.key: tuple[str, str] = ("", "")
        self.program: CudaProgram | None = None
        self.weight_bytes = 0
        self.context = 40 if device.toy else CONTEXT
        self.prefills = (50,) if device.toy else PREFILLS
        self.job_size = TOY_JOB if device.toy else JOB
        self.operators = Operators(report, device)

    def items(self) -> Iterator[Item]:
        """All items; those that goals are judged by come before the others, as far as programs allow."""
        toy = self.device.toy
        main, small = ("toy", "toy") if toy else ("8b", "l1b")
        *programs, last = (("toy", ""), ("toy", "int4")) if toy else PROGRAMS
        for model, quantization in programs:
            yield from self.steps(model, quantization)
            if (model, quantization) == (main, ""):
                yield f"trace {model} bf16", functools.partial(self.trace, model, quantization)
            if (model, quantization) == (small, ""):
                yield f"job {model} bf16", functools.partial(self.job, model, quantization)
        yield "release memory", self.release
        for num_rows, width in ((4, 300), (1, 300)) if toy else ((256, 128256), (1, 128256)):
            yield f"draw {num_rows} x {width}", functools.partial(self.operators.draw, num_rows, width)
        yield from self.operators.priced_items(main)
        batch = self.job_size.batch
        yield f"start {main} bf16", functools.partial(self.start, main)
        yield from mixture_engine.items(self)
        for loop in peers.LOOPS:
            yield f"transformers {loop} {small} x{batch}", functools.partial(self.transformers, small, loop)
        yield f"transformers {small} x{batch}", functools.partial(self.beside_transformers, small)
        yield from self.steps(*last)
        yield "release memory again", self.release
        yield from self.operators.other_items(main)

    def steps(self, model: str, quantization: str) -> Iterator[Item]:
        """Steps of a program alone and through the engine; of plain weights also prefills."""
        form, key = f"{model} {quantization or 'bf16'}", (model, quantization)
        yield f"compile {form}", functools.partial(self.compile, *key)
        for batch in self.batches(model):
            yield f"decode {form} x{batch}", functools.partial(self.decode, *key, batch)
        for batch in self.batches(model):
            yield f"engine {form} x{batch}", functools.partial(self.engine, *key, batch)
        if not quantization:
            for length in self.prefills:
                yield f"prefill {form} {length}", functools.partial(self.prefill, *key, length)
            yield f"capture {form}", functools.partial(self.capture, *key)

    def release(self) -> Result:
        if self.program is not None:
            self.program.close()
        self.program, self.key = None, ("", "")
        tune.KEPT.clear()
        gc.collect()
        if self.device.is_gpu:
            torch.cuda.empty_cache()
        return {}

    def start(self, model: str) -> Result:
        """From a new process with no compiled kernel to the first token."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "bench.gpu.starting", model, self.device.name]
            done = subprocess.run(
                tied(command),
                env=os.environ | {"TRITON_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                timeout=120,
            )
        if done.returncode:
            return {"fault": done.stderr[-300:]}
        result: Result = json.loads(done.stdout.splitlines()[-1])
        return result

    def batches(self, model: str) -> tuple[int, ...]:
        if self.device.toy:
            return (1, 3)
        config, positions = shapes.models(False)[model], self.context + BLOCK
        return shapes.batches_that_fit(config, BATCHES, positions, self.device.free_memory())

    def make(self, model: str, quantization: str) -> CudaProgram:
        if self.program is None or self.key != (model, quantization):
            self.release()
            config, most = shapes.models(self.device.toy)[model], max(self.batches(model))
            longest = max(*self.prefills, self.context + 8, 1)
            positions = max(most * (self.context + BLOCK), longest)
            self.program, backend = make_program(
                config, self.device.name, quantization, longest, most, longest, positions
            )
            self.key, self.weight_bytes = (model, quantization), backend.ops.weight_bytes
        return self.program

    def compile_with(self, key: tuple[str, str], make: Callable[[], tuple[CudaProgram, Cuda]]) -> Result:
        """Make another program the one that is measured, and compile it."""

        def made() -> CudaProgram:
            self.release()
            self.program, backend = make()
            self.key, self.weight_bytes = key, backend.ops.weight_bytes
            return self.program

        return self.compiled(made)

    def compile(self, model: str, quantization: str) -> Result:
        return self.compiled(lambda: self.make(model, quantization))

    def compiled(self, make: Callable[[], CudaProgram]) -> Result:
        began = time.perf_counter()
        program = make()
        seconds = time.perf_counter() - began
        result: Result = {"making": seconds, "weights": self.weight_bytes}
        if self.device.is_gpu:
            every = (work for size in program.whole.sizes for work in program.whole.launches(size))
            result |= compile_all(work for work in every if isinstance(work, Launch))
            result["memory"] = torch.cuda.memory_allocated()
        return result

    def capture(self, model: str, quantization: str) -> Result:
        """Capture the graphs of all buckets, as a server has them that has run for a while."""
        replay = self.make(model, quantization).whole
        if not self.device.is_gpu:
            return {"graphs": "none without a GPU"}
        for size in reversed(replay.sizes):
            if size not in replay._graphs:
                replay.capture(size)
        return {"graphs": len(replay.sizes), "memory": torch.cuda.memory_reserved()}

    def decode(self, model: str, quantization: str, batch: int) -> Result:
        program, config = self.make(model, quantization), shapes.models(self.device.toy)[model]
        per_seq = -(-(self.context + 1) // BLOCK)
        chunks = Chunks(
            [self.context - 1] * batch,
            [[3 + i % 100] for i in range(batch)],
            [list(range(i * per_seq, (i + 1) * per_seq)) for i in range(batch)],
        )
        floor = self.floor_of_decode(config, batch, batch * self.context)
        result = self.step(program, chunks, list(range(batch)), floor)
        result["tokens_per_second"] = batch / result["seconds_of_step"]
        return result | self.beside_bf16("decode", model, quantization, batch, result)

    def floor_of_decode(self, config: dict[str, Any], batch: int, positions: float) -> float:
        """Return the seconds that a step takes at least whose sequences have so many positions together."""
        read = self.weight_bytes + positions * shapes.cache_bytes(config)
        return self.operators.floor(read, 2 * batch * sum(shapes.num_weights(config)))

    def beside_bf16(self, work: str, model: str, quantization: str, batch: int, result: Result) -> Result:
        plain = self.report.result_of(f"{work} {model} bf16 x{batch}") if quantization else {}
        return {"times_bf16": result["tokens_per_second"] / plain["tokens_per_second"]} if plain else {}

    def engine(self, model: str, quantization: str, batch: int) -> Result:
        """Steps that the host prepares while the GPU computes. A step alone waits for copies between its parts, so
        goals are judged here."""
        result = serving.decode(self.device, self.make(model, quantization), batch, self.context)
        floor = self.floor_of_decode(shapes.models(self.device.toy)[model], batch, result["positions"])
        result |= {"floor": floor, "share": floor / result["seconds_of_step"]}
        if "seconds_of_gpu" in result:
            result["share_of_gpu"] = floor / result["seconds_of_gpu"]
        return result | self.beside_bf16("engine", model, quantization, batch, result)

    def prefill(self, model: str, quantization: str, length: int) -> Result:
        program, config = self.make(model, quantization), shapes.models(self.device.toy)[model]
        chunks = Chunks([0], [[3 + i % 100 for i in range(length)]], [list(range(-(-length // BLOCK)))])
        blocks, head = shapes.num_weights(config)
        width = config["num_attention_heads"] * shapes.head_size(config)
        flops = 2 * length * blocks + 2 * head + 2 * config["num_hidden_layers"] * length**2 * width
        result = self.step(program, chunks, [length - 1], self.operators.floor(self.weight_bytes, flops))
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
            graph = program.whole._graphs[program.whole.bucket(num_rows)]
            busy = elapsed(graph.replay, 3)
            result |= {"seconds_of_gpu": busy, "idle": max(1 - busy / seconds, 0.0), "share_of_gpu": floor / busy}
        return result

    def trace(self, model: str, quantization: str) -> Result:
        """A slice of the Azure trace of 2023: requests come when they came there, with as many tokens."""
        program = self.make(model, quantization)
        return serving.serve_trace(self.device, program, serving.arrivals(self.device.toy), max(self.batches(model)))

    def job(self, model: str, quantization: str) -> Result:
        """The job that transformers is measured by, the second time: the first one captures graphs."""
        program = self.make(model, quantization)
        seconds = [serving.job(program, *self.job_size) for _ in range(2)][-1]
        return {"seconds_of_job": seconds, "new_tokens_per_second": self.num_new / seconds}

    @property
    def num_new(self) -> int:
        return self.job_size.batch * self.job_size.num_new

    def transformers(self, model: str, loop: str) -> Result:
        self.release()
        return peers.run(self.device, shapes.models(self.device.toy)[model], self.job_size, loop)

    def beside_transformers(self, model: str) -> Result:
        """How many times as fast the engine is as the faster of transformers' loops that were measured."""
        ours, name = self.report.result_of(f"job {model} bf16"), "seconds_of_job"
        loops = {x: self.report.result_of(f"transformers {x} {model} x{self.job_size.batch}") for x in peers.LOOPS}
        theirs = {loop: item[name] for loop, item in loops.items() if name in item}
        result: Result = {loop: "not measured" for loop in loops if loop not in theirs}
        if theirs and name in ours:
            result |= {f"times_{loop}": seconds / ours[name] for loop, seconds in theirs.items()}
            result["times"] = min(theirs.values()) / ours[name]
        return result
