"""`DeviceRanks`: the gathers of ranks that have a device each, by `torch.distributed`: NCCL between GPUs, gloo between
CPUs, where the GPU backend's twins run.

Neither encrypts nor checks the identity of the other end: ranks of one host meet on the loopback interface, ranks of
several hosts in a network that is trusted. Implements `parallel.program.Gathers`. Called by `engine.ranks`.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

from headrace import env
from headrace.parallel.gloo import CONNECT_TIMEOUT_S, address_of, first_line, listen_at, require_gloo, store_at
from headrace.protocol.errors import RequestError


class DeviceRanks:
    """This rank's gathers. Until `connect` none can be made.

    Args:
        interface: of this host, through which the ranks find each other, and NCCL sends where no faster link is.
        timeout: seconds that a gather on CPUs waits for the others. On GPUs it waits until the group is broken.
        device: of this rank's tensors, as torch names it.

    Raises `RequestError` for an interface that is not there, and for a torch without NCCL.
    """

    def __init__(self, rank: int, world: int, interface: str, timeout: float, device: str) -> None:
        self.host, self._interface = address_of(interface), interface
        self._rank, self._world, self._timeout, self._device = rank, world, timeout, device
        self._distributed = require_gloo()
        self._is_gpu = device != "cpu"
        if self._is_gpu:
            if not self._distributed.is_nccl_available():
                raise RequestError("device", device, "cpu with this build of torch, which has no NCCL")
            env.set_nccl_interface(interface)
        self._group: Any = None
        self._reason = ""

    def listen(self) -> socket.socket:
        """Return the socket by which the other ranks find this one, which is rank 0."""
        return listen_at(self.host)

    def connect(self, host: str, port: int, listener: socket.socket | None = None) -> None:
        """Find the others at rank 0's `port`, where rank 0 has a listening socket. Raises `TimeoutError`, or `OSError`
        for an interface that has none."""
        import torch

        distributed = self._distributed
        patience = timedelta(seconds=max(self._timeout, CONNECT_TIMEOUT_S))
        try:
            store = store_at(host, port, self._world, patience, listener)
            kind = distributed.ProcessGroupNCCL if self._is_gpu else distributed.ProcessGroupGloo
            options = kind.Options() if self._is_gpu else kind._Options()
            options._timeout = patience
            if not self._is_gpu:
                options._devices = [kind.create_device(interface=self._interface)]
            self._group = kind(store, self._rank, self._world, options)
            # The connections are made when the first bytes are sent.
            part = torch.full((16,), self._rank, dtype=torch.uint8, device=self._device)
            parts = torch.zeros(self._world, 16, dtype=torch.uint8, device=self._device)
            self.gather(parts, part)
            ranks = parts[:, 0].tolist()
        except RuntimeError as error:
            raise TimeoutError(f"the ranks did not find each other: {first_line(error)}") from error
        if self._reason or ranks != list(range(self._world)):
            raise TimeoutError(self._reason or f"the ranks did not find each other: {ranks}")

    def gather(self, parts: Any, part: Any) -> None:
        """Fill `parts` [W, n] with the `part` [n] of each rank, uint8, in the order of ranks. After a failure `fault`
        returns the reason, and nothing is gathered any more."""
        if self._group is None or self._reason:
            self._reason = self._reason or "the ranks are not connected"
            return
        try:
            work = self._group._allgather_base(parts.view(-1), part)
            if self._is_gpu:
                work.wait()  # on the stream: a graph allows no other wait
            else:
                work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            self._reason = self._reason or f"{'NCCL' if self._is_gpu else 'gloo'}: {first_line(error)}"

    def begin(self, call_id: int) -> None:
        """Do nothing: these gathers do not carry the number of their call."""

    def fault(self) -> str:
        return self._reason

    def break_group(self) -> None:
        """End all gathers, also one that waits on a GPU."""
        self._reason = self._reason or "the group is broken"
        if self._group is not None and self._is_gpu:
            with contextlib.suppress(RuntimeError):
                self._group.abort()

    def close(self) -> None:
        self._group = None
