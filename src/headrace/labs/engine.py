"""An engine for experiments: it counts the rows and steps that it computes. Called by the labs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from headrace.cli.bench.offline import ObservedExecutor, steps
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, ScheduledBatch


class Meter:
    """Counts the steps and rows of an engine, and the positions that its rows look back on."""

    def __init__(self, core: EngineCore) -> None:
        self.num_steps = self.num_rows = self.num_seen = 0
        core.executor = ObservedExecutor(core.executor, self._count)

    def _count(self, batch: ScheduledBatch) -> None:
        self.num_steps += bool(batch.lens)
        self.num_rows += sum(batch.lens)
        self.num_seen += sum(n * s + n * (n + 1) // 2 for s, n in zip(batch.starts, batch.lens, strict=True))


class TimedAnswer(NamedTuple):
    """Tokens of an answer, seconds to the first and to the last of them, and prompt tokens that were cached."""

    token_ids: list[int]
    ttft: float
    latency: float
    num_cached: int

    @property
    def tpot(self) -> float:
        """Seconds of each token after the first."""
        return (self.latency - self.ttft) / max(1, len(self.token_ids) - 1)


class Bench:
    """An idle engine and its meter."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.meter = Meter(core)
        self._number = 0

    def prompt(self, length: int, seed: int) -> list[int]:
        """Return random token ids."""
        noise = random.Random(seed)
        return [noise.randrange(self.core.info.vocab_size) for _ in range(length)]

    def run(self, prompts: Sequence[list[int]], num_new: Sequence[int], **fields: Any) -> list[TimedAnswer]:
        """Answer all prompts at once with so many tokens each. `fields` are of `SamplingParams`.

        Raises `RequestError` for a request that the engine refuses, `HeadraceError` for a request that fails."""
        texts: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {}
        hits = self.core.stats().prefix_cache_hits
        for prompt, num in zip(prompts, num_new, strict=True):
            self._number += 1
            params = SamplingParams(**({"temperature": 0.0, "seed": 1} | fields), max_tokens=num, ignore_eos=True)
            name = f"lab {self._number}"
            self.core.add(Request(request_id=name, prompt_token_ids=list(prompt), params=params))
            texts[name], times[name] = [], []
        start = time.perf_counter()
        for output in steps(self.core):
            now = time.perf_counter() - start
            for name, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                texts[name] += token_ids
                times[name] += [now] * bool(token_ids)
        cached = self.core.stats().prefix_cache_hits - hits
        return [TimedAnswer(texts[name], times[name][0], times[name][-1], cached) for name in texts]


@contextmanager
def opened(model: str, **fields: Any) -> Iterator[Bench]:
    """An engine that is closed at the end, and computes one step at a time. `fields` are of `EngineConfig`."""
    defaults: dict[str, Any] = {"enable_prefix_caching": False, "async_scheduling": False}
    core = build_engine(EngineConfig(model=model, **(defaults | fields)))
    bench = Bench(core)
    try:
        yield bench
    finally:
        core.close()
