"""A server over the oracle engine (the real scheduler, tokens that prove where they were read), in its own process.

`oracle(...)` runs it for a campaign; as a script it is the process, with the arguments that `oracle` gives it. `leak`
bytes of every request are never given back, for the control of the soak.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from bench.tied import tied

# To make a client loads the certificates, which takes longer than to ask.
HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), verify=False)
ROOT = Path(__file__).resolve().parents[2]
NUM_KEPT = 256


class Oracle(NamedTuple):
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **more: Any) -> httpx.Response:
        return HTTP.get(self.url + path, timeout=20, **more)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def metrics(self) -> dict[str, float]:
        """All samples of `/metrics`, by name and one label: `request_success_total/length`."""
        result: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            name, _, labels = head.removeprefix("headrace:").partition("{")
            if line.startswith("headrace:") and "_bucket" not in name:
                reason = labels.partition('finished_reason="')[2].partition('"')[0]
                result[name] = result.get(name, 0.0) + float(value)
                if reason:
                    result[f"{name}/{reason}"] = float(value)
        return result

    def unsettled(self, seconds: float = 20.0) -> list[str]:
        """What does not come back to its idle value."""
        end = time.monotonic() + seconds
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while True:
            now = self.metrics()
            left = {name: now[name] for name in names if now[name]} | {
                name: value for name, value in self.get("/load").json().items() if name == "server_load" and value
            }
            if not left or time.monotonic() > end:
                return [f"{name} stays at {value:g}" for name, value in left.items()]
            time.sleep(0.05)


@contextlib.contextmanager
def oracle(
    delay: float = 0.0, max_queued: int = 1024, leak: int = 0, drain: float = 30.0, max_num_seqs: int = 128
) -> Iterator[Oracle]:
    """A ready server. On leaving it is stopped by SIGTERM, unless it is gone, and has to exit with 0."""
    from tests.support.server import write_tokenizer

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        directory = write_tokenizer(Path(folder))
        log = directory / "log"
        command = [sys.executable, __file__, folder, *map(str, (port, delay, max_queued, leak, drain, max_num_seqs))]
        with log.open("wb") as output:
            process = subprocess.Popen(tied(command), env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=output)
        served = Oracle(port, process, log)
        try:
            end = time.monotonic() + 300
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if served.get("/health/ready").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"no server: {log.read_text()[-500:]}")
                time.sleep(0.2)
            yield served
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                if process.wait(timeout=drain + 30):
                    raise RuntimeError(f"exit status {process.returncode}: {log.read_text()[-500:]}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


class Watched:
    """Tells at `/objects` how many blocks of memory Python's objects have, and keeps `leak` bytes of every request."""

    def __init__(self, app: Any, leak: int) -> None:
        self.app, self.leak = app, leak
        self.leaked: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/objects":
            gc.collect()
            body = str(sys.getallocatedblocks()).encode()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})
            return
        if self.leak:
            self.leaked.append(os.urandom(self.leak))
        await self.app(scope, receive, send)


def main() -> int:
    from tests.support import fake

    from headrace.engine import logs
    from headrace.engine.client import EngineClient
    from headrace.engine.links import ProcessLink
    from headrace.insight import lives
    from headrace.protocol.config import EngineConfig, ServerConfig
    from headrace.serve import app, loading, process
    from headrace.text.templates import ChatTemplate
    from headrace.text.tokenizer import Tokenizer

    # What is kept of requests that ended is bounded; a campaign of minutes has to pass the bounds.
    lives.MAX_LIVES = lives.MAX_CHUNKS = NUM_KEPT
    directory, port, delay, max_queued, leak, drain, max_num_seqs = sys.argv[1:]
    tokenizer = Tokenizer.load(directory)
    server = ServerConfig(
        port=int(port), log_stats_interval=0, shutdown_timeout=float(drain), shutdown_delay=0, any_model_name=False
    )
    engine = EngineConfig(model="fake", max_num_seqs=int(max_num_seqs))
    client = EngineClient(ProcessLink(engine, fake.command(float(delay))), max_restarts=3)
    client.admission.max_reqs = int(max_queued)
    logs.set_up("warning")
    application: Any = app.create_app(client, server, "fake", loading.ModelParts(tokenizer, ChatTemplate.of(tokenizer)))
    application.add_middleware(Watched, leak=int(leak))
    return process.run(application, server)


if __name__ == "__main__":
    sys.exit(main())
