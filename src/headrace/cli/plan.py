"""`headrace plan`: what a model needs, and whether a machine has it, from config.json alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import integer
from headrace.protocol.config import DTYPES, KV_ALIASES, KV_DTYPES, QUANTIZATIONS

if TYPE_CHECKING:
    from headrace.plan.hardware import Hardware

CHECK_SECONDS = 150.0
"""Of `--check`, beside loading the model."""


def plan(
    model: Annotated[
        str, typer.Argument(help="A folder, a config.json, a .gguf file, a hub id, or 'builtin'; no weights are read.")
    ] = "builtin",
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
    dtype: Annotated[str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.")] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", "-q", help=f"Form of the weights: {', '.join(QUANTIZATIONS)}, or none."),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help=f"Form of the KV cache: {', '.join(KV_DTYPES)}.")] = "auto",
    slo: Annotated[
        str | None, typer.Option(metavar="GOALS", help="Goals in ms with commas between, such as ttft:500,tpot:50.")
    ] = None,
    price: Annotated[float, typer.Option(help="Dollars that the machine costs in an hour.", min=0)] = 0.0,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run the model on this machine for up to 3 minutes, and compare predicted with measured."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model needs, and whether a machine has it: bytes, times, price, and what to change if it does not fit.

    The engine's own model file runs over operators that only count. Exit status 1 if the plan does not fit.
    """
    import msgspec

    from headrace.cli.bench.stats import parse_goodput
    from headrace.plan import planner, words
    from headrace.protocol.errors import RequestError

    for flag, value, allowed in (("--dtype", dtype, DTYPES), ("--kv-cache-dtype", kv_cache_dtype, KV_DTYPES),
                                 ("--quantization", quantization, (None, "none", *QUANTIZATIONS))):  # fmt: skip
        if value not in allowed:
            raise RequestError(flag, value, "one of " + ", ".join(name for name in allowed if name))
    for flag, number in (("--context", context), ("--output-len", output_len), ("--concurrency", concurrency)):
        if number is not None and number < 1:
            raise RequestError(flag, number, "at least 1")
    try:
        goals = parse_goodput(slo.split(",") if slo else [])
    except RequestError as error:
        raise error.renamed("--slo") from None
    wish = planner.Wish(
        context=context or 0,
        output_len=output_len,
        concurrency=concurrency or 0,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=KV_ALIASES.get(kv_cache_dtype, kv_cache_dtype),
        slo=goals,
        price=price,
    )
    if check and hardware != "this":
        raise RequestError("--check", hardware, "left out, or given with --hardware this")
    one = planner.Planner(planner.read(model), machine_of(hardware), wish)
    if check:
        from headrace.cli import checking
        from headrace.protocol.config import EngineConfig

        config = EngineConfig(model=model, dtype=dtype, quantization=quantization, kv_cache_dtype=wish.kv_cache_dtype)
        checked = checking.check(one, config, CHECK_SECONDS)
        print(json.dumps(msgspec.to_builtins(checked)) if as_json else checking.text_of(checked))
        return
    if hardware == "this":
        one.use_measured_steps()
    result = one.plan()
    if as_json:
        print(json.dumps(msgspec.to_builtins(result)))
    else:
        print(words.text_of(result, wish.slo))
    if not result.fits:
        raise typer.Exit(1)


def machine_of(name: str) -> Hardware:
    """Return the machine that `--hardware` names. Raises `RequestError`."""
    from headrace.plan import hardware

    return this_machine() if name == "this" else hardware.find(name)


def this_machine() -> Hardware:
    """Measure this machine: memory, the bandwidth of all cores, and operations of the native kernels' inner loops."""
    import psutil

    from headrace.plan.hardware import Hardware
    from headrace.protocol.errors import HeadraceError
    from headrace.quantize.samples import limits_of_machine

    limits = limits_of_machine()
    if "f32" not in limits["peaks"]:
        raise HeadraceError("--hardware this needs the native kernels, which are missing: see headrace doctor")
    memory = float(psutil.virtual_memory().total)
    return Hardware(name="this machine", memory=memory, bandwidth=limits["bandwidth"], flops=limits["peaks"]["f32"])
