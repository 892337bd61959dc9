"""An engine server and its front in one event loop, with the certificates of docs/howto-scale.md.

As a script it is the engine's child process, whose clock is far from ours: `remote.py DELAY SHIFT FD`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, blocks, commands
from tests.support import fake

from headrace.engine.client import EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.links import ProcessLink
from headrace.fleet.remote.link import RemoteLink
from headrace.fleet.remote.server import EngineLink, EngineServer
from headrace.protocol.config import EngineConfig
from headrace.secure.credentials import Credentials
from headrace.secure.handshake import Timeouts

FAST = Timeouts(tls=10.0, proof=10.0, silence=5.0, beat=0.1)
PAGE = "howto-scale.md"


@functools.cache
def files() -> Path:
    """A folder with the files that the page's commands make: it goes with this process."""
    folder = tempfile.TemporaryDirectory(prefix="headrace-fleet-")
    files.folder = folder  # type: ignore[attr-defined]
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    for block in blocks(PAGE, text):
        for words in commands(block.text) if block.language == "bash" else ():
            if words[0] == "openssl":
                subprocess.run(words, cwd=folder.name, check=True, capture_output=True)
    (Path(folder.name) / "fleet.secret").chmod(0o600)
    return Path(folder.name)


def page_command(language: str, places: dict[str, str], accepts: Callable[[list[str]], bool]) -> list[str]:
    """The words of the one command of the page that `accepts` takes, of blocks of a language, with other `places`."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    [words] = [
        words
        for block in blocks(PAGE, text)
        for words in (commands(block.text) if block.language == language else ())
        if accepts(words)
    ]
    places = places | {path.name: str(path) for path in files().iterdir()}
    return [places.get(word, word) for word in words]


def credentials(name: str, folder: Path | None = None, secret: str = "fleet.secret") -> Credentials:
    """Those of "engine" or "front"."""
    place = folder or files()
    names = (place / secret, place / f"{name}.pem", place / f"{name}.key", files() / "ca.pem")
    return Credentials.read(*map(str, names), is_server=name == "engine")


def child(delay: float = 0.0, shift: float = 0.0, **config: Any) -> ProcessLink:
    """The fake engine as a child process, whose clock shows `shift` more than ours."""
    command = (sys.executable, "-m", "tests.support.remote", str(delay), str(shift))
    return ProcessLink(EngineConfig(model="fake", **config), command)


@contextlib.asynccontextmanager
async def listening(
    link: EngineLink, times: Timeouts = FAST, weights: str = "weights", port: int = 0
) -> AsyncIterator[tuple[int, EngineServer]]:
    """An engine server on a port of this machine."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = EngineServer(link, credentials("engine"), lambda: weights, times)
        task = asyncio.create_task(server.serve(listener))
        try:
            yield listener.getsockname()[1], server
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def front(port: int, times: Timeouts = FAST, weights: str = "", who: Credentials | None = None) -> RemoteLink:
    return RemoteLink("127.0.0.1", port, who or credentials("front"), lambda: weights, times)


@contextlib.asynccontextmanager
async def served(link: EngineLink, **more: Any) -> AsyncIterator[tuple[EngineClient, EngineServer]]:
    """A started client of an engine server."""
    async with listening(link) as (port, server):
        client = EngineClient(front(port), max_restarts=5, **more)
        await client.start()
        try:
            yield client, server
        finally:
            await client.close()


def run(work: Callable[[EngineClient, EngineServer], Awaitable[Any]], link: EngineLink, **more: Any) -> Any:
    async def go() -> Any:
        async with served(link, **more) as (client, server):
            return await work(client, server)

    return asyncio.run(go())


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not so in time"
        await asyncio.sleep(0.02)


def main(arguments: Sequence[str]) -> int:
    from headrace.engine.child import main

    delay, shift, fd = float(arguments[0]), float(arguments[1]), int(arguments[2])

    def build(config: EngineConfig, is_restart: bool) -> EngineCore:
        core = fake.build(config, delay)
        core.clock = lambda: time.monotonic() + shift
        return core

    return main(fd, build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
