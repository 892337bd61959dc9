"""`headrace bench ablate`: the worth of each technique of an engine, one added after the other from the naive loop to
the whole, and each left out of the whole.

Every rung gets the same requests, all at once, and runs once in every round; the report has medians over the rounds,
with the least and the most. The facts about a rung's engine are read from the engine itself. Called by
`bench.commands`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from headrace import hub
from headrace.cli.bench import runs
from headrace.cli.bench.data import Sample
from headrace.cli.bench.ladder import Rung, context_of, ladder, left_out, longest, requests, sized
from headrace.cli.bench.offline import PARAMS, run_batch
from headrace.cli.bench.plans import AblatePlan
from headrace.cli.bench.stats import figures
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.engine.progress import progress_bar
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError

MEDIANS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms")


class RungRun(NamedTuple):
    """A rung in one round, and the library or the facts of the engine that it ran on."""

    outcome: runs.Outcome
    facts: dict[str, Any]


class Naive:
    """The library of the naive rungs: the faster of transformers and torch_ref in a pass without a KV cache."""

    def __init__(self, config: EngineConfig, length: int) -> None:
        """Time both on prompts of `length` tokens. Without torch, `name` is empty, and there are no naive rungs."""
        self._config, self.name, self.note = config, "", "torch is not installed"
        self._has_transformers = False
        seconds = dict[str, float]()
        try:
            with closing(build_engine(config)) as core:
                seconds["torch_ref"] = _best(runs.engine_pass(core, 1), length)
        except ImportError:
            return
        except RequestError as error:
            if error.field != "backend":
                raise
            return
        try:
            with closing(self._load()) as other:
                seconds[other.name] = _best(other.seconds_of, length)
        except (ImportError, OSError, ValueError, KeyError, AttributeError) as error:
            self.note = f"torch_ref alone: transformers has not this model ({type(error).__name__})"
        self.name = min(seconds, key=lambda name: seconds[name])
        self._has_transformers = self.name != "torch_ref"
        if len(seconds) > 1:
            slower = max(seconds, key=lambda name: seconds[name])
            ratio = seconds[slower] / seconds[self.name]
            self.note = f"{self.name}, {ratio:.1f} times as fast as {slower} at {length} tokens"

    def _load(self) -> runs.Transformers:
        device = "cpu" if self._config.device == "auto" else self._config.device
        directory = hub.resolve(self._config.model, self._config.revision)
        return runs.Transformers(str(directory), device, self._config.num_threads)

    def run(self, rung: Rung, samples: Sequence[Sample], num_sample: int) -> tuple[runs.Outcome, dict[str, Any]]:
        """Run a naive rung; return its outcome and the library that ran it."""
        if not self._has_transformers:
            return run_engine(rung, samples, num_sample)
        with closing(self._load()) as other:
            if rung.has_kv_cache:
                timelines = other.run_cached(samples[:num_sample])
                outcome = runs.Outcome(runs.derived(timelines, samples), len(timelines), [])
            else:
                other.seconds_of(8)
                seconds = runs.pass_times(other.seconds_of, samples)
                outcome = runs.Outcome(runs.uncached(seconds, samples, in_turn=True), num_sample, [])
            facts = {"library": self.name, "kv_cache": rung.has_kv_cache, "batching": rung.batching,
                     "memory_bytes": other.weight_bytes}  # fmt: skip
            return outcome, facts


class Bound:
    """How long the rungs that are left take at most, if none becomes slower: each as long as it ever took. Before all
    have run once nothing bounds them, for the later ones are not always the faster ones."""

    def __init__(self, num_rungs: int, num_rounds: int) -> None:
        self._num_left = [num_rounds] * num_rungs
        self._slowest = [0.0] * num_rungs
        self._num_known = 0

    def note(self, index: int, seconds: float) -> None:
        """Note that a rung has run; in the first round they run in order."""
        self._num_left[index] -= 1
        self._slowest[index] = max(seconds, self._slowest[index])
        self._num_known = max(self._num_known, index + 1)

    def seconds(self) -> float | None:
        """Return the bound; None while there is none."""
        if self._num_known < len(self._slowest):
            return None
        return sum(num * seconds for num, seconds in zip(self._num_left, self._slowest, strict=True))

    def text(self) -> str:
        """Return the bound in words, or what is known before there is one."""
        seconds = self.seconds()
        if seconds is None:
            return f"; the slowest so far took {max(self._slowest):,.0f} s" if self._num_known else ""
        return f"; what is left takes at most {seconds:,.0f} s, if no rung becomes slower than it was"


def _best(seconds_of: runs.PassTime, length: int) -> float:
    seconds_of(8)
    return min(seconds_of(length) for _ in range(2))


def run_engine(rung: Rung, samples: Sequence[Sample], num_sample: int) -> tuple[runs.Outcome, dict[str, Any]]:
    """Build the rung's engine, run the requests on it, and return the outcome and the facts about the engine."""
    with closing(build_engine(rung.config)) as core:
        singles = [] if rung.is_taped else runs.call_for_each(core)
        # The first step touches memory and code that later ones find ready.
        run_batch(core, [Sample([1, 2, 3, 4], 4, 2)], PARAMS)
        core.reset_prefix_cache()
        before = core.stats()
        watch = runs.Watch(core)
        outcome = runs.run(core, rung, samples, num_sample)
        after = core.stats()
        facts = facts_of(core, rung) | {
            "num_single_calls": sum(each.num_calls for each in singles),
            "num_steps": watch.num_steps,
            "num_rows": watch.num_rows,
            "most_seqs": watch.most_seqs,
            "longest_chunk": watch.longest_chunk,
            "most_blocks": watch.most_blocks,
            "empty_share": watch.num_empty / watch.num_held if watch.num_held else None,
            "num_cached_tokens": after.prefix_cache_hits - before.prefix_cache_hits,
            "num_draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
            "num_accepted_tokens": after.num_accepted_tokens - before.num_accepted_tokens,
        }
        if rung.has_kv_cache and outcome.num_run:
            run_samples = samples[: outcome.num_run]
            needed = sum(each.num_prompt_tokens + each.output_len - 1 for each in run_samples)
            facts["rows_per_needed"] = watch.num_rows / needed
        return outcome, facts


