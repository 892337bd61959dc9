"""`client_of`, `LocalFleet`: the engines of one host behind one client, each with its own processors.

Reads from /sys which processors there are, on which node of memory each lies, and which are threads of one core. A
replica is bound to processors of one node if there are as many nodes as replicas, so that its memory is near it. Called
by `serve`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.engine.client import EngineClient, ProcessClient, watchdog_timeout
from headrace.engine.links import ENGINE_COMMAND, Link, ProcessLink, engine_level
from headrace.engine.records.crash_reports import CrashReports
from headrace.engine.replica import Replica
from headrace.fleet.engines.client import Fleet
from headrace.fleet.engines.update import RollingUpdate
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError

NODES = Path("/sys/devices/system/node")
PROCESSORS = Path("/sys/devices/system/cpu")


def client_of(engine: EngineConfig, server: ServerConfig) -> EngineClient:
    """Return a client of as many engines as the config says, each in its own process.

    Raises `RequestError` for settings that several engines cannot share.
    """
    nodes = nodes_of(allowed())
    num = len(nodes) if server.data_parallel_size == "auto" else int(server.data_parallel_size)
    if num == 1:
        return ProcessClient(engine, server)
    return LocalFleet(engine, server, divide(num, nodes))


class LocalFleet(Fleet):
    """A fleet on this host, one engine for each of the `shares` of its processors.

    Args:
        engine, server: the settings of the engines and of the fleet.
        shares: the processors that each engine is bound to; empty: it is not bound.
        command: the engines' program; see `ProcessLink`.

    `updates` replaces the engines. Raises `RequestError` for settings that several engines cannot share.
    """

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        shares: Sequence[Sequence[int]],
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        _check_shared(engine, server, len(shares))
        num_threads = engine.num_threads or (0 if shares[0] else 1)
        engine = msgspec.structs.replace(engine, device="cpu", num_threads=num_threads)
        self._server = server
        self._command = command
        super().__init__(
            [self._link(engine, cpus) for cpus in shares],
            router=server.router,
            max_num_queued_reqs=server.max_num_queued_reqs,
            max_num_queued_tokens=server.max_num_queued_tokens,
            max_restarts=server.max_restarts,
            watchdog_timeout=watchdog_timeout(engine, server),
        )
        self._cpus: dict[int, Sequence[int]] = {}
        for replica, cpus in zip(self.replicas, shares, strict=True):
            self._settle(replica, engine, cpus)
        self.updates = RollingUpdate(self, engine, self)

    def _link(self, engine: EngineConfig, cpus: Sequence[int]) -> Link:
        is_json, level = self._server.log_format == "json", engine_level(self._server.uvicorn_log_level)
        return ProcessLink(engine, self._command, is_json, level, cpus=cpus)

    def _settle(self, replica: Replica, engine: EngineConfig, cpus: Sequence[int]) -> None:
        self._cpus[replica.index] = cpus
        if self._server.crash_report_dir:
            replica.reports = CrashReports(self._server.crash_report_dir, engine, self._server)

    # -- a rolling update

    def link(self, config: EngineConfig, old: Replica) -> Link:
        """See `Starter`: the new engine has the processors of the old one."""
        link = self._link(config, self._cpus[old.index])
        link.adapters = dict(old.link.adapters)
        return link

    def took(self, new: Replica, config: EngineConfig, old: Replica) -> None:
        """See `Starter`."""
        self._settle(new, config, self._cpus[old.index])


def _check_shared(engine: EngineConfig, server: ServerConfig, num: int) -> None:
    fields = {"record_schedule": engine.record_schedule, "slot_save_path": server.slot_save_path}
    for name, value in fields.items():
        if value is not None:
            raise RequestError(name, value, f"left out with data_parallel_size {num}: each replica has its own")
    if engine.device not in ("auto", "cpu"):
        raise RequestError("device", engine.device, f"cpu with data_parallel_size {num}")


def allowed() -> list[int]:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def nodes_of(cpus: Sequence[int], nodes: Path = NODES, processors: Path = PROCESSORS) -> list[list[int]]:
    """Return, for each node of memory, the `cpus` on it, threads of one core next to each other. Nodes without any are
    left out; on a machine that does not name its nodes, there is one."""
    by_node = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        on_node = set(_read(folder / "cpulist"))
        by_node.append([cpu for cpu in cpus if cpu in on_node])
    known = {cpu for node in by_node for cpu in node}
    rest = [cpu for cpu in cpus if cpu not in known]
    by_node = [node for node in by_node if node]
    if rest:
        by_node = [*by_node[:-1], [*by_node[-1], *rest]] if by_node else [rest]

    def core(cpu: int) -> tuple[int, int]:
        siblings = _read(processors / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        return min(siblings, default=cpu), cpu

    return [sorted(node, key=core) for node in by_node]


def divide(num: int, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the processors of each of `num` replicas: nodes as a whole if there are as many, else equal parts of all.
    With fewer processors than replicas, none is bound: the lists are empty."""
    if num == len(nodes):
        return [list(node) for node in nodes]
    cpus = [cpu for node in nodes for cpu in node]
    if len(cpus) < num:
        return [[] for _ in range(num)]
    return [cpus[len(cpus) * at // num : len(cpus) * (at + 1) // num] for at in range(num)]


def _read(path: Path) -> list[int]:
    """Return the numbers of a list such as 0-3,8; none if it cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
        ranges = [part.partition("-") for part in text.split(",") if part]
        return [cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)]
    except (OSError, ValueError):
        return []
