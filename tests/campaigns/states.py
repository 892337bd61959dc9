"""The campaign of a server's states (C-17): random walks of orders, calls, deaths of the engine and held starts.

`python -m tests.campaigns.states --walks 1000 --seed 1` walks in this process, over fake engines whose starts can be
held; `--live 30` walks with `headrace serve` and the built-in model, whose engine is killed.

Every reply is one that docs/states.md has for its route in some state, and in a quiet moment the one of the present
state. At the end of a walk: no call hangs, /is_sleeping, /health/ready and /api/ps agree, the server wakes, answers
with the right text, and ends in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from bench.tied import tied
from tests.serve.test_models_folder import write_model
from tests.support import orders
from tests.support.gated import Server, serving
from tests.support.server import write_tokenizer
from tests.support.serving import free_port

from headrace import hub
from headrace.serve.call.states import State
from headrace.text.tokenizer import Tokenizer

PATIENCE_S = 30.0
"""Seconds after which a call hangs, once no start is held any more."""
STEPS = 14
ENOUGH = 5
"""Findings after which a campaign ends."""
READS = (
    "GET /health/ready", "GET /is_sleeping", "GET /api/ps", "GET /inspect/cache", "GET /inspect/requests",
    "GET /inspect/limits", "GET /inspect/live", "GET /fleet", "GET /metrics", "GET /slots", "GET /server_info",
    "GET /v1/models", "POST /reset_prefix_cache", "GET /health/live",
)  # fmt: skip
ORDERS = ("POST /sleep", "POST /wake_up", "POST /fleet/update")
LEVELS = ("", "?level=1", "?level=2", "?level=0")
LONG = orders.COMPLETION | {"max_tokens": 60, "ignore_eos": True}
OF_FOLDER = orders.COMPLETION | {"model": "tiny"}
LIVE_STEPS = (
    "sleep", "sleep", "wake", "wake", "kill", "complete", "complete", "read", "reset", "load", "unload",
)  # fmt: skip
LIVE_COMPLETION = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Walk:
    """One walk in this process."""

    def __init__(self, server: Server, seed: int, is_fleet: bool, counts: Counter[str]) -> None:
        self.server, self.rng, self.counts = server, random.Random(seed), counts
        self.problems: list[str] = []
        self.table = {name: dict(row) for name, row in orders.rows().items()}
        if not is_fleet:
            self.table["POST /fleet/update"] = dict.fromkeys(orders.STATES, (409, False))
        self.open: set[asyncio.Task[None]] = set()

    def allowed(self, name: str) -> set[int]:
        return {status for status, _ in self.table[name].values()} | ({409, 503} if "update" in name else set())

    async def call(self, name: str, query: str = "", body: Any = None, is_quiet: bool = False) -> None:
        """Call a row's route; in a quiet moment the reply is that of the present state."""
        self.counts["calls"] += 1
        before = self.server.lifespan.state
        method, path = name.split(" ")
        body = orders.BODIES.get(name, {} if method == "POST" else None) if body is None else body
        reply = await self.server.call(f"{method} {path}{query}", body, seconds=600.0)
        after, status = self.server.lifespan.state, reply.status_code
        self.counts[f"status {status}"] += 1
        expected = self.table[name].get(before)
        # The engine is loaded, and has made no token yet.
        is_between = before is State.LOADING and self.server.client.is_started
        if status == 500 and "request_killed_engine" in reply.text and self.counts["kills"] >= 3:
            # Killed at the same token, over and over, a request is given up: docs/reliability.md.
            self.counts["given up"] += 1
        elif status not in self.allowed(name):
            self.problems.append(f"{name}{query} in {before}: {status} {reply.text[:200]}")
        elif (
            is_quiet
            and not is_between
            and before is after
            and expected is not None
            and not expected[1]
            and status != expected[0]
        ):
            self.problems.append(f"{name}{query} in {before}: {status}, and the table has {expected[0]}")

    def begin(self, name: str, query: str = "", body: Any = None) -> None:
        """Call a route, and go on meanwhile."""
        task = asyncio.create_task(self.call(name, query, body))
        self.open.add(task)
        task.add_done_callback(self.open.discard)

    async def step(self) -> None:
        rng, server = self.rng, self.server
        match rng.choice(("read", "read", "order", "order", "order", "call", "call", "kill", "hold", "open", "pause")):
            case "read":
                name = rng.choice(READS)
                quiet = not self.open and server.gate.is_set() and "health" not in name
                await asyncio.wait_for(self.call(name, is_quiet=quiet), PATIENCE_S)
            case "order":
                name = rng.choice(ORDERS)
                self.begin(name, rng.choice(LEVELS) if name == "POST /sleep" else "")
            case "call":
                body = rng.choice((orders.COMPLETION, LONG, LONG | {"stream": True}))
                self.begin("POST /v1/completions", "", OF_FOLDER if rng.random() < 0.05 else body)
            case "kill":
                self.counts["kills"] += 1
                server.kill()
            case "hold":
                server.gate.clear()
            case "open":
                server.gate.set()
        if rng.random() < 0.6:
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.005)))

    async def end(self, text: str) -> None:
        """Let all starts go on, and see that the server is well."""
        server = self.server
        server.gate.set()
        if self.open and (await asyncio.wait(self.open, timeout=PATIENCE_S))[1]:
            self.problems.append(f"{len(self.open)} calls hang in the state {server.lifespan.state}")
            return
        at_rest = (State.READY, State.SLEEPING)
        try:
            await server.until(lambda: server.lifespan.state in at_rest, PATIENCE_S)
        except TimeoutError:
            self.problems.append(f"the state {server.lifespan.state} does not end")
            return
        await self.agree(server.lifespan.state)
        await asyncio.wait_for(self.call("POST /wake_up"), PATIENCE_S)
        await self.agree(State.READY)
        answer = await server.call("POST /v1/completions", orders.COMPLETION, PATIENCE_S)
        if answer.status_code != 200 or answer.json()["choices"][0]["text"] != text:
            self.problems.append(f"the answer at the end: {answer.status_code} {answer.text[:200]}")

    async def agree(self, state: State) -> None:
        """See that the routes that show the state agree."""
        is_ready = (await self.server.call("GET /health/ready")).status_code == 200
        sleeps = (await self.server.call("GET /is_sleeping")).json()["is_sleeping"]
        names = [each["name"] for each in (await self.server.call("GET /api/ps")).json()["models"]]
        has_default = any(name.startswith("fake") for name in names)
        if not (is_ready is not sleeps and is_ready is has_default is (state is State.READY)):
            self.problems.append(f"{state}: ready {is_ready}, sleeps {sleeps}, loaded {names}")


