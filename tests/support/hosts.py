"""Hosts of ranks on 127.0.0.1: one that awaits groups on a thread of this process, and what rank 0 has to know."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.remote import credentials, files
from tests.support.serving import free_port

from headrace import hub
from headrace.engine.hosts import prepared
from headrace.parallel.hosts.server import RankServer
from headrace.protocol.sources import digest_of_sources
from headrace.secure.credentials import Credentials
from headrace.secure.door import Server
from headrace.secure.handshake import Timeouts

FAST = Timeouts(tls=10.0, proof=10.0)


class RankHost:
    """A rank's host on a thread. `port` is rank 0's, `error` what the host ended with by itself."""

    def __init__(self, server: RankServer, port: int) -> None:
        self.server = server
        self.port = port
        self.error: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        async def serve() -> None:
            self._task = asyncio.current_task()
            await self.server.serve()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(serve())
            except asyncio.CancelledError:
                pass
            except Exception as error:
                self.error = error

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def rank_host(
    port: int = 0,
    model: str = "",
    rank: int = 1,
    world: int = 2,
    command: Sequence[str] | None = None,
    who: Credentials | None = None,
    speaks: str = "",
    weights: Callable[[], str] | None = None,
    name: str = "127.0.0.1",
    interface: str | None = "lo",
) -> Iterator[RankHost]:
    """A rank of a rank 0 at `port`; 0: a free one. Without a model its frames pass unchanged."""
    port = port or free_port()
    server = RankServer(
        Server("rank 0", "127.0.0.1", port, name),
        rank,
        world,
        who or credentials("front"),
        speaks or digest_of_sources(),
        weights or (lambda: hub.digest(Path(model))),
        (lambda payload: prepared(payload, rank, model, 1, interface)) if model else bytes,
        FAST,
        command,
    )
    host = RankHost(server, port)
    try:
        yield host
    finally:
        host.close()


def place(port: int, interface: str | None = "lo") -> dict[str, Any]:
    """`EngineConfig.rendezvous` of a rank 0 at `port`."""
    names = {"fleet_secret_file": "fleet.secret", "tls_cert": "engine.pem", "tls_key": "engine.key", "tls_ca": "ca.pem"}
    where = {"host": "127.0.0.1", "port": port, "distributed_interface": interface}
    return where | {field: str(files() / name) for field, name in names.items()}


__all__ = ["FAST", "RankHost", "place", "rank_host"]
