"""The live part of the campaign of hostile files (C-18): they are dropped into the models folder of a server that runs.

Called by `hostile_files`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
from bench.tied import tied
from tests.campaigns import hostile
from tests.campaigns.hostile import CHAT, GROWTH, NAME, Case, fault_of
from tests.support.serving import free_port

PROBE_S = 0.3
KINDS = ("tokenizer", "config", "header", "index", "template", "settings", "gguf", "place")
"""Kinds that a server with the flags of `Live` reads."""


class Probes(threading.Thread):
    """Asks the server `pid` for /health/live all the time, and notes the longest wait that is the server's own: a wait
    for a core, on a machine that is busy with other work, does not count."""

    def __init__(self, url: str, pid: int) -> None:
        super().__init__(daemon=True)
        self.url, self.pids = url, (pid, os.getpid())
        self.longest, self.num, self.is_over = 0.0, 0, threading.Event()
        self.failures: list[str] = []

    def run(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self.is_over.wait(0.02):
                begin, delay = time.monotonic(), run_delay(*self.pids)
                try:
                    client.get(self.url + "/health/live")
                except httpx.HTTPError as error:
                    self.failures.append(f"a probe fails: {type(error).__name__}")
                    return
                self.longest, self.num = (
                    max(self.longest, time.monotonic() - begin - run_delay(*self.pids) + delay),
                    self.num + 1,
                )


def run_delay(*pids: int) -> float:
    """The seconds for which the threads of these processes were ready to run and had no core."""
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that ends just now
                total += int(path.read_text().split()[1])
    return total / 1e9


class Live:
    """`headrace serve` with the built-in model and an empty models folder."""

    def __init__(self, root: Path) -> None:
        self.root, port = root, free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).parent / "headrace"), "serve", "builtin", "--port", str(port)]
        command += ["--models-dir", str(root), "--kv-cache-memory-bytes", "32000000", "--num-threads", "1"]
        command += ["--crash-report-dir", str(root.parent / "reports"), "--shutdown-delay", "0", "--device", "cpu"]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(tied(command), stdout=self.log, stderr=self.log, env=environment)
        self.client = httpx.Client(base_url=self.url, timeout=120)
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/health/ready").status_code == 200:
                    break
            time.sleep(0.05)

    def answer(self) -> str:
        """The text of the built-in model, which nothing of this may change."""
        body = {"model": "builtin", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        reply = self.client.post("/v1/completions", json=body)
        return (
            str(reply.json()["choices"][0]["text"]) if reply.status_code == 200 else f"{reply.status_code} {reply.text}"
        )

    def memory(self) -> int:
        """The resident bytes of the largest process."""
        sizes = [0]
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.process.pid)
            for process in [server, *server.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    sizes.append(process.memory_info().rss)
        return max(sizes)

    def ask(self, case: Case) -> list[str]:
        problems = []
        for method, path, body in (
            ("GET", "/v1/models", None), ("GET", "/api/tags", None), ("POST", "/api/show", {"model": NAME}),
            ("POST", "/v1/chat/completions", CHAT), ("POST", "/tokenize", {"model": NAME, "prompt": "aaaa x"}),
            ("DELETE", "/api/delete", {"model": NAME}),
        ):  # fmt: skip
            try:
                reply = self.client.request(method, path, json=body)
            except httpx.HTTPError as error:
                problems.append(f"{method} {path}: {type(error).__name__}, exit {self.process.poll()}")
                continue
            if method != "DELETE" and (fault := fault_of(case, reply.status_code, reply.text)):
                problems.append(f"{method} {path}: {fault}")
        return problems

    def end(self) -> list[str]:
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.log.seek(0)
        text = self.log.read().decode("utf-8", "replace")
        self.log.close()
        self.client.close()
        problems = [] if status == 0 else [f"the server ends with status {status}"]
        at = text.find("Traceback")
        return problems + ([f"a traceback in the log: {text[at : at + 1500][-700:]}"] if at >= 0 else [])


def through_server(base: Path, num: int, seed: int, kinds: list[str]) -> tuple[Counter[str], list[str]]:
    """Drop `num` cases into the models folder of a server, one after the other."""
    counts: Counter[str] = Counter()
    if not num:
        return counts, []
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "models"
        root.mkdir()
        live = Live(root)
        expected, size = live.answer(), live.memory()
        probes = Probes(live.url, live.process.pid)
        probes.start()
        for number in range(num):
            kind = kinds[number % len(kinds)]
            new = Path(scratch) / "new"
            case = hostile.mutate(base, new, kind, seed, 10**9 + number)
            new.rename(root / NAME)
            label = f"live {kind} {seed}/{number} ({case.file}, {case.how})"
            probes.longest = 0.0
            problems += [f"{label}: {each}" for each in live.ask(case)]
            if probes.longest > PROBE_S:
                problems.append(f"{label}: a probe took {probes.longest:.2f} s")
            if (grown := live.memory() - size) > 2 * GROWTH:
                problems.append(f"{label}: a process grew by {grown:,} bytes")
            if (text := live.answer()) != expected:
                problems.append(f"{label}: the other model says {text!r}")
            shutil.rmtree(root / NAME, ignore_errors=True)
            counts["live cases"] += 1
            if live.process.poll() is not None:
                break
        probes.is_over.set()
        probes.join(60)
        counts["probes"] += probes.num
        problems += probes.failures + live.end()
    return counts, problems
