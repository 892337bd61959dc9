"""Starts the ranks of an engine, and sets up rank 0's part: `open_group`, and the messages of a start.

A rank is a process of `engine.rank`. All of them read the same checkpoint at the same time, each its own part; rank 0
waits for the others, and then they go through the steps of `engine.library.load` together, which calls this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace import env
from headrace.backends import choose_backend, num_gpus
from headrace.backends.base import Backend, Program
from headrace.backends.shares import MAX_RANKS, DeviceSeat, Plan, Seat
from headrace.parallel.devices import DeviceRanks
from headrace.parallel.gloo import GlooRanks
from headrace.parallel.group import SLOT_BYTES, Group, SeparateMemory
from headrace.parallel.pipeline import Arrivals, FirstNeighbours, PipelinedProgram
from headrace.parallel.program import RankedProgram, RankLostError
from headrace.parallel.sharding import Sharing
from headrace.parallel.stages import StageSeat
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError

ALONE = ("eagle", "eagle3", "medusa", "mtp", "early_exit")
"""Drafters that read the target's hidden states or share its layers, which ranks have in parts."""
LOOPBACK = "lo"
"""The interface of ranks with GPUs of one host."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """To a rank, first: the model to load, its number among `world`, the file of the memory that they share (-1: none),
    how long it waits for the others, whether it may spin while it does, and its processors (none: any). On another host
    it has an `interface` through which it gathers."""

    config: EngineConfig
    rank: int
    world: int
    memory: int
    timeout: float
    spins: bool
    cpus: list[int]
    interface: str = ""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """To a rank: all have their weights; choose the activations, by the text of `token_ids`. Ranks on several hosts
    find each other's gathers at `host` and `port`."""

    token_ids: list[int]
    host: str = ""
    port: int = 0


def refuse(config: EngineConfig) -> None:
    """Raise `RequestError` for settings that ranks do not support."""
    field, world = config.ranks
    beside = f"with {field} {world}"
    if config.tensor_parallel_size > 1 and config.pipeline_parallel_size > 1:
        bound = f"1 with tensor_parallel_size {config.tensor_parallel_size}: ranks have columns or layers, not both"
        raise RequestError("pipeline_parallel_size", config.pipeline_parallel_size, bound)
    if world > MAX_RANKS:
        raise RequestError(field, world, f"at most {MAX_RANKS}")
    if config.save_packed:
        raise RequestError("save_packed", True, f"left out {beside}: one process writes the file, ranks then read it")
    spec = config.speculative_config
    if spec is not None and spec.method in ALONE:
        bound = f"ngram, suffix, lookahead or draft_model {beside}: the others read the target's hidden states"
        raise RequestError("speculative_config.method", spec.method, bound)
    if env.debug_level() >= 3:
        raise RequestError("HEADRACE_DEBUG", env.debug_level(), f"at most 2 {beside}")


def on_devices(config: EngineConfig) -> bool:
    """Return whether each rank has its own device, or a stand-in for one in tests."""
    return choose_backend(config.backend, config.device)[0] == "cuda"


def gathers_at(config: EngineConfig, rank: int, interface: str) -> GlooRanks | DeviceRanks:
    """Return the gathers of a rank by `torch.distributed`, through an interface of this host. Raises `RequestError`."""
    world, timeout = config.ranks[1], config.distributed_timeout
    if on_devices(config):
        return DeviceRanks(rank, world, interface, timeout, choose_backend(config.backend, config.device)[1])
    return GlooRanks(rank, world, SLOT_BYTES, interface, timeout)


def open_devices(config: EngineConfig, on_lost: Callable[[str], None] | None) -> Group:
    """Start the other ranks of an engine, each on the next GPU of this host. Raises `RequestError`."""
    (field, world), device = config.ranks, choose_backend(config.backend, config.device)[1]
    devices, interface = ["cpu"] * world, "" if config.pipeline_parallel_size > 1 else LOOPBACK
    if device != "cpu":
        first_gpu, num = int(device.partition(":")[2] or 0), num_gpus()
        if first_gpu + world > num:
            raise RequestError(field, world, f"at most {num - first_gpu}: this host has {num} GPUs")
        devices = [f"cuda:{first_gpu + rank}" for rank in range(world)]

    def first(rank: int, memory: int) -> Start:
        part = msgspec.structs.replace(config, device=devices[rank])
        return Start(part, rank, world, memory, timeout, False, [], interface)

    timeout, gathers = config.distributed_timeout, gathers_at(config, 0, interface) if interface else SeparateMemory()
    return Group(world, timeout, False, first, on_lost, gathers=gathers)


