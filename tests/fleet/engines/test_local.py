"""How the processors of a host are divided, on made-up trees of /sys, and engines that serve side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.client import ProcessClient
from headrace.fleet.engines.client import Fleet
from headrace.fleet.engines.local import allowed, client_of, divide, nodes_of
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError


def tree(folder: Path, nodes: dict[int, str], siblings: dict[int, str]) -> tuple[Path, Path]:
    for node, cpus in nodes.items():
        (folder / "node" / f"node{node}").mkdir(parents=True)
        (folder / "node" / f"node{node}" / "cpulist").write_text(cpus + "\n")
    (folder / "node" / "possible").parent.mkdir(parents=True, exist_ok=True)
    (folder / "node" / "possible").write_text("0-1\n")
    for cpu, text in siblings.items():
        (folder / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text + "\n")
    return folder / "node", folder / "cpu"


def test_two_sockets_with_two_threads_a_core(tmp_path: Path) -> None:
    """As Linux numbers them: processors 0-3 and 8-11 on node 0, of which 0 and 8 are one core."""
    pairs = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    places = tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, pairs)
    nodes = nodes_of(range(16), *places)
    assert nodes == [[0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]]
    assert divide(2, nodes) == nodes
    assert divide(4, nodes) == [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]]
    assert [len(part) for part in divide(3, nodes)] == [5, 5, 6]
    assert divide(1, nodes) == [nodes[0] + nodes[1]]


def test_processors_that_are_not_allowed_are_left_out(tmp_path: Path) -> None:
    places = tree(tmp_path, {0: "0-3", 1: "4-7", 2: "", 10: "8-9"}, {})
    assert nodes_of([1, 2, 5, 8, 9], *places) == [[1, 2], [5], [8, 9]]
    assert nodes_of([1, 2], *places) == [[1, 2]]
    assert nodes_of([1, 20], *places) == [[1, 20]]


@pytest.mark.parametrize("text", [None, "", "x-y", "0-"])
def test_without_a_tree_there_is_one_node(tmp_path: Path, text: str | None) -> None:
    places = tree(tmp_path, {} if text is None else {0: text}, {0: "?"})
    assert nodes_of([0, 1, 2], *places) == [[0, 1, 2]]


def test_fewer_processors_than_replicas_are_not_divided() -> None:
    assert divide(3, [[0, 1]]) == [[], [], []]
    assert divide(3, [[0, 1, 2]]) == [[0], [1], [2]]


def test_this_machine_has_a_node() -> None:
    assert sorted(cpu for node in nodes_of(allowed()) for cpu in node) == allowed()


def test_one_replica_is_the_client_of_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(client_of(EngineConfig(), ServerConfig())) is ProcessClient
    monkeypatch.setattr("headrace.fleet.engines.local.nodes_of", lambda cpus: [[0], [1]])
    fleet = client_of(EngineConfig(), ServerConfig(data_parallel_size="auto", router="least-work"))
    assert isinstance(fleet, Fleet)
    assert len(fleet.replicas) == 2
    assert fleet.router.policy == "least-work"
    assert all(replica.reports is not None for replica in fleet.replicas)


@pytest.mark.parametrize(
    ("engine", "server", "field"),
    [
        ({"record_schedule": "x"}, {}, "record_schedule"),
        ({}, {"slot_save_path": "x"}, "slot_save_path"),
        ({"device": "cuda"}, {}, "device"),
    ],
)
def test_what_replicas_can_not_share_is_refused(engine: dict[str, Any], server: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"{field}.*data_parallel_size 2"):
        client_of(EngineConfig(**engine), ServerConfig(data_parallel_size="2", **server))


@pytest.mark.parametrize("size", ["0", "65", "-1", "two", ""])
def test_a_number_of_replicas_is_checked(size: str) -> None:
    with pytest.raises(RequestError, match="data_parallel_size.*auto, or an integer from 1 to 64"):
        ServerConfig(data_parallel_size=size)


def test_an_engine_is_bound_to_its_processors() -> None:
    """The affinity of a child is that of its share."""
    import asyncio

    from tests.engine.test_client import read, request
    from tests.support import fake

    from headrace.engine.links import ProcessLink

    cpu = allowed()[-1]
    fleet = Fleet([ProcessLink(EngineConfig(model="fake"), fake.command(0.0), cpus=[cpu])])

    async def whole() -> set[int]:
        await fleet.start()
        try:
            await read(fleet.submit([request(max_tokens=2)]))
            pid = fleet.replicas[0].link.pid
            assert pid is not None
            return os.sched_getaffinity(pid)
        finally:
            await fleet.close()

    assert asyncio.run(whole()) == {cpu}
