"""`headrace simulate --check`: plays a slice of a trace on this machine's engine in real time, simulates the same slice
with step times fitted to that engine, and compares. Once with a large cache, and once with one so small that it
thrashes.

The engine is driven in this process: network and text are in neither side. Called by `headrace simulate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import msgspec

from headrace.cli.bench.data import trace_prompt
from headrace.cli.bench.offline import PARAMS, ObservedExecutor
from headrace.cli.bench.stats import Timeline, percentile
from headrace.cli.checking import Compared, measured_steps, sample_of, warm
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.engine.progress import Progress
from headrace.fleet.simulator import SimulatedRun, Simulation, Sizes
from headrace.fleet.traces import Call
from headrace.plan import fitted
from headrace.plan.planner import Planner
from headrace.protocol import step_model
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.step import Request, ScheduledBatch
from headrace.protocol.step_model import StepModel

FIT_SECONDS = 45.0
NUM_LENGTHS = 6
"""Lengths of the slice's prompts, from the shortest to the longest, with which the times of steps are fitted."""
SMALL_SHARE = 0.4
"""Blocks of the small cache, of the most that the replay before held."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The slice with a cache of `num_blocks` blocks. Refused requests are longer than the model or the cache.

    `afterwards`: the same rows, predicted with step times fitted to the steps of the replays themselves. An error that
    is gone there was the machine's, which was faster or slower when the times were fitted."""

    cache: str
    num_blocks: int
    num_requests: int
    num_refused: int
    predicted_preemptions: int
    preemptions: list[int]
    rows: list[Compared]
    afterwards: list[Compared]


class TraceCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted model, and the slice with each cache."""

    model: StepModel
    duration: float
    cases: list[Case]


class EngineRun(msgspec.Struct, kw_only=True):
    """The figures of one replay on the engine."""

    timelines: list[Timeline]
    num_refused: int
    num_preemptions: int
    cached_share: float
    most_blocks: int
    steps: list[fitted.Sample]

    @property
    def duration(self) -> float:
        return max((each.done for each in self.timelines), default=0.0)

    @property
    def throughput(self) -> float:
        return sum(each.num_output_tokens for each in self.timelines) / (self.duration or 1.0)


def replay(
    core: EngineCore,
    calls: Sequence[Call],
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> EngineRun:
    """Play the calls on an idle engine, each at its time. Times are seconds after the first call was due; the time to
    the first token counts from when a request was due, so the figures contain the delay by a late step.

    Raises `HeadraceError` if a request ends in an error."""
    core.reset_prefix_cache()
    allowed = list(range(core.info.vocab_size))
    prompts = [trace_prompt(call, number, seed, allowed) for number, call in enumerate(calls)]
    timelines, samples = dict[str, Timeline](), list[fitted.Sample]()
    batches = list[ScheduledBatch]()
    executor = core.executor = ObservedExecutor(core.executor, batches.append)
    before, at, num_refused, most_blocks = core.stats(), 0, 0, 0
    start = clock()
    while at < len(calls) or core.has_work():
        now = clock() - start
        while at < len(calls) and calls[at].time <= now:
            call, request_id = calls[at], str(at)
            params = msgspec.structs.replace(PARAMS, max_tokens=call.num_new, seed=at)
            try:
                core.add(Request(request_id=request_id, prompt_token_ids=prompts[at], params=params))
                timelines[request_id] = Timeline(sent=call.time, num_prompt_tokens=call.num_prompt)
            except RequestError:
                num_refused += 1
            at += 1
        if not core.has_work():
            if at < len(calls):
                sleep(max(0.0, calls[at].time - now))
            continue
        begin = clock()
        output = core.step()
        now = clock() - start
        batch = batches.pop() if batches else None
        if batch is not None and batch.lens:
            samples.append(sample_of(batch, now + start - begin))
        most_blocks = max(most_blocks, core.scheduler.pool.num_held)
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            if token_ids:
                timelines[request_id].token_times.append(now)
                timelines[request_id].num_output_tokens += len(token_ids)
        for request_id, finish in output.finished.items():
            if finish.reason in ("abort", "error"):
                raise HeadraceError(f"request {request_id} ended with {finish.reason}: {finish.message}")
            timelines[request_id].done = now
    core.executor = executor.inner
    after = core.stats()
    num_prompt = sum(each.num_prompt_tokens for each in timelines.values())
    return EngineRun(
        timelines=list(timelines.values()),
        num_refused=num_refused,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        cached_share=(after.prefix_cache_hits - before.prefix_cache_hits) / max(1, num_prompt),
        most_blocks=most_blocks,
        steps=samples,
    )


def check_trace(
    one: Planner, config: EngineConfig, calls: Sequence[Call], num_blocks: int, num_replays: int, show: Progress
) -> TraceCheck:
    """Replay the calls `num_replays` times with each of two caches: of `num_blocks`, and of so few that sequences and
    prefixes throw one another out. The step times are fitted on the same engine just before, and kept. `show` is called
    before each part.

    Raises `RequestError` if no call fits the model."""
    longest = max((c.num_prompt + c.num_new for c in calls if c.num_prompt + c.num_new <= one.max_context), default=0)
    if not longest:
        raise RequestError("--trace", f"{len(calls)} requests", f"requests of at most {one.max_context} tokens")
    config = msgspec.structs.replace(
        config, max_model_len=longest, num_gpu_blocks_override=num_blocks, async_scheduling=False,
        skip_tokenizer_init=True,
    )  # fmt: skip
    cases, total = list[Case](), 1 + 2 * num_replays

    def replays_on(core: EngineCore, num_done: int) -> list[EngineRun]:
        replays = list[EngineRun]()
        for seed in range(num_replays):
            show(num_done + seed, total, f"replay of {calls[-1].time:.0f} s or more")
            replays.append(replay(core, calls, seed))
        return replays

    show(0, total, "times of steps")
    with closing(build_engine(config)) as core:
        prompts = sorted(call.num_prompt for call in calls if call.num_prompt < longest)
        evenly = [prompts[(len(prompts) - 1) * i // (NUM_LENGTHS - 1)] for i in range(NUM_LENGTHS) if prompts]
        # Short prompts bring many small steps, the slice's own few large ones.
        short = measured_steps(core, FIT_SECONDS / 2)
        longer = measured_steps(core, FIT_SECONDS / 2, more_lengths=evenly, most_seqs=config.max_num_seqs)
        model = fitted.fit([*warm(short.samples), *longer.samples])
        step_model.save(step_model.path_of(one.subject.name, one.form, one.kv_dtype), model)
        replays = replays_on(core, 1)
        cases.append(_case("large", core, config, calls, model, replays))
    least = -(-longest // config.block_size)
    small = max(least, int(SMALL_SHARE * max(each.most_blocks for each in replays)))
    with closing(build_engine(msgspec.structs.replace(config, num_gpu_blocks_override=small))) as core:
        # The first steps of an engine touch memory that later ones find ready.
        measured_steps(core, 1.0)
        replays = replays_on(core, 1 + num_replays)
        cases.append(_case("small", core, config, calls, model, replays))
    return TraceCheck(model=model, duration=calls[-1].time, cases=cases)


def _case(
    cache: str,
    core: EngineCore,
    config: EngineConfig,
    calls: Sequence[Call],
    model: StepModel,
    replays: list[EngineRun],
) -> Case:
    sizes = Sizes(
        num_blocks=core.info.num_blocks,
        block_size=core.info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=core.info.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    run = Simulation(1, "round-robin", sizes, model).run(calls)
    steps = [sample for each in replays for sample in each.steps]
    later_model = fitted.fit(steps) if len(steps) >= fitted.MIN_SAMPLES else model
    return Case(
        cache=cache,
        num_blocks=core.info.num_blocks,
        num_requests=len(run.lives),
        num_refused=replays[0].num_refused,
        predicted_preemptions=run.num_preemptions,
        preemptions=[each.num_preemptions for each in replays],
        rows=_compared(run, replays),
        afterwards=_compared(Simulation(1, "round-robin", sizes, later_model).run(calls), replays),
    )


def _compared(run: SimulatedRun, replays: list[EngineRun]) -> list[Compared]:
    """Return the figures of a simulation next to the replays'."""
    lives = run.lives
    output_tokens = sum(life.num_new for life in lives)
    figures = [("throughput", "tok/s", output_tokens / (run.duration or 1.0), [each.throughput for each in replays])]
    for share in (50, 90):
        for name in ("ttft", "tpot"):
            measured = [1e3 * percentile(times_of(each.timelines, name), share) for each in replays]
            times = [getattr(life, name) for life in lives if name == "ttft" or life.num_new > 1]
            figures.append((f"{name.upper()} p{share}", "ms", 1e3 * percentile(times, share), measured))
    cached = sum(life.num_cached for life in lives) / max(1, sum(life.num_prompt for life in lives))
    figures.append(("cached", "%", 100 * cached, [100 * each.cached_share for each in replays]))
    return [
        Compared(what=what, unit=unit, predicted=value, measured=percentile(each, 50), least=min(each), most=max(each))
        for what, unit, value, each in figures
    ]


