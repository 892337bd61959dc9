"""`headrace bench latency|throughput|quality|speculate|ablate|serve|sweep|report`: the commands. Each makes a plan from
the flags, calls its module to measure it, and prints a table (vLLM's, where it has one), or with --json one object with
vLLM's field names.

Each result carries the circumstances of its measurement: model, dtype, backend, version and date.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

import headrace
from headrace.cli.bench.data import TRACES
from headrace.cli.bench.plans import (
    AblatePlan,
    LatencyPlan,
    QualityPlan,
    ServePlan,
    SpeculatePlan,
    SweepPlan,
    ThroughputPlan,
)
from headrace.cli.options import build, options
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError

app = typer.Typer(help="Measure latency, throughput, quality, speculation, or a running server.", no_args_is_help=True)

# Settings that the rungs of an ablation make themselves.
KEPT = ("seed", "revision", "backend", "device", "num_threads", "speculative_config")
ABLATED = tuple(name for name in EngineConfig.__struct_fields__ if name not in KEPT)

ModelsAndMoreGoals = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...", help="A directory, a .gguf file, a hub id, or 'builtin'; several are compared."
    ),
]
GOAL = re.compile("(ttft|tpot|itl|e2el):")
Show = Callable[[dict[str, Any]], None]
# `--goodput ttft:200 tpot:50`: an option takes one value, so the ones after it arrive as arguments.
MoreGoals = Annotated[list[str] | None, typer.Argument(hidden=True)]
ModelAndMoreGoals = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]", help="A directory, a .gguf file, a hub id, or 'builtin'; as by --model."),
]


@app.command()
@options(LatencyPlan, EngineConfig, skip=("skip_tokenizer_init",))
def latency(words: ModelAndMoreGoals = None, **fields: Any) -> None:
    """Time batches of requests that start together: the whole batch, and each token of it."""
    fields, more_goals = _with_model(fields, words)
    plan = build(LatencyPlan, fields)
    goals = _goals(plan.goodput, more_goals)
    from headrace.cli.bench.offline import measure_latency

    result = _header(plan.model) | measure_latency(plan, build(EngineConfig, fields), goals)
    _report(result, plan.json, plan.output_json, _table("Latency Benchmark Result"))


@app.command()
@options(ThroughputPlan, EngineConfig, skip=("skip_tokenizer_init",))
def throughput(words: ModelsAndMoreGoals = None, **fields: Any) -> None:
    """Give the engine all requests at once, and time it until the last one is done; memory beside it.

    Of several models, or with --forms, it prints a table with a row each: weights, memory, tokens/s and ratio, measured
    in turns."""
    models = [word for word in words or () if not GOAL.match(word)]
    if len(models) > 1 or fields["forms"] is not None:
        _compare(fields, models or [fields["model"]], [word for word in words or () if GOAL.match(word)])
        return
    fields, more_goals = _with_model(fields, words)
    plan = build(ThroughputPlan, fields)
    goals = _goals(plan.goodput, more_goals)
    from headrace.cli.bench.offline import measure_throughput

    result = _header(plan.model) | measure_throughput(plan, build(EngineConfig, fields), goals)
    _report(result, plan.json, plan.output_json, _table("Throughput Benchmark Result"))


def _compare(fields: dict[str, Any], models: list[str], more_goals: list[str]) -> None:
    """Run `bench throughput` of several models and forms in turns."""
    if fields["model"] not in ("builtin", models[0]):
        raise typer.BadParameter(f"unexpected argument {models[0]!r}: MODEL is given as --model already")
    plan = build(ThroughputPlan, fields | {"model": models[0]})
    goals = _goals(plan.goodput, more_goals)
    from headrace.cli.bench.compare import forms_of, measure_comparison, print_comparison

    forms = forms_of(plan.forms) if plan.forms is not None else [fields["quantization"]]
    configs = [
        build(EngineConfig, fields | {"model": model, "quantization": form}) for model in models for form in forms
    ]
    result = _header(models[0]) | measure_comparison(plan, configs, goals)
    _report(result, plan.json, plan.output_json, print_comparison)


@app.command()
@options(QualityPlan, EngineConfig, skip=("skip_tokenizer_init", "model", "enable_prefix_caching"))
def quality(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or 'builtin'.")] = "builtin",
    **fields: Any,
) -> None:
    """Judge a model by a text: perplexity, and how far its logits and weights are from a reference's."""
    plan = build(QualityPlan, fields)
    config = build(EngineConfig, fields | {"model": model})
    from headrace.cli.bench.quality import measure_quality, print_quality

    result = _header(model) | measure_quality(plan, config)
    _report(result, plan.json, plan.output_json, print_quality)


@app.command()
@options(SpeculatePlan, EngineConfig, skip=("skip_tokenizer_init", "model", "enable_prefix_caching"))
def speculate(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or 'builtin'.")] = "builtin",
    **fields: Any,
) -> None:
    """Time decoding with and without speculation, in turns, and count how many guesses are kept."""
    plan = build(SpeculatePlan, fields)
    config = build(EngineConfig, fields | {"model": model})
    _check_plot(plan.plot)
    from headrace.cli.bench.speculate import measure_speculation, plot, print_speculation

    result = _header(model) | measure_speculation(plan, config)
    _report(result, plan.json, plan.output_json, print_speculation)
    if plan.plot is not None:
        plot(result, Path(plan.plot))


