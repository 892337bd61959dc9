"""`headrace simulate`: a trace of requests on a fleet, by the engine's own scheduler and a modelled clock."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import integer
from headrace.cli.planning import AsJson, CacheForm, Dtype, Goals, ModelFiles, Price, WeightForm, make_planner
from headrace.protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace.fleet.simulator import SimulatedRun, Sizes
    from headrace.fleet.traces import Call
    from headrace.plan.planner import Planner
    from headrace.protocol.kinds import CacheKind

MOST_REPLICAS = 1024


def simulate(
    model: ModelFiles = "builtin",
    *,
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Requests and when they came: Azure's CSV or Mooncake's JSON lines.")
    ],
    replicas: Annotated[
        int | None,
        typer.Option(parser=integer, metavar="INT", help="Replicas; by default 1, or with --slo as few as keep it."),
    ] = None,
    router: Annotated[str, typer.Option(help="round-robin, least-work or prefix.")] = "least-work",
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of each replica: h100, h200, a100, l4, rtx4090, this, or a JSON file."),
    ] = "this",
    dtype: Dtype = "auto",
    quantization: WeightForm = None,
    kv_cache_dtype: CacheForm = "auto",
    max_num_seqs: Annotated[int, typer.Option(parser=integer, metavar="INT", help="Sequences running at once.")] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option(parser=integer, metavar="INT", help="Tokens computed in one step.")
    ] = 2048,
    block_size: Annotated[
        int, typer.Option(parser=integer, metavar="INT", help="Tokens in a block of the KV cache.")
    ] = 16,
    duration: Annotated[float, typer.Option(help="Seconds of the trace to play; 0 for all.", min=0)] = 0.0,
    speed_up: Annotated[float, typer.Option(help="How many times as fast as in the trace requests come.")] = 1.0,
    slo: Goals = None,
    slo_share: Annotated[
        float, typer.Option(help="Percent of the requests that must keep all goals.", min=0, max=100)
    ] = 99.0,
    price: Price = 0.0,
    check: Annotated[
        int | None,
        typer.Option(
            parser=integer,
            metavar="N",
            help="Play the slice N times on this machine's engine in real time, with a large and a small cache, and "
            "compare predicted with measured.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a trace of real traffic on a fleet that there need not be: latencies, goodput, cache hits and cost.

    Scheduler, blocks, prefix cache and router are those that run; how long a step takes is a formula's (headrace plan).
    With --slo and without --replicas, the smallest fleet is searched; exit status 1 if there is none, with the goals
    that no number of replicas can keep.
    """
    from headrace.engine.progress import progress_bar
    from headrace.fleet import traces
    from headrace.fleet.figures import figures, report_of
    from headrace.fleet.simulator import Simulation, Sizes, smallest_fleet
    from headrace.plan.plans import parse_goals
    from headrace.protocol.kinds import ROUTERS

    if router not in ROUTERS:
        raise RequestError("--router", router, "one of " + ", ".join(ROUTERS))
    for flag, number in (
        ("--replicas", 1 if replicas is None else replicas),
        ("--check", 1 if check is None else check),
        ("--max-num-seqs", max_num_seqs),
        ("--max-num-batched-tokens", max_num_batched_tokens),
        ("--block-size", block_size),
    ):
        if not 1 <= number <= 2**20:
            raise RequestError(flag, number, f"from 1 to {2**20}")
    if not speed_up > 0:
        raise RequestError("--speed-up", speed_up, "above 0")
    goals = parse_goals(slo.split(",") if slo else [], "--slo")
    if check is not None and (hardware != "this" or (replicas or 1) > 1 or goals):
        raise RequestError("--check", check, "left out beside --slo, --replicas and --hardware other than this")
    calls = traces.read(trace, duration, speed_up)
    one = make_planner(
        model, hardware, dtype, quantization, kv_cache_dtype,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    if hardware == "this" and check is None:
        one.use_measured_steps()
    kinds, num_blocks = pools_of(one, block_size, max_num_seqs, max_num_batched_tokens)
    if num_blocks[0] < 1:
        raise RequestError("--hardware", hardware, "a machine with room for the model: see headrace plan")
    if check is not None:
        if len(kinds) > 1:
            raise RequestError("--check", check, "left out for a model with windows or states")
        from headrace.cli import trace_check
        from headrace.protocol.config import EngineConfig

        config = EngineConfig(
            model=model, dtype=dtype, quantization=quantization, kv_cache_dtype=one.workload.kv_cache_dtype,
            block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=any(call.keys for call in calls),
        )  # fmt: skip
        # No more than all sequences fill at their longest: allocated memory is touched.
        most = max_num_seqs * -(-max(call.num_prompt + call.num_new for call in calls) // block_size)
        with progress_bar("check", not as_json) as show:
            checked = trace_check.check_trace(one, config, calls, min(num_blocks[0], most), check, show)
        print(json.dumps(trace_check.json_of(checked)) if as_json else trace_check.report_of(checked))
        return
    sizes = Sizes(
        num_blocks=num_blocks[0],
        more_blocks=num_blocks[1:],
        kinds=kinds,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=one.max_context,
        # Without keys nothing is known that requests could share.
        enable_prefix_caching=any(call.keys for call in calls),
    )
    most_failures = len(calls) * (1 - slo_share / 100)
    searches = bool(goals) and replicas is None

    def played(num: int) -> SimulatedRun:
        limit = most_failures if searches else float("inf")
        with progress_bar(f"{num:,} replicas", not as_json) as show:
            simulation = Simulation(num, router, sizes, one.step)
            return simulation.run(calls, goals, limit, lambda num_done: show(num_done, len(calls)))

    # Nothing that a simulation makes is a cycle, and looking for them takes a third of the time.
    gc.disable()
    try:
        if searches and (lines := out_of_reach(one, sizes, router, calls, goals, slo_share)):
            print("\n".join(lines))
            raise typer.Exit(1)
        fleet = smallest_fleet(played, MOST_REPLICAS) if searches else (replicas or 1, played(replicas or 1))
    finally:
        gc.enable()
    if fleet is None:
        print(f"{MOST_REPLICAS:,} replicas do not keep {slo} for {slo_share:g} % of the requests")
        raise typer.Exit(1)
    num, run = fleet
    result = figures(run, num, goals, price) | {
        "model": one.subject.name, "hardware": one.machine.name, "router": router, "trace": str(trace),
        "num_blocks": num_blocks[0], "more_blocks": num_blocks[1:], "prefixes": sizes.enable_prefix_caching,
    }  # fmt: skip
    print(json.dumps(result) if as_json else report_of(result, goals))


def out_of_reach(
    one: Planner, sizes: Sizes, router: str, calls: Sequence[Call], goals: dict[str, float], slo_share: float
) -> list[str]:
    """Return a line for each goal that no number of replicas keeps: too many requests break it even where each has a
    replica to itself."""
    from headrace.fleet.simulator import Simulation

    # A day apart, each finds an idle replica, and of its prefix what the cache of one replica holds.
    apart = [call._replace(time=86400.0 * place) for place, call in enumerate(calls)]
    lives = Simulation(1, router, sizes, one.step).run(apart).lives
    lines: list[str] = []
    for name, goal in goals.items():
        times = sorted(1e3 * getattr(life, name) for life in lives)
        needed = times[-1 - min(len(times) - 1, int(len(times) * (1 - slo_share / 100)))]
        if needed > goal:
            why = "the others do not fit a replica" if math.isinf(needed) else f"{needed:,.1f} ms are needed"
            lines.append(
                f"no number of replicas keeps {name}:{goal:g}: for {slo_share:g} % of the requests, each alone on a "
                f"replica, {why}"
            )
    return lines


def pools_of(
    one: Planner, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[tuple[CacheKind, ...], tuple[int, ...]]:
    """Return the kinds of a model's cache, and the blocks (or slots) of each, for which the memory is divided as an
    engine divides it."""
    from headrace.engine.library.pools import bounds_of, divide
    from headrace.protocol.config import EngineConfig
    from headrace.protocol.kinds import CacheKind

    bytes_of: dict[int, float] = {}
    for layer, num in one.counts.layers:
        if not layer.keeps:
            continue
        # A window that no sequence is longer than is none.
        window = layer.window if layer.window is not None and layer.window < one.max_context else 0
        bytes_of[window] = bytes_of.get(window, 0.0) + layer.kept_bytes(one.kv_dtype) * num * block_size
    kinds = tuple(CacheKind(window) for window in sorted(bytes_of))
    each = [bytes_of[kind.window] for kind in kinds]
    if one.counts.state_bytes:
        kinds, each = (*kinds, CacheKind(is_state=True)), [*each, one.counts.state_bytes]
    config = EngineConfig(
        block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    bounds = [bounds_of(kind, config, one.max_context) for kind in kinds]
    sizes = [math.ceil(size) for size in each]
    others = divide(int(one.free) - bounds[0][0] * sizes[0], bounds[1:], sizes[1:])
    left = one.free - sum(num * size for num, size in zip(others, each[1:], strict=True))
    return kinds, (int(left // each[0]), *others)
