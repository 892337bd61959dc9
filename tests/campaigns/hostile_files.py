"""The campaign of hostile files (C-18): models and stored entries that were tampered with, behind a server's doors.

`python -m tests.campaigns.hostile_files --cases 2000 --live 40 --seed 1` changes one file of a sound folder at a time
(`hostile`), and asks for what is in it.

Most cases go through a server in a worker process with fake engines, by its routes: the model is listed, shown, loaded
and asked, and then an engine is made of it. The worker is bounded in memory and, for each case, in processor time. A
sample (`--live`) is dropped into the models folder of a `headrace serve`, or its storage.

Every reply is an answer or a refusal in words that name the file or a field; no process exceeds its bounds; nothing
hangs or dies; the server answers its probes within `PROBE_S` throughout; another model's answers stay the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
from bench.tied import tied
from tests.campaigns import hostile
from tests.campaigns.hostile import Case
from tests.support.gated import Server, serving
from tests.support.server import write_tokenizer
from tests.support.serving import free_port

from headrace.engine.build import build_engine
from headrace.engine.library.model_folder import ModelFolder
from headrace.protocol.errors import HeadraceError
from headrace.serve import loading
from headrace.text.templates import new_process
from headrace.text.tokenizer import Tokenizer

MEMORY = 3_500_000_000
"""Bytes of address space of a worker, of which torch takes one thousand million."""
GROWTH = 2**28
"""Bytes by which one case may raise a worker's peak of resident memory, and a live process its own."""
CPU_S = 20.0
"""Seconds of processor time of one case, in a worker."""
STILL_S = 60.0
PROBE_S = 0.3
ENOUGH = 1000
NAME = "hostile"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "aaaa x"}], "max_tokens": 2, "seed": 1}
PYTHON = re.compile(r"Traceback|File \"|\b[A-Z]\w*(Error|Exception)\b|<class |object at 0x|internal error")
"""What no client should read."""
LIVE_KINDS = ("tokenizer", "config", "header", "index", "template", "settings", "gguf")
"""Kinds that a server with the flags of `Live` reads."""
PLANTS = ("", "key-error", "spin", "memory", "leak")
"""Faults that are planted as a control: each has to be noticed."""


def fault_of(case: Case, status: int, text: str) -> str:
    """What is wrong with a reply, or nothing."""
    if status < 400:
        return "" if is_json(text) else f"{status} with a body that is no JSON: {text[:200]}"
    # A template's own error is quoted as it is.
    text = text.partition("; it says: ")[0]
    if (match := PYTHON.search(text)) is not None:
        return f"{status} with {match[0]!r}: {text[:300]}"
    stem = Path(case.file).name.split(".")[0]
    if not any(word in text for word in (Path(case.file).name, stem, "template", "tokenizer", ": ")):
        return f"{status} names neither file nor field: {text[:300]}"
    return ""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
        return True
    except ValueError:
        return False


# -- in a worker -----------------------------------------------------------------------------------------------------


class Faults(logging.Handler):
    """The tracebacks that the server logs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.found.append(f"a traceback in the log: {record.exc_info[0].__name__}: {record.exc_info[1]}"[:300])


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """A fault in the reader of a model's facts."""
    sound = ModelFolder.facts

    def facts(self: ModelFolder, name_of_model: str) -> Any:
        if name_of_model == NAME:
            match name:
                case "key-error":
                    return {}["absent"]  # type: ignore[var-annotated]
                case "spin":
                    while True:
                        pass
                case "memory":
                    bytearray(MEMORY)
                case "leak":
                    _leaked.append(os.urandom(GROWTH + 2**26))
        return sound(self, name_of_model)

    with mock.patch.object(ModelFolder, "facts", facts) if name else contextlib.nullcontext():
        yield


_leaked: list[bytes] = []
GROUPS = {
    "responses": ("responses", "/input_items"), "files": ("files", "/content"),
    "conversations": ("conversations", "/items"), "batches": ("batches", ""),
}  # fmt: skip
"""The routes of the entries in each folder of the storage."""


async def asked(server: Server, case: Case) -> list[str]:
    """Ask for a model by every door. Returns what was wrong."""
    problems = []
    for route, body in (
        ("GET /v1/models", None),
        ("GET /api/tags", None),
        ("POST /api/show", {"model": NAME}),
        ("POST /v1/chat/completions", CHAT),
        ("POST /tokenize", {"model": NAME, "prompt": "aaaa x"}),
    ):
        reply = await server.call(route, body)
        if fault := fault_of(case, reply.status_code, reply.text):
            problems.append(f"{route}: {fault}")
    await server.lifespan.models.unload(NAME)
    return problems


