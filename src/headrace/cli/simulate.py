"""`headrace simulate`: a trace of requests on a fleet, by the engine's own scheduler and a modelled clock."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import integer
from headrace.protocol.config import DTYPES, KV_ALIASES, KV_DTYPES, QUANTIZATIONS

if TYPE_CHECKING:
    from headrace.fleet.simulator import Run

MOST_REPLICAS = 1024


def simulate(
    model: Annotated[
        str, typer.Argument(help="A folder, a config.json, a .gguf file, a hub id, or 'builtin'; no weights are read.")
    ] = "builtin",
    *,
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Requests and when they came: Azure's CSV or Mooncake's JSON lines.")
    ],
    replicas: Annotated[
        int | None,
        typer.Option(parser=integer, metavar="INT", help="Replicas; by default 1, or with --slo as few as keep it."),
    ] = None,
    router: Annotated[str, typer.Option(help="round-robin, least-loaded or prefix.")] = "least-loaded",
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of each replica: h100, h200, a100, l4, rtx4090, this, or a JSON file."),
    ] = "this",
    dtype: Annotated[str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.")] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", "-q", help=f"Form of the weights: {', '.join(QUANTIZATIONS)}, or none."),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help=f"Form of the KV cache: {', '.join(KV_DTYPES)}.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(parser=integer, metavar="INT", help="Sequences running at once.")] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option(parser=integer, metavar="INT", help="Tokens computed in one step.")
    ] = 2048,
    block_size: Annotated[
        int, typer.Option(parser=integer, metavar="INT", help="Tokens in a block of the KV cache.")
    ] = 16,
    duration: Annotated[float, typer.Option(help="Seconds of the trace to play; 0 for all.", min=0)] = 0.0,
    speed_up: Annotated[float, typer.Option(help="How many times as fast as in the trace requests come.")] = 1.0,
    slo: Annotated[
        str | None, typer.Option(metavar="GOALS", help="Goals in ms with commas between, such as ttft:500,tpot:50.")
    ] = None,
    slo_share: Annotated[
        float, typer.Option(help="Percent of the requests that must keep all goals.", min=0, max=100)
    ] = 99.0,
    price: Annotated[float, typer.Option(help="Dollars that a replica costs in an hour.", min=0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play a trace of real traffic on a fleet that there need not be: latencies, goodput, cache hits and cost.

    Scheduler, blocks, prefix cache and router are those that run; how long a step takes is a formula's (headrace plan).
    With --slo and without --replicas, the smallest fleet is searched; exit status 1 if there is none.
    """
    from headrace.cli.bench.stats import parse_goodput
    from headrace.cli.plan import machine_of
    from headrace.engine.progress import progress_bar
    from headrace.fleet import traces
    from headrace.fleet.figures import figures, text_of
    from headrace.fleet.router import ROUTERS
    from headrace.fleet.simulator import Simulation, Sizes, smallest_fleet
    from headrace.plan import planner
    from headrace.protocol.errors import RequestError

    if router not in ROUTERS:
        raise RequestError("--router", router, "one of " + ", ".join(ROUTERS))
    for flag, number in (
        ("--replicas", 1 if replicas is None else replicas),
        ("--max-num-seqs", max_num_seqs),
        ("--max-num-batched-tokens", max_num_batched_tokens),
        ("--block-size", block_size),
    ):
        if not 1 <= number <= 2**20:
            raise RequestError(flag, number, f"from 1 to {2**20}")
    if not speed_up > 0:
        raise RequestError("--speed-up", speed_up, "above 0")
    try:
        goals = parse_goodput(slo.split(",") if slo else [])
    except RequestError as error:
        raise error.renamed("--slo") from None
    calls = traces.read(trace, duration, speed_up)
    wish = planner.Wish(
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=KV_ALIASES.get(kv_cache_dtype, kv_cache_dtype),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    one = planner.Planner(planner.read(model), machine_of(hardware), wish)
    if hardware == "this":
        one.use_measured_steps()
    num_blocks = int(one.free // (one.counts.kv_token_bytes(one.kv_dtype) * block_size))
    if num_blocks < 1:
        raise RequestError("--hardware", hardware, "a machine with room for the model: see headrace plan")
    sizes = Sizes(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=one.max_context,
        # Without keys nothing is known that requests could share.
        enable_prefix_caching=any(call.keys for call in calls),
    )
    most_failures = len(calls) * (1 - slo_share / 100)
    searches = bool(goals) and replicas is None

    def played(num: int) -> Run:
        limit = most_failures if searches else float("inf")
        with progress_bar(f"{num:,} replicas", not as_json) as show:
            simulation = Simulation(num, router, sizes, one.step)
            return simulation.run(calls, goals, limit, lambda num_done: show(num_done, len(calls)))

    # Nothing that a simulation makes is a cycle, and looking for them takes a third of the time.
    gc.disable()
    try:
        fleet = smallest_fleet(played, MOST_REPLICAS) if searches else (replicas or 1, played(replicas or 1))
    finally:
        gc.enable()
    if fleet is None:
        print(f"{MOST_REPLICAS:,} replicas do not keep {slo} for {slo_share:g} % of the requests")
        raise typer.Exit(1)
    num, run = fleet
    result = figures(run, num, goals, price) | {
        "model": one.subject.name, "hardware": one.machine.name, "router": router, "trace": str(trace),
        "num_blocks": num_blocks, "prefixes": sizes.enable_prefix_caching,
    }  # fmt: skip
    print(json.dumps(result) if as_json else text_of(result, goals))