def open_group(config: EngineConfig, directory: str, on_lost: Callable[[str], None] | None) -> Group | None:
    """Start the other ranks of an engine, and bind this thread to its share of the processors; None for a model that
    one process computes. Raises `RequestError`."""
    world = config.ranks[1]
    if world == 1:
        return None
    refuse(config)
    if on_devices(config):
        return open_devices(msgspec.structs.replace(config, model=directory), on_lost)
    shares = divide(processors(), world)
    spins = bool(shares[0]) and config.num_threads <= len(shares[0])
    # Where there are not processors for all, more threads than ranks would only be in each other's way.
    config = msgspec.structs.replace(config, model=directory, num_threads=num_threads(config, shares))

    def first(rank: int, memory: int) -> Start:
        return Start(config, rank, world, memory, config.distributed_timeout, spins, shares[rank])

    apart = SeparateMemory() if config.pipeline_parallel_size > 1 else None
    group = Group(world, config.distributed_timeout, spins, first, on_lost, gathers=apart)
    if shares[0]:
        before = processors()
        os.sched_setaffinity(0, shares[0])
        group.at_end = lambda: os.sched_setaffinity(0, before)
    return group


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


def go(group: Group, token_ids: list[int]) -> None:
    """Have all ranks, which have their weights, choose the activations by the text of these tokens. Connects gathers by
    `torch.distributed` before.

    Raises `RankLostError`."""
    gathers = group.native
    if not isinstance(gathers, GlooRanks | DeviceRanks):
        group.send(Go(token_ids))
        return
    with gathers.listen() as listener:
        host, port = listener.getsockname()[:2]
        group.send(Go(token_ids, host, port))
        try:
            gathers.connect(host, port, listener)
        except (TimeoutError, OSError) as error:
            raise RankLostError(str(error)) from error


def seat_of(native: Any, rank: int, world: int, whole_experts: bool) -> Seat | DeviceSeat:
    """Return the seat of a rank whose gathers meet the other ranks' gathers in `native`."""
    plan = Plan(rank, world, whole_experts)
    return DeviceSeat(plan, native) if isinstance(native, DeviceRanks) else Seat(plan, native.address(), SLOT_BYTES)


def first_seat(config: EngineConfig, group: Group) -> Seat | DeviceSeat | StageSeat:
    """Return the seat of rank 0."""
    if config.pipeline_parallel_size > 1:
        # On separate hosts or GPUs, no rank shares its memory.
        is_apart = group.hosts is not None or on_devices(config)
        hosts = tuple(range(group.world)) if is_apart else ()
        return StageSeat(0, group.world, FirstNeighbours(group), hosts)
    return seat_of(group.native, 0, group.world, config.enable_expert_parallel)


def program_of(config: EngineConfig, program: Any, group: Group) -> Program:
    """Return the program of rank 0, whose ranks are ready, and look after them from now on."""
    if config.pipeline_parallel_size == 1:
        group.watch()
        return RankedProgram(program, group)
    arrivals = Arrivals(group, config.distributed_timeout)
    group.on_passed = arrivals.arrived
    group.watch()
    return PipelinedProgram(program, group, arrivals.take, group.world)


def take_seat(backend: Backend, seat: Seat | DeviceSeat) -> Sharing:
    """Have `backend` record one rank's part. Raises `RequestError` for one that cannot."""
    take = getattr(backend, "take_seat", None)
    if take is None:
        raise RequestError("tensor_parallel_size", seat.plan.world, f"1 on backend {backend.name}")
    ops: Sharing = take(seat)
    return ops
