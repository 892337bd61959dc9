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
from headrace.protocol.step import Request, TokenLogprob

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


def make_requests(device: Device, num: int) -> list[Request]:
    """Requests of many lengths, of which every other one is greedy; the longest pass a span of attention."""
    repeats = (1,) if device.toy else (1, 3, 9, 36)
    made = []
    for i in range(num):
        ids = list(OPENINGS[i % len(OPENINGS)]) * repeats[i // len(OPENINGS) % len(repeats)]
        params = SamplingParams(
            temperature=(0.0, 0.8)[i % 2], seed=1000 + i, max_tokens=4 if device.toy else 16, ignore_eos=True,
            logprobs=2, top_k=40 if i % 3 == 1 else 0, top_p=0.9 if i % 3 == 2 else 1.0,
        )  # fmt: skip
        made.append(Request(request_id=str(i), prompt_token_ids=ids, params=params))
    return made


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
        if self.device.is_gpu:
            yield "compile the built-in model", self.compile
        yield "greedy ids of torch_ref", self.greedy
        for name, way in ways.items():
            yield f"law: {name}", lambda way=way: self.compare(**way)  # type: ignore[misc]

    def compile(self) -> Result:
        with mock.patch.object(Replay, "prepare"):
            core = make_core(self.device)
        program: Any = core.executor.program  # type: ignore[attr-defined]
        result = compile_all(
            launch for replay in (program._whole, program._head) for size in replay.sizes
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
        if (preempt_every and not stats.num_preemptions) or (twice and not stats.prefix_cache_hits):
            fault = fault or "nothing was preempted, or nothing found in the cache: this shows nothing"
        return {
            "requests": len(mixed), "preemptions": stats.num_preemptions, "cache_hits": stats.prefix_cache_hits,
            "wrong": len(wrong), "fault": fault,
        }  # fmt: skip

    def greedy(self) -> Result:
        """Ids until the first that differs; there the reference's two likeliest must lie within rounding."""
        greedy = [request for request in self.requests if request.params.temperature == 0.0]
        core = make_core(self.device, backend="torch_ref", device="cpu")
        expected = run(core, greedy)
        core.close()
        actual = self.alone()
        equal, close, wrong = 0, 0, []
        for request in greedy:
            name = request.request_id
            ids, mine = expected.token_ids[name], actual.token_ids[name]
            place = next((i for i, pair in enumerate(zip(ids, mine, strict=True)) if pair[0] != pair[1]), None)
            if place is None:
                equal += 1
                continue
            (_, first), (_, second) = expected.logprobs[name][place].top[:2]
            if first - second <= ROUNDING:
                close += 1
            else:
                wrong.append(name)
        return {"equal": equal, "close": close, "fault": f"other ids: {wrong}" if wrong else ""}
