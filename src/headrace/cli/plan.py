"""`headrace plan`: what a model needs, and whether a machine has it, from config.json alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import integer
from headrace.protocol.config import DTYPES, KV_ALIASES, KV_DTYPES, QUANTIZATIONS

if TYPE_CHECKING:
    from headrace.plan.hardware import Hardware
    from headrace.plan.planner import Plan


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model needs, and whether a machine has it: bytes, times, price, and what to change if it does not fit.

    The engine's own model file runs over operators that only count. Exit status 1 if the plan does not fit.
    """
    import msgspec

    from headrace.cli.bench.stats import parse_goodput
    from headrace.plan import planner
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
    result = planner.Planner(planner.read(model), machine_of(hardware), wish).plan()
    if as_json:
        print(json.dumps(msgspec.to_builtins(result)))
    else:
        print(text_of(result, wish.slo))
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


def amount(num_bytes: float) -> str:
    """Return bytes in a decimal unit: 1.19 GB, 131,072 bytes."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def text_of(plan: Plan, goals: dict[str, float]) -> str:
    """Return the plan as lines of text."""
    machine, name = plan.machine, plan.model.rstrip("/").rpartition("/")[2]
    active = [("active", f"{plan.active_parameters:,}", "parameters that a token meets")]
    rows: list[tuple[str, str, str]] = [
        ("model", f"{name}, {plan.model_type}", ""),
        ("parameters", f"{plan.parameters:,}", f"counted by {plan.source}"),
        *active[: plan.active_parameters != plan.parameters],
        ("weights", amount(plan.weight_bytes), ", ".join(f"{amount(b)} {form}" for form, b in plan.forms.items())),
        ("a token", f"{plan.flops_per_token / 1e9:.2f} Gflop", "beside attention"),
        ("KV cache", f"{plan.kv_token_bytes:,.0f} bytes a token", plan.kv_cache_dtype),
        ("a sequence", amount(plan.kv_sequence_bytes), f"KV cache of {plan.context:,} tokens, {plan.output_len:,} of "
         "them the answer"),
    ]  # fmt: skip
    if plan.kv_windowed_bytes < plan.kv_sequence_bytes:
        rows.append(("", amount(plan.kv_windowed_bytes), "if layers kept only what their windows show"))
    rows += [
        ("", "", ""),
        ("machine", machine.name, f"{amount(machine.memory)}, {machine.bandwidth / 1e9:,.0f} GB/s, "
         f"{machine.flops / 1e12:.2f} Tflop/s"),
        ("for the cache", amount(max(plan.free_bytes, 0)), f"{machine.utilization:.0%} of the memory, less weights and "
         f"{amount(plan.working_bytes)} to work in"),
        ("largest batch", f"{plan.largest_batch:,}", f"sequences of {plan.context:,} tokens"),
        ("largest context", f"{plan.largest_context:,}", f"tokens of one sequence; the model has {plan.max_context:,}"),
    ]  # fmt: skip
    if plan.speed is not None:
        rows += _speed_rows(plan, goals)
    width = max(len(row[1]) for row in rows)
    lines = [f"{label:<16} {value:<{width}}  {note}".rstrip() for label, value, note in rows]
    if not plan.fits:
        what = f"{plan.concurrency:,} sequences of {plan.context:,} tokens" if plan.free_bytes > 0 else "the weights"
        lines += ["", f"It does not fit: {machine.name} has no room for {what}. {amount(plan.needed_bytes)} would do."]
        lines += ["What would fit:"] * bool(plan.changes)
        lines += [f"  {change.flags:<44} {change.outcome}" for change in plan.changes]
    return "\n".join(lines)


def _speed_rows(plan: Plan, goals: dict[str, float]) -> list[tuple[str, str, str]]:
    speed, machine = plan.speed, plan.machine
    if speed is None:
        return []
    num_prompt = plan.context - plan.output_len
    rows = [
        ("", "", ""),
        ("estimated for", f"{speed.batch:,} sequences at once", f"at {machine.bandwidth_share:.0%} of bandwidth and "
         f"{machine.flops_share:.0%} of the operations"),
        ("TTFT", duration(speed.ttft), f"a prompt of {num_prompt:,} tokens, alone"),
        ("TPOT", duration(speed.tpot), f"{duration(speed.tpot_mixed)} beside the prompts of others"),
        ("latency", duration(speed.latency), f"TTFT + TPOT x {plan.output_len - 1:,}"),
        ("throughput", f"{speed.tokens_per_second:,.0f} tokens/s", f"{speed.requests_per_second:.2f} requests/s"),
    ]  # fmt: skip
    if speed.goodput is not None:
        words = ", ".join(f"{name} {goal:g} ms" for name, goal in goals.items())
        note = (
            f"at {speed.goodput_batch:,} sequences at once, within {words}"
            if speed.goodput_batch
            else f"no batch keeps {words}"
        )
        rows.append(("goodput", f"{speed.goodput:.2f} requests/s", note))
    if speed.dollars_per_million is not None:
        rows.append(("price", f"${speed.dollars_per_million:.3f}", "for a million tokens of answers"))
    return rows
