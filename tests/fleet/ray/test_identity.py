"""The certificates of a deployment: each side takes the other's, and nobody else's; no file is open to others."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support.remote import FAST, child

from headrace.engine.client import EngineClient
from headrace.fleet.remote.link import RemoteLink
from headrace.fleet.remote.server import EngineServer
from headrace.protocol.errors import RequestError
from headrace.ray.identity import ENGINE_NAME, FILES, Identity, identity_of, make
from headrace.secure.handshake import HandshakeError

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deployment") / "credentials"
    make(path)
    return path


def test_the_files_are_for_this_user_alone(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    with pytest.raises(RequestError, match="a new folder"):
        make(folder)


def test_papers_cross_as_bytes_and_show_nothing(folder: Path) -> None:
    for is_sent in (True, False):
        identity = identity_of(folder, "front", is_sent)
        body = msgspec.msgpack.encode(identity)
        assert msgspec.msgpack.decode(body, type=Identity) == identity
        secret = (folder / "fleet.secret").read_bytes().strip()
        assert (secret in body) is is_sent
        assert secret.decode() not in repr(identity)
        assert identity.credentials().secret == secret


def test_a_folder_without_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tls_ca"):
        identity_of(tmp_path, "front", True)


def connect(folder: Path, name: str | None, other: Path | None = None) -> None:
    """Start an engine with the deployment's identity and a front with those of `other`; one token."""

    async def go() -> None:
        engine = identity_of(folder, "engine", True).credentials()
        front = identity_of(other or folder, "front", True).credentials()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = EngineServer(child(), engine, lambda: "weights", FAST)
            task = asyncio.create_task(server.serve(listener))
            try:
                await server.until_loaded()
                port = listener.getsockname()[1]
                client = EngineClient(RemoteLink("127.0.0.1", port, front, lambda: "", FAST, name))
                async with asyncio.timeout(60):
                    await client.start()
                await client.close()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())


def test_a_front_takes_an_engine_at_any_address(folder: Path) -> None:
    connect(folder, ENGINE_NAME)


def test_an_engine_of_another_name_or_deployment_is_refused(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "other")
    refused: list[Callable[[], None]] = [
        lambda: connect(folder, None),
        lambda: connect(folder, ENGINE_NAME, tmp_path / "other"),
    ]
    for attempt in refused:
        with pytest.raises((HandshakeError, ssl.SSLError), match=r"(?i)certificate|verify"):
            attempt()
