"""Starts the ranks of an engine, and what rank 0 does beside them: `open_group`, and the messages of a start.

A rank is a process of `engine.rank`. All of them read the same checkpoint at the same time, each its own part; rank 0
waits for the others, and then they go through the steps of `engine.load` together. Called by `engine.load`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import headrace
from headrace import env, hub
from headrace.backends.base import Backend
from headrace.parallel.gloo import GlooRanks
from headrace.parallel.group import SLOT_BYTES, Group
from headrace.parallel.hosts.rendezvous import Rendezvous as Hosts
from headrace.parallel.plan import MAX_RANKS, Plan, Seat
from headrace.parallel.program import RankLostError
from headrace.parallel.sharding import Sharing
from headrace.protocol.config import EngineConfig, Rendezvous
from headrace.protocol.errors import RequestError
from headrace.protocol.frames import TransportError
from headrace.secure.credentials import Credentials

ALONE = ("eagle", "eagle3", "medusa", "mtp", "early_exit")
"""Drafters that read the target's hidden states or share its layers, which ranks have in parts."""
OF_ONE_HOST: dict[str, Any] = {
    "model": "", "tokenizer": None, "revision": None, "num_threads": 0, "rendezvous": None, "record_schedule": None,
    "speculative_config": None,
}  # fmt: skip
"""Settings that are each host's own matter, or rank 0's alone: a rank gets none of them from another host."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """To a rank, first: what to load, its number among `world`, the file of the memory that they share, how long it
    waits for the others, whether it may spin while it does, and its processors (none: any). On a host of its own it
    has no such file (-1), but an `interface` through which it gathers."""

    config: EngineConfig
    rank: int
    world: int
    memory: int
    timeout: float
    spins: bool
    cpus: list[int]
    interface: str = ""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """To a rank: all have their weights; choose the activations. Ranks on several hosts find each other's gathers at
    `host` and `port`."""

    host: str = ""
    port: int = 0


class SetUp(msgspec.Struct, frozen=True, tag="set_up"):
    """To a rank: make the program, with these arguments of `Backend.program`."""

    pool_sizes: tuple[int, ...]
    block_size: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int
    num_threads: int


def refuse(config: EngineConfig) -> None:
    """Raise `RequestError` for what ranks can not do together."""
    world = config.tensor_parallel_size
    beside = f"with tensor_parallel_size {world}"
    if world > MAX_RANKS:
        raise RequestError("tensor_parallel_size", world, f"at most {MAX_RANKS}")
    if config.save_packed:
        raise RequestError("save_packed", True, f"left out {beside}: one process writes the file, ranks then read it")
    spec = config.speculative_config
    if spec is not None and spec.method in ALONE:
        bound = f"ngram, suffix, lookahead or draft_model {beside}: the others read the target's hidden states"
        raise RequestError("speculative_config.method", spec.method, bound)
    if env.debug_level() >= 3:
        raise RequestError("HEADRACE_DEBUG", env.debug_level(), f"at most 2 {beside}")


def open_group(config: EngineConfig, directory: str, on_lost: Callable[[str], None] | None) -> Group | None:
    """Start the other ranks of an engine, and bind this thread to its share of the processors; None for a model that
    one process computes. Raises `RequestError`."""
    world = config.tensor_parallel_size
    if world == 1:
        return None
    refuse(config)
    if config.rendezvous is not None:
        return await_hosts(config, config.rendezvous, directory, on_lost)
    shares = divide(processors(), world)
    spins = bool(shares[0]) and config.num_threads <= len(shares[0])
    # Where there are not processors for all, more threads than ranks would only be in each other's way.
    config = msgspec.structs.replace(config, model=directory, num_threads=num_threads(config, shares))

    def first(rank: int, memory: int) -> Start:
        return Start(config, rank, world, memory, config.distributed_timeout, spins, shares[rank])

    group = Group(world, config.distributed_timeout, spins, first, on_lost)
    if shares[0]:
        before = processors()
        os.sched_setaffinity(0, shares[0])
        group.at_end = lambda: os.sched_setaffinity(0, before)
    return group


def await_hosts(
    config: EngineConfig, place: Rendezvous, directory: str, on_lost: Callable[[str], None] | None
) -> Group:
    """Wait until the ranks of other hosts are there. Raises `RequestError`."""
    world, timeout = config.tensor_parallel_size, config.distributed_timeout
    credentials = Credentials.read(place.fleet_secret_file, place.tls_cert, place.tls_key, place.tls_ca, is_server=True)
    gathers = GlooRanks(0, world, SLOT_BYTES, place.distributed_interface, timeout)
    try:
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        listener = socket.create_server((place.host, place.port), family=family)
    except OSError as error:
        bound = f"an address of this machine and a free port ({error.strerror or error})"
        raise RequestError("rendezvous", f"{place.host}:{place.port}", bound) from error
    hosts = Hosts(listener, world, timeout, credentials, version(), lambda: hub.digest(Path(directory)))
    # Every host has its own paths and processors.
    shared = msgspec.structs.replace(config, **OF_ONE_HOST)

    def first(rank: int, memory: int) -> Start:
        return Start(shared, rank, world, memory, timeout, False, [])

    return Group(world, timeout, False, first, on_lost, gathers=gathers, hosts=hosts)


def prepared(payload: bytes, rank: int, model: str, num_threads: int, interface: str) -> bytes:
    """Return the `Start` of a rank on this host: what rank 0 says of the model's numbers, but no path of its.

    Raises `TransportError` for another message, or for that of another rank."""
    try:
        start = msgspec.msgpack.decode(payload, type=Start)
    except (msgspec.DecodeError, RequestError, UnicodeDecodeError) as error:
        raise TransportError(f"not a start: {error}") from error
    if start.rank != rank:
        raise TransportError(f"a start of rank {start.rank}")
    config = msgspec.structs.replace(start.config, **OF_ONE_HOST | {"model": model, "num_threads": num_threads})
    return msgspec.msgpack.encode(
        msgspec.structs.replace(start, config=config, memory=-1, cpus=[], interface=interface)
    )


def find_each_other(group: Group) -> None:
    """Send `Go` to all ranks, which have their weights. Ranks on several hosts compare them, and connect their gathers.

    Raises `CheckpointError` for ranks with other weights, and `RankLostError`."""
    if not isinstance(group.hosts, Hosts) or not isinstance(group.native, GlooRanks):
        group.send(Go())
        return
    group.hosts.check_weights()
    with group.native.listen() as listener:
        host, port = listener.getsockname()[:2]
        group.send(Go(host, port))
        try:
            group.native.connect(host, port, listener)
        except (TimeoutError, OSError) as error:
            raise RankLostError(str(error)) from error


@functools.cache
def version() -> str:
    """Return a digest of headrace's sources, of which all ranks must have the same: each plans its part by itself."""
    folder = Path(headrace.__file__).parent
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        hasher.update(hashlib.sha256(str(path.relative_to(folder)).encode()).digest())
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:16]


def num_threads(config: EngineConfig, shares: Sequence[Sequence[int]]) -> int:
    """Return the threads of each rank: as configured, or one for each core of its share."""
    return config.num_threads or (0 if shares[0] else 1)


def processors() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def divide(cpus: Sequence[int], world: int) -> list[list[int]]:
    """Return the processors of each rank, equal parts in order; with fewer processors than ranks, none is bound."""
    if len(cpus) < world:
        return [[] for _ in range(world)]
    return [list(cpus[len(cpus) * at // world : len(cpus) * (at + 1) // world]) for at in range(world)]


def seat_of(native: Any, rank: int, world: int) -> Seat:
    """Return the seat of a rank whose gathers meet those of the others in `native`."""
    return Seat(Plan(rank, world), native.address(), SLOT_BYTES)


def take_seat(backend: Backend, seat: Seat) -> Sharing:
    """Have `backend` record one rank's part. Raises `RequestError` for one that can not."""
    take = getattr(backend, "take_seat", None)
    if take is None:
        raise RequestError(
            "tensor_parallel_size", seat.plan.world, f"1 on backend {backend.name}: ranks are CPUs' alone"
        )
    ops: Sharing = take(seat)
    return ops
