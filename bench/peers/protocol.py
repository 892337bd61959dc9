"""The program of every measured process: load one model, then answer JSON commands on stdin, one line each.

The works are defined here, once, in terms of `Engine.generate`, so that all engines do the same. Runs inside the peers'
environments: the standard library only. `bench.compare.workers` is at the other end.

    job   one argument, JSON: the fields of `Job`
    ready {"load_s": s, "weight_bytes": n | null, "instructions": "...", "versions": {...}}
    ask   {"work": "decode"}             or {"work": "decode", "warm": true}: the same, shorter, to wake everything
    reply {"value": v, "seconds": s, "peak_rss_mib": n, ...details}     or {"error": "..."}
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bench.tied import end_with_parent

NUM_PROMPT, NUM_NEW = 128, 128
NUM_PREFIX, NUM_AFTER = 2048, 32
NUM_CONTEXT, NUM_DEEP = 16_384, 64
NUM_FIRST = 16
NUM_WARM = 512  # tokens of a warm-up's prompt at most
FIRST_ID = 300  # below are bytes and special tokens


@dataclasses.dataclass(frozen=True)
class Job:
    """The task of a process. `do` is work, first_token or convert; `kv_tokens` is the least number of tokens, over all
    sequences, that the engine's cache must hold."""

    do: str
    shape: str
    vocab: int
    source: str
    model: str
    quant: str
    threads: int
    num_seqs: int = 32
    kv_tokens: int = 9216
    kv_cache_dtype: str = ""
    prefix_caching: bool = False
    max_len: int = 4096


class Engine(Protocol):
    """A loaded model. `generate` completes all prompts together, greedily, each to exactly `num_new` tokens, and
    returns how many tokens it made. `instructions`: the engine's own word for the instruction sets that it
    uses here."""

    weight_bytes: int | None
    instructions: str

    def prepare(self, num_seqs: int, length: int) -> None:
        """Make room for so many sequences of at most `length` tokens; not timed."""

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int: ...


class Streaming(Engine, Protocol):
    def seconds_between(self, prompt: list[int], num_new: int) -> float:
        """Seconds from the first to the last of `num_new` tokens after one prompt."""


class Works:
    """The timed works on one engine. Prompts are drawn at random, no two alike."""

    def __init__(self, engine: Engine, vocab: int, seed: int | None = None) -> None:
        self._engine = engine
        self._vocab = vocab
        # Two processes, or two rounds, must not send an engine the same prompt.
        self._noise = random.Random(time.time_ns() if seed is None else seed)

    def run(self, work: str, warm: bool = False) -> dict[str, float]:
        """Run `work` once: its figure as "value", and the parts of it. Raises ValueError for an unknown work."""
        if work in ("decode", "memory"):
            return self._decode(1 if work == "memory" else 0, warm)
        if match := re.fullmatch(r"prefill(\d+)", work):
            num = int(match[1])
            self._engine.prepare(1, num + 1)
            num = min(num, NUM_WARM) if warm else num
            return {"value": num / self._time(1, num, 1)}
        if match := re.fullmatch(r"batch(\d+)", work):
            num = int(match[1])
            self._engine.prepare(num, NUM_PROMPT + NUM_NEW)
            if warm:
                return {"value": 1 / self._time(min(num, 8), NUM_PROMPT, 4)}
            return {"value": num * NUM_NEW / self._time(num, NUM_PROMPT, NUM_NEW)}
        if match := re.fullmatch(r"step(\d+)", work):
            return self._steps(int(match[1]), warm)
        if work == "prefix":
            return self._prefix(warm)
        if work == "context":
            return self._context(warm)
        raise ValueError(f"no work is called {work!r}")

    def ids(self, num: int) -> list[int]:
        return [self._noise.randrange(FIRST_ID, self._vocab) for _ in range(num)]

    def _time(self, num_seqs: int, num_prompt: int, num_new: int, prompts: list[list[int]] | None = None) -> float:
        prompts = prompts or [self.ids(num_prompt) for _ in range(num_seqs)]
        start = time.perf_counter()
        num_tokens = self._engine.generate(prompts, num_new)
        seconds = time.perf_counter() - start
        if num_tokens != num_seqs * num_new:
            raise RuntimeError(f"{num_tokens} tokens came of {num_seqs * num_new}")
        return seconds

    def _step_seconds(self, num_seqs: int, num_new: int) -> float:
        """Seconds of a decode step: what the tokens after the first took, by the difference of two runs."""
        self._engine.prepare(num_seqs, NUM_PROMPT + num_new)
        whole = self._time(num_seqs, NUM_PROMPT, num_new)
        return (whole - self._time(num_seqs, NUM_PROMPT, 1)) / (num_new - 1)

    def _decode(self, memory: int, warm: bool) -> dict[str, float]:
        step = self._step_seconds(1, 8 if warm else NUM_NEW)
        return {"value": float(peak_rss_mib())} if memory else {"value": 1 / step}

    def _steps(self, num_seqs: int, warm: bool) -> dict[str, float]:
        many = self._step_seconds(num_seqs, 4 if warm else NUM_NEW)
        one = self._step_seconds(1, 4 if warm else NUM_NEW)
        return {"value": many / one, "many_ms": many * 1e3, "one_ms": one * 1e3}

    def _prefix(self, warm: bool) -> dict[str, float]:
        prefix = self.ids(64 if warm else NUM_PREFIX)
        self._engine.prepare(1, NUM_PREFIX + NUM_AFTER + 1)
        cold = self._time(1, 0, 1, [prefix + self.ids(NUM_AFTER)])
        cached = self._time(1, 0, 1, [prefix + self.ids(NUM_AFTER)])
        return {"value": cold / cached, "cold_s": cold, "cached_s": cached}

    def _context(self, warm: bool) -> dict[str, float]:
        prompt = self.ids(64 if warm else NUM_CONTEXT)
        seconds = self._engine.seconds_between(prompt, NUM_DEEP)  # type: ignore[attr-defined]
        return {"value": (NUM_DEEP - 1) / seconds, "mean_context": len(prompt) + NUM_DEEP / 2}


