"""The campaign of faults of the other processes (C-5-children): of templates, grammars and tokenizers, and the server.

`python -m tests.campaigns.children --faults 100 --seed 1` starts `headrace serve` and strikes, one after another:
`kill` (SIGKILL), `stop` (SIGSTOP), `torn` (half a reply, then the end) and `slow` (a byte in half a second). All
processes are struck in one round, and calls that need them come at once. The model's tokenizer is one that is not used
in the server's own process. Every call without a deadline must have the
text of the undisturbed run; one with a deadline may instead be a 408 within `SLACK_S` of it; no call is a 400 or a 500.
The probes must be red within the watchdog's time where a process stands still, and green at the end.

`server-stop`: the server stands still for longer than the watchdogs wait, and goes on: nothing may be restarted.
`server-kill`: it is killed under streams, with a stopped process beside it: no process and no port is left, and what
was stored is there after the next start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from bench.tied import tied
from tests.support.serving import gauge

from headrace import builtin
from headrace.text.bounded import WATCHDOG_S

# To make a client loads the certificates, which takes longer than a call.
HTTP = httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), verify=False, timeout=60)
ROOT = Path(__file__).resolve().parents[2]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "torn": signal.SIGUSR1, "slow": signal.SIGUSR2}
CHILDREN = {
    "template": "headrace.text.sandbox", "grammar": "headrace.text.grammar_sandbox",
    "tokenizer": "headrace.text.tokenizer_sandbox",
}  # fmt: skip
STANDING = ("stop", "slow")
KINDS_OF_EIGHT = ("kill", "torn", "kill", "stop", "torn", "slow", "kill", "torn")
SLACK_S = 1.0
"""How late a deadline may be kept, and a probe be red."""
RECOVERY_S = 20.0
SERVER_ROUNDS = 25
"""After so many faults of the children, the server itself is struck twice."""


class Server:
    """A server with faulty children, started again after it was killed."""

    def __init__(self, model: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "tests.programs.faulty_child", "serve", model, "--port", str(self.port)]
        self._command += ["--served-model-name", "builtin", "--storage-dir", str(folder / "stored")]
        self._command += ["--crash-report-dir", str(folder / "reports"), "--uvicorn-log-level", "critical"]
        self._command += ["--max-model-len", "512", "--shutdown-timeout", "5"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(tied(self._command), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        wait(lambda: self.is_ready(), 120, "the server is ready")

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return HTTP.get(f"{self.url}/health/ready", timeout=10).status_code == 200
        return False

    def child(self, name: str) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if CHILDREN[name] in process.cmdline():
                    return process
        raise LookupError(name)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def wait(until: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            raise TimeoutError(f"not so within {seconds} s: {what}")
        time.sleep(0.02)


class Campaign:
    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.noise = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.lateness: list[float] = []
        self.recoveries: list[float] = []
        self.expected = {name: self.call(name)[1] for name in CHILDREN}

    def call(self, child: str, deadline: float | None = None) -> tuple[int, str, float]:
        """One call that needs `child`. Returns status, text and seconds."""
        body: dict[str, Any] = {"max_tokens": 24, "seed": 1, "temperature": 0}
        if child == "template":
            path, body = (
                "/v1/chat/completions",
                body | {"messages": [{"role": "user", "content": "Say something. " * 9}]},
            )
        elif child == "tokenizer":
            path, body = "/v1/completions", body | {"prompt": "Tell me something. " * 9}
        else:
            # No verdict on it is cached.
            form = {"enum": ["yes", "no"], "description": str(self.noise.random())}
            path, body = "/v1/completions", body | {"prompt": "Is it so?", "structured_outputs": {"json": form}}
        headers = {} if deadline is None else {"x-request-timeout": str(deadline)}
        began = time.monotonic()
        reply = HTTP.post(self.server.url + path, json=body, headers=headers, timeout=60)
        took = time.monotonic() - began
        if reply.status_code != 200:
            return reply.status_code, reply.text, took
        choice = reply.json()["choices"][0]
        return 200, choice["text"] if "text" in choice else choice["message"]["content"], took

    def round(self, strikes: dict[str, str]) -> None:
        """Strike each child of `strikes` once, and judge the calls that come then."""
        for child in CHILDREN:
            self.expect(child, strikes, *self.call(child))
        began = time.monotonic()
        for child, kind in strikes.items():
            self.server.child(child).send_signal(SIGNALS[kind])
            self.counts["faults"] += 1
            self.counts[f"{child} {kind}"] += 1
        deadline = self.noise.choice([0.3, 1.0, 2.0])
        red: list[float] = []
        with ThreadPoolExecutor(8) as pool:
            calls = [(child, limit, pool.submit(self.call, child, limit))
                     for child in CHILDREN for limit in (None, deadline, None)]  # fmt: skip
            while not all(call.done() for _, _, call in calls):
                if not self.server.is_ready():
                    red.append(time.monotonic() - began)
                time.sleep(0.05)
        for child, limit, call in calls:
            self.expect(child, strikes, *call.result(), limit)
        if any(kind in STANDING for kind in strikes.values()) and not (red and red[0] <= WATCHDOG_S + SLACK_S):
            self.problems.append(f"{strikes}: the probes were not red within the watchdog's time: {red[:1]}")
        try:
            wait(self.server.is_ready, RECOVERY_S, f"ready after {strikes}")
        except TimeoutError as error:
            self.problems.append(str(error))
        self.recoveries.append(time.monotonic() - began)

    def expect(
        self, child: str, strikes: object, status: int, text: str, took: float, deadline: float | None = None
    ) -> None:
        """Judge one reply."""
        self.counts["calls"] += 1
        if deadline is not None:
            self.lateness.append(took - deadline)
            if took > deadline + SLACK_S:
                self.problems.append(f"{strikes}: a deadline of {deadline} s was kept after {took:.2f} s")
            if status in (408, 504):
                self.counts["expired"] += 1
                return
        if (status, text) != (200, self.expected[child]):
            self.counts["wrong"] += 1
            self.problems.append(f"{strikes}: a call for {child} got {status} {text[:200]!r}")

    def server_stops(self) -> None:
        """The server stands still, and its children are still the same."""
        before = {child: self.server.child(child).pid for child in CHILDREN}
        with ThreadPoolExecutor(4) as pool:
            calls = [(child, pool.submit(self.call, child)) for child in CHILDREN]
            time.sleep(self.noise.choice([0.0, 0.01, 0.05]))
            self.server.process.send_signal(signal.SIGSTOP)
            time.sleep(WATCHDOG_S + 0.5)
            self.server.process.send_signal(signal.SIGCONT)
            for child, call in calls:
                self.expect(child, "server-stop", *call.result())
        if before != {child: self.server.child(child).pid for child in CHILDREN}:
            self.problems.append("server-stop: a process that did not fail was replaced")
        if gauge(self.server.url, "headrace:engine_restarts_total"):
            self.problems.append("server-stop: the engine was restarted")
        self.counts["faults"] += 1
        self.counts["server-stop"] += 1

    def server_dies(self) -> None:
        """The server is killed under streams, while one of its children is stopped."""
        server = self.server
        stored = HTTP.post(f"{server.url}/v1/responses", json={"input": "Hello", "max_output_tokens": 4}, timeout=60)
        response_id = stored.json()["id"]
        children = psutil.Process(server.process.pid).children(recursive=True)
        stopped = self.noise.choice([*CHILDREN, ""])
        if stopped:
            server.child(stopped).send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(self.call, child) for child in CHILDREN]
            time.sleep(self.noise.choice([0.0, 0.05, 0.2]))
            server.process.kill()
            server.process.wait()
            for call in calls:
                if not isinstance(call.exception(), httpx.TransportError | None):
                    self.problems.append(f"server-kill: {call.exception()!r}")
        left = psutil.wait_procs(children, timeout=10)[1]
        if left:
            self.problems.append(f"server-kill: processes are left: {[process.cmdline() for process in left]}")
            for process in left:
                process.kill()
        server.start()
        response = HTTP.get(f"{server.url}/v1/responses/{response_id}", timeout=30)
        if response.status_code != 200 or response.json()["output"] != stored.json()["output"]:
            self.problems.append(f"server-kill: what was stored is a {response.status_code}")
        self.counts["faults"] += 1
        self.counts["server-kill"] += 1

    def report(self) -> dict[str, Any]:
        late, recovered = sorted(self.lateness), sorted(self.recoveries)
        result: dict[str, Any] = {name.replace(" ", "_"): count for name, count in sorted(self.counts.items())}
        if late:
            result |= {"deadline_late_most_s": round(max(0.0, late[-1]), 2), "recovery_most_s": round(recovered[-1], 2)}
        return result | {"violations": len(self.problems), "examples": self.problems[:5]}


def with_odd_tokenizer(model: str, folder: Path) -> str:
    """Make a copy of a model in `folder` whose tokenizer has a step more, which changes no text of the campaign."""
    shutil.copytree(builtin.directory() if model == "builtin" else model, folder)
    path = folder / "tokenizer.json"
    step = {"type": "Replace", "pattern": {"Regex": "q{99}"}, "content": ""}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"normalizer": step}), "utf-8")
    return str(folder)


def run_campaign(
    num: int, seed: int, model: str = "builtin", kinds: tuple[str, ...] = KINDS_OF_EIGHT, with_server: bool = True
) -> dict[str, Any]:
    """So many faults, those of the server beside them."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(with_odd_tokenizer(model, Path(folder) / "model"), Path(folder))
        try:
            campaign = Campaign(server, seed)
            num_rounds = 0
            while campaign.counts["faults"] < num and len(campaign.problems) < 20:
                # Standing processes are struck together: the round waits once.
                kind = kinds[num_rounds % len(kinds)]
                other = kind if kind not in STANDING else campaign.noise.choice(STANDING)
                third = kind if kind not in STANDING else campaign.noise.choice(STANDING)
                strikes = {"template": kind, "grammar": other, "tokenizer": third}
                campaign.round(dict(list(strikes.items())[: max(1, num - campaign.counts["faults"])]))
                num_rounds += 1
                if with_server and num_rounds % SERVER_ROUNDS == 0:
                    campaign.server_stops()
                    campaign.server_dies()
                print(
                    campaign.counts["faults"], "faults", len(campaign.problems), "problems", file=sys.stderr, flush=True
                )
            server.child("template").send_signal(signal.SIGSTOP)
            began = time.monotonic()
            status = server.stop()
            if status != 0 or time.monotonic() - began > 15:
                campaign.problems.append(f"SIGTERM beside a stopped process: status {status} after "
                                         f"{time.monotonic() - began:.1f} s")  # fmt: skip
            return campaign.report()
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report = run_campaign(options.faults, options.seed)
    print(json.dumps(report, indent=1))
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
