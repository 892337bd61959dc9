"""A port of the fleet takes no more descriptors than it has places for connections (S-43)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

import pytest
from tests.support.remote import credentials

from headrace.fleet.remote import wire
from headrace.secure import door
from headrace.secure.handshake import Timeouts


# The control leaves sockets to the garbage collection, as the door did without the yield.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("yields", [True, False], ids=["", "control"])
def test_S_43_connections_that_come_at_once_take_no_more_descriptors_than_places(
    yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, counts, pause = 6 * door.MAX_PENDING, list[int](), asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds or yields:
            await pause(seconds)

    async def go(listener: socket.socket) -> None:
        accept = asyncio.get_running_loop().sock_accept

        async def counted(sock: socket.socket) -> Any:
            result = await accept(sock)
            counts.append(len(os.listdir("/proc/self/fd")))
            return result

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", counted)
        monkeypatch.setattr(door.asyncio, "sleep", sleep)

        async def serve(peer: Any) -> None:
            raise AssertionError("none has proven itself")

        place = door.Door(credentials("engine"), wire.protocol_version(), Timeouts(tls=60.0, proof=60.0), serve)
        task = asyncio.create_task(place.accept(listener))
        while len(counts) < num:
            await pause(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(num)]
        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(go(listener))
        for each in clients:
            each.close()
    assert (max(counts) - before <= 2 * door.MAX_PENDING) is yields