def times_of(timelines: Sequence[Timeline], name: str) -> list[float]:
    """Return the seconds of one metric, of the requests that have it."""
    return [value for each in timelines if (value := getattr(each, name)) is not None]


def json_of(result: TraceCheck) -> dict[str, Any]:
    """Return the result as JSON has it, with the error of each row as a part of the measured figure."""
    data: dict[str, Any] = msgspec.to_builtins(result) | {"thrashes": is_thrashing(result.cases)}
    for case, plain in zip(result.cases, data["cases"], strict=True):
        pairs = [*zip(case.rows, plain["rows"], strict=True), *zip(case.afterwards, plain["afterwards"], strict=True)]
        for row, fields in pairs:
            fields |= {"error": row.error if row.measured else None, "is_within_spread": row.is_within_spread}
    return data


def report_of(result: TraceCheck) -> str:
    """Return the comparison as lines of text."""
    model = result.model
    lines = [
        f"{model.num_steps:,} steps of 1 to {model.most_rows:,} rows fitted; steps that were not fitted are off by "
        f"{model.median_error:.1%} (median), {model.p90_error:.1%} (p90)",
    ]
    for case in result.cases:
        measured = " and ".join(f"{num:,}" for num in case.preemptions)
        lines += [
            "",
            f"cache         {case.cache}: {case.num_blocks:,} blocks; {case.num_requests:,} requests in "
            f"{result.duration:,.0f} s, {case.num_refused:,} refused",
            f"preemptions   {case.predicted_preemptions:,} predicted, {measured} measured",
            f"{'':<14}{'predicted':>14}{'error':>10}{'afterwards':>14}{'error':>10}{'measured':>14}   least to most of "
            f"{len(case.preemptions)}",
        ]
        for row, after in zip(case.rows, case.afterwards, strict=True):
            cells = _cells(row) + _cells(after) + f"{f'{row.measured:,.1f} {row.unit}':>14}"
            lines.append(f"{row.what:<14}{cells}   {row.least:,.1f} to {row.most:,.1f}")
    lines += ["", "afterwards: with step times fitted to the steps of the replays themselves"]
    if not is_thrashing(result.cases):
        lines += ["", "The small cache does not thrash: more requests at once would make it, by --speed-up."]
    return "\n".join(lines)


def _cells(row: Compared) -> str:
    error = f"{row.error:>+10.1%}" if row.measured else f"{'':>10}"
    return f"{f'{row.predicted:,.1f} {row.unit}':>14}{error}"


def is_thrashing(cases: Sequence[Case]) -> bool:
    """Return whether the small cache threw out sequences, or prefixes that the large one kept."""
    large, small = cases[0], cases[-1]
    before, after = (case.rows[-1].measured for case in (large, small))
    return max(small.preemptions) > max(large.preemptions) or after < 0.9 * before
