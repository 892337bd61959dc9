"""Decoding through the engine: scheduler, runner and sampler around a program with random weights."""

from __future__ import annotations

import time
from typing import Any

from bench.gpu.device import Device, elapsed
from bench.gpu.weights import BLOCK
from headrace.backends.cuda.program import CudaProgram
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Request
from headrace.runner.runner import Runner
from headrace.sampling.sampler import Sampler

STEPS = 40
"""Steps that are timed, of which a few at the beginning are not counted: they capture graphs."""


def make_core(program: CudaProgram, max_num_seqs: int, max_len: int) -> EngineCore:
    """Return an engine around `program`, without a tokenizer and without a prefix cache."""
    scheduler = Scheduler(
        num_blocks=program.num_blocks, block_size=BLOCK, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=program.max_rows, max_model_len=max_len, enable_prefix_caching=False,
        enable_chunked_prefill=True, long_prefill_token_threshold=0, policy="fcfs", eos_token_ids=[],
        speculates=False, cache_key=b"", cache_fingerprint=b"",
    )  # fmt: skip
    info = EngineInfo(
        model="random", max_model_len=scheduler.max_model_len, vocab_size=program.vocab_size, eos_token_ids=[],
        block_size=BLOCK, num_blocks=program.num_blocks, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=program.max_rows,
    )  # fmt: skip
    return EngineCore(scheduler, Runner(program, Sampler(program.vocab_size, [])), info, time.monotonic)


def decode(device: Device, program: CudaProgram, batch: int, context: int) -> dict[str, Any]:
    """Fill `batch` sequences to about `context` positions, then time steps in which each gets one token, drawn with
    temperature. `idle`: the share of a step in which the bucket's graph does not run."""
    num_steps = 6 if device.toy else STEPS
    core = make_core(program, batch, context)
    params = SamplingParams(temperature=0.8, max_tokens=num_steps + batch, ignore_eos=True, seed=1)
    length = context - num_steps - batch
    for i in range(batch):
        ids = [3 + (i + place) % 100 for place in range(length)]
        core.add(Request(request_id=str(i), prompt_token_ids=ids, params=params))
    began, open_prompts = time.perf_counter(), {str(i) for i in range(batch)}
    while open_prompts:
        open_prompts -= set(core.step().request_ids)
    filled = time.perf_counter() - began
    times = []
    for _ in range(num_steps):
        began = time.perf_counter()
        output = core.step()
        times.append(time.perf_counter() - began)
        if len(output.request_ids) != batch:
            raise RuntimeError(f"{len(output.request_ids)} of {batch} sequences got a token")
    for i in range(batch):
        core.abort(str(i))
    while core.has_work():
        core.step()
    counted = sorted(times[num_steps // 4 :])
    seconds = counted[len(counted) // 2]
    result: dict[str, Any] = {"seconds_of_step": seconds, "tokens_per_second": batch / seconds}
    result["prefill_tokens_per_second"] = batch * length / filled
    if device.is_gpu:
        graph = program._whole._graphs[program._whole.bucket(batch)]
        busy = elapsed(graph.replay, 3)
        result |= {"seconds_of_gpu": busy, "idle": max(1 - busy / seconds, 0.0)}
    return result
