"""How a rung of `headrace bench ablate` is run: one request at a time, in static batches, or continuously; with a KV
cache or without; by the engine, or by transformers.

Rungs that take too long run on a sample: the times of the rest are derived from it, and the result says so. Called by
`bench.ablate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.cli.bench.data import Sample, random_samples
from headrace.cli.bench.ladder import ONE, STATIC, Rung, padded
from headrace.cli.bench.offline import PARAMS, ObservedExecutor, run_batch
from headrace.cli.bench.stats import Timeline
from headrace.engine.core import EngineCore
from headrace.protocol.step import ScheduledBatch

NUM_LENGTHS = 3
"""Lengths of prompts at which a pass without a KV cache is timed, from the shortest to the longest."""

PassTime = Callable[[int], float]
"""Seconds of a forward pass for a sequence of so many tokens."""


class Outcome(NamedTuple):
    """The outcome of a run: the timelines of all requests, the number of them that ran, and the answers of these."""

    timelines: list[Timeline]
    num_run: int
    answers: list[list[int]]


class Watch:
    """Counts the rows that the steps of an engine compute, and the empty part of the cache that they hold."""

    def __init__(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler
        self.num_steps = self.num_rows = self.most_seqs = self.longest_chunk = self.most_blocks = 0
        self.num_held = self.num_empty = 0
        core.executor = ObservedExecutor(core.executor, self._count)

    def _count(self, batch: ScheduledBatch) -> None:
        scheduler = self._scheduler
        if batch.lens:
            size = scheduler.block_size
            ends = {seq.seq_id: seq.num_computed + seq.num_ahead for seq in scheduler.running}
            for seq, length in zip(scheduler.flight, batch.lens, strict=True):
                ends[seq.seq_id] += length
            self.num_steps += 1
            self.num_rows += sum(batch.lens) + sum(len(draft.token_ids) for draft in batch.drafts.values())
            self.most_seqs = max(self.most_seqs, len(scheduler.running))
            self.longest_chunk = max(self.longest_chunk, *batch.lens)
            num_blocks = scheduler.pool.num_held
            self.most_blocks = max(self.most_blocks, num_blocks)
            self.num_held += num_blocks * size
            self.num_empty += sum(
                max(0, len(seq.tables[0]) * size - ends[seq.seq_id]) for seq in scheduler.running if seq.tables
            )


class CallForEach:
    """A tape of the cpu backend whose records are separate native calls. `num_calls` counts them."""

    def __init__(self, tape: Any) -> None:
        self.inner, self.num_calls = tape, 0

    def run(self, dims: list[int], num_threads: int = 0) -> None:
        for index in range(len(self.inner.nodes)):
            self.inner.run_range(index, index + 1, dims, num_threads)
        self.num_calls += len(self.inner.nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class LaunchForEach:
    """A replay of the cuda backend without graphs: each kernel is a separate launch. `num_calls` counts them."""

    def __init__(self, replay: Any) -> None:
        self.inner, self.num_calls = replay, 0

    def run(self, num_rows: int) -> None:
        launches = self.inner.launches(self.inner.bucket(num_rows))
        for launch in launches:
            if self.inner._device.type == "cuda":
                launch.run_gpu()
            else:
                launch.run_twin()
        self.num_calls += len(launches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def call_for_each(core: EngineCore) -> list[CallForEach | LaunchForEach]:
    """Let an engine compute its steps without a tape, or on a GPU without graphs; return the replacement."""
    program: Any = core.executor.program  # type: ignore[attr-defined]
    if hasattr(program, "whole"):
        program.whole, program.head = LaunchForEach(program.whole), LaunchForEach(program.head)
        return [program.whole, program.head]
    program.tape = CallForEach(program.tape)
    return [program.tape]


def run(core: EngineCore, rung: Rung, samples: Sequence[Sample], num_sample: int) -> Outcome:
    """Run the requests as the rung says. The engine is idle and its cache empty."""
    answers = list[list[int]]()
    if not rung.has_kv_cache:
        width = 1 if rung.batching == ONE else len(samples)
        seconds = pass_times(engine_pass(core, width), samples)
        return Outcome(uncached(seconds, samples, in_turn=rung.batching == ONE), num_sample if width == 1 else 0, [])
    if rung.batching == ONE:
        some = samples[:num_sample]
        timelines = [
            run_batch(core, [sample], PARAMS, clock=time.perf_counter, first_seed=index, answers=answers)[0]
            for index, sample in enumerate(some)
        ]
        return Outcome(derived(timelines, samples), len(some), answers)
    if rung.batching == STATIC:
        return Outcome(static_batches(core, samples), len(samples), [])
    timelines = run_batch(core, samples, PARAMS, clock=time.perf_counter, answers=answers)
    return Outcome(timelines, len(samples), answers)


def static_batches(core: EngineCore, samples: Sequence[Sample]) -> list[Timeline]:
    """Run as many requests together as the cache holds at the longest, prompts and answers padded to the longest of the
    batch, and the next when the last of them is done. Padded positions are computed, and not counted.

    The engine has no mask for pads, so the answers differ from the answers to the requests alone."""
    blocks = core.scheduler.pool.blocks_for(
        max(s.num_prompt_tokens for s in samples) + max(s.output_len for s in samples)
    )
    width = max(1, min(core.scheduler.max_num_seqs, core.info.num_blocks // blocks))
    timelines = list[Timeline]()
    for first in range(0, len(samples), width):
        batch = samples[first : first + width]
        timelines += run_batch(
            core, padded(batch), PARAMS, clock=time.perf_counter, first_seed=first,
            max_tokens=max(sample.output_len for sample in batch),
        )  # fmt: skip
    start = timelines[0].sent
    for timeline, sample in zip(timelines, samples, strict=True):
        timeline.sent, timeline.num_prompt_tokens = start, sample.num_prompt_tokens
    return timelines


# -- runs on a sample


def derived(timelines: Sequence[Timeline], samples: Sequence[Sample]) -> list[Timeline]:
    """Return the timelines of all samples one after the other, derived from the first ones' timelines: the others take
    as long for each token of prompt and of answer."""
    prompt_time = sum(each.ttft for each in timelines) / sum(each.num_prompt_tokens for each in timelines)
    later = sum(each.num_output_tokens - 1 for each in timelines)
    token_time = sum(each.e2el - each.ttft for each in timelines) / max(1, later)
    pairs = [(each.ttft, (each.e2el - each.ttft) / max(1, each.num_output_tokens - 1)) for each in timelines]
    pairs += [(prompt_time * sample.num_prompt_tokens, token_time) for sample in samples[len(timelines) :]]
    now, result = 0.0, list[Timeline]()
    for sample, (first, each) in zip(samples, pairs, strict=True):
        times = [now + first + each * index for index in range(sample.output_len)]
        result.append(timeline_of(sample, times))
        now = times[-1]
    return result


def timeline_of(sample: Sample, times: Sequence[float]) -> Timeline:
    """Return the timeline of a request that came at 0 and whose tokens came at `times`."""
    return Timeline(
        sent=0.0, token_times=list(times), done=times[-1], num_prompt_tokens=sample.num_prompt_tokens,
        num_output_tokens=len(times),
    )  # fmt: skip


def pass_times(seconds_of: PassTime, samples: Sequence[Sample]) -> PassTime:
    """Return the seconds of a pass by length, between `NUM_LENGTHS` lengths that `seconds_of` is measured at."""
    shortest = min(sample.num_prompt_tokens for sample in samples)
    most = max(sample.num_prompt_tokens + sample.output_len - 1 for sample in samples)
    lengths = np.unique(np.linspace(shortest, most, NUM_LENGTHS).round().astype(int)).tolist()
    seconds = [seconds_of(length) for length in lengths]
    return lambda length: float(np.interp(length, lengths, seconds))


def uncached(seconds: PassTime, samples: Sequence[Sample], in_turn: bool) -> list[Timeline]:
    """Return the timelines of requests without a KV cache: each token is a pass over the prompt grown by those before.

    `in_turn`: one request after the other; else a pass of all requests that are not done, whose times add up."""
    if in_turn:
        now, result = 0.0, list[Timeline]()
        for sample in samples:
            times = np.cumsum([seconds(sample.num_prompt_tokens + index) for index in range(sample.output_len)]) + now
            result.append(timeline_of(sample, times.tolist()))
            now = float(times[-1])
        return result
    ends = np.cumsum(
        [
            sum(seconds(sample.num_prompt_tokens + index) for sample in samples if index < sample.output_len)
            for index in range(max(sample.output_len for sample in samples))
        ]
    ).tolist()
    return [timeline_of(sample, ends[: sample.output_len]) for sample in samples]


def engine_pass(core: EngineCore, width: int) -> PassTime:
    """Return how long an engine takes for prompts of a length, `width` at once: seconds for each of them."""

    def seconds(length: int) -> float:
        prompts = random_samples(width, core.info.vocab_size, input_len=length, output_len=1, seed=length)
        timelines = run_batch(core, prompts, PARAMS, clock=time.perf_counter)
        return max(each.e2el for each in timelines) / width

    return seconds


# -- another library


class Transformers:
    """A model in transformers, float32, on one device: the loop that a newcomer writes.

    Raises ImportError, OSError, ValueError, KeyError or AttributeError for a model that it cannot load."""

    def __init__(self, directory: str, device: str, num_threads: int) -> None:
        import torch
        import transformers

        self.name = f"transformers {transformers.__version__}"
        self._torch, self._device, self._threads_before = torch, device, torch.get_num_threads()
        if num_threads:
            torch.set_num_threads(num_threads)
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        self._model = model.to(device).eval()
        self.weight_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        self.vocab_size = int(model.config.vocab_size)

    def seconds_of(self, length: int) -> float:
        """Return the seconds of a pass over a prompt of `length` tokens, without a KV cache."""
        torch = self._torch
        ids = torch.arange(length, device=self._device)[None] % self.vocab_size
        start = time.perf_counter()
        with torch.inference_mode():
            self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.argmax().item()
        return time.perf_counter() - start

    def run_cached(self, samples: Iterable[Sample]) -> list[Timeline]:
        """Run requests one after the other with a KV cache."""
        torch, timelines = self._torch, list[Timeline]()
        for sample in samples:
            start, times = time.perf_counter(), list[float]()
            ids, past = torch.tensor([sample.prompt], device=self._device), None
            with torch.inference_mode():
                for _ in range(sample.output_len):
                    result = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                    past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
                    ids.tolist()
                    times.append(time.perf_counter() - start)
            timelines.append(timeline_of(sample, times))
        return timelines

    def close(self) -> None:
        self._model = None
        self._torch.set_num_threads(self._threads_before)
