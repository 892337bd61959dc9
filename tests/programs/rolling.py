"""`python -m tests.programs.rolling nginx|haproxy`: rolling restarts of two servers behind a real proxy, under load.

Two servers over the fake engine stand behind the proxy with the configuration of `deploy/`. Clients send completions
without a pause, every second one as a stream, while the servers end with SIGTERM and start again in turn. A request is
refused if it gets another status than 200, and truncated if its answer lacks tokens or its end. Prints the counts as
JSON, also when Ctrl-C ends it before. The exit status is 1 if a request was refused or truncated, 2 if the proxy is not
installed. `--kill` ends the servers with SIGKILL, for the control: requests must then be lost.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.tied import tied
from tests.support.server import write_tokenizer
from tests.support.serving import free_port

ROOT = Path(__file__).resolve().parents[2]
FRONT, BACKS = "127.0.0.1:8080", ("127.0.0.1:8001", "127.0.0.1:8002")
NUM_TOKENS = 40
DELAY_S = 0.02
SHUTDOWN_DELAY_S = 2.0


def get(port: int, path: str) -> int:
    """Status of a GET; 0 if nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def wait_until(condition: Any, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


class Backend:
    """One server over the fake engine, which can be ended and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self.start()

    def start(self) -> None:
        words = [str(self.folder), str(self.port), str(DELAY_S), "5", "30", str(SHUTDOWN_DELAY_S)]
        with (self.folder / f"{self.port}.log").open("a") as log:
            command = [sys.executable, "-m", "tests.programs.serve_fake", *words]
            self.process = subprocess.Popen(tied(command), cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: get(self.port, "/health/ready") == 200, f"port {self.port} is not ready")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=90)


class Proxy:
    """nginx or HAProxy with the configuration of `deploy/`, on other ports."""

    def __init__(self, name: str, folder: Path, ports: list[int]) -> None:
        self.name, self.port, self.socket = name, free_port(), folder / "admin.sock"
        text = (ROOT / "deploy" / {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}[name]).read_text()
        for old, port in zip((FRONT, *BACKS), (self.port, *ports), strict=True):
            if text.count(old) != 1:
                raise ValueError(f"deploy's configuration of {name} names {old} {text.count(old)} times")
            text = text.replace(old, f"127.0.0.1:{port}")
        for old, new in (
            ("/run/nginx.pid", "nginx.pid"),
            ("/var/log/nginx/error.log", "error.log"),
            ("/run/haproxy/admin.sock", "admin.sock"),
        ):
            text = text.replace(old, str(folder / new))
        config = folder / f"{name}.conf"
        config.write_text(text)
        foreground = {"nginx": ["-p", str(folder), "-g", "daemon off;", "-c"], "haproxy": ["-f"]}[name]
        with (folder / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                tied([name, *foreground, str(config)]), stdout=log, stderr=log, start_new_session=True
            )
        wait_until(lambda: get(self.port, "/health/ready") == 200, f"{name} passes nothing on")

    def uses_all(self) -> bool:
        """Whether every server gets requests. nginx tries each one with every request."""
        if self.name == "nginx":
            return True
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self.socket))
            admin.sendall(b"show stat\n")
            rows = b"".join(iter(lambda: admin.recv(65536), b"")).decode().splitlines()
        states = [row.split(",")[17] for row in rows if row.startswith(("headrace,one", "headrace,two"))]
        return len(states) == 2 and all(state == "UP" for state in states)


class Load:
    """Clients that send completions through the proxy until `ending` is set, and what became of their requests."""

    def __init__(self, port: int, num_clients: int) -> None:
        self.port = port
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(number,)) for number in range(num_clients)]
        self.lock = threading.Lock()
        self.expected = self.answer(False)[0]
        if len(self.expected) != NUM_TOKENS:
            raise ValueError(f"the first answer is {self.expected}")
        for thread in self.threads:
            thread.start()

    def answer(self, stream: bool) -> tuple[list[int], int]:
        """The token ids of one answer, and the number of reads that its stream came in."""
        body = {"prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 7, "return_token_ids": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body | {"stream": stream}), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ConnectionRefusedError(f"status {response.status}")
            if not stream:
                return json.loads(response.read())["choices"][0]["token_ids"], 1
            parts = []
            while part := response.read1(65536):
                parts.append(part)
            lines = [line[6:] for line in b"".join(parts).decode().splitlines() if line.startswith("data: ")]
            if not lines or lines[-1] != "[DONE]":
                raise ValueError(f"the stream ends with {lines[-1:]}")
            choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
            return [token for choice in choices for token in choice.get("token_ids") or ()], len(parts)
        finally:
            connection.close()

    def client(self, number: int) -> None:
        while not self.ending.is_set():
            number += 1
            problem, reads, stream = "", 0, bool(number % 2)
            try:
                tokens, reads = self.answer(stream)
                outcome = "answered" if tokens == self.expected else "truncated"
            except (ConnectionRefusedError, http.client.RemoteDisconnected) as error:
                outcome, problem = "refused", repr(error)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                outcome, problem = "truncated", repr(error)
            with self.lock:
                self.counts[outcome] += 1
                if stream and outcome == "answered":
                    self.counts["streams"] += 1
                    # A proxy that buffers gives the whole stream in one or two reads.
                    self.counts["streams_unbuffered"] += reads >= NUM_TOKENS // 4
                if problem:
                    self.examples.append(problem)

    def end(self) -> None:
        self.ending.set()
        for thread in self.threads:
            thread.join(timeout=90)


@contextlib.contextmanager
def stopped(process: Any) -> Iterator[None]:
    """End a process that is still there when the block is left."""
    try:
        yield
    finally:
        if process().poll() is None:
            process().terminate()
            process().wait(timeout=60)


def run(name: str, num_restarts: int, num_clients: int = 8, kill: bool = False) -> dict[str, Any]:
    """Counts of one campaign."""
    statuses: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as result, contextlib.ExitStack() as stack:
        folder = Path(result)
        folder.chmod(0o755)
        write_tokenizer(folder)
        backends = []
        for _ in range(2):
            backends.append(Backend(folder))
            stack.enter_context(stopped(lambda backend=backends[-1]: backend.process))
        proxy = Proxy(name, folder, [backend.port for backend in backends])
        stack.enter_context(stopped(lambda: proxy.process))
        wait_until(proxy.uses_all, f"{name} does not use both servers")
        load = Load(proxy.port, num_clients)
        try:
            for number in range(num_restarts):
                backend = backends[number % 2]
                statuses[backend.end(signal.SIGKILL if kill else signal.SIGTERM)] += 1
                backend.start()
                wait_until(proxy.uses_all, f"{name} does not use both servers")
        except KeyboardInterrupt:
            num_restarts = statuses.total()
        finally:
            load.end()
    counts = {"refused": 0, "truncated": 0} | dict(load.counts)
    about = {"proxy": name, "restarts": num_restarts, "exit_statuses": dict(statuses), "clients": num_clients}
    about |= {"shutdown_delay_s": SHUTDOWN_DELAY_S}
    return about | counts | {"examples": load.examples[:5]}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("proxy", choices=("nginx", "haproxy"))
    arguments.add_argument("--restarts", type=int, default=100)
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--kill", action="store_true")
    args = arguments.parse_args()
    if not shutil.which(args.proxy):
        print(f"{args.proxy} is not installed; on Debian and Ubuntu: apt install {args.proxy}", file=sys.stderr)
        return 2
    counts = run(args.proxy, args.restarts, args.clients, args.kill)
    print(json.dumps(counts))
    return 1 if counts["refused"] or counts["truncated"] else 0


if __name__ == "__main__":
    sys.exit(main())
