"""Connections are taken while there is room for them: descriptors, and the errors of `accept` (S-19)."""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import uvicorn
from bench.tied import tied

from headrace.serve.gates import accept
from headrace.serve.gates.accept import Acceptor
from headrace.serve.process import Server

HALF_SENT = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n"
MAX_FILES = 96
NUM_FILES = 8
"""Files that the server opens for each call of /files, beside its connections."""


class Life:
    """The life of a server without an engine."""

    draining, failure, is_cut, url, num_open = False, None, False, "", 0

    def drain(self, seconds: float) -> None:
        """Do nothing: nothing is open."""


async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def, type-arg]
    if scope["path"] == "/files":
        for descriptor in [os.open(os.devnull, os.O_RDONLY) for _ in range(NUM_FILES)]:
            os.close(descriptor)
    elif scope["path"] == "/v1/completions":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def serve(port_file: str, uses_acceptor: str) -> None:
    """Serve `app` with few descriptors. Called in a process of its own."""
    import resource

    from headrace.engine import logs
    from headrace.serve.gates.connection import Connection

    logs.set_up("info", "text")
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setblocking(False)
    config = uvicorn.Config(app, http=Connection.protocol(10**6), log_config=None, ws="none", lifespan="off")  # type: ignore[arg-type]
    if uses_acceptor != "yes":
        Server.startup = uvicorn.Server.startup  # type: ignore[method-assign]
    Path(port_file).write_text(str(listener.getsockname()[1]))
    asyncio.run(Server(config, Life(), 0, 0).serve([listener]))  # type: ignore[arg-type]


@contextmanager
def server(folder: Path, uses_acceptor: bool) -> Iterator[tuple[int, int, Path]]:
    """A server as port, process id and file of its log."""
    port_file, log = folder / "port", folder / "log"
    code = "import sys; from tests.serve.gates import test_accept as t; t.serve(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(port_file), "yes" if uses_acceptor else "no"]
    root = Path(__file__).parents[3]
    with log.open("wb") as stderr:
        process = subprocess.Popen(tied(command), stderr=stderr, cwd=root)
    try:
        end = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text()):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        yield int(port_file.read_text()), process.pid, log
    finally:
        process.kill()
        process.wait()


def status_of(port: int, path: str, timeout: float = 20) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def crowd(port: int, num: int) -> list[socket.socket]:
    clients = []
    for _ in range(num):
        clients.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        clients[-1].sendall(HALF_SENT)
    return clients


def test_S_19_half_sent_calls_leave_descriptors_for_probes_and_files(tmp_path: Path) -> None:
    with server(tmp_path, uses_acceptor=True) as (port, pid, log):
        assert status_of(port, "/health/live") == 200
        clients = crowd(port, 3 * MAX_FILES)
        for _ in range(8):
            assert status_of(port, "/health/live") == 200
        # A reserve is left while all of them are there, and other calls are refused.
        assert len(os.listdir(f"/proc/{pid}/fd")) <= MAX_FILES - 2 * NUM_FILES
        assert status_of(port, "/files") == 503
        for each in clients:
            each.close()
        end = time.monotonic() + 60
        while status_of(port, "/files") != 200:
            assert time.monotonic() < end
        assert "ERROR" not in log.read_text()
        assert "not taken" not in log.read_text()


def test_S_19_control_with_the_accept_of_asyncio_they_take_all_descriptors(tmp_path: Path) -> None:
    with server(tmp_path, uses_acceptor=False) as (port, pid, log):
        # All wait before the server takes the first of them.
        os.kill(pid, signal.SIGSTOP)
        clients = crowd(port, 3 * MAX_FILES)
        os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + 60
        while log.read_text().count("ERROR") < 50:
            assert time.monotonic() < end
            time.sleep(0.05)
        for each in clients:
            each.close()


class Listener:
    """A listening socket whose `accept` fails with errors of its list, and then has nothing."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self._ours, self._theirs = socket.socketpair()
        self._theirs.send(b"x")  # it can be read: connections wait

    def fileno(self) -> int:
        return self._ours.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        if self.numbers:
            number = self.numbers.pop(0)
            raise OSError(number, os.strerror(number))
        with suppress(BlockingIOError):
            self._ours.recv(1, socket.MSG_DONTWAIT)
        raise BlockingIOError

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


async def taken(listener: Listener, seconds: float) -> None:
    acceptor = Acceptor(listener, asyncio.Protocol)  # type: ignore[arg-type]
    end = time.monotonic() + 60
    while listener.numbers and time.monotonic() < end:
        await asyncio.sleep(0.005)
    await asyncio.sleep(seconds)
    acceptor.close()
    await acceptor.wait_closed()
    listener.close()


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"])
def test_S_19_while_the_system_has_no_room_accepting_pauses_and_is_logged_with_a_count(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "PAUSE_S", 0.01)
    monkeypatch.setattr(accept, "REPORT_S", 0.2)
    with caplog.at_level(logging.WARNING):
        asyncio.run(taken(Listener(*[getattr(errno, name)] * 12), 0.5))
    text = os.strerror(getattr(errno, name))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"connections were not taken: {text} (1 times)"
    counts = [int(line.rpartition("(")[2].partition(" ")[0]) for line in lines]
    assert sum(counts) == 12
    assert len(lines) <= 5


def test_S_19_a_client_that_left_before_it_was_taken_holds_up_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a pause for each, this would not end.
    monkeypatch.setattr(accept, "PAUSE_S", 1e6)
    monkeypatch.setattr(accept, "REPORT_S", 0.05)
    with caplog.at_level(logging.WARNING):
        asyncio.run(taken(Listener(*[errno.ECONNABORTED] * 100), 0.2))
    assert sum(int(record.getMessage().rpartition("(")[2].partition(" ")[0]) for record in caplog.records) == 100


def test_no_more_than_a_turn_of_connections_is_taken_before_their_protocols_know_them() -> None:
    async def run() -> None:
        seen: list[int] = []

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                seen.append(transport.get_extra_info("socket").fileno())
                transport.abort()  # type: ignore[attr-defined]

        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            listener.setblocking(False)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(300)]
            acceptor = Acceptor(listener, Protocol)
            while len(seen) < 300:
                await asyncio.sleep(0)
            acceptor.close()
            # Descriptors are used again at once.
            assert len(set(seen)) <= 3 * accept.TURN
            for each in clients:
                each.close()

    asyncio.run(run())


def test_the_limit_on_open_files_is_raised_as_far_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, infinity = {"now": (1024, 4096)}, accept.resource.RLIM_INFINITY
    monkeypatch.setattr(accept.resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(accept.resource, "setrlimit", lambda _, pair: limits.update(now=pair))
    for before, after in (
        ((1024, 4096), (4096, 4096)),
        ((1024, infinity), (accept.MAX_RAISED_FILES, infinity)),
        ((4096, 4096), (4096, 4096)),
        ((10**6, 10**6), (10**6, 10**6)),
        ((infinity, infinity), (infinity, infinity)),
    ):
        limits["now"] = before
        accept.raise_file_limit()
        assert limits["now"] == after
