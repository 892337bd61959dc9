"""`python -m headrace.plan.worker SECONDS`: plans for the inspector, in a separate process (`text.bounded`).

The server's process imports no numpy and no models. The planner is the one of `headrace plan`.
"""

from __future__ import annotations

import sys

import msgspec

from headrace import hub
from headrace.plan import hardware, planner
from headrace.plan.plans import Job, Plan, Planned
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.text.bounded import serve

MAX_MEMORY = 2**41
"""Bytes of address space: a GGUF file that is mapped counts in it."""


def plan(job: Job) -> Plan:
    """Return the plan. Raises `RequestError`, `CheckpointError`."""
    if job.config is not None:
        subject = planner.Subject("config.json", hub.with_quantization(job.config))
    else:
        subject = planner.read(job.path)._replace(name=job.name)
    if job.machine is None and job.hardware not in hardware.TABLE:
        raise RequestError("hardware", job.hardware, f"one of {', '.join(hardware.TABLE)}, this")
    one = planner.Planner(subject, job.machine or hardware.TABLE[job.hardware], job.workload)
    if job.machine is not None:
        one.use_measured_steps()
    return one.plan()


def answer(body: bytes) -> bytes:
    """Do one job."""
    job = msgspec.msgpack.decode(body, type=Job)
    what = "model" if job.config is None else "config"
    try:
        reply = Planned(plan=plan(job))
    except RequestError as error:
        value = error.value if isinstance(error.value, str | int | float) else None
        reply = Planned(error=(error.field, value, error.bound))
    except (HeadraceError, OSError, ValueError, OverflowError, MemoryError) as error:
        reply = Planned(error=(what, job.name or "this config.json", f"one that can be planned: {error}"))
    return msgspec.msgpack.encode(reply)


if __name__ == "__main__":
    serve(answer, float(sys.argv[1]), MAX_MEMORY)
