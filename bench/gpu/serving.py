"""Serving through the engine: scheduler, runner and sampler around a program with random weights, steps overlapping."""

from __future__ import annotations

import csv
import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from bench.gpu.device import Device, elapsed
from bench.gpu.engine import count_overlaps
from bench.gpu.weights import BLOCK
from headrace.backends.cuda.program import CudaProgram
from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Request
from headrace.runner.runner import Runner
from headrace.sampling.sampler import Sampler

STEPS = 40
"""Steps that are timed, of which a few at the beginning are not counted: they capture graphs."""
TRACE = Path(__file__).with_name("azure2023.csv")
PERCENTILES = (50, 90, 99)

Span = tuple[float, float]


def make_core(program: CudaProgram, max_num_seqs: int, max_len: int) -> EngineCore:
    """Return an engine around `program`, without a tokenizer and without a prefix cache."""
    runner = Runner(program, Sampler(program.vocab_size, []))
    scheduler = Scheduler(SchedulerOptions(
        num_blocks=program.num_blocks, block_size=BLOCK, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=program.max_rows, max_model_len=max_len, enable_prefix_caching=False,
        enable_chunked_prefill=True, long_prefill_token_threshold=0, policy="fcfs", eos_token_ids=[],
        speculates=False, runs_ahead=runner.runs_ahead, cache_key=b"", cache_fingerprint=b"",
    ))  # fmt: skip
    info = EngineInfo(
        model="random", max_model_len=scheduler.max_model_len, vocab_size=program.vocab_size, eos_token_ids=[],
        block_size=BLOCK, num_blocks=program.num_blocks, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=program.max_rows,
    )  # fmt: skip
    return EngineCore(scheduler, runner, info, time.monotonic)


def make_request(i: int, num_prompt: int, num_new: int) -> Request:
    """Return a request whose tokens the device draws, with a prompt that no other one begins like."""
    ids = [3 + (i * 7 + place * (1 + i % 5)) % 100 for place in range(num_prompt)]
    params = SamplingParams(temperature=0.8, max_tokens=num_new, ignore_eos=True, seed=i)
    return Request(request_id=str(i), prompt_token_ids=ids, params=params)