async def restored(base: Path, folder: Path, tokenizer: Tokenizer, root: Path, case: Case) -> list[str]:
    """Start a server over stored entries, and read them all."""
    problems = []
    async with serving(tokenizer, root, storage_dir=str(folder)) as server:
        for path in sorted((base / "stored").glob("*/*.json")):
            name = path.stem
            group, more = GROUPS[path.parent.name]
            routes = [f"GET /v1/{group}/{name}", *([f"GET /v1/{group}/{name}{more}"] if more else [])]
            routes += [f"GET /v1/{group}"] if group in ("files", "batches") else []
            for route in routes:
                reply = await server.call(route)
                if route.endswith("/content"):
                    continue  # the bytes of a file are its owner's
                if fault := fault_of(case, reply.status_code, reply.text):
                    problems.append(f"{route}: {fault}")
    return problems


async def store(base: Path, tokenizer: Tokenizer, root: Path) -> None:
    """Have a server write some entries into the folder that is then changed."""
    async with serving(tokenizer, root, storage_dir=str(base / "stored")) as server:
        await server.until(lambda: server.client.is_alive)
        body = {"model": "fake", "input": "aaaa", "max_output_tokens": 4, "store": True}
        assert (await server.call("POST /v1/responses", body)).status_code == 200
        items = [{"type": "message", "role": "user", "content": "aaaa"}]
        assert (await server.call("POST /v1/conversations", {"items": items})).status_code == 200
        ask = {"model": "fake", "prompt": "aaaa", "max_tokens": 4}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ask}
        form = {"files": {"file": ("x.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        reply = await server.http.post("/v1/files", **form)  # type: ignore[arg-type]
        assert reply.status_code == 200, reply.text
        batch = {"input_file_id": reply.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await server.call("POST /v1/batches", batch)).status_code == 200
        while (await server.call("GET /v1/batches")).json()["data"][0]["status"] != "completed":
            await asyncio.sleep(0.05)


def build(case: Case, folder: Path) -> list[str]:
    """Make an engine of a model. Returns what was wrong."""
    try:
        build_engine(hostile.engine_config(folder, case.kind)).close()
    except HeadraceError as error:
        fault = fault_of(case, 400, str(error))
        return [f"the engine: {fault}"] if fault else []
    except Exception as error:
        return [f"the engine: {type(error).__name__}: {error}"[:300]]
    return []


async def work(base: Path, numbers: range, seed: int, kinds: list[str]) -> None:
    """Do the cases of a worker, and print a line before and after each."""
    faults = Faults()
    for name in ("headrace.server", "headrace.engine", "asyncio"):
        logging.getLogger(name).addHandler(faults)
        logging.getLogger(name).propagate = False
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        tokenizer = Tokenizer.load(write_tokenizer(place))
        root = place / "models"
        root.mkdir()
        if "stored" in kinds and not (base / "stored").exists():
            await store(base, tokenizer, root)
        process = new_process()
        with mock.patch.object(loading, "new_process", return_value=process):
            async with serving(tokenizer, root) as server:
                await server.until(lambda: server.client.is_alive)
                for number in numbers:
                    kind = kinds[number % len(kinds)]
                    print(json.dumps({"begins": number, "kind": kind}), flush=True)
                    target = place / "stored" if kind == "stored" else root / NAME
                    before, faults.found = peak(), []
                    case = hostile.mutate(base, target, kind, seed, number)
                    if kind == "stored":
                        problems = await restored(base, target, tokenizer, root, case)
                    else:
                        problems = await asked(server, case) + await asyncio.to_thread(build, case, target)
                    if (grown := peak() - before) > GROWTH:
                        problems.append(f"memory grew by {grown:,} bytes")
                    shutil.rmtree(target)
                    print(json.dumps({"ends": number, "case": case, "problems": problems + faults.found}), flush=True)
        process.close()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- over the workers ------------------------------------------------------------------------------------------------


class Worker:
    """A worker process, whose lines are read as they come."""

    def __init__(self, base: Path, numbers: range, seed: int, kinds: list[str], plant: str) -> None:
        words = [sys.executable, "-m", "tests.campaigns.hostile_files", "--worker", str(base)]
        words += ["--first", str(numbers.start), "--cases", str(numbers.stop), "--seed", str(seed)]
        words += ["--kinds", ",".join(kinds), "--plant", plant]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(tied(words), stdout=subprocess.PIPE, stderr=self.errors, env=environment)
        self.lines: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))

    def used(self) -> float:
        """The processor time of the worker so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def until_next(self, seen: int) -> str:
        """Wait for the line after the first `seen`. Returns why none comes."""
        begin, used = time.monotonic(), self.used()
        while len(self.lines) <= seen:
            if self.process.poll() is not None:
                self.reader.join(10)
                if len(self.lines) > seen:
                    return ""
                self.errors.seek(0)
                last = self.errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
                return f"the worker ends with status {self.process.returncode}: {last}"
            if seen and self.used() - used > CPU_S:
                return f"it takes more than {CPU_S:g} s of processor time"
            if time.monotonic() - begin > STILL_S and self.used() - used < 1.0:
                return "it stands still"
            time.sleep(0.01)
        return ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(10)
        self.errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def through_workers(
    base: Path, num: int, seed: int, kinds: list[str], plant: str = ""
) -> tuple[Counter[str], list[str]]:
    """Do `num` cases; a worker that dies or hangs is replaced."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    first = 0
    while first < num and len(problems) < ENOUGH:
        worker, seen = Worker(base, range(first, num), seed, kinds, plant), 0
        try:
            while first < num:
                reason = worker.until_next(seen)
                if reason:
                    last = worker.lines[-1] if worker.lines else {}
                    counts["workers lost"] += 1
                    problems.append(f"{last.get('kind')} {seed}/{last.get('begins')}: {reason}")
                    if "begins" not in last:
                        return counts, problems
                    first = last["begins"] + 1
                    break
                line = worker.lines[seen]
                seen += 1
                if "ends" in line:
                    first = line["ends"] + 1
                    kind, file, how = line["case"]
                    counts["cases"] += 1
                    counts[f"of {kind}"] += 1
                    problems += [f"{kind} {seed}/{line['ends']} ({file}, {how}): {each}" for each in line["problems"]]
        finally:
            worker.end()
    return counts, problems


# -- with a server of its own ----------------------------------------------------------------------------------------


class Probes(threading.Thread):
    """Asks a server for /health/live all the time, and notes the longest wait."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.longest, self.num, self.is_over = url, 0.0, 0, threading.Event()
        self.failures: list[str] = []

    def run(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self.is_over.wait(0.02):
                begin = time.monotonic()
                try:
                    client.get(self.url + "/health/live")
                except httpx.HTTPError as error:
                    self.failures.append(f"a probe fails: {type(error).__name__}")
                    return
                self.longest, self.num = max(self.longest, time.monotonic() - begin), self.num + 1


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

    def lag(self) -> float:
        """The longest lag of the event loop that its metric has a bucket for, in seconds."""
        bounds = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("headrace:event_loop_lag_seconds_bucket") and (
                match := re.search(r'le="([^"]+)"', line)
            ):
                bounds[float(match[1].replace("+Inf", "inf"))] = float(line.rsplit(" ", 1)[1])
        return next((bound for bound in sorted(bounds) if bounds[bound] == max(bounds.values())), 0.0)

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
    is_quiet = os.getloadavg()[0] < 0.5 * (os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "models"
        root.mkdir()
        live = Live(root)
        expected, size = live.answer(), live.memory()
        probes = Probes(live.url)
        probes.start()
        for number in range(num):
            kind = kinds[number % len(kinds)]
            new = Path(scratch) / "new"
            case = hostile.mutate(base, new, kind, seed, 10**9 + number)
            new.rename(root / NAME)
            label = f"live {kind} {seed}/{number} ({case.file}, {case.how})"
            before = live.lag()
            probes.longest = 0.0
            problems += [f"{label}: {each}" for each in live.ask(case)]
            # A probe may be late because the machine is busy; then the server's own measure decides.
            if probes.longest > PROBE_S and (is_quiet or live.lag() > max(PROBE_S, before)):
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


def run_campaign(size: tuple[int, int], seed: int, kinds: list[str] | None = None, plant: str = "") -> dict[str, Any]:
    """So many cases through workers, and so many through a server of its own."""
    kinds = kinds or list(hostile.KINDS)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        hostile.sound(base)
        counts, problems = through_workers(base, size[0], seed, kinds, plant)
        more, others = through_server(base, size[1], seed, [kind for kind in kinds if kind in LIVE_KINDS])
    result = {name.replace(" ", "_"): count for name, count in sorted((counts + more).items())}
    problems += others
    by_kind = Counter(each.split()[1 if each.startswith("live") else 0] for each in problems)
    return result | {"by_kind": dict(by_kind), "violations": len(problems), "examples": problems[:60]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hostile_files", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(hostile.KINDS))
    parser.add_argument("--plant", default="", choices=PLANTS)
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if args.worker is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        with planted(args.plant):
            asyncio.run(work(args.worker, range(args.first, args.cases), args.seed, kinds))
        return 0
    counts = run_campaign((args.cases, args.live), args.seed, kinds, args.plant)
    print(json.dumps(counts, indent=1))
    return 1 if counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
