"""A real `headrace serve` for the end-to-end tests: the installed command, in a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from bench.tied import tied


class Served(NamedTuple):
    """A running server: its base URL, and its process."""

    url: str
    pid: int

    def engine(self) -> psutil.Process:
        """The engine's process. The renderer of templates is a child of the server too."""
        return next(self.engines())

    def num_engines(self) -> int:
        """How many engines the server has: one, but for the time of a restart."""
        return len(list(self.engines()))

    def engines(self) -> Iterator[psutil.Process]:
        """The processes of all engines."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "headrace.engine.child" in child.cmdline():
                    yield child


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def serve(*arguments: str, threads: int = 1, key: str = "", program: Sequence[str] = ()) -> Iterator[Served]:
    """A ready server, whose crash reports go with it. On leaving, SIGTERM, and the exit status must be 0.

    `key` opens the health routes of a server with keys. `program` takes the place of the installed command.
    """
    port = free_port()
    reports = tempfile.TemporaryDirectory()
    headrace = program or [str(Path(sys.executable).parent / "headrace")]
    command = [*headrace, "serve", *arguments, "--port", str(port)]
    command += ["--crash-report-dir", reports.name, "--shutdown-delay", "0"]
    # On a machine with other work, torch's second thread costs more than it gives.
    process = subprocess.Popen(tied(command), env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/ready", headers=headers, timeout=240).status_code == 200:
                    break
            assert process.poll() is None, f"{command} exited with {process.returncode}"
            assert time.monotonic() < deadline, f"{command} was not ready after 120 s"
            time.sleep(0.1)
        yield Served(url, process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reports.cleanup()


@contextlib.contextmanager
def running(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command `headrace ...`, with one thread. On leaving, SIGTERM, after which it must end with 0."""
    program = str(Path(sys.executable).parent / words[0])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(tied([program, *words[1:], "--num-threads", "1"]), env=environment, **options)
    try:
        yield process
        if process.poll() is None:
            process.terminate()
            assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def gauge(url: str, name: str) -> float:
    """The sum of a metric's samples, from /metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=240).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
    assert values, f"no metric {name}"
    return sum(values)


def wait_for(url: str, name: str, value: float, seconds: float = 60.0) -> None:
    """Wait until a metric has a value; fail with what it had last."""
    deadline = time.monotonic() + seconds
    while (seen := gauge(url, name)) != value:
        assert time.monotonic() < deadline, f"{name} stays at {seen}, not {value}"
        time.sleep(0.05)


def await_metric(url: str, name: str, value: float) -> None:
    """Wait until a metric has a value: the death of an engine is noticed a moment later."""
    end = time.monotonic() + 60
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=240).text.split("\n")
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]
        if value in values:
            return
        assert time.monotonic() < end, f"{name} is {values}"
        time.sleep(0.1)