def decode(device: Device, program: CudaProgram, batch: int, context: int) -> dict[str, Any]:
    """Fill `batch` sequences to about `context` positions, then time steps in which each gets one token, drawn with
    temperature. `idle`: the share of a step in which neither the bucket's graph nor the draw runs. `positions`: of all
    sequences, which a timed step reads in the mean."""
    num_steps = 6 if device.toy else STEPS
    core = make_core(program, batch, context)
    overlaps = count_overlaps(core)
    length = context - num_steps - batch
    for i in range(batch):
        core.add(make_request(i, length, num_steps + batch))
    began, open_prompts = time.perf_counter(), {str(i) for i in range(batch)}
    positions = batch * length
    while open_prompts:
        request_ids = core.step().request_ids
        open_prompts -= set(request_ids)
        positions += len(request_ids)
    filled = time.perf_counter() - began
    times = []
    overlaps.clear()
    for _ in range(num_steps):
        began = time.perf_counter()
        output = core.step()
        times.append(time.perf_counter() - began)
        if len(output.request_ids) != batch:
            raise RuntimeError(f"{len(output.request_ids)} of {batch} sequences got a token")
    overlapped = sum(overlaps)
    for i in range(batch):
        core.abort(str(i))
    while core.has_work():
        core.step()
    counted = sorted(times[num_steps // 4 :])
    seconds = counted[len(counted) // 2]
    result: dict[str, Any] = {"seconds_of_step": seconds, "tokens_per_second": batch / seconds}
    result |= {"prefill_tokens_per_second": batch * length / filled, "steps": num_steps, "overlapped": overlapped}
    result["positions"] = positions + batch * (num_steps - 1) / 2
    if device.is_gpu:
        graph = program.whole._graphs[program.whole.bucket(batch)]
        busy = elapsed(graph.replay, 3) + elapsed(functools.partial(program._drawing.run, batch), 3)
        result |= {"seconds_of_gpu": busy, "idle": max(1 - busy / seconds, 0.0)}
    return result


def job(program: CudaProgram, batch: int, num_prompt: int, num_new: int) -> float:
    """Return the seconds that `batch` requests take together, from the first prompt token to the last new one."""
    core = make_core(program, min(batch, program.max_logits), num_prompt + num_new + 1)
    for i in range(batch):
        core.add(make_request(i, num_prompt, num_new))
    began = time.perf_counter()
    while core.has_work():
        core.step()
    return time.perf_counter() - began


class Arrival(NamedTuple):
    """A request of a trace: when it comes, in seconds from the first, and its sizes in tokens."""

    seconds: float
    num_prompt: int
    num_new: int


def read_trace(path: Path) -> list[Arrival]:
    """Return the rows of a CSV file of seconds, prompt tokens and generated tokens, under a header; lines that begin
    with # are comments."""
    with path.open() as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        return [Arrival(float(row["seconds"]), int(row["prompt_tokens"]), int(row["generated_tokens"])) for row in rows]


def arrivals(toy: bool) -> list[Arrival]:
    """Return the slice of the Azure trace; a few rows of it, all shorter, if `toy`."""
    rows = read_trace(TRACE)
    if toy:
        return [Arrival(x.seconds / 20, 1 + min(x.num_prompt // 64, 29), 1 + min(x.num_new // 64, 5)) for x in rows[:6]]
    return rows


def serve_trace(device: Device, program: CudaProgram, rows: Sequence[Arrival], max_num_seqs: int) -> dict[str, Any]:
    """Serve requests that come when the trace says. TTFT counts from the arrival; TPOT is a request's mean time
    between its tokens."""
    core = make_core(program, max_num_seqs, max(row.num_prompt + row.num_new for row in rows) + 1)
    overlaps = count_overlaps(core)
    waiting = deque((i, row) for i, row in enumerate(rows))
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    counts = dict.fromkeys(map(str, range(len(rows))), 0)
    began = time.perf_counter()
    with step_events(device, program) as runs:
        while waiting or core.has_work():
            now = time.perf_counter() - began
            while waiting and waiting[0][1].seconds <= now:
                i, row = waiting.popleft()
                core.add(make_request(i, row.num_prompt, row.num_new))
            if not core.has_work():
                runs.append([])  # Without requests the GPU has nothing to do: that is no step's fault.
                time.sleep(max(waiting[0][1].seconds - (time.perf_counter() - began), 0.0))
                continue
            output = core.step()
            now = time.perf_counter() - began
            for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                first.setdefault(request_id, now)
                last[request_id] = now
                counts[request_id] += len(token_ids)
            for request_id, finish in output.finished.items():
                if finish.reason != "length":
                    raise RuntimeError(f"request {request_id} ended with {finish.reason}")
        seconds = time.perf_counter() - began
    num_new = sum(counts.values())
    if num_new != sum(row.num_new for row in rows):
        raise RuntimeError(f"{num_new} tokens came, not {sum(row.num_new for row in rows)}")
    several = [i for i, row in enumerate(rows) if row.num_new > 1]
    result: dict[str, Any] = {
        "requests": len(rows), "seconds": seconds, "new_tokens_per_second": num_new / seconds,
        "tokens_per_second": (num_new + sum(row.num_prompt for row in rows)) / seconds,
    }  # fmt: skip
    result |= percentiles("ttft_ms", [1e3 * (first[str(i)] - row.seconds) for i, row in enumerate(rows)])
    result |= percentiles(
        "tpot_ms", [1e3 * (last[str(i)] - first[str(i)]) / (rows[i].num_new - 1) for i in several]
    )  # fmt: skip
    result |= {"steps": len(overlaps), "overlapped": sum(overlaps)}
    return result | (idle_between(in_seconds(runs)) if device.is_gpu else {})


@contextmanager
def step_events(device: Device, program: CudaProgram) -> Iterator[list[list[tuple[Any, Any]]]]:
    """Yield a list whose last run gets an event before and one behind each step that is started on a GPU."""
    runs: list[list[tuple[Any, Any]]] = [[]]
    start = program.start

    def measured(*arguments: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call = start(*arguments)
        end.record()
        runs[-1].append((begin, end))
        return call

    if device.is_gpu:
        with mock.patch.object(program, "start", measured):
            yield runs
    else:
        yield runs


def in_seconds(runs: Sequence[Sequence[tuple[Any, Any]]]) -> list[list[Span]]:
    """Return the times of events, each run's from its first."""
    torch.cuda.synchronize()
    return [[tuple(run[0][0].elapsed_time(event) / 1e3 for event in pair) for pair in run] for run in runs if run]


def idle_between(runs: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Return how long the GPU had nothing to do between one step and the next, for a step and as a share."""
    busy = sum(end - begin for run in runs for begin, end in run)
    gaps = sum(max(after[0] - before[1], 0.0) for run in runs for before, after in pairwise(run))
    num_steps = sum(map(len, runs))
    return {"idle_between_steps": gaps / max(busy + gaps, 1e-9), "idle_us_of_step": 1e6 * gaps / max(num_steps, 1)}


def percentiles(name: str, numbers: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of `numbers` by name; nothing of none."""
    if not numbers:
        return {}
    return {f"{name}_p{q}": float(np.percentile(numbers, q)) for q in PERCENTILES}