async def walk(
    tokenizer: Tokenizer, root: Path, seed: int, is_fleet: bool, text: str, counts: Counter[str]
) -> list[str]:
    """One walk; returns what was wrong."""
    result: list[str] = []
    try:
        async with serving(tokenizer, root, is_open=seed % 2 == 0, is_fleet=is_fleet) as server:
            one = Walk(server, seed, is_fleet, counts)
            try:
                for _ in range(STEPS):
                    await one.step()
                await one.end(text)
            except TimeoutError:
                one.problems.append("a call hangs")
            finally:
                for task in one.open:
                    task.cancel()
                result = one.problems
    except (TimeoutError, Exception) as error:  # of any kind: it is a finding
        result.append(f"the server does not end: {type(error).__name__} {error}")
    counts["walks"] += 1
    return [f"seed {seed}: {each}" for each in result]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the lines that the servers log."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


async def walks(num: int, seed: int, is_fleet: bool, counts: Counter[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write_tokenizer(Path(folder)))
        root = Path(folder) / "models"
        write_model(root / "tiny")
        async with serving(tokenizer, root) as server:
            await server.until(lambda: server.lifespan.state is State.READY)
            reply = await server.call("POST /v1/completions", orders.COMPLETION)
            text = reply.json()["choices"][0]["text"]
        problems = []
        for at in range(num):
            problems += await walk(tokenizer, root, seed + at, is_fleet, text, counts)
            if len(problems) >= ENOUGH:
                break
        return problems


# -- with a server of its own ------------------------------------------------------------------------------------------


class Live:
    """`headrace serve` with the built-in model and a models folder, and what it must never do."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.port, self.rng, self.problems = free_port(), rng, list[str]()
        headrace = str(Path(sys.executable).parent / "headrace")
        command = [headrace, "serve", "builtin", "--port", str(self.port), "--models-dir", str(folder)]
        command += ["--kv-cache-memory-bytes", "64000000", "--num-threads", "1", "--shutdown-delay", "0"]
        command += ["--max-restarts", "100", "--crash-report-dir", str(folder / ".reports")]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(tied(command), stdout=self.log, stderr=self.log, env=environment)

    def call(self, method: str, path: str, body: Any = None, seconds: float = PATIENCE_S) -> httpx.Response | None:
        """The reply; None and a finding for one that does not come."""
        try:
            return httpx.request(method, f"http://127.0.0.1:{self.port}{path}", json=body, timeout=seconds)
        except httpx.HTTPError as error:
            self.problems.append(f"{method} {path}: {type(error).__name__}, exit {self.process.poll()}")
            return None

    def kill_engine(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                if "headrace.engine.child" in child.cmdline():
                    child.kill()
                    return True
        return False

    def until(self, statuses: tuple[str, ...]) -> str:
        """Wait until /health/ready says one of `statuses`; returns what it said last."""
        end, word = time.monotonic() + 2 * PATIENCE_S, ""
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                word = httpx.get(f"http://127.0.0.1:{self.port}/health/ready", timeout=PATIENCE_S).json()["status"]
                if word in statuses:
                    return word
            time.sleep(0.02)
        self.problems.append(f"neither of {statuses}, but {word}; exit {self.process.poll()}")
        return word

    def end(self) -> None:
        """End it by SIGTERM, in whatever state it is."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(PATIENCE_S)
            if status != 0:
                self.problems.append(f"exit status {status}")
        except subprocess.TimeoutExpired:
            self.problems.append("it does not end")
            self.process.kill()
            self.process.wait()
        self.log.seek(0)
        if b"Traceback" in (text := self.log.read()):
            self.problems.append("a traceback: " + text[text.index(b"Traceback") :][-600:].decode("utf-8", "replace"))
        self.log.close()


def live_walk(seed: int, counts: Counter[str]) -> list[str]:
    """One walk with a server of its own; returns what was wrong."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(hub.resolve("builtin", None), Path(folder) / "second")
        live = Live(Path(folder), rng)
        while live.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{live.port}/health/live", timeout=5)
                break
            time.sleep(0.02)
        if rng.random() < 0.5:
            live.until(("ready",))
        for _ in range(STEPS):
            counts["live calls"] += 1
            match rng.choice(LIVE_STEPS):
                case "sleep":
                    reply = live.call("POST", f"/sleep{rng.choice(LEVELS)}")
                case "wake":
                    reply = live.call("POST", "/wake_up")
                case "kill":
                    counts["live kills"] += live.kill_engine()
                    continue
                case "complete":
                    reply = live.call("POST", "/v1/completions", LIVE_COMPLETION)
                case "load":
                    reply = live.call("POST", "/v1/completions", LIVE_COMPLETION | {"model": "second"})
                case "unload":
                    reply = live.call("POST", "/api/generate", {"model": "second", "keep_alive": 0})
                case "read":
                    reply = live.call("GET", rng.choice([name[4:] for name in READS if name.startswith("GET")]))
                case _:
                    reply = live.call("POST", "/reset_prefix_cache", {})
            if reply is not None and reply.status_code not in (200, 503):
                live.problems.append(f"{reply.request.url.path}: {reply.status_code} {reply.text[:200]}")
        if rng.random() < 0.7:
            if live.until(("ready", "sleeping")) == "sleeping":
                live.call("POST", "/wake_up")
                live.until(("ready",))
            reply = live.call("POST", "/v1/completions", LIVE_COMPLETION)
            text = "" if reply is None or reply.status_code != 200 else reply.json()["choices"][0]["text"]
            if _live_text.setdefault("text", text) != text or not text:
                live.problems.append(f"the answer at the end is {text!r}")
            names = live.call("GET", "/api/ps")
            if names is None or not names.json()["models"]:
                live.problems.append("/api/ps has no model, and the server is ready")
        live.end()
        counts["live walks"] += 1
        return [f"live seed {seed}: {each}" for each in live.problems]


_live_text: dict[str, str] = {}


def run_campaign(size: tuple[int, int], seed: int, is_fleet: bool = False) -> dict[str, Any]:
    """Walk so many times in this process, and so many times with a server of its own."""
    num, num_live = size
    counts: Counter[str] = Counter()
    with quietly():
        problems = asyncio.run(walks(num, seed * 1_000_000, is_fleet, counts))
    for at in range(num_live):
        problems += live_walk(seed * 1_000_000 + at, counts)
    result = {name.replace(" ", "_"): count for name, count in sorted(counts.items())}
    return result | {"violations": len(problems), "examples": problems[:5]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.states", description=__doc__)
    parser.add_argument("--walks", type=int, default=1000)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", action="store_true")
    args = parser.parse_args()
    counts = run_campaign((args.walks, args.live), args.seed, args.fleet)
    print(json.dumps(counts, indent=1))
    return 1 if counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
