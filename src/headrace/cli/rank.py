"""`headrace rank`: one rank of a model on its own host, for an engine whose rank 0 is on another.

A composition root of `parallel.hosts`: reads the files that the flags name, and hands over their contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.engine import FleetFlags, address_of, check_interface, credentials_of
from headrace.cli.options import build, options
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.sources import digest_of_sources


@options(FleetFlags)
def rank(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or 'builtin'.")] = "builtin",
    *,
    rank: Annotated[int, typer.Option(metavar="INT", help="Number of this rank, from 1; rank 0 is the engine's.")],
    world: Annotated[int, typer.Option(metavar="INT", help="Number of ranks, as at rank 0.")],
    rendezvous: Annotated[str, typer.Option(metavar="IP:PORT", help="Address of rank 0, its --rendezvous.")],
    distributed_interface: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Network interface of this host through which ranks gather, unencrypted; stages need none.",
        ),
    ] = None,
    num_threads: Annotated[
        int, typer.Option(metavar="INT", help="Threads of the native kernels; 0 is one for each core.")
    ] = 0,
    revision: Annotated[str | None, typer.Option(metavar="TEXT", help="Branch, tag or commit of a hub model.")] = None,
    **fields: Any,
) -> None:
    """Compute a part of a model whose rank 0 is on another host: headrace serve MODEL --rendezvous IP:PORT.

    MODEL must have the same weights as there; its place is this host's own matter. Serves one group after the other.
    Both sides need a certificate of one CA, and the same secret; see howto-scale.md. Exit status: 0 after a signal, 1
    if rank 0 refused this rank or the model could not be loaded, 2 for a flag or a value at fault.
    """
    if not 0 < rank < world:
        raise RequestError("rank", rank, f"from 1 to {world - 1}, for --world {world}")
    num_threads = EngineConfig(num_threads=num_threads).num_threads
    host, port = address_of("rendezvous", rendezvous)
    check_interface(distributed_interface)
    credentials = credentials_of(build(FleetFlags, fields), is_server=False)
    from headrace import hub
    from headrace.engine import logs
    from headrace.engine.hosts import prepared
    from headrace.parallel.hosts.server import RankServer
    from headrace.secure.door import Server

    logs.set_up("info")
    path = hub.resolve(model, revision)
    server = RankServer(
        Server("rank 0", host, port, host),
        rank,
        world,
        credentials,
        digest_of_sources(),
        Weights(path),
        lambda payload: prepared(payload, rank, str(path), num_threads, distributed_interface),
    )

    async def run() -> None:
        task = asyncio.create_task(server.serve())
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())


class Weights:
    """The digest of a model's files, made again when one of them has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: list[tuple[str, int, int]] = []
        self._digest = ""

    def __call__(self) -> str:
        from headrace import hub

        files = [self._path] if self._path.is_file() else sorted(self._path.iterdir())
        facts = [(file.name, file.stat()) for file in files]
        signature = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in facts]
        if signature != self._signature:
            self._digest, self._signature = hub.digest(self._path), signature
        return self._digest
