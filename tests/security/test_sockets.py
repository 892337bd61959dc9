"""S-02: what listens is what was declared, and no more; and what an engine's socket takes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench.tied import tied
from tests.support.server import HTTP, write_tokenizer

SERVE = Path(__file__).resolve().parents[1] / "programs" / "serve_fake.py"


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every socket of a process and its children that takes connections or packets; a path in
    the file system counts too."""
    result = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        for kind in ("inet", "unix"):
            for each in process.net_connections(kind):
                if kind == "unix" and each.laddr:
                    result.add((str(each.laddr), 0))
                elif kind == "inet" and (each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM):
                    result.add((each.laddr.ip, each.laddr.port))
    return result


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """(process id, port) of a server with an engine's process and a renderer's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    command = [sys.executable, str(SERVE), str(folder), str(port), "0", "1"]
    process = subprocess.Popen(tied(command), env=os.environ | {"PYTHONPATH": str(SERVE.parents[2])})
    end = time.monotonic() + 100
    while True:
        try:
            if HTTP.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                break
        except Exception:
            assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    yield process.pid, port
    process.terminate()
    assert process.wait(60) == 0


def test_S_02_only_the_declared_socket_listens(served: tuple[int, int]) -> None:
    pid, port = served
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert HTTP.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=240).status_code == 200
    assert len(psutil.Process(pid).children(recursive=True)) >= 2
    assert listening(pid) == {("127.0.0.1", port)}


def test_S_02_control_another_one_is_noticed(tmp_path: Path) -> None:
    pid = psutil.Process().pid
    before = listening(pid)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "x"))
        unix.listen()
        more = listening(pid) - before
        assert more == {("127.0.0.1", tcp.getsockname()[1]), (str(tmp_path / "x"), 0)}


def test_S_02_by_default_only_this_machine_is_let_in() -> None:
    from headrace.protocol.config import ServerConfig

    assert ServerConfig().host == "127.0.0.1"
