"""A recorded engine without a model that lives through evictions, preemptions, speculation and aborts, and its
notes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tests.support import fake

from headrace.core.journal import Note, decode_note
from headrace.engine.build import make_scheduler
from headrace.engine.core import EngineCore
from headrace.engine.records.recording import RecordedEngine, Recorder
from headrace.insight.simulated import Behaviour, Oracle, SimulatedExecutor
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft, Request, StepOutput

# So few blocks that sequences are thrown out.
CONFIG = EngineConfig(
    model="fake",
    num_gpu_blocks_override=24,
    block_size=4,
    max_num_batched_tokens=16,
    max_num_seqs=6,
    speculative_config={"method": "ngram", "num_speculative_tokens": 3},
)


def request(name: str, prompt: list[int], num: int = 8, **more: Any) -> Request:
    params = SamplingParams(seed=len(prompt), max_tokens=num, ignore_eos=True, **more.pop("params", {}))
    return Request(request_id=name, prompt_token_ids=prompt, params=params, **more)


def recorded(path: Path, config: EngineConfig = CONFIG, seed: int = 3) -> RecordedEngine:
    """Return an engine whose clock ticks at each reading, and whose executor guesses, fails and is late."""
    core, rng = fake.build(config), random.Random(seed)

    def guess(step_id: int, index: int, say: Any) -> Draft | None:
        tokens = [say([])]
        tokens.append(say(tokens) if rng.random() < 0.5 else 1)
        return Draft(tokens) if rng.random() < 0.5 else None

    executor = SimulatedExecutor(
        core.info.num_blocks,
        core.info.block_size,
        Oracle(fake.VOCAB_SIZE, [fake.EOS]),
        Behaviour(
            guess=guess if config.speculative_config is not None else None,
            fail=lambda step_id, index: rng.random() < 0.01,
            defer=lambda step_id, index: rng.random() < 0.05,
        ),
    )
    scheduler = make_scheduler(config, core.info, speculates=config.speculative_config is not None)
    recorder = Recorder(str(path), 2**24, msgspec.msgpack.encode(config), core.info, 1.5)
    ticks = itertools.count(100)
    return RecordedEngine(recorder, None, None, scheduler, executor, core.info, lambda: next(ticks) / 64, check_every=1)


def notes_of_life(core: EngineCore, seed: int = 3) -> Iterator[Note]:
    for output in live_through(core, seed):
        yield decode_note(output.note)


def live_through(core: EngineCore, seed: int = 3) -> Iterator[StepOutput]:
    """Yield the steps of arrivals, aborts and a reset of the cache, at random steps, until all is over."""
    rng = random.Random(seed)
    for step in itertools.count():
        if step < 80 and rng.random() < 0.4:
            prompt = [7] * rng.choice((0, 8, 12)) + [rng.randrange(200) for _ in range(rng.randint(1, 20))]
            params = {"prompt_logprobs": 1} if rng.random() < 0.1 else {}
            core.add(request(f"r{step}", prompt, rng.randint(3, 30), params=params))
        if step < 80 and rng.random() < 0.1:
            core.abort(rng.choice([*core.scheduler.sequences, ""]))
        if step == 40:
            core.reset_prefix_cache()
        if core.has_work():
            yield core.step()
        elif step >= 80:
            return