def facts_of(core: EngineCore, rung: Rung) -> dict[str, Any]:
    """Return the facts about an engine, read from its parts and not from its config."""
    info, scheduler = core.info, core.scheduler
    executor: Any = core.executor
    return {
        "library": info.backend,
        "kv_cache": rung.has_kv_cache,
        "batching": rung.batching,
        "dtype": info.dtype,
        "weights": info.quantization or info.dtype,
        "weight_bytes": info.weight_bytes,
        "block_size": scheduler.block_size,
        "num_blocks": info.num_blocks,
        "cache_bytes": info.num_blocks * info.block_size * info.kv_token_bytes,
        "memory_bytes": info.weight_bytes + info.num_blocks * info.block_size * info.kv_token_bytes,
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "prefix_cache": scheduler.tables.enable_prefix_caching,
        "kv_cache_dtype": info.kv_cache_dtype,
        "speculates": executor.speculator is not None,
    }


def measure_ablation(plan: AblatePlan, config: EngineConfig) -> dict[str, Any]:
    """Return `rungs` and `without`, a row each with figures and facts, and a description of the requests.

    Raises `RequestError` for requests that the model's context does not hold, and the engine's errors."""
    plan = sized(plan)
    with progress_bar("rungs", not plan.json, has_long_steps=True) as show:
        show(0, 0, "the whole engine and the naive loops are tried, once each")
        backend, cache_bytes, vocab_size = _probe(plan, config)
        samples = requests(plan, vocab_size)
        rungs = ladder(plan, config, backend, cache_bytes)
        without = left_out(plan, rungs[-1])
        middle = sum(each.num_prompt_tokens + each.output_len // 2 for each in samples) // len(samples)
        naive = Naive(rungs[0].config, middle)
        if not naive.name:
            rungs = [rung for rung in rungs if not rung.is_naive]
        every = [*rungs, *without]
        rounds = list[list[RungRun]]()
        bound = Bound(len(every), plan.rounds)
        for number in range(plan.rounds):
            rounds.append([])
            for index, rung in enumerate(every):
                show(number * len(every) + index, plan.rounds * len(every), f"{rung.name}{bound.text()}")
                step = naive.run if rung.is_naive else run_engine
                begin = time.monotonic()
                rounds[-1].append(RungRun(*step(rung, samples, plan.sample)))
                gc.collect()
                bound.note(index, time.monotonic() - begin)
            check_answers(every, [each.outcome for each in rounds[-1]])
    rows = [_row(rung, column, len(samples)) for rung, column in zip(every, zip(*rounds, strict=True), strict=True)]
    steps, omissions = rows[: len(rungs)], rows[len(rungs) :]
    for before, row in zip([None, *steps[:-1]], steps, strict=True):
        row |= _factors(row, before) if before else {"factor": None, "factors": []}
    for row in omissions:
        row |= _factors(steps[-1], row)
    return {
        "backend": backend,
        "naive": naive.note,
        **{name: getattr(plan, name) for name in plan.__struct_fields__ if name not in ("plot", "output_json", "json")},
        "max_model_len": context_of(plan),
        "cache_bytes": cache_bytes,
        "total_input_tokens": sum(sample.num_prompt_tokens for sample in samples),
        "total_output_tokens": sum(sample.output_len for sample in samples),
        "whole_over_naive": _factors(steps[-1], steps[0]) if naive.name else None,
        "rungs": steps,
        "without": omissions,
    }


def _probe(plan: AblatePlan, config: EngineConfig) -> tuple[str, int, int]:
    """Return the backend, the bytes of `plan.cache_seqs` contexts, and the width of the vocabulary. It builds the
    whole, so that a model which cannot have all of it is refused before anything is measured."""
    context = context_of(plan)
    stored = msgspec.structs.replace(
        config, skip_tokenizer_init=True, max_model_len=context, max_num_seqs=plan.cache_seqs, block_size=context,
        num_gpu_blocks_override=plan.cache_seqs, quantization="int4", speculative_config=None,
        max_num_batched_tokens=max(2048, context), enable_prefix_caching=False,
    )  # fmt: skip
    try:
        with closing(build_engine(stored)) as core:
            info, size = core.info, core.info.num_blocks * core.info.block_size * core.info.kv_token_bytes
    except RequestError as error:
        if error.field != "max_model_len":
            raise
        bound = f"less: requests have up to {longest(plan)} tokens with prefix_len and output_len, and {error}"
        raise RequestError("input_len", plan.input_len, bound) from None
    if info.backend not in ("cpu", "cuda"):
        raise RequestError("backend", info.backend, "cpu or cuda: the rungs after the naive ones need native kernels")
    whole = ladder(plan, config, info.backend, size)[-1]
    build_engine(whole.config).close()
    return info.backend, size, info.vocab_size


def check_answers(every: Sequence[Rung], outcomes: Sequence[runs.Outcome]) -> None:
    """Raise `HeadraceError` if rungs with the same numbers gave one request different answers: then they did not do
    the same work. Static batches are left out, whose pads are tokens to the engine."""
    first = dict[tuple[Any, ...], tuple[str, list[list[int]]]]()
    for rung, outcome in zip(every, outcomes, strict=True):
        if not outcome.answers:
            continue
        config = rung.config
        key = config.backend, config.dtype, config.quantization, config.kv_cache_dtype
        name, answers = first.setdefault(key, (rung.name, outcome.answers))
        for index, (one, other) in enumerate(zip(answers, outcome.answers, strict=False)):
            if one != other:
                raise HeadraceError(f"request {index} has other answers with {name!r} than with {rung.name!r}")


def _row(rung: Rung, column: Sequence[RungRun], num_requests: int) -> dict[str, Any]:
    """Return the medians of a rung's runs, its speed in each, and the facts of the last."""
    each_run = list[dict[str, Any]]()
    for run in column:
        timelines = run.outcome.timelines
        duration = max(each.done for each in timelines) - min(each.sent for each in timelines)
        each_run.append(figures(timelines, duration, percentiles=(99.0,)))
    num_run = column[-1].outcome.num_run
    return {
        "rung": rung.name,
        "num_run": num_run,
        "is_derived": num_run < num_requests,
        **{name: statistics.median(result[name] for result in each_run) for name in MEDIANS},
        "throughputs": [result["output_throughput"] for result in each_run],
        **column[-1].facts,
    }


def _factors(row: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return how many times as fast `row` is as `before`: in each round, and the median."""
    factors = [a / b for a, b in zip(row["throughputs"], before["throughputs"], strict=True)]
    return {"factor": statistics.median(factors), "factors": factors}
