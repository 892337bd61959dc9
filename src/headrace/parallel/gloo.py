"""`GlooRanks`: the gathers of ranks on several hosts, whose parts gloo (`torch.distributed`) moves.

Implements `parallel.program.Gathers`. gloo neither encrypts nor checks the identity of the other end: only numbers go
through it, between addresses that were exchanged over a connection which does both. Called by `engine.ranks`.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import psutil

from headrace.backends.native import require_native
from headrace.protocol.errors import RequestError

CONNECT_TIMEOUT_S = 15.0
"""Least time in which all ranks, which have loaded their weights, find each other."""
MAX_REASON = 200


def address_of(interface: str) -> str:
    """Return the address of an interface of this host, IPv4 if it has one. Raises `RequestError`."""
    addresses = psutil.net_if_addrs()
    if interface not in addresses:
        names = ", ".join(sorted(addresses))
        raise RequestError("distributed_interface", interface, f"an interface of this host: {names}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in addresses[interface]:
            if each.family == family and not each.address.startswith("fe80"):
                return str(each.address)
    raise RequestError("distributed_interface", interface, "an interface with an address")


def require_gloo() -> Any:
    """Return `torch.distributed`. Raises `RequestError` where it is missing."""
    try:
        import torch.distributed as distributed
    except ModuleNotFoundError as error:
        bound = "left out without torch, whose gloo moves numbers between hosts: pip install 'headrace[torch]'"
        raise RequestError("rendezvous", "set", bound) from error
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise RequestError("rendezvous", "set", "left out with this build of torch, which has no gloo")
    return distributed


def listen_at(host: str) -> socket.socket:
    """Return a listening socket at a free port of an address."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def store_at(host: str, port: int, world: int, patience: timedelta, listener: socket.socket | None) -> Any:
    """Return the store at rank 0's `port` by which ranks find each other. Rank 0 has a `listener` there, which the
    store then owns."""
    more = {} if listener is None else {"master_listen_fd": listener.detach()}
    return require_gloo().TCPStore(
        host, port, world, listener is not None, timeout=patience, wait_for_workers=False, **more
    )


class Exchange:
    """Moves the parts of gathers between all ranks: each is sent to each. `reason`: why a move failed."""

    def __init__(self, rank: int, world: int, interface: str, timeout: float) -> None:
        self._rank, self._world, self._interface, self._timeout = rank, world, interface, timeout
        self._others = [other for other in range(world) if other != rank]
        self._distributed = require_gloo()
        self._parts: list[Any] = []
        self._process_group: Any = None
        self._patience = timedelta(seconds=timeout)
        self.reason = ""

    def connect(self, parts: list[memoryview], host: str, port: int, listener: socket.socket | None) -> None:
        """Find the others at rank 0's `port`, where rank 0 has a listening socket.

        Raises `TimeoutError`, or `OSError` for an interface that has none."""
        import torch

        gloo = self._distributed.ProcessGroupGloo
        patience = timedelta(seconds=max(self._timeout, CONNECT_TIMEOUT_S))
        try:
            store = store_at(host, port, self._world, patience, listener)
            options = gloo._Options()
            options._devices = [gloo.create_device(interface=self._interface)]
            options._timeout = self._patience = patience
            group = gloo(store, self._rank, self._world, options)
            self._parts = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
            self._process_group = group
            # gloo makes its connections when the first bytes are sent.
            if not self(64):
                raise TimeoutError(self.reason)
            self._patience = timedelta(seconds=self._timeout)
        except RuntimeError as error:
            raise TimeoutError(f"the ranks did not find each other: {first_line(error)}") from error

    def __call__(self, size: int) -> bool:
        """Send the first `size` bytes of this rank's part, and receive the others' parts, of any size. gloo ends the
        process if a message is longer than the buffer that awaits it, so the buffers have room for a whole part."""
        group, rank, parts = self._process_group, self._rank, self._parts
        if group is None:
            self.reason = self.reason or "the ranks are not connected"
            return False
        try:
            part = [parts[rank][:size]]
            works = [group.recv([parts[other]], other, 0) for other in self._others]
            works += [group.send(part, other, 0) for other in self._others]
            for work in works:
                work.wait(self._patience)
        except RuntimeError as error:
            self.reason = self.reason or f"gloo: {first_line(error)}"
            return False
        return True

    def close(self) -> None:
        self._process_group, self._parts = None, []


def first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:MAX_REASON]


class GlooRanks:
    """This rank's gathers. Until `connect` none can be made.

    Args:
        slot_bytes: the most bytes of a rank that are gathered at a time; longer parts go in portions.
        timeout: seconds that a gather waits for the others.

    Raises `RequestError` for an interface that is not there, and where torch is missing.
    """

    def __init__(self, rank: int, world: int, slot_bytes: int, interface: str, timeout: float) -> None:
        self.host, self._world = address_of(interface), world
        self._exchange = Exchange(rank, world, interface, timeout)
        self._native = require_native().Ranks.exchanging(rank, world, slot_bytes, self._exchange)
        self.address, self.begin = self._native.address, self._native.begin

    def listen(self) -> socket.socket:
        """Return the socket by which the other ranks find this one, rank 0: on the interface, at a free port."""
        return listen_at(self.host)

    def connect(self, host: str, port: int, listener: socket.socket | None = None) -> None:
        """See `Exchange.connect`."""
        parts = [self._native.part(rank) for rank in range(self._world)]
        self._exchange.connect(parts, host, port, listener)

    def fault(self) -> str:
        fault: str = self._native.fault()
        return self._exchange.reason or fault if fault else ""

    def break_group(self) -> None:
        self._native.break_group()

    def close(self) -> None:
        self._exchange.close()
