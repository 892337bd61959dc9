"""A plan as a table of text with units. Called by `headrace plan`."""

from __future__ import annotations

from headrace.plan.plans import Plan


def amount(num_bytes: float) -> str:
    """Return bytes in a decimal unit: 1.19 GB, 131,072 bytes."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def report_of(plan: Plan, goals: dict[str, float]) -> str:
    """Return the plan as lines of text."""
    machine, name = plan.machine, plan.model.rstrip("/").rpartition("/")[2]
    active = [("active", f"{plan.active_parameters:,}", "parameters that a token meets")]
    rows: list[tuple[str, str, str]] = [
        ("model", f"{name}, {plan.model_type}", ""),
        ("parameters", f"{plan.parameters:,}", f"counted by {plan.source}"),
        *active[: plan.active_parameters != plan.parameters],
        ("weights", amount(plan.weight_bytes), ", ".join(f"{amount(b)} {form}" for form, b in plan.forms.items())),
        ("served", plan.served, plan.served_how),
        ("a token", f"{plan.flops_per_token / 1e9:.2f} Gflop", "beside attention"),
        ("KV cache", f"{plan.kv_token_bytes:,.0f} bytes a token", plan.kv_cache_dtype),
        ("a sequence", amount(plan.kv_sequence_bytes), f"KV cache of {plan.context:,} tokens, {plan.output_len:,} of "
         "them the answer"),
    ]  # fmt: skip
    if plan.kv_windowed_bytes < plan.kv_sequence_bytes:
        rows.append(("", amount(plan.kv_windowed_bytes), "as kept: layers free what lies behind their windows"))
    rows += [
        ("a batch", amount(plan.kv_batch_bytes), f"{plan.concurrency:,} x {amount(plan.kv_windowed_bytes)}: the KV "
         "cache of all sequences at once"),
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
    speed = plan.speed
    if speed is None:
        return []
    num_prompt = plan.context - plan.output_len
    rows = [
        ("", "", ""),
        ("estimated for", f"{speed.batch:,} sequences at once", plan.step_source),
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