@app.command()
@options(AblatePlan, EngineConfig, skip=ABLATED)
def ablate(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or 'builtin'.")] = "builtin",
    **fields: Any,
) -> None:
    """Time the same requests on a naive loop, with each technique added up to the whole engine, and without each."""
    plan = build(AblatePlan, fields)
    config = build(EngineConfig, fields | {"model": model})
    from headrace.cli.bench.ablate import measure_ablation
    from headrace.cli.bench.ablation_text import plot, print_ablation

    result = _header(model) | measure_ablation(plan, config)
    _report(result, plan.json, plan.output_json, print_ablation)
    if plan.plot is not None:
        plot(result, Path(plan.plot))


@app.command()
@options(ServePlan)
def serve(more_goals: MoreGoals = None, **fields: Any) -> None:
    """Send requests to any OpenAI-compatible server; report throughput and latencies as its client sees them."""
    plan = build(ServePlan, fields)
    goals = _goals(plan.goodput, more_goals)
    from headrace.cli.bench.serve import measure_server, plot
    from headrace.cli.bench.stats import check_metrics, check_percentiles

    metrics, percentiles = check_metrics(plan.percentile_metrics), check_percentiles(plan.metric_percentiles)
    result, detail = measure_server(plan, goals, metrics, percentiles)
    result = _header(result["model_id"]) | result
    path = None
    if plan.save_result or plan.save_detailed:
        name = str(result["model_id"]).strip("/").split("/")[-1]
        path = str(Path(plan.result_dir) / (plan.result_filename or f"{plan.backend}-{name}-{result['date']}.json"))
    show = _table("Serving Benchmark Result", metrics, percentiles)
    if plan.plot is not None:
        plot(result, detail, Path(plan.plot))
    _report(result, plan.json, path, show, detail if plan.save_detailed else {})
    for warning in result["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    errors = [error for error in detail["errors"] if error]
    if errors:
        typer.echo(f"{len(errors)} of {plan.num_prompts} requests failed; the first: {errors[0]}", err=True)
        raise typer.Exit(1)


@app.command()
@options(SweepPlan, ServePlan, skip=("save_result", "save_detailed", "result_dir", "result_filename"), request_rate=1.0)
def sweep(more_goals: MoreGoals = None, **fields: Any) -> None:
    """Send requests at rising rates, from --request-rate on; find the highest at which --goodput is kept."""
    plan, one = build(SweepPlan, fields), build(ServePlan, fields)
    goals = _goals(one.goodput, more_goals)
    if not goals:
        raise RequestError("--goodput", one.goodput, "given: the goals that a rate must keep, such as ttft:200")
    if math.isinf(one.request_rate) or one.dataset_name in TRACES:
        raise RequestError("--request-rate", one.request_rate, "a finite rate, and not that of a trace")
    _check_plot(plan.plot)
    from headrace.cli.bench.serve import measure_server
    from headrace.cli.bench.sweep import plot, print_sweep
    from headrace.cli.bench.sweep import sweep as walk

    def measure(rate: float) -> dict[str, Any]:
        # Other prompts at each rate: a prefix cache would make the next one faster.
        other = msgspec.structs.replace(one, request_rate=rate, seed=one.seed + round(1000 * rate))
        return measure_server(other, goals, ("ttft", "tpot", "e2el"), (99.0,))[0]

    result = walk(measure, one.request_rate, plan.slo_share / 100, plan.num_rates)
    result = _header(result["runs"][0]["model_id"]) | {"goodput": goals} | result
    for run in result["runs"]:
        for warning in run["warnings"]:
            typer.echo(f"warning: at {run['request_rate']:.2f} requests/s: {warning}", err=True)
    _report(result, one.json, plan.output_json, print_sweep)
    if plan.plot is not None:
        plot(result, Path(plan.plot))


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Results that --save-result or --output-json wrote.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page that compares results, a column each."""
    from headrace.cli.bench.report import page, read

    text = page([path.stem for path in files], read(files))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError("--output", str(output), f"a file that can be written ({error.strerror})") from None
    print(f"{output}: {len(files)} results")


def _check_plot(path: str | None) -> None:
    """Raise `RequestError` where `--plot` could not be drawn in the end."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot", path, "left out, since matplotlib is not installed")


def _header(model_id: str) -> dict[str, Any]:
    return {"date": time.strftime("%Y%m%d-%H%M%S"), "version": headrace.__version__, "model_id": model_id}


def _with_model(fields: dict[str, Any], words: list[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the flags with the model among `words`, if there is one, and the goals among them: words such as
    ttft:200."""
    models = [word for word in words or () if not GOAL.match(word)]
    if len(models) > 1 or (models and fields["model"] not in ("builtin", models[0])):
        raise typer.BadParameter(f"unexpected argument {models[-1]!r}: MODEL is given once")
    return fields | ({"model": models[0]} if models else {}), [word for word in words or () if GOAL.match(word)]


def _goals(goals: list[str] | None, more: list[str] | None) -> dict[str, float]:
    from headrace.plan.plans import parse_goals

    if more and not goals:
        raise typer.BadParameter(f"unexpected argument {more[0]!r}")
    return parse_goals([*(goals or []), *(more or [])], "goodput")


def _table(
    title: str,
    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    percentiles: Sequence[float] = (90.0, 99.0),
) -> Show:
    """Return a function that prints vLLM's table of a result."""
    from headrace.cli.bench.stats import table

    return lambda result: print(table(result, metrics=metrics, percentiles=percentiles, title=title))


def _report(
    result: dict[str, Any], as_json: bool, path: str | None, show: Show, detail: dict[str, Any] | None = None
) -> None:
    """Write the result, with `detail`, to `path` if there is one, and print it."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result | (detail or {}), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(result))
    else:
        show(result)
