"""`headrace bench latency` and `throughput`: drives an `EngineCore` step by step and times each token.

A token's time is the end of the step that made it, so the figures contain no text, sockets or progress bars. Prompts
differ in every iteration, as a prefix cache would speed up a second run. It uses only `add` and `step` of the engine,
so that tests can run it on a simulated executor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil

from headrace import hub
from headrace.cli.bench.data import Sample, check_dataset, file_samples, find_tokenizer, random_samples
from headrace.cli.bench.plans import LatencyPlan, ThroughputPlan
from headrace.cli.bench.stats import Timeline, figures, percentile
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore, Ticket
from headrace.engine.library.model_facts import facts_of
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Request, ScheduledBatch, StepOutput, StepResult

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
# Answers of full length, with every token drawn: the work must not depend on the text that the model generates.
PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)


class ObservedExecutor:
    """An executor that passes each batch to `on_batch` before `inner` runs it."""

    def __init__(self, inner: Any, on_batch: Callable[[ScheduledBatch], None]) -> None:
        self.inner = inner
        self._on_batch = on_batch

    def start(self, batch: ScheduledBatch) -> Ticket:
        self._on_batch(batch)
        return self.inner.start(batch)

    def finish(self, ticket: Ticket) -> StepResult:
        result: StepResult = self.inner.finish(ticket)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def steps(core: EngineCore) -> Iterator[StepOutput]:
    """Step an engine until it has no more work. Raises `HeadraceError` if a request ends in an error."""
    while core.has_work():
        output = core.step()
        for request_id, finish in output.finished.items():
            if finish.reason in ("abort", "error"):
                raise HeadraceError(f"request {request_id} ended with {finish.reason}: {finish.message}")
        yield output


def run_batch(
    core: EngineCore,
    samples: Sequence[Sample],
    params: SamplingParams,
    *,
    clock: Callable[[], float] = time.monotonic,
    first_seed: int = 0,
    max_tokens: int = 0,
    answers: list[list[int]] | None = None,
) -> list[Timeline]:
    """Give all samples (token ids) to an idle engine at once, run it dry, and return their timelines in order.

    `params` is used for every request, with max_tokens set from the sample (or `max_tokens`, of which those after the
    sample's are not counted) and the seed from its index after `first_seed`. The counted tokens are appended to
    `answers`. Raises `RequestError` if the engine refuses a request, `HeadraceError` if one ends in an error.
    """
    timelines: dict[str, Timeline] = {}
    texts: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if isinstance(sample.prompt, str):
            raise HeadraceError("offline benchmarks take token ids, not text")
        request_id = str(index)
        request_params = msgspec.structs.replace(
            params, max_tokens=max_tokens or sample.output_len, seed=first_seed + index
        )
        core.add(Request(request_id=request_id, prompt_token_ids=sample.prompt, params=request_params))
        timelines[request_id] = Timeline(sent=0.0, num_prompt_tokens=len(sample.prompt))
        texts[request_id] = []
    start = clock()
    for timeline in timelines.values():
        timeline.sent = start
    for output in steps(core):
        now = clock()
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            timeline = timelines[request_id]
            counted = token_ids[: samples[int(request_id)].output_len - timeline.num_output_tokens]
            if counted:
                timeline.token_times.append(now)
                timeline.num_output_tokens += len(counted)
                timeline.done = now
                texts[request_id] += counted
        for request_id in output.finished:
            timelines[request_id].done = timelines[request_id].done or now
    if answers is not None:
        answers += texts.values()
    return list(timelines.values())


def run_uncached(
    core: EngineCore,
    samples: Sequence[Sample],
    params: SamplingParams,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Timeline]:
    """As `run_batch`, but without a cache from token to token: each is the answer to the prompt grown by those before,
    which is computed as a whole. The engine's prefix cache must be off."""
    prompts = [list(sample.prompt) for sample in samples]
    start = clock()
    timelines = [Timeline(sent=start, num_prompt_tokens=len(prompt)) for prompt in prompts]
    for length in range(max(sample.output_len for sample in samples)):
        for index, sample in enumerate(samples):
            if length < sample.output_len:
                one = msgspec.structs.replace(params, max_tokens=1, seed=index)
                request = Request(request_id=f"{index}", prompt_token_ids=list(prompts[index]), params=one)  # type: ignore[arg-type]
                core.add(request)
        for output in steps(core):
            for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                timeline = timelines[int(request_id)]
                prompts[int(request_id)] += token_ids
                timeline.done = clock()
                timeline.token_times.append(timeline.done)
                timeline.num_output_tokens += len(token_ids)
    return timelines


def token_samples(core: EngineCore, num: int, input_len: int, output_len: int, seed: int) -> list[Sample]:
    """Return prompts of random token ids that fit the engine's context. Raises `RequestError` for longer ones."""
    most = core.info.max_model_len
    if input_len + output_len > most:
        raise RequestError("input_len", input_len, f"at most {most}, with output_len ({output_len})")
    return random_samples(num, core.info.vocab_size, input_len=input_len, output_len=output_len, seed=seed)


def about(info: EngineInfo) -> dict[str, Any]:
    return {"dtype": info.dtype, "backend": info.backend, "device": info.device}


def memory_of(info: EngineInfo) -> dict[str, Any]:
    """Return bytes: of the weights that a step reads, of the KV cache as allocated, of
    this process now and at most (None where the system does not say it), and on a GPU of the device at most."""
    sizes: dict[str, Any] = {
        "weight_bytes": info.weight_bytes,
        "kv_cache_bytes": info.num_blocks * info.block_size * info.kv_token_bytes,
        "resident_bytes": psutil.Process().memory_info().rss,
        "peak_resident_bytes": peak_resident(),
    }
    if info.backend == "cuda":
        import torch

        sizes["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return sizes


def form_of(config: EngineConfig, info: EngineInfo) -> str:
    """Return the form of the weights in words: int4 of those that were quantised at load, AWQ-4bit or Q4_K_M of those
    that are stored so, else the dtype."""
    if config.quantization is not None:
        return info.quantization or info.dtype
    path = hub.resolve(config.model, config.revision)
    if path.suffix == ".gguf" or hub.read_config(path).get("quantization_config") is not None:
        return facts_of(path).quantization
    return info.dtype


def peak_resident(path: Path = Path("/proc/self/status")) -> int | None:
    """Return the most bytes that this process had in memory; None on systems without /proc."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def measure_latency(plan: LatencyPlan, config: EngineConfig, goals: dict[str, float]) -> dict[str, Any]:
    """Run the batches of the plan one after the other. `avg_latency`, `latencies` and `percentiles` are in seconds."""
    if not plan.kv_cache:
        config = msgspec.structs.replace(config, enable_prefix_caching=False)
    run = run_batch if plan.kv_cache else run_uncached
    with closing(build_engine(config)) as core:
        latencies: list[float] = []
        timelines: list[Timeline] = []
        num_cached = 0
        for iteration in range(-plan.num_iters_warmup, plan.num_iters):
            if iteration == 0:
                num_cached = core.stats().prefix_cache_hits
            # A seed for each batch, so that none repeats another's prompts.
            seed = plan.seed + (iteration + plan.num_iters_warmup) * 1_000_003
            batch = token_samples(core, plan.batch_size, plan.input_len, plan.output_len, seed)
            start = time.perf_counter()
            batch_timelines = run(core, batch, PARAMS)
            if iteration >= 0:
                latencies.append(time.perf_counter() - start)
                timelines += batch_timelines
        result: dict[str, Any] = about(core.info) | {
            name: getattr(plan, name) for name in ("input_len", "output_len", "batch_size", "num_iters", "kv_cache")
        }
        result["avg_latency"] = statistics.fmean(latencies)
        result["percentiles"] = {f"{share:g}": percentile(latencies, share) for share in PERCENTILES}
        result["latencies"] = latencies
        result |= figures(timelines, sum(latencies), percentiles=PERCENTILES, goals=goals)
        result |= memory_of(core.info)
        return result | {"prefix_cache_hit_tokens": core.stats().prefix_cache_hits - num_cached}


def measure_throughput(plan: ThroughputPlan, config: EngineConfig, goals: dict[str, float]) -> dict[str, Any]:
    """Run all requests of the plan together. Loading the model is not in the time, making the requests is."""
    check_dataset(plan.dataset_name)
    with closing(build_engine(config)) as core:
        if plan.dataset_name == "random":
            samples = token_samples(core, plan.num_prompts, plan.input_len, plan.output_len, plan.seed)
        else:
            tokenizer = find_tokenizer(config.tokenizer or config.model)
            texts = file_samples(plan, lambda text: len(tokenizer.encode(text)))
            samples = [text._replace(prompt=tokenizer.encode(str(text.prompt))) for text in texts]
        start = time.perf_counter()
        timelines = run_batch(core, samples, PARAMS)
        elapsed = time.perf_counter() - start
        total = sum(timeline.num_prompt_tokens + timeline.num_output_tokens for timeline in timelines)
        result: dict[str, Any] = about(core.info) | {
            "elapsed_time": elapsed,
            "num_requests": len(samples),
            "total_num_tokens": total,
            "requests_per_second": len(samples) / elapsed,
            "tokens_per_second": total / elapsed,
        }
        result |= figures(timelines, elapsed, percentiles=PERCENTILES, goals=goals)
        result |= {"form": form_of(config, core.info)} | memory_of(core.info)
        return result | {"prefix_cache_hit_tokens": core.stats().prefix_cache_hits}
