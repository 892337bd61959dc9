"""`headrace plan`: the needs of a model, and whether a machine has it, from config.json alone."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headrace.cli.options import integer
from headrace.cli.planning import AsJson, CacheForm, Dtype, Goals, ModelFiles, Price, WeightForm, make_planner
from headrace.protocol.errors import RequestError

CHECK_SECONDS = 150.0
"""Of `--check`, in addition to loading the model."""


def plan(
    model: ModelFiles = "builtin",
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="h100, h200, a100, l4, rtx4090, this (measured in a second), or a JSON file."
        ),
    ] = "this",
    context: Annotated[
        int | None,
        typer.Option(
            parser=integer, metavar="INT", help="Tokens of a sequence, prompt and answer; by default at most 4096."
        ),
    ] = None,
    output_len: Annotated[int, typer.Option(parser=integer, metavar="INT", help="Tokens of its answer.")] = 256,
    concurrency: Annotated[
        int | None,
        typer.Option(parser=integer, metavar="INT", help="Sequences at once; by default those that fit, at most 128."),
    ] = None,
    dtype: Dtype = "auto",
    quantization: WeightForm = None,
    kv_cache_dtype: CacheForm = "auto",
    slo: Goals = None,
    price: Price = 0.0,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run the model on this machine for up to 3 minutes, and compare predicted with measured."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model needs, and whether a machine has it: bytes, times, price, and what to change if it does not fit.

    The engine's own model file runs over operators that only count. Exit status 1 if the plan does not fit.
    """
    import msgspec

    from headrace.plan import words
    from headrace.plan.forms import CHECKPOINTS

    if check and hardware != "this":
        raise RequestError("--check", hardware, "left out, or given with --hardware this")
    if check and quantization in CHECKPOINTS:
        raise RequestError("--quantization", quantization, "a form that a server makes while loading, with --check")
    one = make_planner(
        model, hardware, dtype, quantization, kv_cache_dtype, slo,
        context=context, output_len=output_len, concurrency=concurrency, price=price,
    )  # fmt: skip
    if check:
        from headrace.cli import checking
        from headrace.engine.progress import progress_bar
        from headrace.protocol.config import EngineConfig

        config = EngineConfig(
            model=model, dtype=dtype, quantization=quantization, kv_cache_dtype=one.workload.kv_cache_dtype
        )
        with progress_bar("check", not as_json) as show:
            checked = checking.check(one, config, CHECK_SECONDS, show)
        print(json.dumps(msgspec.to_builtins(checked)) if as_json else checking.report_of(checked))
        return
    if hardware == "this":
        one.use_measured_steps()
    result = one.plan()
    if as_json:
        print(json.dumps(msgspec.to_builtins(result)))
    else:
        print(words.report_of(result, one.workload.slo))
    if not result.fits:
        raise typer.Exit(1)
