"""The common part of `headrace plan` and `headrace simulate`: the flags that name a model, its forms and a machine, and
the planner made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.protocol.config import DTYPES, KV_ALIASES, KV_DTYPES, QUANTIZATIONS
from headrace.protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace.plan.hardware import Hardware
    from headrace.plan.planner import Planner

ModelFiles = Annotated[
    str, typer.Argument(help="A folder, a config.json, a .gguf file, a hub id, or 'builtin'; no weights are read.")
]
Dtype = Annotated[str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.")]
WeightForm = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        "-q",
        help=f"Form of the weights: {', '.join(QUANTIZATIONS)}, or none; int3 and int2: checkpoints of headrace "
        "quantize.",
    ),
]
CacheForm = Annotated[str, typer.Option(help=f"Form of the KV cache: {', '.join(KV_DTYPES)}.")]
Goals = Annotated[
    str | None, typer.Option(metavar="GOALS", help="Goals in ms with commas between, such as ttft:500,tpot:50.")
]
Price = Annotated[float, typer.Option(help="Dollars that one machine costs in an hour.", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def make_planner(
    model: str,
    hardware: str,
    dtype: str,
    quantization: str | None,
    kv_cache_dtype: str,
    slo: str | None = None,
    **workload: Any,
) -> Planner:
    """Return the planner of a model in these forms on a machine; `workload` are further fields of `Workload`.

    Raises `RequestError`, which names the flag, and the errors of reading the model."""
    from headrace.plan.planner import Planner, read
    from headrace.plan.plans import Workload, parse_goals

    goals = parse_goals(slo.split(",") if slo else [], "--slo")
    kv_cache_dtype = KV_ALIASES.get(kv_cache_dtype, kv_cache_dtype)
    one = Workload(dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype, slo=goals, **workload)
    subject, machine = read(model), machine_of(hardware)
    try:
        return Planner(subject, machine, one)
    except RequestError as error:
        raise error.renamed("--" + error.field.replace("_", "-")) from None


def machine_of(name: str) -> Hardware:
    """Return the machine that `--hardware` names. Raises `RequestError`."""
    from headrace.plan import hardware

    return this_machine() if name == "this" else hardware.find(name)


def this_machine() -> Hardware:
    """Measure this machine: memory, the bandwidth of all cores, and operations of the native kernels' inner loops."""
    from headrace.plan.hardware import measured
    from headrace.quantize.samples import limits_of_machine

    return measured(**limits_of_machine())
