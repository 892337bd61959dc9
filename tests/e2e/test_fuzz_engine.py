"""Differential fuzz of the real engine: random requests under random hostile conditions, against a plain loop.

The loop runs one request alone on a runner, its prompt in one piece, without scheduler, blocks to share or cache.
The engine gets the same requests in a mix: siblings, priorities, shared prefixes, resumed tokens, tiny pools and
budgets, aborts, forced preemptions, resets of the cache, failing steps and steps that memory is too small for. Token
ids, ends and the bits of every log-probability must be equal. The last tests break the engine on purpose.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.harness import make_batch, save_random

from headrace import models
from headrace.backends.step import Chunks, HostLogits
from headrace.core import prefix
from headrace.core.scheduler import Scheduler
from headrace.core.tables import BlockTables
from headrace.engine import build
from headrace.engine.core import EngineCore, Ticket
from headrace.engine.library.load import build_runner
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Finish, Request, ScheduledBatch, TokenLogprob

LONGEST = 64
EOS = [3, 17]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2, int4": ("gemma2", {"quantization": "int4", "dtype": "bfloat16"}),
    "mixtral, int8": ("mixtral", {"quantization": "int8"}),
    "mistral, int4 of 64 with minima, cache of int8": (
        "mistral", {"quantization": "int4-g64-asym", "kv_cache_dtype": "int8"}
    ),
    "gpt2, cache of bfloat16": ("gpt2", {"kv_cache_dtype": "bfloat16"}),
    "torch_ref: gemma2 in bfloat16": ("gemma2", {"backend": "torch_ref", "dtype": "bfloat16"}),
    "torch_ref: mistral in float16": ("mistral", {"backend": "torch_ref", "dtype": "float16"}),
    "torch_ref: mixtral": ("mixtral", {"backend": "torch_ref"}),
}  # fmt: skip
SMALL = {"vocab_size": 61, "eos_token_id": EOS, "max_position_embeddings": LONGEST}


class Answer(msgspec.Struct):
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    finish: Finish | None = None


def bits(entries: list[TokenLogprob]) -> list[tuple[int, int, bytes, list[int]]]:
    pack = lambda e: struct.pack(f"{1 + len(e.top)}d", e.logprob, *(p for _, p in e.top))  # noqa: E731
    return [(e.token_id, e.rank, pack(e), [t for t, _ in e.top]) for e in entries]


class Plain:
    """One request at a time, by the shortest way there is. Its own reading of the finish rules."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        config = EngineConfig(model=str(directory), num_gpu_blocks_override=LONGEST // 16, **options)
        self.runner, self.info = build_runner(config)
        self.known: dict[bytes, Answer] = {}

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        key = msgspec.msgpack.encode((prompt, params))
        if key not in self.known:
            self.known[key] = self._answer(prompt, params)
        return self.known[key]

    def _answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        tokens, start, answer = list(prompt), 0, Answer([], [], [])
        table = list(range(LONGEST // 16))
        while answer.finish is None:
            batch = make_batch([(1, start, tokens[start:], table)], params=[params], num_prompts=[len(prompt)])
            result = self.runner.run(batch)
            assert not result.column("error"), result.column("error")
            start = len(tokens)
            token = result.token_ids[0]
            tokens.append(token)
            answer.token_ids.append(token)
            answer.logprobs += result.column("logprob").values()
            answer.prompt_logprobs += result.column("prompt_logprobs").get(0, [])
            num = len(answer.token_ids)
            if num >= params.min_tokens and token in EOS and not params.ignore_eos:
                answer.finish = Finish("stop")
            elif num >= params.min_tokens and token in (params.stop_token_ids or []):
                answer.finish = Finish("stop", stop_reason=token)
            elif num == params.max_tokens or len(tokens) == LONGEST:
                answer.finish = Finish("length")
        return answer


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    max_tokens = rng.choice([1, 2, 5, 12, 30])
    maybe = lambda value: value if rng.random() < 0.3 else None  # noqa: E731
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
        ignore_eos=rng.random() < 0.5,
        top_k=rng.choice([0, 0, 1, 7]),
        top_p=rng.choice([1.0, 0.7]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        logprobs=maybe(rng.choice([0, 3])),
        prompt_logprobs=maybe(rng.choice([0, 2])),
        logit_bias=maybe({rng.randrange(61): rng.choice([-100.0, 2.5, 100.0]) for _ in range(3)}),
        stop_token_ids=maybe([rng.randrange(61) for _ in range(4)]),
    )


def random_requests(rng: random.Random, plain: Plain, num_groups: int) -> list[Request]:
    stems = [[rng.randrange(61) for _ in range(rng.choice([1, 3, 16, 40]))] for _ in range(3)]
    result: list[Request] = []
    for group in range(num_groups):
        stem = rng.choice(stems)
        tail = [rng.randrange(61) for _ in range(rng.choice([0, 1, 4, 15]))]
        prompt = (stem[: rng.randint(1, len(stem))] if rng.random() < 0.4 else stem) + tail
        params = random_params(rng, rng.randrange(2**40))
        for i in range(rng.choice([1, 1, 1, 2, 4])):
            seeded = msgspec.structs.replace(params, seed=(params.seed or 0) + i)
            whole = plain.answer(prompt, seeded).token_ids
            resumed = whole[: rng.randint(0, len(whole))] if rng.random() < 0.2 else []
            result.append(
                Request(
                    request_id=f"g{group}.{i}", prompt_token_ids=prompt, params=seeded, group=f"g{group}",
                    priority=rng.randint(-2, 2), cache_salt=rng.choice(["", "", "salt"]), resume_token_ids=resumed,
                )
            )  # fmt: skip
    return result


def random_engine(rng: random.Random, directory: Path, options: dict[str, Any]) -> EngineCore:
    block_size = rng.choice([1, 2, 3, 5, 8, 16])
    budget = rng.choice([1, 2, 5, 13, 40, 200])
    chunked = budget < LONGEST or rng.random() < 0.7
    return build.build_engine(
        EngineConfig(
            model=str(directory),
            num_threads=rng.choice([1, 2]),
            **options,
            block_size=block_size,
            num_gpu_blocks_override=-(-LONGEST // block_size) * rng.choice([1, 1, 2, 4]) + rng.randrange(3),
            max_num_seqs=rng.choice([1, 2, 7, 32]),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 3]),
            enable_prefix_caching=rng.random() < 0.7,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
        )
    )


def run_mixed(rng: random.Random, core: EngineCore, requests: list[Request], plain: Plain) -> set[str]:
    """Run all to their ends under random events, comparing as they go. Returns the ids of those that were aborted."""
    arrivals = rng.sample(requests, len(requests))
    answers = {r.request_id: Answer([], [], []) for r in requests}
    aborted: set[str] = set()
    hostile = rng.choice([0.0, 0.05, 0.3])
    right, failing = core.executor.start, [False]

    def start(batch: ScheduledBatch) -> Ticket:
        if failing[0]:
            raise RuntimeError("the device is gone")
        return right(batch)

    core.executor.start = start  # type: ignore[method-assign]
    program: Any = core.executor.program  # type: ignore[attr-defined]
    right_forward = program.forward
    program.max_rows = min(program.max_rows, rng.choice([1000, 1000, 3, 17]))

    def forward(chunks: Chunks, rows: list[int]) -> tuple[list[bool], HostLogits]:
        # A lone chunk always fits, so no request may fail.
        if len(chunks.starts) > 1 and rng.random() < hostile / 2:
            raise MemoryError
        done: tuple[list[bool], HostLogits] = right_forward(chunks, rows)
        if len(chunks.starts) > 1 and rng.random() < hostile / 4:
            raise MemoryError
        return done

    program.forward = forward
    for _ in range(100_000):
        if not arrivals and not core.has_work():
            break
        while arrivals and rng.random() < 0.3:
            core.add(arrivals.pop())
        alive = [name for name, seq in core.scheduler.sequences.items() if seq.status < 2]
        if alive and rng.random() < hostile:
            core.scheduler.preempt(rng.choice(alive))
        if alive and rng.random() < hostile / 8:
            name = rng.choice(alive)
            aborted.add(name)
            assert core.abort(name)
        if rng.random() < hostile / 4:
            core.reset_prefix_cache()
        failing[0] = rng.random() < hostile / 4
        if failing[0]:
            with pytest.raises(RuntimeError, match="the device is gone"):
                core.step()
            core.scheduler.check()
            continue
        output = core.step()
        core.scheduler.check()
        for name, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            answers[name].token_ids += token_ids
        for name, entries in output.logprobs.items():
            answers[name].logprobs += entries
        for name, entries in output.prompt_logprobs.items():
            answers[name].prompt_logprobs += entries
        for name, finish in output.finished.items():
            assert answers[name].finish is None, f"{name} ended twice"
            answers[name].finish = finish
    assert not core.has_work(), "never ends"
    assert core.stats().num_blocks_held == 0
    for request in requests:
        compare(request, answers[request.request_id], plain, request.request_id in aborted)
    return aborted


def compare(request: Request, actual: Answer, plain: Plain, aborted: bool) -> None:
    expected = plain.answer(request.prompt_token_ids, request.params)
    done = len(request.resume_token_ids)
    finished = done == len(expected.token_ids)
    num = len(actual.token_ids) if aborted else len(expected.token_ids) - done
    assert actual.finish == (Finish("abort") if aborted else expected.finish), request
    assert actual.token_ids == expected.token_ids[done : done + num], request
    if request.params.logprobs is not None:
        assert bits(actual.logprobs) == bits(expected.logprobs)[done : done + num], request
    if not aborted and not finished:
        assert bits(actual.prompt_logprobs) == bits(expected.prompt_logprobs), request


@pytest.fixture(scope="module")
def make_plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Plain]]:
    result: dict[str, tuple[Path, Plain]] = {}

    def make(name: str) -> tuple[Path, Plain]:
        if name not in result:
            model_type, options = MODELS[name]
            directory = tmp_path_factory.mktemp(model_type)
            save_random(models.find(model_type).TINY | SMALL, directory)
            result[name] = directory, Plain(directory, options)
        return result[name]

    return make


