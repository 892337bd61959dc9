"""`headrace plan --check`: measures an engine on this machine, fits a model of its steps, and compares the planner's
predictions with measurements."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec

from headrace.cli.bench.offline import PARAMS, ObservedExecutor, run_batch, token_samples
from headrace.cli.bench.stats import percentile
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.engine.progress import Progress
from headrace.fleet.simulator import Simulation, Sizes
from headrace.fleet.traces import Call
from headrace.plan import fitted
from headrace.plan.planner import Planner
from headrace.protocol import step_model
from headrace.protocol.config import EngineConfig
from headrace.protocol.step import Request, ScheduledBatch

CASES = ((1, 128, 32), (8, 128, 32), (1, 512, 16), (16, 64, 32))
"""Sequences that come together, tokens of their prompts and of their answers."""
MOST_SEQS, MOST_TOKENS, LENGTHS = 32, 512, (8, 32, 64, 128, 256, 500)
NUM_REPEATS = 5
NUM_WARMUP = 40


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A figure as predicted and as measured: the median of some repeats, and the least and the most of them."""

    what: str
    unit: str
    predicted: float
    measured: float
    least: float
    most: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_within_spread(self) -> bool:
        return self.least <= self.predicted <= self.most


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result: the fitted model, where it is kept, and the comparisons."""

    model: step_model.StepModel
    path: str
    rows: list[Compared]


Case = tuple[int, int, int]
"""A row of `CASES`."""


class CaseTimes(NamedTuple):
    """Medians of the sequences of a case, of each repeat, in seconds."""

    ttfts: list[float]
    tpots: list[float]

    def add(self, core: EngineCore, case: Case, seed: int) -> None:
        """Run the case once."""
        timelines = run_batch(core, token_samples(core, *case, seed=seed), PARAMS, clock=time.perf_counter)
        self.ttfts.append(percentile([timeline.ttft for timeline in timelines], 50))
        self.tpots.append(percentile([timeline.tpot or 0.0 for timeline in timelines], 50))


class Steps(NamedTuple):
    """Steps that ran, and the most blocks that were held at once."""

    samples: list[fitted.Sample]
    num_blocks: int


def sample_of(batch: ScheduledBatch, seconds: float) -> fitted.Sample:
    """Return a step for a fit."""
    seen, alone = (count(batch.starts, batch.lens) for count in (step_model.num_seen, step_model.num_alone))
    return fitted.Sample(sum(batch.lens), sum(batch.samples), seen, seconds, alone)


def measured_steps(
    core: EngineCore,
    seconds: float,
    least: int = fitted.MIN_SAMPLES,
    seed: int = 3,
    more_lengths: Sequence[int] = (),
    most_seqs: int = 0,
) -> Steps:
    """Return the steps of bursts of random requests, for about `seconds`, but `least` at least. more_lengths: of
    prompts, in addition to `LENGTHS`: a fit says little of longer ones. most_seqs: at once, `MOST_SEQS` by default."""
    num_blocks, lengths, most_seqs = 0, (*LENGTHS, *more_lengths), most_seqs or MOST_SEQS
    noise, samples = random.Random(seed), list[fitted.Sample]()
    batches = list[ScheduledBatch]()
    executor = core.executor = ObservedExecutor(core.executor, batches.append)
    most = core.info.max_model_len - 1
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline or len(samples) < least:
        if noise.random() < 0.12 or not core.has_work():
            for _ in range(noise.choice((1, 1, 2, 4, 8, 16))):
                stats = core.stats()
                if stats.num_waiting + stats.num_running >= most_seqs:
                    break
                number += 1
                num_new = noise.choice((4, 16, 48, 96))
                length = max(1, min(noise.choice(lengths), most - num_new))
                prompt = [noise.randrange(core.info.vocab_size) for _ in range(length)]
                params = msgspec.structs.replace(PARAMS, seed=number, max_tokens=min(num_new, most - 1))
                core.add(Request(request_id=f"step {number}", prompt_token_ids=prompt, params=params))
        start = time.perf_counter()
        core.step()
        elapsed, batch = time.perf_counter() - start, batches.pop() if batches else None
        if batch is not None and batch.lens:
            samples.append(sample_of(batch, elapsed))
            num_blocks = max(num_blocks, core.scheduler.pool.num_held)
    for request_id in list(core.scheduler.sequences):
        core.abort(request_id)
    while core.has_work():
        core.step()
    core.executor = executor.inner
    return Steps(samples, num_blocks)


def warm(samples: list[fitted.Sample]) -> list[fitted.Sample]:
    """Return the samples without the first ones, if there are enough others."""
    return samples[NUM_WARMUP:] if len(samples) > 2 * NUM_WARMUP else samples


def check(one: Planner, config: EngineConfig, seconds: float, show: Progress) -> Check:
    """Measure for about `seconds`, of which half are for the fit, and compare. Raises the engine's errors."""
    import psutil

    process = psutil.Process()
    config = msgspec.structs.replace(
        config,
        max_model_len=min(1024, one.max_context),
        max_num_seqs=MOST_SEQS,
        max_num_batched_tokens=MOST_TOKENS,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    before = process.memory_info().rss
    samples, num_blocks, measured = list[fitted.Sample](), 0, dict[Case, CaseTimes]()
    with closing(build_engine(config)) as core:
        deadline = time.monotonic() + seconds
        cases = [case for case in CASES if sum(case[1:]) <= core.info.max_model_len]
        for repeat in range(NUM_REPEATS):
            # In turns, so that both are measured alike if the machine becomes slower.
            show(repeat, NUM_REPEATS, "times of steps")
            least = -(-fitted.MIN_SAMPLES // NUM_REPEATS)
            steps = measured_steps(core, seconds / 2 / NUM_REPEATS, least, seed=repeat)
            samples += steps.samples
            num_blocks = max(num_blocks, steps.num_blocks)
            for number, case in enumerate(cases):
                if not repeat or time.monotonic() <= deadline:
                    show(repeat, NUM_REPEATS, "{} x {} + {} tokens".format(*case))
                    measured.setdefault(case, CaseTimes([], [])).add(core, case, seed=1000 * number + repeat)
        model = fitted.fit(warm(samples))
        path = step_model.path_of(one.subject.name, one.form, one.kv_dtype)
        step_model.save(path, model)
        # The explanations of an engine find it by the engine's `EngineInfo`.
        step_model.save(step_model.path_of_engine(core.info), model)
        rows = [row for case, times in measured.items() for row in _compared(core, config, model, case, times)]
        info, resident = core.info, process.memory_info().rss - before
        # Blocks of the cache that were never held were never touched, and take no memory yet.
        touched = num_blocks * info.block_size * one.counts.kv_token_bytes(one.kv_dtype)
        predicted = one.counts.weight_bytes + touched + one.working
        rows.append(Compared(what="memory", unit="MB", predicted=predicted / 1e6, measured=resident / 1e6,
                             least=resident / 1e6, most=resident / 1e6))  # fmt: skip
    return Check(model=model, path=str(path), rows=rows)


def _compared(
    core: EngineCore, config: EngineConfig, model: step_model.StepModel, case: Case, times: CaseTimes
) -> list[Compared]:
    """Compare a case with its simulation by the scheduler and the model's times."""
    info, (batch, num_prompt, num_new) = core.info, case
    sizes = Sizes(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        enable_prefix_caching=False,
    )
    run = Simulation(1, "round-robin", sizes, model).run([Call(0.0, num_prompt, num_new)] * batch)
    words = f"{batch} x {num_prompt} + {num_new} tokens"

    def row(what: str, values: Sequence[float], predictions: Sequence[float]) -> Compared:
        return Compared(
            what=f"{what} {words}", unit="ms", predicted=1e3 * percentile(list(predictions), 50),
            measured=1e3 * percentile(list(values), 50), least=1e3 * min(values), most=1e3 * max(values),
        )  # fmt: skip

    return [
        row("TTFT", times.ttfts, [life.ttft for life in run.lives]),
        row("TPOT", times.tpots, [life.tpot for life in run.lives]),
    ]


def report_of(result: Check) -> str:
    """Return the comparison as lines of text."""
    model = result.model
    lines = [
        f"{model.num_steps:,} steps of 1 to {model.most_rows:,} rows fitted; steps that were not fitted are off by "
        f"{model.median_error:.1%} (median), {model.p90_error:.1%} (p90)",
        f"kept in {result.path}; headrace plan and simulate with --hardware this use it",
        "",
        f"{'':<32}{'predicted':>14}{'measured':>14}{'error':>9}   least to most of {NUM_REPEATS}",
    ]
    for row in result.rows:
        spread = f"{row.least:,.2f} to {row.most:,.2f}{', predicted within' * row.is_within_spread}"
        spread = "" if row.least == row.most else spread
        figures = f"{f'{row.predicted:,.2f} {row.unit}':>14}{f'{row.measured:,.2f} {row.unit}':>14}"
        lines.append(f"{row.what:<32}{figures}{row.error:>+9.1%}   {spread}".rstrip())
    return "\n".join(lines)
