"""The resources of a machine: memory, bandwidth and operations a second. The numbers of the table are the makers'
(dense, at the usual power); a file or a measurement gives others. Must not import numpy. Called by `plan.planner`,
`headrace plan` and `inspector.planning`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.protocol.errors import HeadraceError, RequestError


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator, or one computer.

    memory: bytes. bandwidth: bytes a second. flops: multiplications and additions a second of 16-bit floats.
    bandwidth_share, flops_share: the parts of them that kernels reach. step_overhead: seconds of a step outside of its
    kernels. utilization: the part of the memory that weights, working memory and cache may take.
    """

    name: str = ""
    memory: float
    bandwidth: float
    flops: float
    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    step_overhead: float = 0.0005
    utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops"):
            if not 0 < getattr(self, name) < 1e30:
                raise ValueError(f"{name} must be above 0")
        for name in ("bandwidth_share", "flops_share", "utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")
        if not 0 <= self.step_overhead < 10:
            raise ValueError("step_overhead must be from 0 to 10")


TABLE = {
    # NVIDIA's data sheets: H100 SXM5, H200 SXM, A100 80GB SXM, L4, and the Ada whitepaper for the RTX 4090.
    "h100": Hardware(name="h100", memory=80e9, bandwidth=3350e9, flops=989e12),
    "h200": Hardware(name="h200", memory=141e9, bandwidth=4800e9, flops=989e12),
    "a100": Hardware(name="a100", memory=80e9, bandwidth=2039e9, flops=312e12),
    "l4": Hardware(name="l4", memory=24e9, bandwidth=300e9, flops=121e12),
    "rtx4090": Hardware(name="rtx4090", memory=24e9, bandwidth=1008e9, flops=165e12),
}


def read(path: Path) -> Hardware:
    """Return the machine that a JSON file describes by the fields of `Hardware`. Raises `RequestError`."""
    fields = "a JSON object with memory (bytes), bandwidth (bytes/s) and flops"
    try:
        machine = msgspec.json.decode(path.read_bytes(), type=Hardware)
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestError("--hardware", str(path), f"{fields} ({error})") from None
    return machine if machine.name else msgspec.structs.replace(machine, name=path.stem)


def find(name: str) -> Hardware:
    """Return the machine of that name, or of that file. Raises `RequestError`."""
    if name in TABLE:
        return TABLE[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise RequestError("--hardware", name, f"one of {', '.join(TABLE)}, this, or a JSON file")
    return read(path)


def measured(bandwidth: float, peaks: Mapping[str, float]) -> Hardware:
    """Return this machine, of which the bandwidth of all cores and the operations of the native kernels' inner loops by
    kind were measured. Raises `HeadraceError` where the native kernels are missing."""
    import psutil

    if "f32" not in peaks:
        raise HeadraceError(
            "this machine is not measured without the native kernels, which are missing: see headrace doctor"
        )
    memory = float(psutil.virtual_memory().total)
    return Hardware(name="this machine", memory=memory, bandwidth=bandwidth, flops=peaks["f32"])
