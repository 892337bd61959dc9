"""`POST /inspect/plan`: the needs of a model, and whether a machine meets them, as `headrace plan --json` prints them.

The planner runs in a separate process (`plan.worker`), with bounds on its time and memory. A request names a model of
the server or has the values of a config.json; no other file is read, and nothing from the hub. Where keys are set the
route needs an administrator's. Called by `serve.app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette

from headrace.insight.limits import Machine
from headrace.plan import hardware
from headrace.plan.hardware import Hardware
from headrace.plan.plans import MAX_TOKENS, Job, Plan, Planned, Workload, parse_goals
from headrace.protocol.errors import RequestError
from headrace.protocol.human import human_int
from headrace.serve import routing
from headrace.serve.call.models import ModelSet
from headrace.serve.call.parsing import Body, convert
from headrace.serve.errors import CallError
from headrace.text.bounded import BoundedProcess

PLAN_CPU_S = 4.0
"""A plan takes some tenths of a second; a context of a billion tokens ends here."""
THIS = "this"


class PlanRequest(Body):
    """The fields are the flags of `headrace plan`, whose numbers may be 4096, or "4k" for 4,000. `model`: a name of the
    server's models, by default the first loaded one; `config`: in its place, the values of a config.json.
    `hardware`: a name of the table, or "this" server."""

    model: str | None = None
    config: dict[str, Any] | None = None
    hardware: str = THIS
    context: int | str | None = None
    output_len: int | str = 256
    concurrency: int | str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    slo: str | None = None
    price: float = 0.0


class Planning:
    """Plans for the page.

    Args:
        machine: returns the measured rates of this machine, and measures it first if no request is open.
    """

    def __init__(self, models: ModelSet, machine: Callable[[], Awaitable[Machine]]) -> None:
        self._models = models
        self._machine = machine
        self._process = BoundedProcess("headrace.plan.worker", PLAN_CPU_S)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    async def plan(self, body: dict[str, Any]) -> Plan:
        """The needs of a model, and whether a machine meets them: the numbers of `headrace plan --json`."""
        request = convert(PlanRequest, body)
        if request.warnings:
            raise RequestError(request.warnings[0].partition(":")[0], "given", "a field that headrace knows")
        if request.model is not None and request.config is not None:
            raise RequestError("config", "given", "left out, or given without a model")
        if request.hardware != THIS and request.hardware not in hardware.TABLE:
            raise RequestError("hardware", request.hardware, f"one of {', '.join(hardware.TABLE)}, this")
        workload = Workload(
            context=_number("context", request.context),
            output_len=_number("output_len", request.output_len) or 0,
            concurrency=_number("concurrency", request.concurrency),
            dtype=request.dtype,
            quantization=request.quantization,
            kv_cache_dtype=request.kv_cache_dtype,
            slo=parse_goals(request.slo.split(",") if request.slo else [], "slo"),
            price=request.price,
        )
        name, path = ("", "") if request.config is not None else await asyncio.to_thread(self._files, request.model)
        machine = await self._this() if request.hardware == THIS else None
        job = Job(
            name=name, path=path, config=request.config, hardware=request.hardware, machine=machine, workload=workload
        )
        try:
            reply = await asyncio.to_thread(self._process.run, job, Planned)
        except OverflowError:
            raise RequestError("config", "an integer of more than 64 bits", "without such") from None
        if isinstance(reply, str):
            raise RequestError("config" if request.config else "model", "given", f"one that can be planned: {reply}")
        if reply.plan is None:
            raise RequestError(*(reply.error or ("config", None, "one that can be planned")))
        return reply.plan

    async def _this(self) -> Hardware:
        """Return this machine as it was measured. Raises `CallError` if that was not possible yet."""
        machine = await self._machine()
        if not machine.bandwidth:
            message = "this machine is measured while no request is open; until then, name another one"
            raise CallError(503, "not_measured", message, {"retry-after": "5"})
        return hardware.measured(machine.bandwidth, machine.peaks)

    def _files(self, name: str | None) -> tuple[str, str]:
        """Return the engine's name for a model, and the path of its files. Blocks."""
        models, folder = self._models, self._models.files
        running = next(iter(models.running), None) if name is None else models.running_as(name)
        if running is not None and running.path is not None:
            return running.client.info.model, str(running.path)
        if running is None and folder is not None and name in folder.names():
            path = str(folder.path(name))
            return path, path
        if name is None or running is not None:
            raise CallError(404, "not_found", "the model has no files" if running else "no model is loaded")
        raise RequestError("model", name, f"one of {', '.join(models.names())}")


def _number(field: str, value: int | str | None) -> int | None:
    """Return a number as the command line reads it: 4096, "4096" or "4k". Raises `RequestError`."""
    if isinstance(value, str):
        try:
            value = human_int(value)
        except ValueError:
            bound = "a whole number such as 4096, 32k (32,000) or 32K (32,768)"
            raise RequestError(field, value, bound) from None
    if value is not None and not -MAX_TOKENS <= value <= MAX_TOKENS:
        raise RequestError(field, value, f"from 1 to {MAX_TOKENS}")
    return value


def add_routes(app: Starlette, planning: Planning) -> None:
    """Add the route."""
    routing.post(app, "/inspect/plan", planning.plan, takes=PlanRequest, gives=Plan)
