"""Rank 0 and ranks of other hosts: `await_hosts` waits for them, `connect` connects their gathers.

Each host decides from which path its rank loads and through which interface it gathers: `prepared` applies that there
to rank 0's `Start`. Called by `load`, which imports it only where it is needed, and by `headrace rank`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace import hub
from headrace.engine.ranks import Start, gathers_at, go, refuse
from headrace.parallel.group import Group, SeparateMemory
from headrace.parallel.hosts.rendezvous import Rendezvous as Hosts
from headrace.parallel.program import Gathers
from headrace.protocol.config import EngineConfig, Rendezvous
from headrace.protocol.errors import RequestError
from headrace.protocol.frames import TransportError
from headrace.protocol.sources import digest_of_sources
from headrace.secure.credentials import Credentials
from headrace.secure.handshake import HandshakeError

OF_ONE_HOST: dict[str, Any] = {
    "model": "", "tokenizer": None, "revision": None, "num_threads": 0, "rendezvous": None, "record_schedule": None,
    "speculative_config": None,
}  # fmt: skip
"""Settings that are each host's own matter, or rank 0's alone: a rank gets none of them from another host."""


def await_hosts(
    config: EngineConfig, place: Rendezvous, directory: str, on_lost: Callable[[str], None] | None
) -> Group:
    """Wait until the ranks of other hosts are there. Raises `RequestError`."""
    refuse(config)
    (_, world), timeout = config.ranks, config.distributed_timeout
    credentials = Credentials.read(place.fleet_secret_file, place.tls_cert, place.tls_key, place.tls_ca, is_server=True)
    try:
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        listener = socket.create_server((place.host, place.port), family=family)
    except OSError as error:
        bound = f"an address of this machine and a free port ({error.strerror or error})"
        raise RequestError("rendezvous", f"{place.host}:{place.port}", bound) from error
    hosts = Hosts(listener, world, timeout, credentials, digest_of_sources(), lambda: hub.digest(Path(directory)))
    try:
        # It imports torch, while the ranks come.
        name = place.distributed_interface
        gathers: Gathers = SeparateMemory() if name is None else gathers_at(config, 0, name)
    except BaseException:
        hosts.close()
        raise
    # Every host has its own paths and processors.
    shared = msgspec.structs.replace(config, **OF_ONE_HOST)

    def first(rank: int, memory: int) -> Start:
        return Start(shared, rank, world, memory, timeout, False, [])

    return Group(world, timeout, False, first, on_lost, gathers=gathers, hosts=hosts)


def prepared(payload: bytes, rank: int, model: str, num_threads: int, interface: str | None) -> bytes:
    """Return the `Start` of a rank on this host: rank 0's settings of the model's numbers, without its paths.

    Raises `TransportError` for another message, or for one to another rank, and `HandshakeError` where gathers need an
    interface."""
    try:
        start = msgspec.msgpack.decode(payload, type=Start)
    except (msgspec.DecodeError, RequestError, UnicodeDecodeError) as error:
        raise TransportError(f"not a start: {error}") from error
    if start.rank != rank:
        raise TransportError(f"a start of rank {start.rank}")
    gathers = start.config.tensor_parallel_size > 1
    if gathers and interface is None:
        raise HandshakeError("the ranks gather columns: --distributed-interface is missing here", is_final=True)
    config = msgspec.structs.replace(start.config, **OF_ONE_HOST | {"model": model, "num_threads": num_threads})
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            start, config=config, memory=-1, cpus=[], interface=(interface or "") if gathers else ""
        )
    )


def connect(group: Group, token_ids: list[int]) -> None:
    """Compare the weights of all ranks, then go on as ranks of one host do (`ranks.go`).

    Raises `CheckpointError` for ranks with other weights, and `RankLostError`."""
    if not isinstance(group.hosts, Hosts):
        raise TypeError("a group of hosts that `await_hosts` has not made")
    group.hosts.check_weights()
    go(group, token_ids)
