"""The client of `headrace bench serve`: sends requests to an OpenAI-compatible server and times the streamed replies.

The times of arrival are drawn from the seed before the run (Poisson for burstiness 1, gamma else), so a slow server
does not delay later requests. If a request waits because of `max_concurrency`, the wait is reported as the client's
queue time and is not part of the time to first token. Works with any server; knows nothing of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from headrace.cli.bench.data import (
    TRACES,
    Sample,
    check_dataset,
    file_samples,
    find_tokenizer,
    random_samples,
    trace_samples,
)
from headrace.cli.bench.plans import ServePlan
from headrace.cli.bench.run_warnings import warnings_of
from headrace.cli.bench.stats import Timeline, figures
from headrace.cli.remote import NoServerError, address_of, authorization, client_of, models_of, verification
from headrace.engine.progress import progress_bar
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.text.tokenizer import Tokenizer

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to send requests. `chat`: the endpoint takes messages, not a prompt."""

    base_url: str
    endpoint: str
    model: str
    chat: bool = False
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    timeout: float = 6 * 3600.0

    def body(self, sample: Sample) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sample.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt
        return body | self.extra_body


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds after the start at which each request is due; all zero for an infinite rate.

    Gaps are gamma-distributed with mean 1 / request_rate and shape `burstiness`: 1 is a Poisson process, less is
    burstier, more is more even.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    noise = random.Random(seed)
    gaps = [noise.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in range(max(0, count - 1))]
    return [0.0, *itertools.accumulate(gaps)][:count]


def first_model(
    base_url: str, headers: dict[str, str], seconds: float = 0.0, cacert: str | None = None
) -> dict[str, Any]:
    """Return name and root of the server's first model, once it answers. Raises `NoServerError` after `seconds`."""
    deadline = time.monotonic() + seconds
    with client_of(base_url, cacert, 10.0) as client:
        while True:
            try:
                model = models_of(client, base_url, headers)[0]
                return {"id": model["id"], "root": str(model.get("root") or model["id"])}
            except NoServerError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.25)


async def send(client: httpx.AsyncClient, target: Target, sample: Sample, queue_time: float = 0.0) -> Timeline:
    """Send one streamed request. No failure of the server raises: `Timeline.error` reports it."""
    pieces: list[str] = []
    timeline = Timeline(sent=time.perf_counter(), queue_time=queue_time, num_prompt_tokens=sample.num_prompt_tokens)
    usage: dict[str, Any] | None = None
    finished = False
    try:
        url = f"{target.base_url}{target.endpoint}"
        async with client.stream("POST", url, json=target.body(sample), headers=target.headers) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode(errors="replace")
                timeline.error = f"HTTP {reply.status_code}: {text[:300]}"
            else:
                async for line in reply.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        finished = True
                        break
                    event = json.loads(data)
                    if "error" in event:
                        timeline.error = str(event["error"])[:300]
                        break
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or []:
                        piece = (choice.get("delta") or {}).get("content") if target.chat else choice.get("text")
                        if piece:
                            timeline.token_times.append(time.perf_counter())
                            pieces.append(piece)
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        timeline.error = f"{type(error).__name__}: {error}"
    timeline.done = time.perf_counter()
    timeline.text = "".join(pieces)
    if not timeline.error and not finished:
        timeline.error = "the stream ended without [DONE]"
    if usage:
        timeline.num_prompt_tokens = usage.get("prompt_tokens", timeline.num_prompt_tokens)
        timeline.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    # Without a usage report, pieces of text are the nearest thing to tokens that a client can count.
    timeline.num_output_tokens = (usage or {}).get("completion_tokens", len(timeline.token_times))
    return timeline


async def run(
    target: Target,
    samples: Sequence[Sample],
    plan: ServePlan,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[list[Timeline], float]:
    """Send all samples and return their timelines, in order, and the seconds from first request to last answer.

    Args:
        target: the server.
        samples: the requests.
        plan: the arrival times, the bound of open requests, and how often the first sample is sent unmeasured.
        on_done: called after each request, for a progress bar.

    Raises `HeadraceError` if a warm-up fails.
    """
    # No request may wait for the pool: the wait would count as the server's.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.max_concurrency or len(samples))
    timeout, verify = httpx.Timeout(target.timeout), verification(target.base_url, plan.cacert)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, verify=verify, trust_env=False) as client:
        prompt = samples[0].prompt
        # Token ids backwards: the same prompt would find itself in the server's prefix cache when it is measured.
        warmup = samples[0] if isinstance(prompt, str) else samples[0]._replace(prompt=prompt[::-1])
        for _ in range(plan.num_warmups):
            warm = await send(client, target, warmup)
            if warm.error:
                raise HeadraceError(f"the warm-up request failed: {warm.error}")
        slots = asyncio.Semaphore(plan.max_concurrency or max(1, len(samples)))
        start = time.perf_counter()

        async def one(sample: Sample, due: float) -> Timeline:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            arrived = time.perf_counter()
            async with slots:
                timeline = await send(client, target, sample, time.perf_counter() - arrived)
            timeline.late = max(0.0, timeline.sent - start - due)
            on_done()
            return timeline

        dues = arrival_times(len(samples), plan.request_rate, plan.burstiness, plan.seed)
        if plan.dataset_name in TRACES:
            dues = [sample.due for sample in samples]
        timelines = await asyncio.gather(*(one(s, due) for s, due in zip(samples, dues, strict=True)))
        return list(timelines), time.perf_counter() - start


