"""The law and the greedy ids end to end: the built-in model through an `EngineCore`, which is what `LLM` runs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from bench.gpu.compiling import compile_all
from bench.gpu.device import Device
from headrace.backends.cuda.replay import Replay
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Request, ScheduledBatch, TokenLogprob

Result = dict[str, Any]
Bits = tuple[list[int], bytes]

OPENINGS = (
    [0, 518, 485, 264, 428],
    [0, 517, 393, 17, 264, 419, 510, 706, 580, 688, 264, 968, 308, 305, 324, 822, 19],
    [0, 1800, 275, 331, 931, 1306, 527, 277, 267, 808, 19, 442, 496, 264, 514, 871],
    [0, 313, 375, 849, 1037, 267, 272, 293, 71, 460, 381, 289, 70, 702, 17, 275, 474, 1829],
)
"""Token ids of the built-in model's vocabulary: beginnings of stories."""
ROUNDING = 0.06
"""Two logits may change places by rounding to bfloat16 if they lie this close."""
REF_TOLERANCES = {"float32": 1e-3, "bfloat16": ROUNDING}
"""Of a log-probability of torch_ref on the device from torch_ref's on the CPU."""


class Answers:
    """What requests got: token ids, and logprobs of the token and of the two likeliest."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}

    def bits(self, request_id: str) -> Bits:
        entries = self.logprobs[request_id]
        numbers = [x for entry in entries for x in (entry.logprob, *(p for _, p in entry.top))]
        return self.token_ids[request_id], struct.pack(f"{len(numbers)}d", *numbers)


def make_core(place: Device, **options: Any) -> EngineCore:
    toy = place.toy
    fields: dict[str, Any] = {
        "model": "builtin", "backend": "cuda", "device": place.name, "dtype": "bfloat16", "skip_tokenizer_init": True,
        "max_num_seqs": 8 if toy else 256, "num_gpu_blocks_override": 128 if toy else 16384,
        "max_model_len": 128 if toy else 1024,
    }  # fmt: skip
    return build_engine(EngineConfig(**(fields | options)))


def make_requests(device: Device, num: int, logprobs: int | None = 2) -> list[Request]:
    """Requests of many lengths, of which every other one is greedy; the longest pass a span of attention. With log-
    probabilities the host draws their tokens, without them the device does, and steps overlap."""
    repeats = (1,) if device.toy else (1, 3, 9, 36)
    requests = []
    for i in range(num):
        ids = list(OPENINGS[i % len(OPENINGS)]) * repeats[i // len(OPENINGS) % len(repeats)]
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2], seed=1000 + i, max_tokens=8 if device.toy else 16, ignore_eos=True,
            logprobs=logprobs, top_k=40 if i % 3 == 1 else 0, top_p=0.9 if i % 3 == 2 else 1.0,
        )  # fmt: skip
        requests.append(Request(request_id=str(i), prompt_token_ids=ids, params=params))
    return requests


def count_overlaps(core: EngineCore) -> list[bool]:
    """Return a list that gets an entry for each step: whether another one was started beside it."""
    overlaps: list[bool] = []
    schedule_ahead = core.scheduler.schedule_ahead

    def counted() -> ScheduledBatch | None:
        batch = schedule_ahead()
        overlaps.append(batch is not None)
        return batch

    core.scheduler.schedule_ahead = counted  # type: ignore[method-assign]
    return overlaps


def run(core: EngineCore, requests: list[Request], preempt_every: int = 0) -> Answers:
    """Run the requests together; preempt a running sequence by force at each n-th step."""
    answers, ended, step = Answers(), set(), 0
    for request in requests:
        answers.token_ids[request.request_id], answers.logprobs[request.request_id] = [], []
        core.add(request)
    while core.has_work():
        output, step = core.step(), step + 1
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            answers.token_ids[request_id] += token_ids
        for request_id, entries in output.logprobs.items():
            answers.logprobs[request_id] += entries
        for request_id, finish in output.finished.items():
            ended.add(request_id)
            if finish.reason not in ("stop", "length"):
                raise RuntimeError(f"request {request_id} ended with {finish.reason}")
        if preempt_every and step % preempt_every == 0:
            alive = [request_id for request_id in answers.token_ids if request_id not in ended]
            if alive:
                core.scheduler.preempt(alive[step % len(alive)])
    return answers


class Law:
    """The bits of requests alone, and the same requests run in other ways."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.requests = make_requests(device, 3 if device.toy else 32)
        self.reference: Answers | None = None

    def items(self) -> Iterator[tuple[str, Callable[[], Result]]]:
        toy = self.device.toy
        ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
        ways: dict[str, dict[str, Any]] = {
            "in a batch of 256": {"strangers": 2 if toy else 224},
            "chunked": {"max_num_batched_tokens": 7 if toy else 77},
            "cached": {"twice": True},
            "preempted": {"preempt_every": 2, "strangers": 2 if toy else 60},
            "with n-gram drafts": {"speculative_config": ngram},
        }
        for dtype in REF_TOLERANCES:
            yield f"torch_ref on the device, {dtype}", lambda dtype=dtype: self.reference_backend(dtype)  # type: ignore[misc]
        if self.device.is_gpu:
            yield "compile the built-in model", self.compile
        yield "greedy ids of torch_ref", self.greedy
        for name, way in ways.items():
            yield f"law: {name}", lambda way=way: self.compare(**way)  # type: ignore[misc]
        yield "law: drawn on the device", lambda: self.drawn(2 if toy else 224)
        yield "law: drawn on the device, no overlap", lambda: self.drawn(2 if toy else 224, async_scheduling=False)

    def compile(self) -> Result:
        with mock.patch.object(Replay, "prepare"):
            core = make_core(self.device)
        program: Any = core.executor.program  # type: ignore[attr-defined]
        result = compile_all(
            launch for replay in (program.whole, program.head) for size in replay.sizes
            for launch in replay.launches(size)
        )  # fmt: skip
        core.close()
        return result

    def alone(self) -> Answers:
        if self.reference is None:
            core = make_core(self.device, enable_prefix_caching=False)
            self.reference = Answers()
            for request in self.requests:
                answers = run(core, [request])
                self.reference.token_ids |= answers.token_ids
                self.reference.logprobs |= answers.logprobs
            core.close()
        return self.reference

    def compare(self, strangers: int = 0, twice: bool = False, preempt_every: int = 0, **options: Any) -> Result:
        reference = self.alone()
        core = make_core(self.device, **options)
        others = make_requests(self.device, len(self.requests) + strangers)[len(self.requests) :]
        mixed = [*self.requests, *others]
        mixed = [mixed[i * 31 % len(mixed)] for i in range(len(mixed))]
        answers = run(core, mixed, preempt_every)
        if twice:
            answers = run(core, mixed)
        stats = core.stats()
        core.close()
        names = [request.request_id for request in self.requests]
        wrong = [name for name in names if answers.bits(name) != reference.bits(name)]
        fault = f"other bits: {wrong[:5]}" if wrong else ""
        happened = {
            "preempted": (preempt_every, stats.num_preemptions),
            "found in the cache": (twice, stats.prefix_cache_hits),
            "guessed": ("speculative_config" in options, stats.num_draft_tokens),
        }
        for what, (is_expected, count) in happened.items():
            if is_expected and not count:
                fault = fault or f"nothing was {what}: this shows nothing"
        return {
            "requests": len(mixed), "preemptions": stats.num_preemptions, "cache_hits": stats.prefix_cache_hits,
            "guesses": stats.num_draft_tokens, "wrong": len(wrong), "fault": fault,
        }  # fmt: skip

    def drawn(self, strangers: int, **options: Any) -> Result:
        """The same requests and others, without log-probabilities: the device draws, and step N + 1 starts before the
        end of step N. Their ids must be those that the host drew from the logits of requests alone."""
        reference = self.alone()
        core = make_core(self.device, **options)
        overlaps = count_overlaps(core)
        requests = make_requests(self.device, len(self.requests) + strangers, logprobs=None)
        answers = run(core, requests)
        core.close()
        names = [request.request_id for request in self.requests]
        wrong = [name for name in names if answers.token_ids[name] != reference.token_ids[name]]
        fault = f"other ids: {wrong[:5]}" if wrong else ""
        if any(overlaps) != options.get("async_scheduling", True):
            fault = fault or f"{sum(overlaps)} of {len(overlaps)} steps overlapped: this shows nothing"
        return {"requests": len(requests), "steps": len(overlaps), "overlapped": sum(overlaps), "fault": fault}

    def reference_backend(self, dtype: str) -> Result:
        """torch_ref on the device against torch_ref on the CPU: log-probabilities of greedy answers, up to the first
        token that differs; there the two likeliest must lie within rounding."""
        return compare_logprobs(self.by_torch_ref("cpu", dtype), self.by_torch_ref(self.device.name, dtype), dtype)

    def by_torch_ref(self, device: str, dtype: str) -> Answers:
        """Return torch_ref's answers to the greedy requests, together."""
        core = make_core(self.device, backend="torch_ref", device=device, dtype=dtype)
        answers = run(core, self.greedy_requests)
        core.close()
        return answers

    @property
    def greedy_requests(self) -> list[Request]:
        return [request for request in self.requests if request.params.temperature == 0.0]

    def greedy(self) -> Result:
        """Ids until the first that differs; there the reference's two likeliest must lie within the roundings of both.
        The reference runs on the same device: in bfloat16 a GPU's and a CPU's own ids differ."""
        expected, actual = self.by_torch_ref(self.device.name, "bfloat16"), self.alone()
        equal, gaps, wrong = 0, [], []
        for request in self.greedy_requests:
            name = request.request_id
            ids, mine = expected.token_ids[name], actual.token_ids[name]
            place = next((i for i, pair in enumerate(zip(ids, mine, strict=True)) if pair[0] != pair[1]), None)
            if place is None:
                equal += 1
                continue
            (_, first), (_, second) = expected.logprobs[name][place].top[:2]
            gaps.append(round(first - second, 3))
            if first - second > 2 * ROUNDING:
                wrong.append(name)
        return {
            "equal": equal,
            "close": len(gaps) - len(wrong),
            "gaps": gaps,
            "fault": f"other ids: {wrong}" if wrong else "",
        }


def compare_logprobs(expected: Answers, actual: Answers, dtype: str) -> Result:
    """Return how far the log-probabilities of answers lie apart, as far as their tokens are the same."""
    tolerance, wrong = REF_TOLERANCES[dtype], []
    errors: list[float] = []
    for name, ids in expected.token_ids.items():
        for place, token_id in enumerate(ids):
            entry, other = expected.logprobs[name][place], actual.logprobs[name][place]
            if actual.token_ids[name][place] != token_id:
                # Each of the two may be off by the tolerance.
                wrong += [name] * (entry.top[0][1] - entry.top[1][1] > 2 * tolerance)
                break
            errors.append(abs(entry.logprob - other.logprob))
    far = [error for error in errors if not error <= tolerance]  # NaN too
    fault = f"other ids: {wrong}" if wrong else ""
    if far or not errors:
        fault = fault or f"{len(far)} of {len(errors)} log-probabilities differ by more than {tolerance}"
    return {"tokens": len(errors), "distance": max(errors, default=0.0), "fault": fault}