def fuzz(seed: int, name: str, directory: Path, plain: Plain) -> Counter[str]:
    """One world: an engine, its requests, its events. Returns what happened in it."""
    rng = random.Random(f"{name} {seed}")
    core = random_engine(rng, directory, MODELS[name][1])
    requests = random_requests(rng, plain, rng.choice([1, 3, 8]))
    aborted = run_mixed(rng, core, requests, plain)
    stats = core.stats()
    core.close()
    return Counter(
        requests=len(requests), aborted=len(aborted), preempted=stats.num_preemptions, steps=stats.num_steps,
        hits=stats.prefix_cache_hits, tokens=stats.num_generated_tokens,
    )  # fmt: skip


NUM_SEEDS = {"cpu": 16, "torch_ref": 7}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_I_13_random_requests_in_random_worlds(name: str, make_plain: Callable[[str], tuple[Path, Plain]]) -> None:
    directory, plain = make_plain(name)
    total: Counter[str] = Counter()
    for seed in range(NUM_SEEDS[MODELS[name][1].get("backend", "cpu")]):
        total += fuzz(seed, name, directory, plain)
    # The worlds were hostile indeed.
    assert all(total[name] for name in ("aborted", "preempted", "hits")), total
    generated = {tuple(answer.token_ids) for answer in plain.known.values()}
    assert len(generated) > len(plain.known) / 2  # and the model does say different things


def copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks write to blocks that hold nothing of what they share."""
    monkeypatch.setattr(BlockTables, "take_copies", lambda tables: [pairs.clear() or [] for pairs in tables.copies])


def match_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that differ are said to agree, in a block that is shared in part."""
    right = prefix._common
    monkeypatch.setattr(prefix, "_common", lambda left, right_: min(right(left, right_) + 1, len(left) // 8))


def lose_a_retraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step that failed, its sequences go on as if it had been computed up to where it began."""

    def retract(self: Scheduler) -> None:
        self._retire()

    monkeypatch.setattr(Scheduler, "retract", retract)


@pytest.mark.parametrize("plant", [copy_nothing, match_one_too_many, lose_a_retraction])
def test_control_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None],
    make_plain: Callable[[str], tuple[Path, Plain]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, plain = make_plain("llama")
    plant(monkeypatch)
    assert any(notices(seed, directory, plain) for seed in range(100))


def notices(seed: int, directory: Path, plain: Plain) -> bool:
    try:
        fuzz(seed, "llama", directory, plain)
    except (AssertionError, HeadraceError):
        return True
    return False