def measure_server(
    plan: ServePlan, goals: dict[str, float], metrics: Sequence[str], percentiles: Sequence[float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Carry out the plan. Return the result, and the detail: columns with one entry per request.

    Raises `RequestError` for a plan that makes no sense, `HeadraceError` if there is no server.
    """
    if plan.backend not in ENDPOINTS:
        raise RequestError("backend", plan.backend, "one of " + ", ".join(ENDPOINTS))
    check_dataset(plan.dataset_name, TRACES)
    extra = _object(plan.extra_body)
    if plan.ignore_eos:
        extra["ignore_eos"] = True
    if plan.temperature is not None:
        extra["temperature"] = plan.temperature
    metadata = dict(_pair(text) for text in plan.metadata or [])
    base_url = address_of(plan.base_url or f"http://{plan.host}:{plan.port}")
    headers = authorization(plan.api_key)
    served = first_model(base_url, headers, plan.ready_check_timeout_sec, plan.cacert)
    target = Target(
        base_url=base_url,
        endpoint=plan.endpoint or ENDPOINTS[plan.backend],
        model=plan.model or served["id"],
        chat=plan.backend == "openai-chat",
        headers=headers,
        extra_body=extra,
    )
    tokenizer_id = plan.tokenizer or plan.model or served["root"]
    samples = _samples(plan, find_tokenizer(tokenizer_id))

    numbers = itertools.count(1)
    with progress_bar("requests", not plan.json and not plan.disable_tqdm) as show:
        timelines, duration = asyncio.run(run(target, samples, plan, lambda: show(next(numbers), len(samples))))
    result: dict[str, Any] = {
        "model_id": target.model,
        "backend": plan.backend,
        "endpoint_type": plan.backend,
        "endpoint": target.endpoint,
        "label": plan.label,
        "tokenizer_id": tokenizer_id,
        "dataset_name": plan.dataset_name,
        "num_prompts": plan.num_prompts,
        "speed_up": plan.speed_up if plan.dataset_name in TRACES else None,
        # JSON has no infinity; vLLM writes it as this word.
        "request_rate": "inf" if math.isinf(plan.request_rate) else plan.request_rate,
        "burstiness": plan.burstiness,
        "max_concurrency": plan.max_concurrency,
        "seed": plan.seed,
        **metadata,
    }
    result |= figures(timelines, duration, metrics=metrics, percentiles=percentiles, goals=goals)
    queued = [timeline.queue_time * 1000 for timeline in timelines]
    result["mean_client_queue_time_ms"] = sum(queued) / len(queued)
    result["max_client_queue_time_ms"] = max(queued)
    result["warnings"] = warnings_of(
        timelines, samples, has_rate=plan.dataset_name in TRACES or not math.isinf(plan.request_rate),
        is_token_ids=target.endpoint == ENDPOINTS["openai"],
    )  # fmt: skip
    first = min(timeline.sent for timeline in timelines)
    detail = {
        "input_lens": [timeline.num_prompt_tokens for timeline in timelines],
        "output_lens": [timeline.num_output_tokens for timeline in timelines],
        "ttfts": [timeline.ttft for timeline in timelines],
        "itls": [timeline.itls for timeline in timelines],
        "latencies": [timeline.e2el for timeline in timelines],
        "start_times": [timeline.sent - first for timeline in timelines],
        "queue_times": [timeline.queue_time for timeline in timelines],
        "generated_texts": [timeline.text for timeline in timelines],
        "errors": [timeline.error for timeline in timelines],
    }
    return result, detail


def plot(result: dict[str, Any], detail: dict[str, Any], path: Path) -> None:
    """Draw the latencies of each request by when it was sent, and their distributions. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    good = [index for index, error in enumerate(detail["errors"]) if not error]
    starts = [detail["start_times"][index] for index in good]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, label in (("ttfts", "TTFT"), ("latencies", "end to end")):
        times = [1000 * detail[name][index] for index in good]
        left.plot(starts, times, ".", label=label)
        right.step(sorted(times), [(rank + 1) / len(times) for rank in range(len(times))], label=label)
    gaps = sorted(1000 * gap for index in good for gap in detail["itls"][index])
    right.step(gaps, [(rank + 1) / len(gaps) for rank in range(len(gaps))], label="between tokens")
    left.set(xlabel="sent at [s]", ylabel="ms", yscale="log")
    right.set(xlabel="ms", ylabel="share of requests (of gaps)", xscale="log", ylim=(0, 1))
    right.legend(fontsize=8)
    figure.suptitle(f"{result['model_id']}, {result['output_throughput']:,.0f} tokens/s", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _samples(plan: ServePlan, tokenizer: Tokenizer) -> list[Sample]:
    avoid = frozenset(i for i in range(tokenizer.vocab_size) if tokenizer.added_token(i) is not None)
    if plan.dataset_name not in ("random", *TRACES):
        return file_samples(plan, lambda text: len(tokenizer.encode(text)))
    samples = (
        trace_samples(plan, tokenizer.vocab_size, avoid)
        if plan.dataset_name in TRACES
        else random_samples(
            plan.num_prompts,
            tokenizer.vocab_size,
            input_len=plan.input_len or plan.random_input_len,
            output_len=plan.output_len or plan.random_output_len,
            range_ratio=plan.random_range_ratio,
            prefix_len=plan.random_prefix_len,
            seed=plan.seed,
            avoid=avoid,
        )
    )
    if plan.backend == "openai":
        return samples
    # A chat message is text; its token count is the server's.
    return [sample._replace(prompt=tokenizer.decode(list(sample.prompt))) for sample in samples]  # type: ignore[arg-type]


def _object(text: str | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        raise RequestError("extra_body", text, "a JSON object") from None


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RequestError("metadata", text, "KEY=VALUE")
    return key, value
