"""transformers' own loops over a job that the engine is given too: many prompts of one length, some new tokens each.

`generate_batch` is its continuous batching over a paged cache, `static` its loop over a static cache, which it compiles
on a GPU. Weights are random, of the same shape. Where transformers is not carried, an item says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gpu.device import Device
from bench.gpu.report import Result
from bench.gpu.yardsticks import NOT_CARRIED


class Job(NamedTuple):
    """So many sequences, with so many prompt tokens and new tokens each."""

    batch: int
    num_prompt: int
    num_new: int

    def prompts(self) -> list[list[int]]:
        return [[3 + (i * 7 + place) % 100 for place in range(self.num_prompt)] for i in range(self.batch)]


def run(device: Device, config: dict[str, Any], job: Job, loop: str) -> Result:
    """Run one of LOOPS twice, the first time to compile and to capture, and return the seconds of the second time."""
    if importlib.util.find_spec("transformers") is None:
        return {"yardstick": NOT_CARRIED}
    transformers = importlib.import_module("transformers")
    network, attention = make_network(device, config, "paged|sdpa" if loop == "generate_batch" else "sdpa")
    call = LOOPS[loop](device, network, job)
    call()
    seconds = call()
    result: Result = {"seconds_of_job": seconds, "new_tokens_per_second": job.batch * job.num_new / seconds}
    return result | {
        "attention": attention, "version": transformers.__version__, "compiled": hasattr(network, "_compiled_call")
    }  # fmt: skip


def make_network(device: Device, config: dict[str, Any], attention: str) -> tuple[Any, str]:
    """Return a network of random weights and the name of its attention. Later versions drop the prefix `paged|`."""
    transformers = importlib.import_module("transformers")
    network_config = transformers.LlamaConfig(**{name: x for name, x in config.items() if name != "model_type"})

    def make(name: str) -> tuple[Any, str]:
        with torch.device(device.name):
            return transformers.AutoModelForCausalLM.from_config(
                network_config, dtype=torch.bfloat16, attn_implementation=name
            ).eval(), name

    try:
        return make(attention)
    except ValueError:
        return make(attention.removeprefix("paged|"))


def generate_batch(device: Device, network: Any, job: Job) -> Callable[[], float]:
    """Return what runs the job by continuous batching, and the seconds from its first request to its last token."""
    transformers = importlib.import_module("transformers")
    settings: dict[str, Any] = {"record_timestamps": True}
    if not device.is_gpu:  # By default its cache is most of the memory.
        sizes = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 256}
        settings["continuous_batching_config"] = transformers.ContinuousBatchingConfig(**sizes)
    options = transformers.GenerationConfig(
        max_new_tokens=job.num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def call() -> float:
        answers = network.generate_batch(job.prompts(), generation_config=options, **settings).values()
        counts = [len(answer.generated_tokens) for answer in answers]
        if counts != [job.num_new] * job.batch:
            raise RuntimeError(f"{sum(counts)} tokens of {len(counts)} requests came: {[a.error for a in answers][:1]}")
        return float(max(a.timestamps[-1] for a in answers) - min(a.created_time for a in answers))

    return call


def static(device: Device, network: Any, job: Job) -> Callable[[], float]:
    """Return what runs the job in one batch with a static cache, and the seconds of that."""
    ids = torch.tensor(job.prompts(), device=device.name)

    def call() -> float:
        began = time.perf_counter()
        out = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.num_new, min_new_tokens=job.num_new,
            do_sample=False, cache_implementation="static", pad_token_id=0,
        )  # fmt: skip
        if out.shape != (job.batch, job.num_prompt + job.num_new):
            raise RuntimeError(f"{tuple(out.shape)} tokens came")
        out.cpu()  # waits for the GPU
        return time.perf_counter() - began

    return call


LOOPS = {"generate_batch": generate_batch, "static": static}