def peak_rss_mib() -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) // 1024
    raise RuntimeError("/proc has no VmHWM")


def versions(packages: Sequence[str]) -> dict[str, str]:
    versions_by_name = {}
    for name in packages:
        try:
            versions_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions_by_name[name] = "not installed"
    return versions_by_name


def torch_instructions() -> str:
    """What torch dispatches to, and whether oneDNN may use AMX."""
    import torch

    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return torch.backends.cpu.get_cpu_capability() + (", AMX" if amx else "")


def first_prompt(vocab: int) -> list[int]:
    return [FIRST_ID + 7919 * i % (vocab - FIRST_ID) for i in range(NUM_FIRST)]


def main(load: Callable[[Job], Engine], convert: Callable[[Job], None], packages: Sequence[str]) -> None:
    """Do the job in argv. Replies go to what was stdout; whatever else prints there goes to stderr instead."""
    start = time.perf_counter()
    end_with_parent(os.getppid())  # a stopped process would not see its stdin end
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    if job.do == "convert":
        convert(job)
        return
    engine = load(job)
    loaded = time.perf_counter() - start
    if job.do == "first_token":
        engine.prepare(1, NUM_FIRST + 1)
        engine.generate([first_prompt(job.vocab)], 1)
        replies.write(json.dumps({"load_s": loaded, "peak_rss_mib": peak_rss_mib()}) + "\n")
        replies.flush()
        os._exit(0)  # the rest is not measured
    works = Works(engine, job.vocab)
    facts = {"weight_bytes": engine.weight_bytes, "instructions": engine.instructions}
    replies.write(json.dumps({"load_s": loaded, **facts, "versions": versions(packages)}) + "\n")
    for number in itertools.count():
        line = sys.stdin.readline()
        if not line:
            break
        replies.write(json.dumps(answer(works, json.loads(line), number)) + "\n")
    os._exit(0)  # some engines hang or crash while they are taken apart


def answer(works: Works, command: dict[str, Any], number: int) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        reply: dict[str, Any] = dict(works.run(command["work"], bool(command.get("warm"))))
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return reply | {"seconds": time.perf_counter() - start, "peak_rss_mib": peak_rss_mib(), "number": number}
